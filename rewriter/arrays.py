"""Arrays whose element type is only known at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.errors import ValidationError

Array = NDArray[Any]  # an array of any element type
_BLOCK = 64


def largest_places(values: Array, count: int) -> list[int]:
    """The places of the `count` largest of some numbers [N], the largest first, equal ones in order."""
    if len(values) > count * _BLOCK:  # the largest of each group bound them from below
        groups = values[: len(values) // _BLOCK * _BLOCK].reshape(_BLOCK, -1).max(axis=0)
        places = np.flatnonzero(~(values < np.partition(groups, -count)[-count]))
    else:
        places = np.arange(len(values))
    return list(places[np.argsort(-values[places], kind="stable")[:count]].tolist())


def tensors_of(values: Mapping[str, Any]) -> dict[str, Array]:
    """Outputs tensor by tensor: the elements of a sequence `y` are `y[0]` and so on; a missing optional value is False.

    Raises:
        ValidationError: another output has the name of an element.
    """
    found: dict[str, Array] = {}
    for name, value in values.items():
        if isinstance(value, list) and value:
            parts = tensors_of({f"{name}[{place}]": each for place, each in enumerate(value)})
        else:
            parts = {name: np.asarray(value if value is not None else False)}
        if taken := parts.keys() & values.keys() - {name}:
            raise ValidationError(f"output '{min(taken)}' has the name of an element of another; rename it")
        found |= parts
    return found
