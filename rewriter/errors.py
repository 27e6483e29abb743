"""Errors that reach the user, each with the exit status of the command line.

A message is one line: what is wrong, and what to do about it. It is written with the flags of the command line, which
prints it as it is; as the text of an exception the flags are keywords: `--force` reads `force=True`.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import ClassVar


class ExitStatus(IntEnum):
    """Exit statuses of `rewrite`, part of its public interface."""

    CONVERTED = 0
    VALIDATION_FAILED = 1
    USAGE = 2
    NOTHING_TO_CONVERT = 3
    BAD_MODEL = 4
    PROVIDER_UNAVAILABLE = 5
    INTERNAL_ERROR = 70


_KEYWORDS = {"force": "force=True", "no-validate": "validate=False", "dry-run": "dry_run=True"}
_KEYWORDS |= {"provider": "providers=", "dim": "dims=", "max-tokens": "max_tokens=", "option": ""}
_KEYWORDS |= {"lower-experts": "lower_experts=True", "certificate-only": "validate='certificate'"}
_KEYWORDS |= {name: f"{name}=" for name in ("accuracy", "expose", "form", "gate", "inputs", "only")}
_KEYWORDS |= {name: f"{name}=" for name in ("scope", "skip", "top")}
_FLAG = re.compile(rf"--({'|'.join(_KEYWORDS)})\b(?!-)( (?=\w+=)| (?=local|whole|heads|product))?")


class RewriteError(Exception):
    """Base of every error that the caller can act on."""

    exit_status: ClassVar[ExitStatus] = ExitStatus.USAGE

    def __str__(self) -> str:
        return _FLAG.sub(lambda flag: _KEYWORDS[flag[1]], super().__str__())


class UsageError(RewriteError):
    """An option or argument cannot be used: a bad value, an output that exists, inputs that do not fit the model."""

    exit_status = ExitStatus.USAGE


class ModelError(RewriteError):
    """The model file is unreadable, malformed or unsafe."""

    exit_status = ExitStatus.BAD_MODEL


class ProviderError(RewriteError):
    """A requested execution provider is not available in this onnxruntime."""

    exit_status = ExitStatus.PROVIDER_UNAVAILABLE


class NothingToConvertError(RewriteError):
    """The model has no block that could be converted."""

    exit_status = ExitStatus.NOTHING_TO_CONVERT


class ValidationError(RewriteError):
    """The proof could not be carried out, so no output is written."""

    exit_status = ExitStatus.VALIDATION_FAILED
