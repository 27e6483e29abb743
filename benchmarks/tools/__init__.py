"""Other tools that change or compare ONNX models, tried on the same wrong models as `rewrite validate`."""
