"""What is claimed of a replaced part of a model, and the two models that it is proved on.

Comes in: models and their indices; claims made by the pass. Goes out: `Claim` and `Side`, used by the proofs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut, cut, extract
from rewriter.graph.view import GraphView, Path, all_views


@dataclass(frozen=True)
class Claim:
    """What is claimed of one replaced block.

    Attributes:
        name: the block's name.
        inputs: the tensors that the replaced region reads: the pre-activation, for a gated block also the value.
        output: the tensor that it makes.
        block_inputs: data inputs of the first linear operators.
        block_outputs: outputs of the second ones.
        max_error: certified largest error against the original function f in exact arithmetic, over max(1, |f|).
        rounding: what float32 arithmetic may add, relative to max(1, |f|).
        elem_type: least precise element type at the ends of the region: what accuracy is judged by.
        path: path of the graph that holds the block, as in `GraphView`.
        width: channels of the block's inputs, None where unknown.
        domain: largest |pre-activation| that the claim is about; the proof fails when the model's own go beyond it.
        float64_rounding: what even float64 arithmetic may add, relative to max(1, |f|).
        axis: the axis of the region's channels, counted from the end.
        heads: where the whole block was replaced, the tensor of the rewritten model that holds what its heads write,
            [batch, tokens and further rows, channels]; its first rows are `output`. Empty where the region alone was.
        shapes: tensors that hold shapes, computed from the block's inputs instead of a tensor inside it.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    block_inputs: tuple[str, ...]
    block_outputs: tuple[str, ...]
    max_error: float
    rounding: float
    elem_type: int
    path: Path = ()
    width: int | None = None
    domain: float = float("inf")
    float64_rounding: float = 0.0
    axis: int = -1
    heads: str = ""
    shapes: tuple[str, ...] = ()

    @property
    def inputs_and_output(self) -> tuple[str, ...]:
        """The ends of the region."""
        return (*self.inputs, self.output)


@dataclass(frozen=True)
class Variants:
    """Other forms of the two models, where claims are about these.

    Attributes:
        lowered: the form of the original that the claims name tensors of, where that is not the original itself.
        reweighted: that form with the weights of the rewritten model, where some of them are others: these must make no
            difference, and the certified errors of the heads are measured from there.
        alone: the rewritten model with blocks that can be cut out, where its own cannot: they are then proved in it,
            and the rewritten model end to end.
    """

    lowered: LoadedModel | None = None
    reweighted: LoadedModel | None = None
    alone: LoadedModel | None = None


NO_VARIANTS = Variants()


@dataclass(frozen=True)
class Side:
    """One of the two models: where its bytes are, and the indices of its graphs."""

    model: LoadedModel
    views: Mapping[Path, GraphView]

    @classmethod
    def of(cls, model: LoadedModel) -> Side:
        """Index the model."""
        return cls(model, {view.path: view for view in all_views(model.proto)})

    @property
    def main(self) -> GraphView:
        """The index of the main graph."""
        return self.views[()]

    def part(self, claim: Claim, inputs: Sequence[str], outputs: Sequence[str]) -> LoadedModel:
        """The nodes between two sets of tensors of the claim's graph as a model; weights stay where they are."""
        view = self.views[claim.path]
        return self.extracted(view, cut(view, inputs, outputs), elem_type=claim.elem_type)

    def piece(self, part: Cut) -> LoadedModel:
        """A part of the main graph as a model of its own, its types as they are."""
        return self.extracted(self.main, part, elem_type=0)

    def extracted(self, view: GraphView, part: Cut, *, elem_type: int = onnx.TensorProto.FLOAT) -> LoadedModel:
        """A part of a graph as a model of its own; weights stay where they are."""
        proto = extract(self.model.proto, view, part, lambda tensor: tensor, elem_type=elem_type)
        return LoadedModel(proto, None, self.model.base_dir, (), 0)
