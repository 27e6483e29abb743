"""The command line: `rewrite MODEL -o OUT`, and the subcommands.

The plain command gets every command line that does not start with the name of a subcommand; a model file with such a
name must be given as ./NAME.
"""

import ctypes
import difflib
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, shell_complete

from rewriter import require_own_passes

try:
    require_own_passes()  # the commands import it
except ImportError as error:
    click.echo(f"rewrite: {error}", err=True)
    sys.exit(2)

from rewriter.cli import interpret
from rewriter.cli.models import bench, certify, convert, diff, doctor, inspect, validate
from rewriter.cli.options import with_json_files
from rewriter.errors import ExitStatus, RewriteError, UsageError
from rewriter.text import quoted

_OF_HEADS = (interpret.heads, interpret.attribute, interpret.graph, interpret.rank, interpret.run)
COMMANDS = {str(each.name): each for each in (inspect, certify, validate, diff, bench, doctor, *_OF_HEADS)}
"""Subcommand name to command; the plain command is `convert`."""

_COMPLETE = "_REWRITE_COMPLETE"
_GC_THRESHOLD = 20_000  # objects; by default 700, and files have tens of thousands
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 2**25), (-1, 2**27)  # options of glibc's `mallopt`, and bytes


class Forgiving(io.FileIO):
    """A stream that drops its output once the reader has gone, as in `rewrite MODEL -o OUT | head -1`, or it failed."""

    failed = False

    def write(self, data: Any, /) -> int:
        try:
            return len(data) if self.failed else super().write(data)
        except BrokenPipeError:
            return len(data)
        except OSError as error:
            self.failed = True  # what the buffer still holds follows
            stream = "standard error" if self.fileno() == 2 else "standard output"
            raise UsageError(f"cannot write {stream}: {error.strerror}; free some space on its disk") from error


class _Completing(click.Group):
    """Shell completion: the first word is a command or a model, the others belong to the command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args) if args[0] in COMMANDS else ("rewrite", convert, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        plain = convert.make_context("rewrite", [], resilient_parsing=True)
        return [*super().shell_complete(ctx, incomplete), *convert.shell_complete(plain, incomplete)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits with an `ExitStatus`."""
    if _COMPLETE in os.environ:
        group = _Completing("rewrite", commands=COMMANDS, add_help_option=False)
        sys.exit(shell_complete(group, {}, "rewrite", _COMPLETE, os.environ[_COMPLETE]))
    # Container runtimes send it; an exit cleans up everything, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for name in ("stdout", "stderr"):
        # Where it is closed, no other file may get its number.
        stream = getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False)
        if isinstance(stream, io.TextIOWrapper):
            buffer = io.BufferedWriter(Forgiving(stream.fileno(), "wb", closefd=False))
            how: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, **how))
    status = run(arguments)
    gc.freeze()  # or the interpreter looks for reference cycles in everything before it exits
    sys.exit(status)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Errors become one line on standard error."""
    given = with_json_files(sys.argv[1:] if arguments is None else arguments)
    try:
        command, rest = _dispatch(given)
        # OpenBLAS's other threads spin between small products, and where cores are shared inside large ones too. numpy
        # reads this once.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        with suppress(AttributeError):  # glibc uses freed memory again, whose pages the system need not clear
            for threshold in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
                ctypes.CDLL(None).mallopt(*threshold)
        gc.set_threshold(_GC_THRESHOLD)
        name = "rewrite" if command is convert else f"rewrite {command.name}"
        result: Any = command.main(rest, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except RewriteError as error:
        told, status = error.args[0], int(error.exit_status)
    except click.ClickException as error:
        name = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "rewrite"
        message = error.format_message().rstrip(".")
        # click's own suggestions end in a question mark.
        told, status = f"{message}{' See' if message.endswith('?') else '; see'} '{name} --help'", error.exit_code
    except (click.Abort, KeyboardInterrupt, SystemExit) as error:
        terminated = isinstance(error, SystemExit)
        told = f"{'terminated' if terminated else 'interrupted'}; no half-written file is left"
        status = 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    except MemoryError:
        told, status = "out of memory; try --certificate-only, or fewer and shorter inputs with --dim", 1
    except Exception as error:  # noqa: BLE001 - command-line users need a message, not a traceback
        calls = reversed(traceback.extract_tb(error.__traceback__)[-3:])
        # Neither paths nor values: people can share it without reading it first.
        places = ", called by ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls)
        told = f"internal error ({type(error).__name__} in {places}); this is a bug, please report it"
        told, status = f"{told} with 'rewrite --version'", int(ExitStatus.INTERNAL_ERROR)
    else:
        return int(result) if result is not None else 0
    click.echo(f"rewrite: {told}", err=True)
    return status


def _dispatch(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The subcommand that the first word names and the other words, or the plain command and all words."""
    if not arguments:
        return convert, ["--help"]
    first = arguments[0]
    if first in COMMANDS:
        return COMMANDS[first], arguments[1:]
    if (near := difflib.get_close_matches(first, COMMANDS, 1, 0.7)) and not os.path.lexists(first):
        raise UsageError(f"there is no command or file {quoted(first)}; did you mean 'rewrite {near[0]}'?")
    if len(arguments) == 2 and not any(each.startswith("-") for each in arguments):
        raise UsageError(f"where should the result go? did you mean 'rewrite {first} -o {arguments[1]}'?")
    return convert, arguments
