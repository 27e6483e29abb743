"""Options that the commands for heads share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rewriter.cli.declared import declared_options
from rewriter.proof.settings import Settings

Command = TypeVar("Command", bound=Callable[..., Any])

program_option = click.option(
    "--program",
    type=click.Choice(["fewest", "fast"]),
    default="fewest",
    show_default=True,
    help="Heads of neurons: those of the program with the fewest heads, or with the fewest operations.",
)

_LOGIT = (
    click.option("--logit", type=int, metavar="N", required=True, help="Entry of the output's last axis."),
    click.option("--minus", type=int, metavar="N", help="Take the difference from this entry."),
    click.option("--output", metavar="NAME", help="The output; default: the first one."),
    click.option("--position", type=int, metavar="N", default=-1, show_default=True, help="The token."),
    click.option("--sequence", type=int, metavar="N", default=0, show_default=True, help="The sequence in the batch."),
    program_option,
)


_PAGE = (
    click.option("--logit", type=int, metavar="N", help="With --html: attribute this entry of the output's last axis."),
    click.option("--minus", type=int, metavar="N", help="With --logit: take the difference from this entry."),
    click.option("--output-name", metavar="NAME", help="With --logit: the output; default: the first one."),
    click.option("--position", type=int, metavar="N", default=-1, show_default=True, help="With --logit: the token."),
    click.option("--sequence", type=int, metavar="N", default=0, show_default=True, help="With --html: the sequence."),
    click.option(
        "--tokenizer",
        metavar="FILE.json",
        type=click.Path(path_type=Path),
        help="With --html: show tokens as text, by a tokenizer.json.",
    ),
    click.option(
        "--max-neurons",
        type=click.IntRange(0),
        metavar="N",
        default=200,
        show_default=True,
        help="With --html: how many neurons the page shows.",
    ),
)


def page_options(command: Command) -> Command:
    """The options of a page of heads."""
    for option in reversed(_PAGE):
        command = option(command)
    return command


def logit_options(command: Command) -> Command:
    """The options of commands that take a logit apart: the inputs, and which entry of which output."""
    for option in reversed(_LOGIT):
        command = option(command)
    return declared_options(
        Settings, only=("inputs",), inputs={"required": True, "metavar": "FILE.npz", "help": "The inputs: one case."}
    )(command)  # type: ignore[return-value]
