"""onnxruntime: sessions and execution providers."""
