"""The pass pipeline: graph passes run in order, checked after each one, and timed.

A pass turns a `Unit` into another one. Preparing passes bring the model into an equivalent form that later passes can
match; rewriting passes follow. Nothing here knows what a pass does: a pass of one's own is any object with the
attributes of `Pass`. See CONTRIBUTING.md for one in twenty lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import onnx

from rewriter.errors import ModelError, UsageError, ValidationError
from rewriter.files.structure import check_structure
from rewriter.files.walk import iter_nodes

Fact = TypeVar("Fact")


@dataclass(frozen=True, eq=False)
class Unit:
    """A model on its way through a pipeline.

    Attributes:
        model: the model so far. A pass never changes it: it makes another one.
        read: gives the values of a tensor, external data included.
        facts: what passes found out, by type, for later passes.
        stages: the model after each pass that ran, by the name of the pass.
    """

    model: onnx.ModelProto
    read: Callable[[onnx.TensorProto], Any]
    facts: Mapping[type, Any] = field(default_factory=dict)
    stages: Mapping[str, onnx.ModelProto] = field(default_factory=dict)

    def fact(self, kind: type[Fact]) -> Fact:
        """What an earlier pass found.

        Raises:
            LookupError: no pass has found anything of this type.
        """
        if kind not in self.facts:
            raise LookupError(f"no pass before this one leaves a {kind.__name__}")
        found: Fact = self.facts[kind]
        return found

    def having(self, *facts: object, model: onnx.ModelProto | None = None) -> Unit:
        """The unit with further facts, and with another model if one is given."""
        known = {**self.facts, **{type(fact): fact for fact in facts}}
        return replace(self, model=self.model if model is None else model, facts=known)


@runtime_checkable
class Pass(Protocol):
    """A graph pass. A frozen dataclass is the natural way to write one: its fields are the pass's options."""

    @property
    def name(self) -> str:
        """One word, unique in the pipeline."""

    @property
    def requires(self) -> tuple[str, ...]:
        """The names of passes that must have run before."""

    @property
    def prepares(self) -> bool:
        """Whether the pass only brings the model into an equivalent form for others. A dry run stops behind these."""

    def run(self, unit: Unit) -> Unit:
        """The unit after the pass."""

    def ensures(self, unit: Unit) -> None:
        """Check what the pass promises of its result, beyond what holds for every pass. Raises AssertionError."""


@dataclass(frozen=True)
class Timing:
    """What one pass took.

    Attributes:
        name: the pass.
        seconds: wall time, checks included.
        nodes_before: nodes of the model that it was given, bodies of control flow included.
        nodes_after: nodes of the model that it made.
    """

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


def run_passes(passes: Sequence[Pass], unit: Unit) -> tuple[Unit, tuple[Timing, ...]]:
    """Run passes in order; each result is checked before the next pass sees it.

    Raises:
        UsageError: two passes have one name, or a pass lacks one that it requires.
        ValidationError: a pass broke an invariant; the message names it.
    """
    timings: list[Timing] = []
    for each in passes:
        _require(each, unit)
        start, nodes = time.perf_counter(), count_nodes(unit.model)
        after = each.run(unit)
        if after.model is not unit.model:
            _check(each, unit, after)
        try:
            each.ensures(after)
        except AssertionError as error:
            raise ValidationError(f"pass '{each.name}' broke its promise, {error}; this is a bug in it") from error
        unit = replace(after, stages={**unit.stages, each.name: after.model})
        timings.append(Timing(each.name, time.perf_counter() - start, nodes, count_nodes(unit.model)))
    return unit, tuple(timings)


def split(passes: Sequence[Pass]) -> tuple[Sequence[Pass], Sequence[Pass]]:
    """(the preparing passes at the start, the rest)."""
    count = next((index for index, each in enumerate(passes) if not each.prepares), len(passes))
    return passes[:count], passes[count:]


def count_nodes(model: onnx.ModelProto) -> int:
    """Nodes of the main graph and of bodies of control flow."""
    return sum(1 for _ in iter_nodes(model.graph.node))


def _require(each: Pass, unit: Unit) -> None:
    if each.name in unit.stages:
        raise UsageError(f"pass '{each.name}' is in the pipeline twice; name each pass once")
    missing = [name for name in each.requires if name not in unit.stages]
    if missing:
        raise UsageError(f"pass '{each.name}' must come after '{missing[0]}', which has not run")


def keeps_signature(old: onnx.ModelProto, new: onnx.ModelProto) -> bool:
    """Whether `new` is a drop-in replacement: same inputs, outputs, opset and IR version."""
    return (
        list(old.graph.input) == list(new.graph.input)
        and list(old.graph.output) == list(new.graph.output)
        and old.ir_version == new.ir_version
        and list(new.opset_import)[: len(old.opset_import)] == list(old.opset_import)
    )


def _check(each: Pass, before: Unit, after: Unit) -> None:
    """The invariants of every pass: a sound model with the signature that it had."""
    if not keeps_signature(before.model, after.model):
        raise ValidationError(
            f"pass '{each.name}' changed the model's inputs, outputs, opset or IR version; this is a bug in the pass"
        )
    try:
        # Names unique, made before they are read, nothing dangling.
        check_structure(after.model)
    except ModelError as error:
        raise ValidationError(f"pass '{each.name}' left a model that is not sound: {error}") from error
