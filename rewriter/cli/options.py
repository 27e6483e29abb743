"""Options of commands: declared by dataclasses or shared by several commands, and checks of their values."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rewriter.errors import RewriteError, UsageError
from rewriter.files.atomic import check_directory, os_errors, write_text
from rewriter.options import Option, options_of, unknown_option
from rewriter.text import counted, quoted

if TYPE_CHECKING:
    from rewriter.proof.run import Progress
    from rewriter.report.report import Result
    from rewriter.report.terminal import Console

Command = TypeVar("Command", bound=Callable[..., Any])
Found = TypeVar("Found", bound="Result")

STANDARD = Path("-")  # standard output as a path on the command line

MODEL = {4: "the model is unreadable, malformed or unsafe"}
MODELS = {4: "a model is unreadable, malformed or unsafe", 5: "a requested execution provider is not available"}
"""Exit statuses of commands that read one model, and of commands that run several."""


def command(
    further: Mapping[int, str], *, ok: str, failed: str = "", usage: str = "", nothing: str = ""
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command whose help ends in its exit statuses; `usage` describes further usage errors."""
    statuses = {0: ok, 1: failed, 2: f"usage error, or {usage}" if usage else "usage error", 3: nothing, **further}
    lines = [f"  {status}  {meaning}" for status, meaning in statuses.items() if meaning]
    return click.command(cls=Checked, epilog="\n".join(["\b", "Exit status:", *lines, ""]), context_settings=SETTINGS)


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}  # of click, for every command


def _one_model(_ctx: click.Context, _param: click.Parameter, path: Path) -> Path:
    """The model; of a folder, the one in it."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.onnx"))
    chosen = [each for each in found if each.name == "model.onnx"] or found
    if len(chosen) != 1:
        choice = f"one of {', '.join(quoted(each.name) for each in found)}" if found else "the file of a model"
        raise UsageError(f"{quoted(path)} holds {counted(len(found), 'ONNX file')}: name {choice}")
    return chosen[0]


def about_model(**statuses: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command on one model, which may be in a folder; `statuses` are as for `command`."""
    model = click.argument("model", type=click.Path(path_type=Path), callback=_one_model)
    return lambda called: command(MODEL, **statuses)(model(called))


file_option = partial(click.option, type=click.Path(path_type=Path))


class Output(click.Option):
    """An option that names a file to write; `new`: one that replaces nothing, and ends in `suffix`."""

    def __init__(self, *flags: Any, suffix: str = "", new: bool = False, **given: Any) -> None:
        self.suffix, self.new = suffix, new
        super().__init__(*flags, **{"type": click.Path(path_type=Path), "metavar": f"FILE{suffix}", **given})

    def check(self, path: Path, others: Sequence[Path], *, force: bool) -> None:
        """Refuse a file that cannot be written, or would replace `others` or a file of another kind."""
        if self.suffix == ".html":
            from rewriter.report.html import require_jinja

            require_jinja()
        if self.new and path.suffix != (self.suffix or path.suffix):
            raise UsageError(f"{quoted(path)} must end in {self.suffix}")
        if self.new and os.path.lexists(path):
            raise UsageError(f"{quoted(path)} exists; remove it, or choose another output")
        with os_errors("write", path):
            check_directory(path.parent)
        if path.absolute() in [other.absolute() for other in others]:
            what = f"the {'output' if self.new else 'report'} {quoted(path)} would replace another file of this command"
            raise UsageError(f"{what}; choose another path")
        if path.is_dir() or (path.exists() and path.suffix != self.suffix and not force):
            advice = "choose another path" if path.is_dir() else "remove it, or choose another path"
            raise UsageError(f"{quoted(path)} exists and is not a {self.suffix} file; {advice}")


class Checked(click.Command):
    """A command that refuses unfit outputs before the long work."""

    def invoke(self, ctx: click.Context) -> Any:
        given = {name: value if isinstance(value, tuple) else (value,) for name, value in ctx.params.items()}
        for option in (each for each in self.params if isinstance(each, Output)):
            (path,) = given.pop(str(option.name))
            others = [each for values in given.values() for each in values if isinstance(each, Path)]
            if path not in (None, STANDARD):
                option.check(path, others, force=bool(ctx.params.get("force")))
        return super().invoke(ctx)


output_option = partial(click.option, cls=Output)


def report_option(what: str, *flags: str) -> Callable[[Command], Command]:
    """The option of all commands with a result: where its JSON goes; `flags` are further names of it."""
    told = f"Write {what} as JSON; -, or --json alone: to standard output instead of tables."
    return output_option(*flags, "--report", "--json", "report", suffix=".json", help=told)


def with_json_files(arguments: Sequence[str]) -> list[str]:
    """The arguments with a file for each `--json` that has none: `-`, standard output."""
    return [
        "--json=-" if each == "--json" and next_one != "-" and not next_one.endswith(".json") else each
        for each, next_one in zip_longest(arguments, arguments[1:], fillvalue="")
    ]


def write_report(report: Path, data: Mapping[str, Any]) -> None:
    """Write JSON to a file, or to standard output."""
    from rewriter.report.report import json_text

    if report == STANDARD:
        click.echo(json_text(data), nl=False)
    else:
        write_text(report, json_text(data))


def answer(
    lines: Iterable[str], report: Path | None = None, facts: Mapping[str, Any] | None = None, *, error: bool = False
) -> None:
    """Write JSON if requested, and print lines; to standard error also where standard output has the JSON."""
    if report is not None and facts is not None:
        write_report(report, facts)
    for line in lines:
        click.echo(line.rstrip(), err=error or report == STANDARD)


def carried_out(
    report: Path | None, call: "Callable[[Progress], Found]", show: "Callable[[Console, Found], object]", **how: bool
) -> int:
    """Call, write the JSON if requested, print, and return the exit status; `how` is verbose or quiet."""
    from rewriter.report.terminal import Console

    console = Console(error=report == STANDARD, **how)
    with console.progress() as progress:
        found = call(progress)
    if report is not None:
        write_report(report, found.to_json())
    show(console, found)
    return int(found.exit_status)


# -- options that dataclasses declare ----------------------------------------------------------------------------


def declared_options(*kinds: type, only: Collection[str] | None = None, **instead: Any) -> Callable[[Any], Any]:
    """Add the options of dataclasses to a command: those in `only`, by default all except rare ones.

    `instead` has attributes of click for this command, by option name, as `name={"help": ...}`.
    """
    every = [each for kind in kinds for each in options_of(kind)]
    found = [each for each in every if (not each.rare if only is None else each.name in only)]
    options = [_option(each, instead.get(each.name, {})) for each in reversed(found)]
    return lambda command: reduce(lambda made, option: option(made), options, command)


def rare_options(*kinds: type) -> Callable[[Any], Any]:
    """Add `--option NAME=VALUE`, which sets any rare option of dataclasses, to a command with their other options."""
    known = {each.name: each for kind in kinds for each in options_of(kind)}
    rare = [name for name in known if known[name].rare]

    def parsed(ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> None:
        for text in texts:
            name, sign, value = text.partition("=")
            name = name.replace("-", "_")
            if name not in known:
                raise UsageError(unknown_option(name, rare))
            if name not in rare:
                raise UsageError(f"'{name}' has its own flag: {known[name].command_line}")
            ctx.params[name] = known[name].parsed(value if sign else None)

    about: dict[str, Any] = {"help": f"Set a rare option (repeatable): {', '.join(rare)}.", "metavar": "NAME=VALUE"}
    return click.option("--option", multiple=True, expose_value=False, callback=parsed, **about)


def _option(each: Option, instead: Mapping[str, Any]) -> Callable[[Any], Any]:
    multiple = each.repeatable or each.name in _PARSED
    one = _PARSED.get(each.name, replace(each, repeatable=False).parsed)

    def parsed(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        if multiple:
            found = tuple(map(one, value))
            return found if each.repeatable else dict(found) or each.default
        return None if value in (None, "dtype") else one(value)

    attributes: dict[str, Any] = {"help": each.help, "metavar": each.metavar or None}
    if each.kind is bool:
        attributes["is_flag"] = True
    elif each.kind is object and not multiple:
        attributes["type"] = click.Path(path_type=Path)
    else:
        attributes |= {"callback": parsed, "multiple": multiple}
        if each.choices:
            attributes |= {"type": click.Choice(each.choices), "default": each.default, "show_default": True}
    return click.option(each.command_line, each.name, **{**attributes, **instead})


def _provider(text: str) -> str:
    """A provider by its usual name; an unknown name is a usage error, not a missing provider."""
    from rewriter.ort import parse_provider

    try:
        return parse_provider(text).text
    except RewriteError as error:
        raise UsageError(error.args[0]) from error


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not name or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise UsageError(f"--dim: '{text}' is not NAME=VALUE with a value of at least 1")
    return name, int(number)


def _renaming(text: str) -> tuple[str, str]:
    old, _, new = text.partition("=")
    if not old or not new:
        raise UsageError(f"--map: '{text}' is not OLD=NEW, the name in the first model and the one in the second")
    return old, new


_PARSED: Mapping[str, Callable[[str], Any]] = {"providers": _provider, "dims": _size, "names": _renaming}
"""Options with a special parser, which is called for each occurrence."""
