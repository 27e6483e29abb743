"""onnxsim's command line, with WRONG as what its simplifier is said to have made; run by onnxsim's own Python.

`python patched_onnxsim.py WRONG ARGUMENTS...`. Its own comparison judges WRONG against the original.
"""

import sys
from typing import Any

import onnx
from onnxsim import model_checking
from onnxsim.onnx_simplifier import main

_, _wrong, *_arguments = sys.argv
_compare = model_checking.compare


def _compare_wrong(_: Any, *arguments: Any, **named: Any) -> bool:
    return bool(_compare(onnx.load(_wrong), *arguments, **named))


model_checking.compare = _compare_wrong
sys.argv = ["onnxsim", *_arguments]
main()
