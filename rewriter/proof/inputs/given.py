"""How callers give their own inputs: an npz file, or arrays in Python.

Light on imports, because the command line loads the options of the proof even when nothing is proved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewriter.errors import UsageError

Given = Path | Mapping[str, Any]
"""An npz file, or what would be in one: arrays by `input`, or by `case/input`."""

Inputs = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""The path of an npz file, arrays by input name, or several cases of those."""


def as_given(inputs: Inputs) -> Given:
    """What a caller passes as `inputs`, in one of two forms.

    Raises:
        UsageError: it is neither a path nor arrays by name.
    """
    if isinstance(inputs, (str, os.PathLike)):
        return Path(inputs)
    cases = (inputs,) if isinstance(inputs, Mapping) else tuple(inputs)
    if not cases or not all(isinstance(case, Mapping) and case for case in cases):
        raise UsageError("inputs must be the path of an npz file, arrays by input name, or a list of those")
    prefixes = [""] if len(cases) == 1 else [f"{number}/" for number in range(len(cases))]
    return {
        f"{prefix}{name}": value for prefix, case in zip(prefixes, cases, strict=True) for name, value in case.items()
    }


def spelled(given: Given) -> str:
    """What messages call the inputs."""
    return given.name if isinstance(given, Path) else "inputs"
