"""Errors that reach the user, each with the exit status of the command line.

A message is one line: what is wrong, and what to do about it, with the names of options on the command line.
"""

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


class RewriteError(Exception):
    """Base of every error that the caller can act on."""

    exit_status: ClassVar[ExitStatus] = ExitStatus.USAGE


class UsageError(RewriteError):
    """An option or argument cannot be used: a bad value, an output that exists, inputs that do not fit the model."""


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
