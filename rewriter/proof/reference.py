"""The truth: a model evaluated in float64, weights and constants included.

What rounds to integers on purpose or draws numbers makes another function of the model there, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from rewriter.arrays import Array, tensors_of
from rewriter.errors import RewriteError
from rewriter.evaluate.arithmetic import Floats, Unsupported, Value
from rewriter.evaluate.evaluator import Evaluator, Program
from rewriter.files.load import LoadedModel, collect_external
from rewriter.graph.extract import bytes_of
from rewriter.graph.view import label
from rewriter.graph.walk import is_external, iter_nodes, iter_tensors

LARGEST = 2**31
"""Maximum size of the weights, in bytes; in float64 they take two or four times as much."""

_REFUSED = re.compile("Quant|Integer|QLinear|Random|Multinomial|Bernoulli|Hardmax")


class NoReference(RewriteError):  # noqa: N818 - not an error: the proof does without
    """The model has no float64 evaluation; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Reference:
    """A model in float64."""

    program: Program

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model on the original's inputs; floats become float64. Raises NoReference if an operator fails."""
        try:
            made = Evaluator(self.program, Floats(), feeds, in_reals=True).run()
        except Unsupported as error:
            raise NoReference(str(error)) from error
        return tensors_of({name: _array(each) for name, each in made.items()})


def _array(value: object) -> object:
    if isinstance(value, list):
        return [_array(each) for each in value]
    if isinstance(value, Value):
        return value.entries
    wide = isinstance(value, np.ndarray) and (value.dtype.kind == "f" or value.dtype.name == "bfloat16")
    return value.astype(np.float64) if wide and isinstance(value, np.ndarray) else value


def open_reference(model: onnx.ModelProto, base_dir: Path | None = None) -> Reference:
    """The float64 evaluation of `model`, which is not changed; `base_dir` has its external data. Raises NoReference."""
    if sum(bytes_of(tensor) for tensor in iter_tensors(model)) > LARGEST:
        raise NoReference(f"larger than {round(LARGEST / 1e9)} GB")
    if base_dir is None and any(map(is_external, iter_tensors(model))):
        raise NoReference("weights lie outside the model file and were not loaded")
    for node in iter_nodes(model.graph.node):
        if _REFUSED.search(node.op_type):
            raise NoReference(f"{label(node)} has no known float64 form")
    try:
        return Reference(Program(LoadedModel(model, None, base_dir, collect_external(model, base_dir), 0)))
    except RewriteError as error:
        raise NoReference(str(error)) from error
