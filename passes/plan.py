"""The plan: which blocks are converted, how, and why the others are not; lowering, which precedes it; `apply`.

Planning is pure; `apply` turns a plan into a new model. A plan refers to nodes of its model by index, so that model
must not change afterwards.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import onnx

from passes.conversion import Conversion
from passes.forms import FORMS, convert
from passes.match.blocks import QUANTISING, Block, Finder, Left, Namer
from passes.match.linear import AFTER_LINEAR, LINEAR_OPERATORS
from passes.options import ALREADY, COMPACT, WHOLE, FormOptions, Options
from passes.record import Recognised, inline_values, recognise, with_record
from passes.whole import SCORING, Join, Reader, Whole, whole_for
from rewriter.evaluate.scalar import NONLINEAR
from rewriter.evaluate.table import MICROSOFT
from rewriter.graph.attention import ATTENTION, DEFINITIONS, with_plain
from rewriter.graph.constants import Read
from rewriter.graph.edit import inlined, splice
from rewriter.graph.fused import in_parts, saturating, with_parts, with_plain_experts
from rewriter.graph.view import ONNX_DOMAINS, GraphView, LostError, Miss, all_views, key_of
from rewriter.graph.walk import all_graphs, functions_with, is_external

_NO_ATTENTION = DEFINITIONS.keys() - {*ATTENTION, (MICROSOFT, "FusedMatMul"), (MICROSOFT, "TransposeMatMul")}


@dataclass(frozen=True)
class Plan:
    """What will be done to a model."""

    model: onnx.ModelProto  # the given one, or its lowered form
    views: tuple[GraphView, ...]
    conversions: tuple[Conversion, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()
    whole: Whole | None = None
    recognised: Recognised = field(default_factory=Recognised)
    options: Options = field(default_factory=Options)

    def view_of(self, block: Block) -> GraphView:
        return next(view for view in self.views if view.path == block.path)

    @property
    def undetermined(self) -> tuple[Block, ...]:
        """Blocks that are left because the range of their pre-activations is unknown."""
        left = (entry for entry in self.left if entry.miss.kind == "domain")
        return tuple(entry.block for entry in left if entry.block is not None)


def make_plan(model: onnx.ModelProto, options: Options, read: Read = inline_values) -> Plan:
    """Find the blocks of `model`, with fused operators and local functions expanded, and decide about each.

    Fused operators outside converted blocks are kept, except experts that the user wants expanded.
    """
    recognised = recognise(model, read)
    model = with_plain_experts(model) if options.lower_experts else model
    model = with_plain(model, _NO_ATTENTION) if options.form == WHOLE else model
    lowered = lower(model, whole=recognised.functions)
    plan = _plan(lowered, options, recognised)
    # Lowering again without the operators that no block needs keeps the result as close to the file as possible.
    unused = lowered.fused - _tensors_of_blocks(plan)
    plan = _plan(lower(model, keep=unused, whole=recognised.functions), options, recognised) if unused else plan
    return _through_network(plan, read) if plan.conversions and options.form == WHOLE else plan


def _through_network(plan: Plan, read: Read) -> Plan:
    others = [f"'{entry.name}' is left" for entry in plan.left if entry.block is not None]
    others += [f"'{each.block.name}' is in a body of control flow" for each in plan.conversions if each.block.path]
    try:
        reader = Reader(plan.views[0], read)
        whole = whole_for(reader, plan.conversions, others, plan.options.max_tokens)
    except LostError as lost:
        miss = Miss(f"the network cannot be attention only: {lost.miss.reason}; use form masked", lost.miss.node)
        left = [Left.of(each.block, miss) for each in plan.conversions]
        return replace(plan, conversions=(), left=(*left, *plan.left))
    options = replace(plan.conversions[0].options, max_tokens=whole.max_tokens)
    compact = whole.bias_tokens if whole.cores else 0  # without heads of the model nothing limits the tokens
    fit = tuple(
        replace(each, options=options, carried=compact if each.form == COMPACT else whole.bias_tokens)
        for each in plan.conversions
    )
    return replace(plan, conversions=fit, whole=whole, notes=(*plan.notes, *whole.notes))


def apply(plan: Plan) -> onnx.ModelProto:
    """A new model in which the converted blocks are attention heads; the plan is in its metadata."""
    result, conversions = deepcopy(plan.model), plan.conversions
    replacements = [FORMS[each.form].emit(plan.view_of(each.block), each) for each in conversions]
    present = {(function.domain, function.name): function for function in plan.model.functions}
    needed = (function for replacement in replacements for function in replacement.functions)
    if any(present.get((each.domain, each.name), each) != each for each in needed):
        conversions = tuple(replace(each, inline=True) for each in conversions)
        replacements = [FORMS[each.form].emit(plan.view_of(each.block), each) for each in conversions]
    placed = [(each.block.path, made) for each, made in zip(conversions, replacements, strict=True)]
    if plan.whole is not None:
        cores = (Join(plan.whole, plan.views[0], *core) for core in plan.whole.cores)
        placed += [((), part) for core in cores for part in core.parts()]
        result.graph.initializer.extend(plan.whole.constants())
    for view in plan.views:
        if parts := [made for path, made in placed if path == view.path]:
            splice(result, view, parts)
    if not conversions:
        return result
    return with_record(result, [*plan.recognised.blocks, *conversions], plan.options)


def _plan(lowered: Lowered, chosen: Options, recognised: Recognised) -> Plan:
    model = lowered.model
    views = all_views(model)
    d_head = own_attention(views, recognised)[1] or FormOptions.d_head
    names = {name for view in views for node in view.nodes for name in (node.name, *node.output)}
    names.update(name for view in views for name in (*view.initializers, *view.inputs))
    taken = (name.partition("/heads")[0] for name in names if "/heads" in name)
    namer = Namer(frozenset(taken).union(each.block.name for each in recognised.blocks))
    notes = list(recognised.notes)
    plain, opset = "", views[0].opsets.get("", 1)  # why no function can be called
    if model.ir_version < 8:
        plain = f"the model has IR version {model.ir_version}, without model-local functions"
    elif opset < 9:
        plain = f"the model has opset {opset}, whose Constant operator holds no integers, which the function body needs"
    options = replace(chosen, inline=chosen.inline or bool(plain), d_head=d_head)
    conversions: list[Conversion] = []
    left: list[Left] = []
    for view in views:
        blocks, rejected = Finder(view, namer, options).run(recognised.nodes(view))
        for made in (each.block for each in recognised.blocks if each.block.path == view.path):
            miss = Miss(ALREADY, made.output)
            left.append(Left(made.name, view.where, made.identified.label, "", "", miss))
        for block in blocks:
            named = [any(fnmatchcase(block.name, glob) for glob in globs) for globs in (options.only, options.skip)]
            why = "not chosen by --only" if options.only and not named[0] else "left by --skip" if named[1] else ""
            decision = Miss(why, block.output) if why else convert(view, block, options)
            if isinstance(decision, Conversion):
                conversions.append(decision)
            else:
                left.append(Left.of(block, decision))
        left += rejected
    if conversions and plain and not chosen.inline:
        notes.append(f"{plain}: the heads are written out")
    notes += _kept_operators(conversions)
    if conversions and lowered.inlined:
        notes.append(f"local functions that hold parts of blocks are inlined: {', '.join(lowered.inlined)}")
    return Plan(model, views, tuple(conversions), tuple(left), tuple(notes), recognised=recognised, options=chosen)


def own_attention(views: tuple[GraphView, ...], recognised: Recognised) -> tuple[int | None, int | None]:
    """(heads, d_head) of the first attention that states them, from the query before its softmax."""
    for view in views:
        made = recognised.nodes(view)
        for index, node in enumerate(view.nodes):
            if node.op_type != "Softmax" or index in made:
                continue
            for maker in filter(None, map(view.made_by, view.back(node.input[0], SCORING))):
                shape = view.type_of(maker.input[0]).shape or () if maker.op_type in ("MatMul", "FusedMatMul") else ()
                if len(shape) == 4 and isinstance(shape[3], int):
                    joined = sum(recognised.stream or ()) * maker.output[0].endswith("/scores")  # q beside p P
                    return (shape[1] if isinstance(shape[1], int) else None), shape[3] - joined
    return None, None


def _kept_operators(conversions: list[Conversion]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for conversion in conversions:
        if conversion.by_reference:
            reasons.setdefault((conversion.form, conversion.by_reference), []).append(conversion.block.name)
    return [
        f"form {form} keeps the linear operators of {len(names)} block{'s' * (len(names) > 1)} as "
        f"projections by reference, since {reason}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for (form, reason), names in reasons.items()
    ]


def _tensors_of_blocks(plan: Plan) -> frozenset[str]:
    names: set[str] = set()
    for block in (*(conversion.block for conversion in plan.conversions), *plan.undetermined):
        view = plan.view_of(block)
        # An operator on quantised numbers ends with the rounding of the activation's output.
        rounding = [each for each in view.consumers.get(block.output, ()) if view.nodes[each].op_type in QUANTISING]
        for index in (*block.region.nodes, *(operator.node for operator in block.first), *rounding):
            names.update(view.nodes[index].output)
    return frozenset(names)


# -- lowering: fused operators expanded, and local functions inlined that hide parts of MLP blocks --------------------

# Operators for which a local function is inlined: exporters wrap modules, or single activations, in functions.
# Activations are spelled with the last three alone.
_PARTS_OF_BLOCKS = {*(operator for _, operator in LINEAR_OPERATORS), *NONLINEAR, "Abs", "Max", "Where"}


@dataclass(frozen=True)
class Lowered:
    """A lowered model (the original if unchanged), the outputs of expanded operators and the inlined functions."""

    model: onnx.ModelProto
    fused: frozenset[str]
    inlined: tuple[str, ...]


def lower(
    model: onnx.ModelProto, keep: frozenset[str] = frozenset(), *, whole: frozenset[tuple[str, str]] = frozenset()
) -> Lowered:
    """Lower `model`, except fused operators with the outputs `keep` and functions `whole`, heads of an earlier run."""
    # Functions that contain a linear operator or an activation, or call such a function.
    known = (*ONNX_DOMAINS, MICROSOFT)
    functions = sorted(
        functions_with(model, lambda each: each.op_type in _PARTS_OF_BLOCKS and each.domain in known, whole)
    )
    try:
        model = inlined(model, functions) if functions else model
    except RuntimeError:  # onnx refuses functions of another operator set, whose nodes would get another meaning
        functions = []
    # By the identity of nodes, which are held: a body may have a tensor of the same name.
    fused: dict[int, tuple[onnx.NodeProto, list[onnx.NodeProto]]] = {}
    for graph in all_graphs(model.graph):
        relus = _dropped_relus(graph)
        for node in graph.node:
            parts = in_parts(node, relus)
            if parts != [node] and node.output[0] not in keep:
                fused[id(node)] = node, parts
    lowered = with_parts(model, lambda node: fused[id(node)][1] if id(node) in fused else None)
    names = frozenset(node.output[0] for node, _ in fused.values())
    return Lowered(lowered, names, tuple(f"{domain}::{name}" for domain, name in functions))


def _dropped_relus(graph: onnx.GraphProto) -> frozenset[str]:
    """Projections whose quantiser also acts as a Relu."""
    given = {value.name for value in graph.input}
    low = saturating(graph, lambda each: None if is_external(each) else onnx.numpy_helper.to_array(each), given)
    linear, found = set[str](), set[str]()
    for node in graph.node if low else ():
        if key_of(node) in LINEAR_OPERATORS or (node.op_type in AFTER_LINEAR and not linear.isdisjoint(node.input)):
            (found if node.output[0] in low else linear).update(node.output)
    return frozenset(found)
