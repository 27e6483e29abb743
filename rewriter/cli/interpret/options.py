"""Options that the commands for heads share: the inputs, as arrays or as text, and what is taken apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rewriter.cli.declared import declared_options
from rewriter.cli.options import file_option, with_options
from rewriter.errors import UsageError
from rewriter.proof.inputs.given import Text
from rewriter.proof.settings import Settings

Command = TypeVar("Command", bound=Callable[..., Any])

program_option = click.option(
    "--program",
    type=click.Choice(["fewest", "fast"]),
    default="fewest",
    show_default=True,
    help="Heads of neurons: those of the program with the fewest heads, or with the fewest operations.",
)

_TEXT = (
    click.option("--text", metavar="TEXT", multiple=True, help="The input as text, instead of --inputs."),
    file_option(
        "--tokenizer",
        metavar="FILE",
        help="The tokenizer of --text: a tokenizer.json, or a folder with one. Needs the extra text.",
    ),
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
    file_option("--tokenizer", metavar="FILE.json", help="With --html: show tokens as text, by a tokenizer.json."),
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
    return with_options(_PAGE)(command)


def logit_options(command: Command) -> Command:
    """The options of commands that take a logit apart: the inputs, and which entry of which output."""
    return input_options("The inputs: one case.")(with_options(_LOGIT)(command))


def input_options(told: str, **instead: Any) -> Callable[[Command], Command]:
    """`--inputs`, `--text` and `--tokenizer`, which the command receives as `inputs`: a path or a `Text`.

    Args:
        told: the help of `--inputs`.
        **instead: further options of the proof, as for `declared_options`.
    """

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def called(*, inputs: Path | None, text: tuple[str, ...], tokenizer: Path | None, **options: Any) -> Any:
            return command(inputs=_given(inputs, text, tokenizer), **options)

        declared = declared_options(Settings, only=("inputs", *instead), inputs={"help": told}, **instead)
        return declared(with_options(_TEXT)(called))  # type: ignore[return-value]

    return decorated


def files_of(inputs: Path | Text) -> tuple[Path, ...]:
    """The files that inputs are read from, which no output may replace."""
    return (inputs,) if isinstance(inputs, Path) else (Path(inputs.tokenizer),)


def _given(inputs: Path | None, text: tuple[str, ...], tokenizer: Path | None) -> Path | Text:
    if (inputs is None) == (not text):
        raise UsageError("pass --inputs FILE.npz, or --text and --tokenizer" + (", not both" if text else ""))
    if bool(text) != (tokenizer is not None):
        raise UsageError("--text and --tokenizer belong together")
    return Text(text, tokenizer) if inputs is None else inputs
