"""The passes in order, with the model checked after each one.

Planning is separate from applying: the passes before `MlpToAttention` build equivalent models and the `Plan`, and a dry
run ends there. Any object with the attributes of `Pass` can run before `Lower`, or after `MlpToAttention`.
CONTRIBUTING.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import onnx

from passes.options import Options
from passes.plan import Plan, apply, make_plan
from rewriter.errors import ModelError, UsageError, ValidationError
from rewriter.files.soundness import check_structure
from rewriter.graph.walk import all_graphs


@dataclass(frozen=True, eq=False)
class Unit:
    """A model between passes.

    Attributes:
        model: the current model. A pass never modifies it, but returns a new one.
        read: returns the values of a tensor, external data included.
        planned: the plan by `Lower`.
        heads: the model as `MlpToAttention` leaves it.
    """

    model: onnx.ModelProto
    read: Callable[[onnx.TensorProto], Any]
    planned: Plan | None = None
    heads: onnx.ModelProto | None = None

    @property
    def plan(self) -> Plan:
        """The plan. Raises UsageError where there is none yet."""
        if self.planned is None:
            raise UsageError(f"pass '{MlpToAttention.name}' must come after '{Lower.name}', which has not run")
        return self.planned

    @property
    def added(self) -> frozenset[str]:
        """The requested outputs that `MlpToAttention` appended."""
        made = () if self.heads is None else self.heads.graph.output[len(self.plan.model.graph.output) :]
        return frozenset(value.name for value in made)


class Pass(Protocol):
    """A graph pass; best written as a frozen dataclass, with the pass's options as fields."""

    @property
    def name(self) -> str:
        """One word."""

    def run(self, unit: Unit) -> Unit:
        """The unit after the pass."""

    def ensures(self, unit: Unit) -> None:
        """Check the promises of this pass beyond those of every pass; raise AssertionError if one is broken."""


@dataclass(frozen=True)
class Lower:
    """Expand fused operators and local functions where a block needs their parts, and plan."""

    options: Options
    name = "lower"

    def run(self, unit: Unit) -> Unit:
        plan = make_plan(unit.model, self.options, unit.read)
        return replace(unit, model=plan.model, planned=plan)

    def ensures(self, unit: Unit) -> None:
        """Nothing beyond a valid model: the proof compares the lowered form with the original in float64."""


@dataclass(frozen=True)
class MlpToAttention:
    """Replace the planned MLP blocks by attention heads; the plan goes into the model's metadata."""

    name = "mlp-to-attention"

    def run(self, unit: Unit) -> Unit:
        """The model with the heads. Raises UsageError where another pass changed the model after its plan."""
        if unit.model is not unit.plan.model:
            raise UsageError(
                f"the model was changed between its plan and '{self.name}'; put passes of your own before 'lower' or "
                "after the last pass"
            )
        model = apply(unit.plan)
        return replace(unit, model=model, heads=model)

    def ensures(self, unit: Unit) -> None:
        """Check that every planned block has nodes in the result."""
        made = {node.name.partition("/heads/")[0] for graph in all_graphs(unit.model.graph) for node in graph.node}
        missing = [one.block.name for one in unit.plan.conversions if one.block.name not in made]
        if missing:
            raise AssertionError(f"{missing[0]} has no nodes in the result")


def pipeline(options: Options) -> tuple[Pass, ...]:
    """The passes that the options ask for, in order."""
    return Lower(options), MlpToAttention()


def split(passes: Sequence[Pass]) -> tuple[Sequence[Pass], Sequence[Pass]]:
    """The passes that plan, and the passes that apply the plan. Raises UsageError without a `MlpToAttention`."""
    place = next((place for place, each in enumerate(passes) if each.name == MlpToAttention.name), None)
    if place is None:
        raise UsageError(f"the pipeline has no pass '{MlpToAttention.name}', so nothing would be converted")
    return passes[:place], passes[place:]


def run_passes(passes: Sequence[Pass], unit: Unit) -> Unit:
    """Run passes in order; each result is checked before the next sees it. Raises ValidationError where it is wrong."""
    for each in passes:
        after = each.run(unit)
        if after.model is not unit.model:
            _check(each, unit, after)
        try:
            each.ensures(after)
        except AssertionError as error:
            raise ValidationError(f"pass '{each.name}' broke its promise: {error}; this is a bug in it") from error
        unit = after
    return unit


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
    if not keeps_signature(before.model, after.model, after.added):
        raise ValidationError(
            f"pass '{each.name}' changed the model's inputs, outputs, opset or IR version; this is a bug in the pass"
        )
    try:
        # Unique names, every tensor computed before it is read, nothing dangling.
        check_structure(after.model)
    except ModelError as error:
        raise ValidationError(f"pass '{each.name}' produced an invalid model: {error}; this is a bug in it") from error
