"""What the pass claims of the blocks that it replaced, which is all that the proof knows of it; and one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut, extract
from rewriter.graph.view import GraphView, Path, Place, all_views
from rewriter.proof.records import Claimed


@dataclass(frozen=True)
class Claim:
    """The claim about one replaced block."""

    name: str
    output: str  # of the activation
    reads: tuple[str, ...]  # the inputs of what was replaced: an activation, or the whole block
    makes: tuple[str, ...]  # its outputs, shapes last
    held: Claimed
    elem_type: int  # the least precise one at the ends of the activation, by which accuracy is judged
    path: Path = ()
    exposed: tuple[str, ...] = ()  # tensors of the heads that are further outputs of the rewritten model

    @property
    def place(self) -> Place:
        return self.path, self.output

    @property
    def gate(self) -> str:
        return self.held.leaves[0]


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
