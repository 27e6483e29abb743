"""What is claimed of a replaced part of a model, and the two models that it is proved on.

Comes in: models and their indices; claims made by the pass. Goes out: `Claim` and `Side`, used by the proofs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.extract import cut, extract
from rewriter.graph.view import GraphView, view_model


@dataclass(frozen=True)
class Claim:
    """What is claimed of one replaced block.

    Attributes:
        name: the block's name.
        inputs: the tensors that the replaced region reads: the pre-activation, for a gated block also the value.
        output: the tensor that it makes.
        block_inputs: data inputs of the first linear operators.
        block_outputs: outputs of the second ones.
        max_error: certified largest error against the original function in exact arithmetic, absolute.
        rounding: what float32 arithmetic may add, relative to max(1, |f|).
        elem_type: element type of `output`.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    block_inputs: tuple[str, ...]
    block_outputs: tuple[str, ...]
    max_error: float
    rounding: float
    elem_type: int


@dataclass(frozen=True)
class Side:
    """One of the two models: where its bytes are, and its index."""

    model: LoadedModel
    view: GraphView

    @classmethod
    def of(cls, model: LoadedModel) -> Side:
        """Index the model."""
        return cls(model, view_model(model.proto))

    def part(self, inputs: Sequence[str], outputs: Sequence[str], elem_type: int) -> onnx.ModelProto:
        """The nodes between two sets of tensors as a model of its own, weights inline."""
        return extract(self.model.proto, self.view, cut(self.view, inputs, outputs), self._read, elem_type=elem_type)

    def _read(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return tensor
        return onnx.numpy_helper.from_array(np.ascontiguousarray(read_tensor(self.model, tensor)), tensor.name)
