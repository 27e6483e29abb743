"""Write the graph that an onnxruntime session optimises with ORT_ENABLE_ALL: `python ort_offline.py IN OUT`."""

import sys

import onnxruntime

_, _source, _target = sys.argv
_options = onnxruntime.SessionOptions()
_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
_options.optimized_model_filepath = _target
onnxruntime.InferenceSession(_source, _options, providers=["CPUExecutionProvider"])
