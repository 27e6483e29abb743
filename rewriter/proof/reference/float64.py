"""The truth: a model evaluated in float64.

`open_reference` returns a `Reference`, which runs the original's inputs in double precision, or raises `NoReference`
with the reason. Each operator is computed by the first of these that can: onnxruntime's double kernel, a definition in
numpy, onnx's reference evaluator (`rewriter.proof.reference.engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnx

from rewriter.arrays import Array
from rewriter.files.walk import iter_tensors
from rewriter.graph.segments import bytes_of
from rewriter.proof.reference.engine import Program, float64_ways, plan
from rewriter.proof.reference.operators.table import Operator
from rewriter.proof.reference.scope import Key, read_model
from rewriter.proof.reference.widen import NoReference, widened

__all__ = ["NoReference", "Reference", "open_reference", "widened"]

ONNXRUNTIME = "onnxruntime double kernels"

LARGEST = 2**31
"""Maximum size of the weights, in bytes, by default; in float64 they take two or four times as much."""

_NAMED = 8
"""Maximum number of operators that `Reference.how` names."""


class _Engine(Protocol):
    def by(self) -> Iterable[tuple[str, str]]: ...

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...


@dataclass(frozen=True, eq=False)
class Reference:
    """A model in float64."""

    engine: _Engine

    @property
    def how(self) -> str:
        """A description of what computes it, for the report."""
        return described(self.by())

    def by(self) -> Iterable[tuple[str, str]]:
        """Pairs of a way and an operator that it computes."""
        return self.engine.by()

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model on the original's inputs, whose floats are widened.

        Returns:
            Maps an output to its array; float64 where the original gives floats.

        Raises:
            NoReference: an operator cannot be computed on these feeds.
        """
        return self.engine.run({name: widened(array) for name, array in feeds.items()})


def open_reference(
    model: onnx.ModelProto,
    base_dir: Path | None = None,
    own: Mapping[Key, Operator] | None = None,
    *,
    largest: int = LARGEST,
) -> Reference:
    """Load the float64 evaluation of `model`.

    Args:
        model: the model; its external data may be loaded or not. It is not changed.
        base_dir: directory of its external data.
        own: the caller's operators, called like those of `NUMPY_OPERATORS`. They may occur anywhere in the model and
            take precedence over all others.
        largest: maximum size of the weights in bytes.

    Raises:
        NoReference: an operator or a tensor has no float64 form, or the model is too large.
    """
    if sum(bytes_of(tensor) for tensor in iter_tensors(model)) > largest:
        raise NoReference(f"larger than {round(largest / 1e9)} GB")
    scope = read_model(model, base_dir, wide=True)
    return Reference(_Planned(plan(scope, float64_ways(own or {}))))


@dataclass(frozen=True, eq=False)
class _Planned:
    """A planned model."""

    program: Program

    def by(self) -> Iterable[tuple[str, str]]:
        return self.program.by()

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return self.program.run(feeds, {})


def described(pairs: Iterable[tuple[str, str]]) -> str:
    """The ways that compute a model, with the operators that each computes, as the report names them."""
    found: dict[str, dict[str, None]] = {}
    for way, name in pairs:
        found.setdefault(way, {}).setdefault(name)
    kernels = [ONNXRUNTIME] if found.pop(ONNXRUNTIME, None) or not found else []
    return " and ".join([*kernels, *(_phrase(way, sorted(names)) for way, names in sorted(found.items()))])


def _phrase(way: str, names: list[str]) -> str:
    shown = ", ".join([*names[:_NAMED], "..."] if len(names) > _NAMED else names)
    return f"{way} for {len(names)} operator{'s' if len(names) > 1 else ''}: {shown}"
