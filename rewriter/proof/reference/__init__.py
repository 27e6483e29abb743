"""The float64 reference: a model widened for onnx's evaluator, and the operators that it lacks."""
