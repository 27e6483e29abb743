"""Options, each declared once: a field of a frozen dataclass with its default, its help and its range.

Options of the command line, keywords in Python, the tables of docs/reference.md and the options in a report are derived
from these fields.
"""

import dataclasses
import inspect
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeVar

from rewriter.errors import UsageError

Made = TypeVar("Made")
_KEY = "option"
_hints_of = cache(typing.get_type_hints)
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
    least: float = -math.inf  # inclusive; `above` and `below` are exclusive
    above: float = -math.inf
    below: float = math.inf
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
            words = self.name.replace("_", " ")
            raise UsageError(f"unknown {words} '{value}'; known are: {', '.join(self.choices)}")
        if self.kind in (int, float):
            number = isinstance(value, Integral if self.kind is int else Real) and not isinstance(value, bool)
            if not number or not (self.least <= value and self.above < value < self.below):
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
    def _range(self) -> str:
        bounds = {"of at least": self.least, "above": self.above, "below": self.below}
        parts = [f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound)]
        return f"{'an integer' if self.kind is int else 'a number'} {' and '.join(parts)}".rstrip()


def option(default: Any, help: str, **further: Any) -> Any:  # noqa: A002 - click's word for it
    """A dataclass field that declares an option; `further` are attributes of `Option`."""
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(**given, metadata={_KEY: {"help": help, **further}})


def options_of(kind: type) -> tuple[Option, ...]:
    """The options of a dataclass in order, inherited ones last."""
    hints, declared = _hints_of(kind), {each.name: each for each in dataclasses.fields(kind)}
    names = [name for each in kind.__mro__ for name in inspect.get_annotations(each)]
    return tuple(_option(declared[name], hints[name]) for name in names if _KEY in declared[name].metadata)


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    parts = [each for each in typing.get_args(hint) if each not in (type(None), Ellipsis)] or [hint]
    plain = parts[0] if len(parts) == 1 and parts[0] in (bool, int, float, str) else object
    default = {} if field.default is dataclasses.MISSING else field.default
    return Option(field.name, plain, default, repeatable=typing.get_origin(hint) is tuple, **field.metadata[_KEY])


def build(kind: type[Made], given: Mapping[str, Any]) -> Made:
    """An instance from those of the keywords that are its options; UsageError where a value is unfit."""
    return kind(**{each.name: each.checked(given[each.name]) for each in options_of(kind) if each.name in given})


def unknown_option(name: str, known: Iterable[str]) -> str:
    """The message about an unknown option."""
    options = list(known)
    near = get_close_matches(name, options, 1)
    return f"unknown option '{name}'; " + (f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(options)}")


def values_of(instance: Any) -> dict[str, Any]:
    """Option name to value."""
    return {each.name: getattr(instance, each.name) for each in options_of(type(instance))}
