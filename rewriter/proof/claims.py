"""Claims about replaced blocks, and the models on which they are proved.

The pass states a `Claim` for every block that it replaced: its place and the error bound of its activation. The proof
knows nothing else about the pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut, extract
from rewriter.graph.view import GraphView, Path, Place, all_views


@dataclass(frozen=True)
class Claim:
    """The claim about one replaced block.

    Attributes:
        inputs: the tensors that the replaced region reads: the pre-activation and, for a gated block, the value.
        output: the tensor that the region produces.
        block_inputs: data inputs of the first linear operators.
        block_outputs: outputs of the second linear operators.
        max_error: certified maximum error against the original function f in exact arithmetic, relative
            to max(1, |f|); for a gated block h(g) u, relative to max(1, |h|) |u|.
        elem_type: the least precise element type at the ends of the region, by which accuracy is judged.
        domain: largest |pre-activation| that the claim covers; the proof fails if the model's own exceed it.
        heads: if the whole block was replaced, the tensor of the rewritten model that holds the output of its heads,
            [batch, tokens and further rows, channels]; its first rows are `output`. Empty if only the region was
            replaced.
        shapes: tensors that hold shapes, now computed from the block's inputs instead of a tensor inside it.
        longest: maximum sequence length of the block; None if unlimited.
        accuracy: maximum error that the user asked for, relative to max(1, |f|); 0 if none was given.
        exposed: tensors of the heads that are further outputs of the rewritten model, after the original's.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    block_inputs: tuple[str, ...]
    block_outputs: tuple[str, ...]
    max_error: float
    elem_type: int
    path: Path = ()
    domain: float = float("inf")
    heads: str = ""
    shapes: tuple[str, ...] = ()
    longest: int | None = None
    accuracy: float = 0.0
    exposed: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """The graph and the output, which identify a block."""
        return self.path, self.output

    @property
    def gate(self) -> str:
        """The pre-activation."""
        return self.inputs[0]

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs of the replaced region or whole block."""
        return self.block_inputs if self.heads else self.inputs

    @property
    def makes(self) -> tuple[str, ...]:
        """The outputs of the replaced region or whole block, shapes last."""
        return (*self.block_outputs, *self.shapes) if self.heads else (self.output,)


@dataclass(frozen=True)
class Side:
    """One model with the indices of its graphs."""

    model: LoadedModel
    views: Mapping[Path, GraphView]

    @classmethod
    def of(cls, model: LoadedModel) -> Side:
        return cls(model, {view.path: view for view in all_views(model.proto)})

    @property
    def main(self) -> GraphView:
        return self.views[()]

    def extracted(self, part: Cut, path: Path = (), elem_type: int = 0) -> LoadedModel:
        """A part of a graph as a model; weights stay where they are. `elem_type` is that of inputs of unknown type."""
        proto = extract(self.model.proto, self.views[path], part, elem_type=elem_type)
        return LoadedModel(proto, None, self.model.base_dir, (), 0)
