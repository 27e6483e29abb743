"""onnxslim's command line, with WRONG as what its optimiser makes; run by onnxslim's own Python.

`python patched_onnxslim.py WRONG ARGUMENTS...`. Its own comparison judges WRONG against the original.
"""

import sys
from typing import Any

import onnx
import onnxslim.core
from onnxslim.cli import main

_, _wrong, *_arguments = sys.argv


def _wrong_model(*_: Any, **__: Any) -> onnx.ModelProto:
    return onnx.load(_wrong)


onnxslim.core.optimize = _wrong_model
sys.argv = ["onnxslim", *_arguments]
main()
