"""The pass pipeline: runs graph passes in order, and checks the model after each one.

A pass turns a `Unit` into another one. Preparing passes bring the model into an equivalent form that later passes can
match; rewriting passes follow. The pipeline does not know what a pass does: any object with the attributes of `Pass`
can be one. See CONTRIBUTING.md for an example in twenty lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import onnx

from rewriter.errors import ModelError, UsageError, ValidationError
from rewriter.files.soundness import check_structure

Fact = TypeVar("Fact")


@dataclass(frozen=True, eq=False)
class Unit:
    """A model on its way through a pipeline.

    Attributes:
        model: the current model. A pass never modifies it, but makes a new one.
        read: returns the values of a tensor, external data included.
        facts: results of earlier passes for later ones, by type.
        stages: the model after each pass that ran, by the name of the pass.
    """

    model: onnx.ModelProto
    read: Callable[[onnx.TensorProto], Any]
    facts: Mapping[type, Any] = field(default_factory=dict)
    stages: Mapping[str, onnx.ModelProto] = field(default_factory=dict)

    def fact(self, kind: type[Fact]) -> Fact:
        """The result of this type that an earlier pass left.

        Raises:
            LookupError: no earlier pass left one.
        """
        if kind not in self.facts:
            raise LookupError(f"no pass before this one leaves a {kind.__name__}")
        found: Fact = self.facts[kind]
        return found

    def having(self, *facts: object, model: onnx.ModelProto | None = None) -> Unit:
        """The unit with `facts` added, and with `model` if one is given."""
        known = {**self.facts, **{type(fact): fact for fact in facts}}
        return replace(self, model=self.model if model is None else model, facts=known)


@runtime_checkable
class Pass(Protocol):
    """A graph pass; best written as a frozen dataclass, with the pass's options as fields."""

    @property
    def name(self) -> str:
        """One word, unique in the pipeline."""

    @property
    def requires(self) -> tuple[str, ...]:
        """The names of passes that must have run before."""

    @property
    def prepares(self) -> bool:
        """Whether the pass only brings the model into an equivalent form for later ones. A dry run ends after these."""

    def run(self, unit: Unit) -> Unit:
        """The unit after the pass."""

    def ensures(self, unit: Unit) -> None:
        """Check the promises of this pass beyond those of every pass; raise AssertionError if one is broken."""


def run_passes(passes: Sequence[Pass], unit: Unit) -> Unit:
    """Run passes in order; each result is checked before the next pass sees it.

    Raises:
        UsageError: two passes have the same name, or a required pass has not run.
        ValidationError: a pass broke an invariant; the message names it.
    """
    for each in passes:
        _require(each, unit)
        after = each.run(unit)
        if after.model is not unit.model:
            _check(each, unit, after)
        try:
            each.ensures(after)
        except AssertionError as error:
            raise ValidationError(f"pass '{each.name}' broke its promise: {error}; this is a bug in it") from error
        unit = replace(after, stages={**unit.stages, each.name: after.model})
    return unit


def require_current(each: Pass, planned: onnx.ModelProto, unit: Unit) -> None:
    """Refuse to carry out a plan that was made on another model than the pass is given.

    Raises:
        UsageError: another pass changed the model in between.
    """
    if unit.model is not planned:
        raise UsageError(
            f"the model was changed between its plan and '{each.name}'; put passes of your own before 'lower' or after "
            "the last pass"
        )


def split(passes: Sequence[Pass]) -> tuple[Sequence[Pass], Sequence[Pass]]:
    """The preparing passes at the start, and the rest."""
    count = next((index for index, each in enumerate(passes) if not each.prepares), len(passes))
    return passes[:count], passes[count:]


def _require(each: Pass, unit: Unit) -> None:
    if each.name in unit.stages:
        raise UsageError(f"pass '{each.name}' is in the pipeline twice; name each pass once")
    missing = [name for name in each.requires if name not in unit.stages]
    if missing:
        raise UsageError(f"pass '{each.name}' must come after '{missing[0]}', which has not run")


@dataclass(frozen=True)
class AddedOutputs:
    """A fact that a pass leaves: the outputs that it added behind the others, as it was asked to."""

    names: frozenset[str]


def keeps_signature(old: onnx.ModelProto, new: onnx.ModelProto, added: frozenset[str] = frozenset()) -> bool:
    """Whether `new` has the same inputs, outputs (and then only `added` ones), opset and IR version."""
    count = len(old.graph.output)
    return (
        list(old.graph.input) == list(new.graph.input)
        and list(old.graph.output) == list(new.graph.output)[:count]
        and all(value.name in added for value in list(new.graph.output)[count:])
        and old.ir_version == new.ir_version
        and list(new.opset_import)[: len(old.opset_import)] == list(old.opset_import)
    )


def _check(each: Pass, before: Unit, after: Unit) -> None:
    """Check the invariants of every pass: the model is valid and keeps its signature."""
    added = after.fact(AddedOutputs).names if AddedOutputs in after.facts else frozenset[str]()
    added |= frozenset(value.name for value in before.model.graph.output)
    if not keeps_signature(before.model, after.model, added):
        raise ValidationError(
            f"pass '{each.name}' changed the model's inputs, outputs, opset or IR version; this is a bug in the pass"
        )
    try:
        # Unique names, every tensor made before it is read, nothing dangling.
        check_structure(after.model)
    except ModelError as error:
        raise ValidationError(f"pass '{each.name}' produced an invalid model: {error}; this is a bug in it") from error
