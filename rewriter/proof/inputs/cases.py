"""One set of inputs of the proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Case:
    """One set of inputs.

    Attributes:
        name: what distinguishes it, such as `batch 3, sequence 17`.
        feeds: maps every graph input without a default to an array.
    """

    name: str
    feeds: Mapping[str, NDArray[Any]]
