"""Inputs of models, given by callers or generated.

The module imports little at the top, because the command line always loads it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewriter.errors import UsageError

Given = Path | Mapping[str, Any]  # an npz file, or its content: arrays by `input`, or by `case/input`

Inputs = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""The path of an npz file, arrays by input name, or several cases of those."""


def as_given(inputs: Inputs) -> Given:
    """The caller's `inputs` in one of two forms. Raises UsageError for anything else."""
    if isinstance(inputs, (str, os.PathLike)):
        return Path(inputs)
    cases = (inputs,) if isinstance(inputs, Mapping) else tuple(inputs)
    if not cases or not all(isinstance(case, Mapping) and case for case in cases):
        raise UsageError("inputs must be the path of an npz file, arrays by input name, or a list of those")
    key = "{1}" if len(cases) == 1 else "{0}/{1}"
    return {key.format(number, name): value for number, case in enumerate(cases) for name, value in case.items()}


def spelled(given: Given) -> str:
    """The name of the inputs in messages."""
    return given.name if isinstance(given, Path) else "inputs"
