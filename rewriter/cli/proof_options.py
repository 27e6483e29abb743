"""The options of every proof, declared once.

Comes in: the command line of a command that proves something. Goes out: one frozen `Settings`, as the argument
`settings` of the command. Used by the plain command and by every subcommand that proves or compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rewriter.errors import RewriteError
from rewriter.proof.settings import LARGE, PROOFS, Settings


def proof_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options below; it is called with `settings` in their place."""

    @functools.wraps(command)
    def with_settings(*arguments: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in _FIELDS}
        return command(*arguments, settings=Settings(**given), **options)

    for option in reversed(_OPTIONS):
        with_settings = option(with_settings)
    return with_settings


def _providers(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    if not texts:
        return ()
    from rewriter.ort.providers import parse_provider

    try:
        return tuple(parse_provider(text).text for text in texts)
    except RewriteError as error:
        raise click.BadParameter(str(error)) from error


def _backend(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str | None:
    from rewriter.proof.run.jobs import parse_backend

    try:
        parse_backend(text)
    except RewriteError as error:
        raise click.BadParameter(str(error)) from error
    return text


def _dimension(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for value in values:
        name, sign, number = value.rpartition("=")
        if not sign or not name or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise click.BadParameter(f"'{value}' is not NAME=VALUE with a value of at least 1")
        sizes[name] = int(number)
    return sizes


INPUT_OPTIONS = (
    click.option(
        "--provider",
        "providers",
        metavar="NAME[:KEY=VALUE,...]",
        multiple=True,
        callback=_providers,
        help="Execution provider to prove on: cpu, cuda, cuda:device_id=1 (repeatable). Default: cpu, and cuda where "
        "it works.",
    ),
    click.option(
        "--inputs", metavar="FILE.npz", type=click.Path(path_type=Path), help="Prove on these inputs instead."
    ),
    click.option(
        "--dim", "dims", metavar="NAME=VALUE", multiple=True, callback=_dimension, help="Size of a symbolic dimension."
    ),
    click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the inputs."),
)
"""What models are run on, and where."""

_OPTIONS = (
    *INPUT_OPTIONS,
    click.option(
        "--proof",
        type=click.Choice(PROOFS),
        default="auto",
        show_default=True,
        help="Load whole models, or one block and one segment of a model at a time; auto: the latter above "
        f"{LARGE // 10**6} MB.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=-1),
        default=1,
        show_default=True,
        help="How many blocks to prove at once; -1: one per processor. Needs joblib.",
    ),
    click.option(
        "--joblib-backend",
        metavar="NAME[:KEY=VALUE,...]",
        callback=_backend,
        help="Where joblib runs them: loky, dask:scheduler_host=tcp://HOST:PORT, ray.",
    ),
    click.option("--isolate", is_flag=True, help="Run the models in a process of its own, with the limits below."),
    click.option("--memory-limit-mb", type=click.IntRange(min=1), help="What that process may allocate, in MB."),
    click.option(
        "--time-limit", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), help="How long it may take."
    ),
)
_FIELDS = (
    "providers",
    "inputs",
    "dims",
    "seed",
    "proof",
    "jobs",
    "joblib_backend",
    "isolate",
    "memory_limit_mb",
    "time_limit",
)
