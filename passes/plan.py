"""The plan: what will be converted, how, and why the rest is left.

Comes in: a model that nobody changes meanwhile, and the user's choices. Goes out: `Plan`; `apply` turns it into a
new model. A dry run is stopping after the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx

from passes.conversion import Conversion, decide
from passes.find import Block, Left, find, kinds
from passes.forms import FORMS
from passes.heads import DOMAIN
from passes.linear import Miss
from passes.names import Namer
from rewriter.graph.edit import splice
from rewriter.graph.view import GraphView, inner_views, view_model

_PRODUCTS = {"MatMul", "Gemm"}
_ACTIVATIONS = {"Gelu", "Erf", "Tanh", "Sigmoid", "Relu", "Swish", "Mish", "HardSwish", "LeakyRelu", "Elu", "Clip"}

FUNCTIONS_IR_VERSION = 8
"""The IR version that brought model-local functions; older models get the heads written out."""


@dataclass(frozen=True)
class Options:
    """The user's choices about the rewriting.

    Attributes:
        form: a key of `passes.forms.FORMS`.
        inline: write the heads out instead of calling a model-local function.
        only: globs; only blocks whose names match one are converted. Empty: all.
        skip: globs; blocks whose names match one are left.
    """

    form: str = "local"
    inline: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What will happen to a model.

    Attributes:
        view: the index of the main graph that the plan refers to.
        conversions: the blocks to convert, in graph order.
        left: the candidates that stay, with reasons, in graph order.
        notes: remarks on the whole, such as an option that could not be followed.
    """

    view: GraphView
    conversions: tuple[Conversion, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()


def make_plan(model: onnx.ModelProto, options: Options) -> Plan:
    """Find the blocks of `model` and decide about each."""
    view = view_model(model)
    namer = Namer(_reserved(view))
    found = find(view, namer)
    notes = []
    inline = options.inline
    if not inline and found.blocks and model.ir_version < FUNCTIONS_IR_VERSION:
        inline = True
        notes.append(
            f"the model has IR version {model.ir_version}, without model-local functions: the heads are written out"
        )
    conversions: list[Conversion] = []
    left = list(_converted_before(view))
    for block in found.blocks:
        if _is_converted(view, block):
            continue
        decision = _unwanted(block, options) or decide(
            block, form=options.form, inline=inline, opset=view.opsets.get("", 1)
        )
        if isinstance(decision, Conversion):
            conversions.append(decision)
        else:
            left.append(_left(block, decision))
    left += found.left
    left += _in_inner_scopes(model, namer)
    return Plan(view, tuple(conversions), tuple(left), tuple(notes))


def apply(model: onnx.ModelProto, plan: Plan) -> onnx.ModelProto:
    """A new model with the plan carried out; `model`, which the plan was made on, stays as it is."""
    replacements = [FORMS[conversion.form](plan.view, conversion) for conversion in plan.conversions]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    splice(result, plan.view, replacements)
    return result


def _unwanted(block: Block, options: Options) -> Miss | None:
    if options.only and not any(fnmatchcase(block.name, glob) for glob in options.only):
        return Miss("not chosen by --only", block.output)
    if any(fnmatchcase(block.name, glob) for glob in options.skip):
        return Miss("left by --skip", block.output)
    return None


def _left(block: Block, miss: Miss) -> Left:
    return Left(block.name, block.where, block.identified.label, kinds(block.first), kinds(block.second), miss)


def _reserved(view: GraphView) -> frozenset[str]:
    """Block names that tensors of the model occupy already."""
    names = (name for node in view.nodes for name in (node.name, *node.output))
    occupied = {name.partition("/heads")[0] for name in names if "/heads" in name}
    return frozenset(occupied | {name.partition("/heads")[0] for name in view.initializers if "/heads" in name})


def _block_of(node: onnx.NodeProto) -> str | None:
    """The block that an earlier run of this pass made the node for."""
    return next((entry.value for entry in node.metadata_props if entry.key == f"{DOMAIN}.block"), None)


def _is_converted(view: GraphView, block: Block) -> bool:
    return any(_block_of(view.nodes[index]) is not None for index in block.region.nodes)


def _converted_before(view: GraphView) -> Iterator[Left]:
    """Blocks that are attention heads already, by their nodes' domain or metadata."""
    seen: set[str] = set()
    for node in view.nodes:
        block = _block_of(node)
        if node.domain != DOMAIN and block is None:
            continue
        name = block or node.name.partition("/heads")[0]
        if name not in seen:
            seen.add(name)
            yield Left(name, view.where, "", "", "", Miss("it is attention heads already", node.name))


def _in_inner_scopes(model: onnx.ModelProto, namer: Namer) -> Iterator[Left]:
    """Blocks in bodies of control flow and local functions: found, and honestly left.

    A function takes its weights as inputs, so that its linear operators cannot be told from products of data: one
    that holds both products and activations is named as a whole.
    """
    for view in inner_views(model):
        if view.where.startswith(f"function {DOMAIN}::"):
            continue
        reason = f"it is inside {view.where}; blocks in control flow and local functions are not converted yet"
        found = find(view, namer)
        for block in found.blocks:
            yield _left(block, Miss(reason, block.output))
        kinds_inside = {node.op_type for node in view.nodes}
        if not found.blocks and kinds_inside & _PRODUCTS and kinds_inside & _ACTIVATIONS:
            yield Left(view.where, view.where, "", "", "", Miss(reason, view.where))
