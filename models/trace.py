"""The two exporters of PyTorch behind one function.

The file still contains the exporter's notes about this machine, which `models.clean` removes. Needs PyTorch and
onnxscript.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from models.entry import Entry, Exporter, Input, Output
from rewriter.errors import UsageError

DYNAMO_OPSET = 18  # its native opset; it converts upwards correctly, downwards not
INLINE_LIMIT = 1_800_000_000  # bytes of weights; protobuf's limit is 2 GiB


def trace(module: Any, entry: Entry, inputs: tuple[Tensor, ...], exporter: Exporter, opset: int, path: Path) -> None:
    """Export the module with dynamic dimensions.

    Raises:
        UsageError: The exporter cannot export this model at this opset; the message contains its error.
    """
    if exporter == "dynamo" and opset < DYNAMO_OPSET:
        raise UsageError(f"dynamo exports opset {DYNAMO_OPSET} and above, not {opset}; choose torchscript")
    inputs_outputs: tuple[Input | Output, ...] = (*entry.inputs, *entry.outputs)
    names = {
        "input_names": [spec.name for spec in entry.inputs],
        "output_names": [output.name for output in entry.outputs],
    }
    specific: dict[str, Any]
    if exporter == "torchscript":
        axes = {spec.name: spec.dynamic_axes for spec in inputs_outputs}
        specific = {"dynamo": False, "dynamic_axes": axes}
    else:
        shapes = (tuple(spec.dynamic_axes for spec in entry.inputs),)
        large = sum(parameter.nbytes for parameter in module.parameters()) > INLINE_LIMIT
        specific = {"dynamo": True, "dynamic_shapes": shapes, "external_data": large}
    try:
        with quiet():
            torch.onnx.export(module, inputs, str(path), opset_version=opset, verbose=False, **names, **specific)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"{exporter} cannot export {entry.name} at opset {opset}: {reason}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the prints, logs and warnings of the exporters; errors are exceptions and pass through.

    Standard output is closed at the level of the process, since on an error the exporter prints the graph from C++.
    """
    disabled = logging.root.manager.disable
    bars = transformers_logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), _no_standard_output():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _no_standard_output() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
