"""Accounting: the parameters and work of a model's MLP blocks, and the number of heads that would replace them.

Head counts are given for the sources' three-sublayer construction (W1 split by rank over ceil(d_ff / d_head) heads, one
head per neuron for the activation, W2 over ceil(d_model / d_head)), and for the form that the plan chose, with the cost
of each form.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil, prod

from passes.conversion import Conversion
from passes.forms import FORMS
from passes.forms.cost import FormCost, Setting, cost, in_form
from passes.match.blocks import Block
from passes.match.dataflow import analyse
from passes.match.linear import Miss
from passes.own_attention import own_attention
from passes.plan import Plan
from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView, label

NONLINEAR = frozenset(
    [
        *("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "Clip", "Shrink"),
        *("Gelu", "QuickGelu", "FastGelu", "BiasGelu", "Erf", "Tanh", "Sigmoid", "HardSigmoid", "HardSwish"),
        *("Swish", "SwiGLU", "Mish", "Softplus", "Softsign", "MaxPool", "MoE", "QMoE", "Exp"),
    ]
)
"""Operators that count against purity. Softmax and normalisations do not: attention-only transformers have both. What
stands inside heads does not count either: their exponentials, and the Clip that keeps a query finite."""

PRODUCT = "elementwise products of gates"
"""The purity line's name for the products that `--gate product` keeps."""


@dataclass(frozen=True)
class BlockAccount:
    """One MLP block, whether converted or left.

    Attributes:
        name: the block.
        d_model: width of its input, None where unknown.
        d_ff: its number of neurons.
        parameters: number of elements of its weights.
        share: its share of the multiply-adds of the model's linear operators for one token.
        heads: heads of the chosen form; None for a block that is left.
        staged: heads of the three sublayers W1, activation, W2; None where a size is unknown or the block is left.
        forms: the cost in each form that can be used; empty where a size is unknown or the block is left.
        refused: the other forms, each with the reason and its figures.
    """

    name: str
    d_model: int | None
    d_ff: int | None
    parameters: int
    share: float
    heads: int | None
    staged: tuple[int, int, int] | None
    forms: tuple[FormCost, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Accounting:
    """The whole model.

    Attributes:
        blocks: the MLP blocks, converted ones first.
        head_dimension: d_head of the model's own attention, None where it was not found.
        attention_heads: heads per sublayer of that attention.
        share: the blocks' total share of the multiply-adds of linear operators.
        remaining: nonlinear operators (neither softmax nor normalisation) that remain after conversion, and how many;
            they include the elementwise products of gates that `--gate product` keeps.
        setting: the sizes for which the costs of the forms are stated.
    """

    blocks: tuple[BlockAccount, ...]
    head_dimension: int | None
    attention_heads: int | None
    share: float
    remaining: dict[str, int]
    setting: Setting

    @property
    def purity(self) -> str:
        """The purity line: which nonlinearities other than softmax and normalisation remain after conversion."""
        if not self.remaining:
            return "none: attention, linear maps and normalisation only"
        return ", ".join(f"{count} {name}" for name, count in self.remaining.items())


def account(plan: Plan, head_dimension: int | None = None, setting: Setting | None = None) -> Accounting:
    """The accounting of a plan.

    Args:
        plan: the plan.
        head_dimension: d_head; by default that of the model's own attention.
        setting: the sizes for which costs are stated, by default `Setting()`; its head dimension is replaced.
    """
    heads, found = own_attention(plan.views, plan.recognised)
    width = head_dimension or found
    setting = replace(setting or Setting(), head_dimension=width)
    operators = {view.path: analyse(view, Constants(view)).operators for view in plan.views}
    total = sum(_work(view, op.weight) for view in plan.views for op in operators[view.path].values())
    entries: list[tuple[Block, Conversion | None]] = [(conversion.block, conversion) for conversion in plan.conversions]
    entries += [(left.block, None) for left in plan.left if left.block is not None]
    blocks = []
    for block, conversion in entries:
        view = plan.view_of(block)
        weights = [op.weight for op in (*block.first, *block.second)]
        work = sum(_work(view, weight) for weight in weights)
        d_model = next((op.in_features for op in block.first), None)
        forms, refused = ((), ()) if conversion is None else _forms(view, conversion, setting)
        blocks.append(
            BlockAccount(
                name=block.name,
                d_model=d_model,
                d_ff=block.neurons,
                parameters=sum(_work(view, weight) for weight in dict.fromkeys(weights)),
                share=work / total if total else 0.0,
                heads=None if conversion is None else conversion.heads,
                staged=None if conversion is None else _staged(view, conversion, d_model, width),
                forms=forms,
                refused=refused,
            )
        )
    return Accounting(tuple(blocks), width, heads, sum(block.share for block in blocks), _remaining(plan), setting)


def _forms(
    view: GraphView, conversion: Conversion, setting: Setting
) -> tuple[tuple[FormCost, ...], tuple[tuple[str, str], ...]]:
    """The cost of the block in every form that can be used, and why the others cannot."""
    costs = {form: cost(view, conversion, form, setting) for form in FORMS}
    taken = tuple(found for found in costs.values() if isinstance(found, FormCost))
    return taken, tuple((form, found.reason) for form, found in costs.items() if isinstance(found, Miss))


def _staged(
    view: GraphView, conversion: Conversion, d_model: int | None, d_head: int | None
) -> tuple[int, int, int] | None:
    d_ff, chosen = conversion.block.neurons, in_form(view, conversion, "staged")
    if d_model is None or d_ff is None or d_head is None or isinstance(chosen, Miss):
        return None
    return ceil(d_ff / d_head), d_ff * len(chosen.program.heads), ceil(d_model / d_head)


def _work(view: GraphView, weight: str) -> int:
    """The number of elements of a weight, which is its multiply-adds for one token (or position of a convolution)."""
    if weight in view.initializers:
        return prod(view.initializers[weight].dims)
    shape = view.type_of(weight).shape or ()
    return prod(dim for dim in shape if isinstance(dim, int)) if shape else 0


def _remaining(plan: Plan) -> dict[str, int]:
    """The nonlinear operators outside the converted regions, and how many of each."""
    converted = {
        (conversion.block.path, index) for conversion in plan.conversions for index in conversion.block.region.nodes
    }
    converted |= {(view.path, index) for view in plan.views for index in plan.recognised.nodes(view)}
    counts: Counter[str] = Counter()
    for view in plan.views:
        constants = Constants(view)
        for index, node in enumerate(view.nodes):
            inside = (view.path, index) in converted
            constant = all(name in constants for name in node.output)
            if node.op_type in NONLINEAR and not inside and not constant:
                counts[label(node).partition(" ")[0]] += 1
    products = sum(conversion.block.product for conversion in plan.conversions)
    if products:
        counts[PRODUCT] += products
    return dict(sorted(counts.items()))
