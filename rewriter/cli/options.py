"""Options that several commands share.

Comes in: what a user wrote. Goes out: checked values, or an error of one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from rewriter.errors import UsageError
from rewriter.text import quoted

Command = TypeVar("Command", bound=Callable[..., Any])


def dimension(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """NAME=VALUE pairs as sizes."""
    sizes: dict[str, int] = {}
    for value in values:
        name, sign, number = value.rpartition("=")
        if not sign or not name or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise click.BadParameter(f"'{value}' is not NAME=VALUE with a value of at least 1")
        sizes[name] = int(number)
    return sizes


def tolerance(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str | None, float] | None:
    """NUMBER or OUTPUT:NUMBER; the number alone is for all outputs that are not named."""
    found: dict[str | None, float] = {}
    for value in values:
        name, colon, number = value.rpartition(":")
        try:
            found[name if colon else None] = float(number)
        except ValueError as error:
            raise click.BadParameter(f"'{value}' is neither NUMBER nor OUTPUT:NUMBER") from error
    return found or None


def check_report(report: Path, models: Sequence[Path | None], *, force: bool = False) -> None:
    """Refuse a report path that could not be written, or that would replace something else, before the long work."""
    if not report.parent.is_dir():
        raise UsageError(
            f"the directory of the report, {quoted(report.parent)}, does not exist; create it first (mkdir -p)"
        )
    if report.absolute() in [model.absolute() for model in models if model is not None]:
        raise UsageError(f"the report {quoted(report)} would replace a model; choose another path for it")
    if report.is_dir() or (report.exists() and report.suffix != ".json" and not force):
        advice = "choose another path" if report.is_dir() else "pass --force to replace it, or choose another path"
        raise UsageError(f"{quoted(report)} exists and is no .json file; {advice}")


_RUNNING = (
    click.option(
        "--provider",
        "providers",
        type=click.Choice(["cpu", "cuda"]),
        multiple=True,
        help="Execution provider to run on (repeatable). Default: cpu, and cuda where it works.",
    ),
    click.option("--inputs", metavar="FILE.npz", type=click.Path(path_type=Path), help="Run on these inputs instead."),
    click.option(
        "--dim", "dims", metavar="NAME=VALUE", multiple=True, callback=dimension, help="Size of a symbolic dimension."
    ),
    click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the inputs."),
)

_COMPARING = (
    click.option(
        "--atol",
        metavar="[OUTPUT:]NUMBER",
        multiple=True,
        callback=tolerance,
        help="Judge outputs by this absolute tolerance instead of the float64 rule; for all outputs, or for one "
        "(repeatable).",
    ),
    click.option(
        "--rtol",
        metavar="[OUTPUT:]NUMBER",
        multiple=True,
        callback=tolerance,
        help="The same, relative to the first model's values; adds to --atol.",
    ),
    click.option("--top-k", metavar="K", type=click.IntRange(1), help="Also compare the K best entries of each row."),
    click.option(
        "--taps",
        type=click.Choice(["blocks"]),
        help="Compare the output of every block too, and show how the error grows through depth.",
    ),
    click.option("--bisect", is_flag=True, help="If they differ, try every part alone and name the guilty ones."),
    click.option(
        "--report", "--json", "report", metavar="FILE.json", type=click.Path(path_type=Path), help="Write it as JSON."
    ),
    click.option("-q", "--quiet", is_flag=True, help="Print the last line only."),
    click.option("-v", "--verbose", is_flag=True, help="Print everything: all boundaries, nodes, weights."),
)


def comparison_options(command: Command) -> Command:
    """The options of `validate` and `diff`."""
    for option in reversed((*_RUNNING, *_COMPARING)):
        command = option(command)
    return command
