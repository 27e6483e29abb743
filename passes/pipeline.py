"""The passes of this package; `PASSES` has their order.

Planning is separate from applying: the preparing passes make a `Plan` for the model that they produce; the other passes
carry it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from passes.options import Options
from passes.plan import Plan, apply, make_plan
from rewriter.graph.walk import all_graphs
from rewriter.pipeline import AddedOutputs, Pass, Unit, require_current


@dataclass(frozen=True)
class Lower:
    """Take fused operators and local functions apart where a block needs their parts, and plan."""

    options: Options = field(default_factory=Options)
    name = "lower"
    requires = ()
    prepares = True

    def run(self, unit: Unit) -> Unit:
        """Leave the `Plan`."""
        plan = make_plan(unit.model, self.options, unit.read)
        return unit.having(plan, model=plan.model)

    def ensures(self, unit: Unit) -> None:
        """Nothing beyond a valid model: the proof compares the lowered form with the original in float64."""


@dataclass(frozen=True)
class MlpToAttention:
    """Replace the planned MLP blocks by attention heads; the plan goes into the model's metadata.

    In form `whole` the bias tokens are appended once, after the embeddings, and carried through the network
    (Theorem 6).
    """

    name = "mlp-to-attention"
    requires = (Lower.name,)
    prepares = False

    def run(self, unit: Unit) -> Unit:
        """The model with the heads."""
        plan = unit.fact(Plan)
        require_current(self, plan.model, unit)
        model = apply(plan)
        names = frozenset(value.name for value in model.graph.output[len(plan.model.graph.output) :])
        return unit.having(AddedOutputs(names), model=model)

    def ensures(self, unit: Unit) -> None:
        """Check that every planned block has nodes of its own."""
        made = {node.name.partition("/heads/")[0] for graph in all_graphs(unit.model.graph) for node in graph.node}
        missing = [one.block.name for one in unit.fact(Plan).conversions if one.block.name not in made]
        if missing:
            raise AssertionError(f"no node is made for {missing[0]}")


PASSES = (Lower, MlpToAttention)
"""All passes, in the order in which they run."""


def pipeline(options: Options) -> tuple[Pass, ...]:
    """The passes that the options ask for, in order."""
    return Lower(options), MlpToAttention()
