"""Dataclasses rebuilt from plain data, field by field: for data that comes from elsewhere and is not trusted."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

Made = TypeVar("Made")

_NUMBERS = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}


def from_plain(kind: type[Made], data: object, *, saved: bool = False) -> Made:
    """Rebuild a value of `kind`: a dataclass of strings, numbers, tuples, mappings and further dataclasses.

    Args:
        kind: the type.
        data: what `json.loads` gives.
        saved: the data is a JSON report, maybe of another version: further fields are left out, missing ones get
            their defaults, and null stands for a number that is infinite.

    Raises:
        ValueError: the data has another form.
    """
    made: Made = _value(kind, data, saved)
    return made


def _value(kind: Any, data: object, saved: bool) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in inner:
            return None
        return _value(next(each for each in inner if each is not type(None)), data, saved)
    if is_dataclass(kind):
        return _dataclass(kind, data, saved)
    if origin is typing.Literal and data in inner:
        return data
    if origin is tuple and isinstance(data, list):
        kinds = inner[:1] * len(data) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(data):
            return tuple(_value(each, entry, saved) for each, entry in zip(kinds, data, strict=True))
    if origin is Mapping and isinstance(data, dict):
        return {str(key): _value(inner[1], entry, saved) for key, entry in data.items()}
    if kind is float and data is None and saved:
        return float("inf")
    if kind in _NUMBERS and isinstance(data, _NUMBERS[kind]) and (kind is bool or not isinstance(data, bool)):
        return kind(data)
    raise ValueError(f"not a {kind}: {str(data)[:80]}")


def _dataclass(kind: Any, data: object, saved: bool) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"not a {kind.__name__}")  # noqa: TRY004 - the data is wrong, not the call
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    given = {name: value for name, value in data.items() if name in known or not saved}
    optional = {name for name, each in known.items() if (each.default, each.default_factory) != (MISSING, MISSING)}
    lacking = set(known) - set(given) - (optional if saved else set())
    if lacking or not set(given) <= set(known):
        raise ValueError(f"{kind.__name__} has other fields{f': no {min(lacking)}' if lacking else ''}")
    return kind(**{name: _value(hints[name], value, saved) for name, value in given.items()})
