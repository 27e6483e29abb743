"""What one run of the proof is fed with.

Comes in: nothing. Goes out: `Case`, made by `rewriter.proof.inputs.generate` and read by the validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Case:
    """One set of inputs.

    Attributes:
        name: what is particular about it, such as `batch 3, sequence 17`.
        feeds: graph input name to array; every input that has no default.
    """

    name: str
    feeds: Mapping[str, NDArray[Any]]
