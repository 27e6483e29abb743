"""The options as keywords of `rewrite`: their types, and their text in `help(rewrite)`.

Names, defaults and help come from the dataclasses that declare the options. `RewriteKeywords` repeats names and types
for type checkers; a test compares it with the dataclasses.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from rewriter.options import options_of
from rewriter.proof.inputs.given import Inputs as GivenInputs


class RewriteKeywords(TypedDict, total=False):
    """The options of `rewriter.rewrite`."""

    form: str
    scope: str
    inline: bool
    only: str | Sequence[str]
    skip: str | Sequence[str]
    gate: str
    precision: str
    fit: bool
    accuracy: float | None
    domain: float | None
    max_pattern_mb: float
    max_tokens: int | None
    spelling: str
    expose: str | Sequence[str]
    head_dim: int | None
    providers: str | Sequence[str] | None
    inputs: GivenInputs | None
    dims: Mapping[str, int] | None
    seed: int
    proof: str


def describe(function: Callable[..., Any], *declared: type) -> None:
    """Replace `**options` in the signature of `function` by the declared options, and list them in its docstring."""
    found = [each for kind in declared for each in options_of(kind)]
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    types = RewriteKeywords.__annotations__
    further = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name])
        for each in found
    ]
    function.__signature__ = signature.replace(parameters=[*own, *further])  # type: ignore[attr-defined]
    lines = [
        textwrap.fill(
            f"{each.name} ({each.default!r}): {each.text}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12
        )
        for each in found
    ]
    function.__doc__ = f"{function.__doc__ or ''}\n    Options:\n" + "\n".join(lines) + "\n"
