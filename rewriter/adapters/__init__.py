"""The rewriting as a pass of other people's pipelines: onnx-ir, Olive."""
