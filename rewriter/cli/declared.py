"""Command-line options from the dataclasses that declare them (`rewriter.options`).

Rare options have no flag of their own: `--option NAME=VALUE` carries them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click

from rewriter.errors import RewriteError
from rewriter.options import Option, options_of, unknown_option

Command = Callable[..., Any]


def declared_options(*kinds: type, only: Collection[str] | None = None, **instead: Any) -> Callable[[Command], Command]:
    """Add the options of dataclasses to a command, which receives them under their Python names.

    Args:
        *kinds: the dataclasses.
        only: names of the options to add; default: all that are not rare.
        **instead: click attributes that differ for this command, by option name, as `name={"help": ...}`.
    """
    every = [each for kind in kinds for each in options_of(kind)]
    found = [each for each in every if (not each.rare if only is None else each.name in only)]

    def decorated(command: Command) -> Command:
        for each in reversed(found):
            command = _option(each, instead.get(each.name, {}))(command)
        return command

    return decorated


def rare_options(*kinds: type) -> Callable[[Command], Command]:
    """Add `--option NAME=VALUE`, which sets any rare option of dataclasses, to a command with their other options."""
    known = {each.name: each for kind in kinds for each in options_of(kind)}

    def parsed(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
        values = {}
        for text in texts:
            name, sign, value = text.partition("=")
            name = name.replace("-", "_")
            each = known.get(name)
            if each is None:
                raise click.BadParameter(unknown_option(name, [name for name in known if known[name].rare]))
            if not each.rare:
                raise click.BadParameter(f"'{name}' has a flag of its own: {each.command_line}")
            try:
                values[name] = each.parsed(value if sign else None)
            except RewriteError as error:
                raise click.BadParameter(str(error)) from error
        return values

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def called(*arguments: Any, option: Mapping[str, Any], **options: Any) -> Any:
            return command(*arguments, **options, **option)

        return click.option(
            "--option",
            metavar="NAME=VALUE",
            multiple=True,
            callback=parsed,
            help=f"Set a rare option (repeatable): {', '.join(name for name in known if known[name].rare)}.",
        )(called)

    return decorated


def _option(each: Option, instead: Mapping[str, Any]) -> Callable[[Command], Command]:
    flag = each.command_line
    attributes: dict[str, Any] = {"help": each.help}
    if each.kind is bool:
        return click.option(flag, each.name, is_flag=True, **{**attributes, **instead})
    if each.metavar:
        attributes["metavar"] = each.metavar
    if each.repeatable or isinstance(each.default, Mapping):
        attributes["multiple"] = True
    elif each.default is not None:
        attributes |= {"default": each.default, "show_default": True}
    if each.name in _CALLBACKS:
        attributes["callback"] = _CALLBACKS[each.name]
    elif each.choices:
        attributes["type"] = click.Choice(each.choices)
    elif each.kind is int:
        attributes["type"] = click.IntRange(
            None if each.least is None else int(each.least), None if each.below is None else int(each.below) - 1
        )
    elif each.kind is float:
        attributes["type"] = click.FloatRange(each.above, each.below, min_open=True, max_open=True)
    elif each.kind is object:
        attributes["type"] = click.Path(path_type=Path)
    return click.option(flag, each.name, **{**attributes, **instead})


def _accuracy(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    if value is None or value == "dtype":
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 < number < 1.0:
        raise click.BadParameter(f"'{value}' is neither 'dtype' nor a number between 0 and 1, such as 1e-6")
    return number


def _providers(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    if not texts:
        return ()
    from rewriter.ort.providers import parse_provider

    try:
        return tuple(parse_provider(text).text for text in texts)
    except RewriteError as error:
        raise click.BadParameter(str(error)) from error


def _dimension(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for value in values:
        name, sign, number = value.rpartition("=")
        if not sign or not name or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise click.BadParameter(f"'{value}' is not NAME=VALUE with a value of at least 1")
        sizes[name] = int(number)
    return sizes


_CALLBACKS: Mapping[str, Callable[[click.Context, click.Parameter, Any], Any]] = {
    "accuracy": _accuracy,
    "providers": _providers,
    "dims": _dimension,
}
"""Options whose text needs a parser of its own."""
