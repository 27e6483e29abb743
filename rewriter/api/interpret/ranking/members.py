"""All heads and neurons of a model under one numbering, and which of them were asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from passes.heads.layers import Named
from rewriter.api.interpret.index import HeadIndex
from rewriter.api.interpret.selection import Names, chosen_heads, count_of

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Members:
    """The numbering.

    Attributes:
        starts: sublayer to the number of its first head or neuron.
        chosen: sublayer to those that were asked for, as numbers in the sublayer; other sublayers are not in it.
        count: how many there are.
    """

    starts: dict[str, int]
    chosen: dict[str, Places]
    count: int

    @classmethod
    def of(cls, index: HeadIndex, names: Names) -> Members:
        """Number the heads of a model. Raises UsageError if a glob matches nothing."""
        counts = [count_of(each) for each in index.sublayers]
        ends = np.cumsum([0, *counts])
        starts = {each.name: int(end) for each, end in zip(index.sublayers, ends[:-1], strict=True)}
        found = chosen_heads(index, names) if index.sublayers else []
        return cls(starts, {each.name: np.array(numbers) for each, numbers in found}, int(ends[-1]))

    @cached_property
    def _sublayers(self) -> tuple[list[str], list[int]]:
        """The sublayers, and where each begins, with the end."""
        return list(self.starts), [*self.starts.values(), self.count]

    def name(self, place: int) -> str:
        """`blocks.1.attn.3`, as `ablate` takes it."""
        names, starts = self._sublayers
        sublayer = bisect_right(starts, place) - 1
        return f"{names[sublayer]}.{place - starts[sublayer]}"

    def place(self, name: str) -> int:
        """The number of a head. Raises KeyError if there is none of this name."""
        names, starts = self._sublayers
        sublayer, _, number = name.rpartition(".")
        start = self.starts[sublayer]
        if not number.isdecimal() or start + int(number) >= starts[names.index(sublayer) + 1]:
            raise KeyError(name)
        return start + int(number)

    def places(self) -> Iterator[int]:
        """The chosen ones."""
        for sublayer, numbers in self.chosen.items():
            yield from (self.starts[sublayer] + int(number) for number in numbers)

    def of_sublayer(self, named: Named) -> tuple[Places, Places]:
        """(those of a sublayer that were asked for, all), as numbers among all heads."""
        start = self.starts[named.name]
        everyone = np.arange(start, start + count_of(named))
        return start + self.chosen.get(named.name, np.zeros(0, np.int64)), everyone
