"""Dataclasses rebuilt from plain data, field by field: for data that comes from elsewhere and is not trusted."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Made = TypeVar("Made")

_NUMBERS = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}


def from_plain(kind: type[Made], data: object) -> Made:
    """Rebuild a value of `kind`: a dataclass of strings, numbers, tuples, mappings and further dataclasses.

    Args:
        kind: the type.
        data: what `json.loads` gives.

    Raises:
        ValueError: the data has another form.
    """
    made: Made = _value(kind, data)
    return made


def _value(kind: Any, data: object) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in inner:
            return None
        return _value(next(each for each in inner if each is not type(None)), data)
    if is_dataclass(kind):
        return _dataclass(kind, data)
    if origin is typing.Literal and data in inner:
        return data
    if origin is tuple and isinstance(data, list):
        kinds = inner[:1] * len(data) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(data):
            return tuple(_value(each, entry) for each, entry in zip(kinds, data, strict=True))
    if origin is Mapping and isinstance(data, dict):
        return {str(key): _value(inner[1], entry) for key, entry in data.items()}
    if kind in _NUMBERS and isinstance(data, _NUMBERS[kind]) and (kind is bool or not isinstance(data, bool)):
        return kind(data)
    raise ValueError(f"not a {kind}: {str(data)[:80]}")


def _dataclass(kind: Any, data: object) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"not a {kind.__name__}")  # noqa: TRY004 - the data is wrong, not the call
    hints = typing.get_type_hints(kind)
    if set(data) != {field.name for field in fields(kind)}:
        raise ValueError(f"{kind.__name__} has other fields")
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})
