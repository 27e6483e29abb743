"""What is claimed of a replaced part of a model, and the models that it is proved on.

The pass states a `Claim` for every block that it replaced: where the block is, and the numbers that take the
activation's place (`Planned`). The proof reads nothing else of the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx
from numpy.typing import NDArray

from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut, cut, extract
from rewriter.graph.view import GraphView, Path, all_views
from rewriter.proof.reference.operators.table import Operator


class Planned(Protocol):
    """What the plan puts in the place of an activation, as plain numbers evaluated in numpy.

    The proof compares the emitted nodes with these numbers, and these numbers with the original's own nodes, so that
    neither is ever its own measure.
    """

    @property
    def crossings(self) -> NDArray[Any]:
        """Pre-activations where the program changes quickly; adversarial points gather around them. 1-D."""
        ...

    def evaluate(self, y: NDArray[Any], z: NDArray[Any] | None = None) -> NDArray[Any]:
        """The value at pre-activations `y`, in float64; a gated block multiplies with `z`. Shapes broadcast."""
        ...

    def float64_rounding(self, y: NDArray[Any], z: NDArray[Any] | None = None) -> NDArray[Any]:
        """How far any float64 evaluation may be from exact arithmetic there: absolute, in output units."""
        ...


@dataclass(frozen=True)
class Claim:
    """What is claimed of one replaced block.

    Attributes:
        name: the block's name.
        inputs: the tensors that the replaced region reads: the pre-activation, for a gated block also the value.
        output: the tensor that it makes.
        block_inputs: data inputs of the first linear operators.
        block_outputs: outputs of the second ones.
        max_error: certified largest error of `planned` against the original function f in exact arithmetic, over
            max(1, |f|); for a gated block h(g) u over max(1, |h|) |u|.
        rounding: what float32 arithmetic may add, in the same unit.
        elem_type: least precise element type at the ends of the region: what accuracy is judged by.
        planned: the numbers that take the activation's place.
        gated: whether `planned` is multiplied with a value; the last of `inputs`.
        unstable: whether float64 rounding of `planned` is far above that of the operators around it.
        path: path of the graph that holds the block, as in `GraphView`.
        width: channels of the block's inputs, None where unknown.
        domain: largest |pre-activation| that the claim is about; the proof fails when the model's own go beyond it.
        axis: the axis of the region's channels, counted from the end.
        heads: where the whole block was replaced, the tensor of the rewritten model that holds what its heads write,
            [batch, tokens and further rows, channels]; its first rows are `output`. Empty where the region alone was.
        shapes: tensors that hold shapes, computed from the block's inputs instead of a tensor inside it.
        chunk_size: constant of the rewritten model that bounds the size of its attention patterns, so that a smaller
            one makes it work in more chunks; empty where there are no chunks.
        neurons: heads of one chunked attention, None where unknown.
        bias_tokens: rows that the attention has beside the tokens'.
        longest: the longest sequence that the block takes, None where any is.
        accuracy: largest error that the user asked for, over max(1, |f|); 0 where nothing was asked.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    block_inputs: tuple[str, ...]
    block_outputs: tuple[str, ...]
    max_error: float
    rounding: float
    elem_type: int
    planned: Planned
    gated: bool = False
    unstable: bool = False
    path: Path = ()
    width: int | None = None
    domain: float = float("inf")
    axis: int = -1
    heads: str = ""
    shapes: tuple[str, ...] = ()
    chunk_size: str = ""
    neurons: int | None = None
    bias_tokens: int = 0
    longest: int | None = None
    accuracy: float = 0.0

    @property
    def gate(self) -> str:
        """The pre-activation."""
        return self.inputs[0]

    @property
    def value(self) -> str:
        """What the activation is multiplied with; the pre-activation itself where there is nothing else."""
        return self.inputs[-1]

    @property
    def inputs_and_output(self) -> tuple[str, ...]:
        """The ends of the region."""
        return (*self.inputs, self.output)


@dataclass(frozen=True)
class Variants:
    """Other forms of the two models, where claims are about these.

    Attributes:
        lowered: the form of the original that the claims name tensors of, where that is not the original itself. It
            must compute what the original does, and that is proved as well.
        reweighted: that form with the weights of the rewritten model, where some of them are others: these must make no
            difference beyond rounding.
        alone: the rewritten model with blocks that can be cut out, where its own cannot: they are then proved in it,
            and the rewritten model end to end.
    """

    lowered: LoadedModel | None = None
    reweighted: LoadedModel | None = None
    alone: LoadedModel | None = None


NO_VARIANTS = Variants()


@dataclass(frozen=True)
class Side:
    """One model: where its bytes are, the indices of its graphs, and numpy operators that only float64 knows."""

    model: LoadedModel
    views: Mapping[Path, GraphView]
    own: Mapping[tuple[str, str], Operator] = field(default_factory=dict)

    @classmethod
    def of(cls, model: LoadedModel, own: Mapping[tuple[str, str], Operator] | None = None) -> Side:
        """Index the model."""
        return cls(model, {view.path: view for view in all_views(model.proto)}, own or {})

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
