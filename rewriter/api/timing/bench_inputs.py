"""The inputs of a measurement: of a given size, or from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import onnx
from numpy.typing import NDArray

from rewriter.errors import UsageError
from rewriter.graph.view import view_model
from rewriter.proof.inputs.cases import Maker
from rewriter.proof.inputs.given import Given
from rewriter.proof.inputs.read import load_cases
from rewriter.proof.inputs.roles import InputSpec, Kind, Role, input_specs, kind_of
from rewriter.proof.inputs.sizes import Setting
from rewriter.timing.options import TOKENS, BenchOptions

_TOKENS = (Kind.SEQUENCE, Kind.FRAMES, Kind.SAMPLES)
_OPTION = {Kind.SEQUENCE: "tokens", Kind.BATCH: "batch", Kind.PAST: "past"}


@dataclass(frozen=True, eq=False)
class Inputs:
    """One set of inputs.

    Attributes:
        name: its size, or the name of its case in the file.
        tokens: tokens in one run, of all sequences; None if the model has no dimension of tokens.
        feeds: maps inputs to arrays.
    """

    name: str
    tokens: int | None
    feeds: Mapping[str, NDArray[Any]]


def inputs_of(
    model: onnx.ModelProto, options: BenchOptions, inputs: Given | None, dims: Mapping[str, int], seed: int
) -> tuple[Inputs, ...]:
    """The inputs on which a model is measured.

    Raises:
        UsageError: the model has no such dimension, or fixes it; or the file does not fit the model.
    """
    if inputs is not None:
        if options.tokens or options.past or options.batch > 1 or dims:
            raise UsageError("sizes come with the inputs of a file: leave out tokens, batch, past and dim")
        known: tuple[InputSpec, ...] = ()
        with suppress(UsageError):  # inputs for which no values can be made, such as strings
            known = input_specs(model, view_model(model))
        return tuple(Inputs(case.name, _tokens(known, case.feeds), case.feeds) for case in load_cases(inputs, model))
    maker = Maker(model, seed=seed, dims=dims)
    return tuple(_made(maker, options, tokens) for tokens in options.tokens or (None,))


def _made(maker: Maker, options: BenchOptions, tokens: int | None) -> Inputs:
    setting = Setting(options.batch, TOKENS if tokens is None else tokens, past=options.past)
    sizes = maker.sizes(setting)
    asked = {Kind.SEQUENCE: tokens, Kind.BATCH: options.batch, Kind.PAST: options.past}
    for kind, size in asked.items():
        if size is not None and (kind is Kind.SEQUENCE or size != BenchOptions.batch * (kind is Kind.BATCH)):
            _check(kind, size, sizes.kinds[kind], has=kind in sizes.varied)
    feeds = maker.case(setting).feeds
    kinds = [kind for kind in (Kind.BATCH, Kind.SEQUENCE, Kind.PAST) if kind in sizes.varied]
    shown = [f"{_OPTION[kind]} {sizes.kinds[kind]}" for kind in kinds if kind is not Kind.BATCH or options.batch > 1]
    return Inputs(", ".join(shown) or "fixed shapes", _tokens(maker.specs, feeds), feeds)


def _check(kind: Kind, asked: int, got: int, *, has: bool) -> None:
    option = _OPTION[kind]
    if not has:
        raise UsageError(f"{option} {asked}: no input of the model has an open dimension for it; leave {option} out")
    if got != asked:
        raise UsageError(f"{option} {asked}: the model's inputs and tables allow {got}")


def _tokens(specs: Sequence[InputSpec], feeds: Mapping[str, NDArray[Any]]) -> int | None:
    """Tokens in one run: those of the first input of ids or floats that has a dimension for them."""
    for spec in specs:
        if spec.role not in (Role.IDS, Role.FLOATS, Role.INTEGERS) or spec.name not in feeds:
            continue
        kinds = [kind_of(spec, axis) for axis in range(len(spec.shape))]
        if Kind.SEQUENCE in kinds:
            sizes = zip(kinds, feeds[spec.name].shape, strict=True)
            count = 1
            for kind, size in sizes:
                count *= size if kind in (Kind.BATCH, Kind.SEQUENCE) else 1
            return count
    return None
