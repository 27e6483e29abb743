"""Options, each declared once: a field of a frozen dataclass with its default, its help and its range.

Options of the command line, keywords in Python, the tables of docs/reference.md and the options in a report are derived
from these fields. A field that holds another such dataclass contributes its options.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar

from rewriter.errors import UsageError

Made = TypeVar("Made")
_KEY = "option"
_TRUTH = {None: True, "true": True, "false": False}


@dataclass(frozen=True)
class Option:
    """One option; a repeatable one is a sequence, with an entry for each time that it is given."""

    name: str  # keyword in Python; on the command line with dashes
    kind: type  # of the value, or of the entries: bool, int, float, str; object if the command line parses it specially
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    metavar: str = ""
    least: float | None = None  # inclusive; `above` and `below` are exclusive
    above: float | None = None
    below: float | None = None
    repeatable: bool = False
    flag: str = ""  # if not derived from the name
    see: str = ""  # page of docs/, with an anchor
    rare: bool = False  # on the command line `--option NAME=VALUE` only

    def checked(self, value: Any) -> Any:
        """The value, or UsageError where it is unfit; a single entry of a repeatable option becomes a tuple."""
        if self.repeatable:
            single = replace(self, repeatable=False)
            return tuple(map(single.checked, (value,) if isinstance(value, (str, int)) else value or ()))
        if value is None and self.default is None:
            return None
        if self.choices and value not in self.choices:
            raise UsageError(f"unknown {self.words} '{value}'; known are: {', '.join(self.choices)}")
        if self.kind in (int, float) and not self._within(value):
            raise UsageError(f"{self.name} is {value}; it must be {self._range}")
        return value

    @property
    def command_line(self) -> str:
        return self.flag or f"--{self.name.replace('_', '-')}"

    def parsed(self, text: str | None) -> Any:
        """The value of a text on the command line, or UsageError; None is a flag without a value, which is true."""
        if self.kind is bool:
            if text not in _TRUTH:
                raise UsageError(f"{self.name} is '{text}'; it must be true or false")
            return _TRUTH[text]
        if not text:
            raise UsageError(f"{self.name} has no value; write --option {self.name}={self.metavar or 'VALUE'}")
        if self.kind in (int, float):
            try:
                return self.checked(self.kind(text))
            except ValueError as error:
                raise UsageError(f"{self.name} is '{text}'; it must be {self._range}") from error
        return self.checked(text)

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    def _within(self, value: Any) -> bool:
        kind = Integral if self.kind is int else Real
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            return False
        number, least, above, below = float(value), self.least, self.above, self.below
        inside = (above is None or number > above) and (below is None or number < below)
        return inside and (least is None or number >= least)

    @property
    def _range(self) -> str:
        bounds = {"of at least": self.least, "above": self.above, "below": self.below}
        parts = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
        return f"{'an integer' if self.kind is int else 'a number'} {' and '.join(parts)}".rstrip()


def option(default: Any, help: str, *, name: str = "", **further: Any) -> Any:  # noqa: A002 - click's word for it
    """A dataclass field that declares an option; `further` are attributes of `Option`."""
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(**given, metadata={_KEY: {"name": name, "help": help, **further}})


def options_of(kind: type) -> tuple[Option, ...]:
    """All options of a dataclass in order, including those of nested dataclasses."""
    hints, options = typing.get_type_hints(kind), list[Option]()
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if _KEY in field.metadata:
            given = {**field.metadata[_KEY], "name": _name(field)}
            repeatable = typing.get_origin(hint) is tuple
            parts = [each for each in typing.get_args(hint) if each not in (type(None), Ellipsis)] or [hint]
            plain = parts[0] if len(parts) == 1 and parts[0] in (bool, int, float, str) else object
            default = {} if field.default is dataclasses.MISSING else field.default
            options.append(Option(kind=plain, default=default, repeatable=repeatable, **given))
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            options.extend(options_of(hint))
    return tuple(options)


def build(kind: type[Made], given: Mapping[str, Any]) -> Made:
    """An instance from checked keywords; UsageError where a value is unfit, TypeError where a keyword is unknown."""
    known = {found.name: found for found in options_of(kind)}
    check_known(given, known)
    return _built(kind, {name: known[name].checked(value) for name, value in given.items()})


def check_known(given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for an unknown keyword."""
    for name in given:
        if name not in known:
            raise TypeError(unknown_option(name, known))


def unknown_option(name: str, known: Iterable[str]) -> str:
    """The message about an unknown option."""
    near = get_close_matches(name, list(known), 1)
    return f"unknown option '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")


def values_of(instance: Any) -> dict[str, Any]:
    """Option name to value, nested dataclasses included."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if _KEY in field.metadata:
            values[_name(field)] = value
        elif dataclasses.is_dataclass(value):
            values.update(values_of(value))
    return values


def _built(kind: type[Made], given: Mapping[str, Any]) -> Made:
    arguments, hints = dict[str, Any](), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if _KEY in field.metadata:
            if _name(field) in given:
                arguments[field.name] = given[_name(field)]
        elif dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _built(hints[field.name], given)
    return kind(**arguments)


def _name(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata[_KEY]["name"] or field.name)
