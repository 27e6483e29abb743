"""Comparison of any two models: their outputs, and their files. Here, its options and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rewriter.options import option


@dataclass(frozen=True)
class CompareOptions:
    """What a comparison does otherwise."""

    names: Mapping[str, str] = option(
        {}, "An input or output that the second model calls otherwise (repeatable).", metavar="OLD=NEW", flag="--map"
    )
    atol: float | None = option(
        None, "Judge outputs by this absolute tolerance instead of the rule.", metavar="NUMBER", least=0.0
    )
    rtol: float | None = option(
        None, "The same, relative to the first model's values; added to --atol.", metavar="NUMBER", least=0.0
    )
    accuracy: float | None = option(
        None,
        "Let the plan in the second model claim errors up to this, over max(1, |f|). Default: the usual limits.",
        metavar="EPS",
        above=0.0,
        below=1.0,
    )

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """atol and rtol, if either was given."""
        return None if self.atol is self.rtol is None else (self.atol or 0.0, self.rtol or 0.0)


@dataclass(frozen=True)
class Change:
    """One difference."""

    what: str  # `weight`, or the kind of entry: `opset`, `input`, `metadata`
    name: str  # its name, that of a weight in a body behind the path to the body
    a: str | None  # what A has there: element type and dims, or a text; None if A lacks it
    b: str | None  # the same for B
    how: str = ""  # of a weight that both have, the number of elements that differ and the largest |B - A|

    @property
    def text(self) -> str:
        if self.a is None or self.b is None:
            return f"{self.what} {self.name} is only in {'A' if self.b is None else 'B'}"
        return f"{self.what} {self.name}: {self.a} in A, {self.b} in B"


@dataclass(frozen=True)
class GraphDifference:
    """The differences between two files."""

    # maps every operator, also in control-flow bodies, to its counts in A and in B, as the files have it
    operators: Mapping[str, tuple[int, int]]
    tensors: tuple[Change, ...]  # the weights that differ
    same_tensors: int  # number of A's weights that B has bit for bit
    fields: tuple[Change, ...]  # differences in inputs, outputs, and opsets
    remarks: tuple[Change, ...]  # differences in metadata, producer and IR version, which do not affect the computation
    also: ClassVar = ("same",)

    @property
    def same(self) -> bool:
        """Whether both files have the same weights and declare the same."""
        return not (self.tensors or self.fields)
