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


def logits(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int | None, int | None]:
    """The entry of a logit, and the one that is subtracted: N, or N-M."""
    entry, minus, other = (text or "").partition("-")
    if text is None:
        return None, None
    if not entry.isdecimal() or (minus and not other.isdecimal()):
        raise click.BadParameter(f"'{text}' is neither N nor N-M, such as 318 or 318-262")
    return int(entry), int(other) if minus else None


top_option = click.option(
    "--top", type=click.IntRange(1), metavar="K", default=10, show_default=True, help="Rows of each table."
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
    click.option(
        "--logit",
        "pair",
        metavar="N[-M]",
        required=True,
        callback=logits,
        help="Entry N of the output's last axis; N-M: its difference from entry M.",
    ),
    click.option("--position", type=int, metavar="N", default=-1, show_default=True, help="The token."),
)


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
