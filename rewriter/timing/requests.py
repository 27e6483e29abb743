"""What the parent asks of the process of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Start:
    """Load a model.

    Attributes:
        model: its file, or its bytes.
        provider: the execution provider.
        threads: threads per operator; 0 for onnxruntime's default.
        profile: prefix of the profile that the session writes; None for none.
    """

    model: Path | bytes
    provider: str
    threads: int
    profile: Path | None = None


@dataclass(frozen=True)
class Turn:
    """Run the model for a while.

    Attributes:
        feeds: the inputs; None for those of the last turn.
        seconds: how long; a run that has started is finished.
        warm: seconds at the start whose runs do not count, unless none would be left.
        runs: at least so many runs.
    """

    feeds: Mapping[str, NDArray[Any]] | None
    seconds: float
    warm: float = 0.0
    runs: int = 1


@dataclass(frozen=True)
class EndProfile:
    """Close the profile, and say where it is."""
