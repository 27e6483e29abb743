"""Comparing an exported file with the PyTorch module that it came from.

Several batch sizes and lengths are run, so that a dynamic dimension frozen by the exporter is noticed.
"""

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

from models.build import example_inputs
from models.entry import Dtype, Entry
from models.widen import widen
from rewriter.errors import ValidationError

TRACED = {"batch": 2, "sequence": 7, "decoder_sequence": 5, "past": 4, "total": 11}
OTHERS = (
    {"batch": 3, "sequence": 12, "decoder_sequence": 9, "past": 5, "total": 17},
    {"batch": 1, "sequence": 5, "decoder_sequence": 3, "past": 8, "total": 13},
)
TOLERANCES: dict[Dtype, float] = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 1e-2}


def verify(path: Path, module: Any, entry: Entry, size: str, dtype: Dtype) -> float:
    """Largest |difference| / largest |output| of the file against PyTorch.

    A bfloat16 file is first widened to float32, as `widened.onnx` beside it, and compared with the module in float32 on
    its rounded weights; the remaining difference is the rounding of constants that the exporter folded.

    Raises:
        ValidationError: The file is not a valid model, or its outputs differ by more than the type's tolerance.
    """
    try:
        onnx.checker.check_model(path)
    except onnx.checker.ValidationError as error:
        raise ValidationError(f"{path.name} is not a valid model: {str(error).splitlines()[0]}") from error
    session, run_dtype = _session(path, dtype)
    if run_dtype != dtype:
        module = module.float()
    names = [value.name for value in session.get_inputs()]
    worst = 0.0
    for seed, lengths in enumerate((TRACED, *OTHERS)):
        inputs = example_inputs(entry, size, lengths, run_dtype, seed=seed)
        with torch.no_grad():
            expected = module(*inputs)
        feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        expected = expected if isinstance(expected, tuple) else (expected,)
        for want, got in zip(expected, session.run(None, feeds), strict=True):
            if want.shape != got.shape:
                raise ValidationError(f"{path.name}: shape {got.shape} where PyTorch gives {tuple(want.shape)}")
            difference = (torch.from_numpy(got).double() - want.double()).abs().max() / want.double().abs().max()
            worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
    if worst > TOLERANCES[dtype]:
        allowed = TOLERANCES[dtype]
        raise ValidationError(
            f"{path.name} differs from PyTorch by {worst:.1e} of the largest output; allowed: {allowed:.0e}"
        )
    return worst


def _session(path: Path, dtype: Dtype) -> tuple[Any, Dtype]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if dtype == "bf16":
        wide, dtype = path.with_name("widened.onnx"), "fp32"
        onnx.save(widen(onnx.load(path)), wide, save_as_external_data=True, location="widened.data")
        path = wide
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]), dtype
