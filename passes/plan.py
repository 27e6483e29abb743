"""The plan: which blocks are converted, how, and why the others are not; lowering, `apply`, and the plan in a file.

Planning is pure; `apply` turns a plan into a new model. A plan refers to nodes of its model by index, so that model
must not change afterwards.
"""

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms import FORMS, convert
from passes.match.blocks import QUANTISING, Block, Dataflow, Finder, Left, Namer
from passes.match.identify import in_table
from passes.match.linear import AFTER_LINEAR, LINEAR_OPERATORS
from passes.options import ALREADY, COMPACT, STAGED, WHOLE, FormOptions, Options
from passes.programs.activations import ACTIVATIONS, LINEAR, UNNAMED, Activation
from passes.programs.program import grid
from passes.whole import SCORING, Join, Reader, Whole, whole_for
from rewriter.arrays import grouped
from rewriter.evaluate.scalar import NONLINEAR
from rewriter.evaluate.table import MICROSOFT
from rewriter.graph.attention import ATTENTION, DEFINITIONS, with_plain
from rewriter.graph.constants import UNFIT, Constants, Read, small
from rewriter.graph.edit import Replacement, inlined, splice
from rewriter.graph.fused import in_parts, saturating, with_parts, with_plain_experts
from rewriter.graph.view import ONNX_DOMAINS, SAME_NUMBERS, GraphView, LostError, Miss, Place, all_views, key_of
from rewriter.graph.walk import all_graphs, functions_with, is_external, reached
from rewriter.options import values_of

_NO_ATTENTION = DEFINITIONS.keys() - {*ATTENTION, (MICROSOFT, "FusedMatMul"), (MICROSOFT, "TransposeMatMul")}


@dataclass(frozen=True)
class Recognised:
    """The blocks of a model that are heads of earlier runs; the notes state what was ignored, and why."""

    blocks: tuple[Conversion, ...] = ()
    outputs: frozenset[Place] = frozenset()  # of the nodes of their heads
    functions: frozenset[tuple[str, str]] = frozenset()  # (domain, name), called by these nodes
    notes: tuple[str, ...] = ()

    @property
    def stream(self) -> tuple[int, int] | None:
        """In form `whole`: the bias tokens of the stream, and how many tokens it has at the most."""
        return next(((each.carried, each.options.positions) for each in self.blocks if each.carried), None)

    def nodes(self, view: GraphView) -> frozenset[int]:
        return frozenset(index for name, index in view.producer.items() if (view.path, name) in self.outputs)


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
        return tuple(each.block for each in self.left if each.block is not None and each.miss.kind == "domain")


def make_plan(model: onnx.ModelProto, options: Options, read: Read = small) -> Plan:
    """Find the blocks of `model`, with fused operators and local functions expanded, and decide about each.

    Fused operators outside converted blocks are kept, except experts that the user wants expanded.
    """
    recognised = recognise(model, read)
    model = with_plain_experts(model) if options.lower_experts else model
    model = with_plain(model, _NO_ATTENTION) if options.form == WHOLE else model
    lowered, fused, functions = lower(model, whole=recognised.functions)
    plan = _plan(lowered, functions, options, recognised)
    # Lowering again without the operators that no block needs keeps the result as close to the file as possible.
    if unused := fused - _tensors_of_blocks(plan):
        lowered, _, functions = lower(model, unused, whole=recognised.functions)
        plan = _plan(lowered, functions, options, recognised)
    return _through_network(plan, read) if plan.conversions and options.form == WHOLE else plan


def _through_network(plan: Plan, read: Read) -> Plan:
    others = [f"'{entry.name}' is left" for entry in plan.left if entry.block is not None]
    others += [f"'{each.block.name}' is in a body of control flow" for each in plan.conversions if each.block.path]
    try:
        whole = whole_for(Reader(plan.views[0], read), plan.conversions, others, plan.options.max_tokens)
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
    placed = [(each.block.path, FORMS[each.form].emit(plan.view_of(each.block), each)) for each in conversions]
    present = {(function.domain, function.name): function for function in plan.model.functions}
    needed = (function for _, made in placed for function in made.functions)
    if any(present.get((each.domain, each.name), each) != each for each in needed):
        conversions = tuple(replace(each, inline=True) for each in conversions)
        placed = [(each.block.path, FORMS[each.form].emit(plan.view_of(each.block), each)) for each in conversions]
    if plan.whole is not None:
        placed += [((), part) for core in plan.whole.cores for part in Join(plan.whole, core).parts()]
        result.graph.initializer.extend(plan.whole.constants())
    for view in plan.views:
        if parts := [made for path, made in placed if path == view.path]:
            splice(result, view, parts)
    return with_record(result, [*plan.recognised.blocks, *conversions], plan.options) if conversions else result


def _plan(model: onnx.ModelProto, functions: Sequence[str], chosen: Options, recognised: Recognised) -> Plan:
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
    conversions, left = list[Conversion](), list[Left]()
    for view in views:
        blocks, rejected = Finder(view, namer, options).run(recognised.nodes(view))
        done = (each.block for each in recognised.blocks if each.block.path == view.path)
        left += [Left(one.name, view.where, one.identified.label, "", "", Miss(ALREADY, one.output)) for one in done]
        for block in blocks:
            named = [any(fnmatchcase(block.name, glob) for glob in globs) for globs in (options.only, options.skip)]
            why = "not chosen by --only" if options.only and not named[0] else "left by --skip" if named[1] else ""
            decision = Miss(why, block.output) if why else convert(view, block, options)
            if isinstance(decision, Conversion):
                conversions.append(decision)
            else:
                left.append(Left.of(block, decision))
        left += rejected
    called = [*(each.block.name for each in conversions), *(each.name for each in left)]
    unknown = [glob for glob in (*options.only, *options.skip) if not any(fnmatchcase(name, glob) for name in called)]
    notes += [f"no block is called '{glob}'; `rewrite inspect` lists all" for glob in unknown]
    if conversions and plain and not chosen.inline:
        notes.append(f"{plain}: the heads are written out")
    kept = grouped(((each.form, each.by_reference), each.block.name) for each in conversions if each.by_reference)
    for (form, reason), those in kept.items():
        what = f"{len(those)} block{'s' * (len(those) > 1)} as projections by reference, since {reason}"
        shown = f"{', '.join(those[:3])}{', ...' if len(those) > 3 else ''}"
        notes.append(f"form {form} keeps the linear operators of {what}: {shown}")
    if conversions and functions:
        notes.append(f"local functions that hold parts of blocks are inlined: {', '.join(functions)}")
    return Plan(model, views, tuple(conversions), tuple(left), tuple(notes), recognised=recognised, options=chosen)


def own_attention(views: tuple[GraphView, ...], recognised: Recognised) -> tuple[int | None, int | None]:
    """(heads, d_head) of the first attention that states them, from the query before its softmax."""
    for view in views:
        made = recognised.nodes(view)
        softmaxes = (node for index, node in enumerate(view.nodes) if node.op_type == "Softmax" and index not in made)
        for node in softmaxes:
            for maker in filter(None, map(view.made_by, view.back(node.input[0], SCORING | {"Concat"}))):  # with a sink
                shape = view.type_of(maker.input[0]).shape or () if maker.op_type in ("MatMul", "FusedMatMul") else ()
                if len(shape) == 4 and isinstance(shape[3], int):
                    joined = sum(recognised.stream or ()) * maker.output[0].endswith("/scores")  # q beside p P
                    return (shape[1] if isinstance(shape[1], int) else None), shape[3] - joined
    return None, None


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


def lower(
    model: onnx.ModelProto, keep: Container[str] = (), *, whole: Container[tuple[str, str]] = ()
) -> tuple[onnx.ModelProto, frozenset[str], tuple[str, ...]]:
    """Lower `model`, except fused operators with the outputs `keep` and functions `whole`, heads of an earlier run.

    Returns it (itself if unchanged), the outputs of expanded operators, and the names of inlined functions.
    """
    # Functions that contain a linear operator or an activation, or call such a function.
    known = (*ONNX_DOMAINS, MICROSOFT)
    found = functions_with(model, lambda each: each.op_type in _PARTS_OF_BLOCKS and each.domain in known, whole)
    functions = sorted(found)
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
    return lowered, names, tuple(f"{domain}::{name}" for domain, name in functions)


def _dropped_relus(graph: onnx.GraphProto) -> frozenset[str]:
    """Projections whose quantiser also acts as a Relu."""
    given = {value.name for value in graph.input}
    low = saturating(graph, lambda each: None if is_external(each) else onnx.numpy_helper.to_array(each), given)
    linear, found = set[str](), set[str]()
    for node in graph.node if low else ():
        if key_of(node) in LINEAR_OPERATORS or (node.op_type in AFTER_LINEAR and not linear.isdisjoint(node.input)):
            (found if node.output[0] in low else linear).update(node.output)
    return frozenset(found)


# -- the plan that a rewritten model carries: JSON in `ModelProto.metadata_props` --------------------------------------
#
# It is the `Conversion` of every block, field by field:
#
#     {"version": 2, "options": {"form": "compact"}, "blocks": [{"program": {...}, ...}]}
#
# with the options of the last run. Real numbers are hexadecimal floats; defaults are omitted. `read_record` checks
# shape and types alone. A block counts as heads (`recognise`) if its program computes the activation that the plan
# names, and if the file has exactly the nodes and constants that the form emits for it. Otherwise the plan is ignored
# with a note.

KEY = "attnonly.plan"  # of the metadata entry
VERSION = 2  # the only one that is read and written
MAX_BYTES = 2**24  # of a plan; a block takes about a kilobyte
_MAX_NAME = 2**14
_MAX_POSITION_ENTRIES = 2**26  # of a table of positions
_LARGEST_POINT = 1e3  # at which a program is compared with its activation
_COMPARED = ("op_type", "domain", "input", "output", "attribute")  # of nodes
_ROUNDING = 1e-7  # of that comparison in float64, where gates are differences of large terms
_OF_THE_ORIGINAL = ("where", "nodes", "first", "second", "by_reference")  # fields about nodes that the file lacks


class PlanError(ValueError):
    """A plan is not as described above, or the file contradicts it."""


@dataclass(frozen=True)
class Record:
    """A plan as a file carries it: options that differ from their defaults, and blocks."""

    options: Mapping[str, Any]
    blocks: tuple[Conversion, ...]


def with_record(model: onnx.ModelProto, conversions: Iterable[Conversion], options: Options) -> onnx.ModelProto:
    """Put the plan into `model`, in place."""
    usual = values_of(Options())
    unusual = {name: value for name, value in values_of(options).items() if value != usual[name]}
    record = Record(unusual, tuple(conversions))
    for entry in [entry for entry in model.metadata_props if entry.key == KEY]:
        model.metadata_props.remove(entry)
    text = json.dumps({"version": VERSION} | _as_json(record), separators=(",", ":"), ensure_ascii=False)
    model.metadata_props.add(key=KEY, value=text)
    return model


def _as_json(value: Any) -> Any:
    if isinstance(value, Activation):
        return value.name
    if is_dataclass(value):
        given = ((each, getattr(value, each.name)) for each in fields(value) if each.name not in _OF_THE_ORIGINAL)
        return {field.name: _as_json(each) for field, each in given if each != field.default}
    if isinstance(value, tuple):
        return [_as_json(each) for each in value]
    return float(value).hex() if isinstance(value, float) else value


# -- reading -----------------------------------------------------------------------------------------------------------


def read_record(model: onnx.ModelProto) -> Record:
    """The plan that a model carries, an empty one by default. Raises PlanError where it is not as above."""
    found = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if not found:
        return Record({}, ())
    if len(found) > 1:
        raise PlanError("there are several")
    if len(found[0]) > MAX_BYTES:
        raise PlanError(f"it has {len(found[0]):,} characters, more than {MAX_BYTES:,}")
    try:
        content = json.loads(found[0])
    except (ValueError, RecursionError) as error:
        raise PlanError("it is not JSON") from error
    if isinstance(content, dict) and (type(content.get("version")) is not int or content["version"] != VERSION):
        raise PlanError(f"its version is not {VERSION}")
    record: Record = _parsed(Record, content, "the plan")
    if len({(each.block.path, each.block.output) for each in record.blocks}) < len(record.blocks):
        raise PlanError("two blocks have the same output")
    for each in record.blocks:
        _check(each)
    return record


def _check(conversion: Conversion) -> None:
    block, whole = conversion.block, conversion.projections
    width = 1 if whole is None else max(whole.query.in_features, whole.output.out_features)
    if whole is not None and (whole.query.data != whole.value.data or whole.gated is (block.value == block.gate)):
        raise PlanError("a block has a value and no gate, or a gate and no value")
    if not 0.0 <= conversion.max_error < math.inf or conversion.program.domain <= 0.0:
        raise PlanError("a block has a bound below 0 or an empty domain")
    rows = conversion.carried + conversion.options.positions
    rows += max((len(head.bias_tokens) for head in conversion.program.heads), default=0)
    if rows * max(rows, width) > _MAX_POSITION_ENTRIES:
        raise PlanError("a block has too many positions or bias tokens")
    if conversion.form not in FORMS:
        raise PlanError(f"the form of a block is not one of {', '.join(FORMS)}")
    if conversion.carried and conversion.form not in (WHOLE, COMPACT, STAGED):
        raise PlanError("a block of form local, masked or maskless shares bias tokens")


# What JSON must be for a type, and that in words.
_SCALARS: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda each: isinstance(each, str) and len(each) <= _MAX_NAME, f"a text of at most {_MAX_NAME:,} characters"),
    bool: (lambda each: isinstance(each, bool), "true or false"),
    int: (lambda each: type(each) is int and 0 <= each < 2**40, "a size"),
    float: (lambda each: not math.isnan(float.fromhex(each)), "a hexadecimal number"),
    tuple: (lambda each: isinstance(each, list), "a list"),
    dict: (lambda each: isinstance(each, dict), "an object"),
}
_hints_of = cache(get_type_hints)


def _parsed(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:  # X | None
        return None if value is None else _parsed(arguments[0], value, where)
    if kind is Activation:
        known = {each.name: each for each in (*ACTIVATIONS, LINEAR, UNNAMED)}
        if value not in known:
            raise PlanError(f"the table has no activation '{value}'")
        return known[value]
    fits, what = _SCALARS[kind if kind in _SCALARS else tuple if origin is tuple else dict]
    try:
        right = fits(value)
    except (TypeError, ValueError, OverflowError):
        right = False
    if not right:
        raise PlanError(f"{where} is not {what}")
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise PlanError(f"{where} has {len(value)} entries, not {len(kinds)}")
        return tuple(_parsed(kinds[at], item, f"{where}[{at}]") for at, item in enumerate(value))
    if isinstance(kind, type) and is_dataclass(kind):
        if missing := [each.name for each in fields(kind) if each.default is MISSING and each.name not in value]:
            raise PlanError(f"{where} has no '{missing[0]}'")
        hints = _hints_of(kind)
        given = {name: _parsed(hints[name], each, f"{where}.{name}") for name, each in value.items() if name in hints}
        return kind(**given)
    return float.fromhex(value) if kind is float else value


# -- the heads of earlier runs -----------------------------------------------------------------------------------------


def recognise(model: onnx.ModelProto, read: Read) -> Recognised:
    """The blocks of a model that are heads, by its plan and its nodes; `read` gives the values of a tensor."""
    try:
        record = read_record(model)
    except PlanError as error:
        return Recognised(notes=(f"the plan in the file's metadata is ignored: {error}",))
    if not record.blocks:
        return Recognised()
    views = {view.path: view for view in all_views(model)}
    flow_of = cache(lambda path: Dataflow(views[path]))
    made, outputs, functions, notes = list[Conversion](), set[Place](), set[tuple[str, str]](), list[str]()
    for each in record.blocks:
        try:
            view, flow = views[each.block.path], flow_of(each.block.path)
            conversion = replace(each, block=with_operators(view, flow, each))
            heads = _heads(model, view, conversion, read)
            made.append(conversion)
            for part in (heads, *heads.further):
                outputs.update((view.path, name) for node in part.nodes for name in node.output)
                outputs.update((view.path, tensor.name) for tensor in part.initializers)  # Constant nodes in old models
            functions.update((function.domain, function.name) for function in heads.functions)
        except (KeyError, PlanError) as error:
            reason = "the graph that should contain it does not exist" if isinstance(error, KeyError) else error
            notes.append(f"the plan in the file's metadata is ignored for block {each.block.name}: {reason}")
    return Recognised(tuple(made), frozenset(outputs), frozenset(functions), tuple(notes))


def _heads(model: onnx.ModelProto, view: GraphView, conversion: Conversion, read: Read) -> Replacement:
    """The nodes and functions of a block's heads. Raises PlanError where the model lacks them."""
    _check_activation(conversion)
    _check_weights(view, conversion)
    try:
        with np.errstate(all="ignore"):
            written = FORMS[conversion.form].emit(view, conversion)
    except (ArithmeticError, *UNFIT) as error:
        raise PlanError(f"no heads can be written for {conversion.program.name}") from error
    values = Constants(view, read)
    for part in (written, *written.further):
        for node in part.nodes:
            there = view.made_by(node.output[0])
            if there is None or any(getattr(there, field) != getattr(node, field) for field in _COMPARED):
                raise PlanError(f"'{node.output[0]}' is not what the heads of the plan would be")
        for tensor in part.initializers:
            wanted = onnx.numpy_helper.to_array(tensor)
            try:
                found = values.of(tensor.name)
            except Exception as error:  # without the values the plan cannot be checked
                raise PlanError(f"'{tensor.name}' cannot be read") from error
            if found.dtype != wanted.dtype or not np.array_equal(found, wanted):
                raise PlanError(f"'{tensor.name}' has other values than the heads of the plan")
    for function in written.functions:
        if function not in model.functions:
            raise PlanError(f"its function '{function.name}' is another one")
    return written


def _check_weights(view: GraphView, conversion: Conversion) -> None:
    whole, constants = conversion.projections, Constants(view)
    for each in () if whole is None else (whole.query, whole.value, whole.output):
        shape = constants.shape(each.weight) if each.weight in constants else None
        rows, columns = (shape[::-1] if each.transposed else shape) if shape and len(shape) == 2 else (0, 0)
        stop = columns if each.stop is None else each.stop
        if not rows or (rows, stop - each.start) != (each.in_features, each.out_features) or stop > columns:
            raise PlanError(f"'{each.weight}' has another shape than in the plan, or is not constant")
        if any(bias.name not in constants for bias in each.biases):
            raise PlanError(f"a bias beside '{each.weight}' is not constant")


@np.errstate(all="ignore")
def _check_activation(conversion: Conversion) -> None:
    named, program, block = conversion.block.identified, conversion.program, conversion.block
    if not in_table(named):
        return
    if len(named.activation.parameters) != len(named.parameters):
        raise PlanError(f"the table has no activation '{named.activation.name}' with so many parameters")
    try:
        y = grid(min(program.domain, _LARGEST_POINT), program)
        f = named.activation.function(y, named.parameters)
        made = program.evaluate(y, y if block.value == block.gate else np.ones_like(y))
        error = float(np.max(np.abs(made - f) / np.maximum(1.0, np.abs(f))))
    except (ArithmeticError, *UNFIT) as reason:
        raise PlanError(f"{program.name} cannot be evaluated") from reason
    if not error <= conversion.max_error + _ROUNDING:
        raise PlanError(f"{program.name} is off by {error:.2g} from {named.activation.name}, more than the plan says")


def with_operators(view: GraphView, flow: Dataflow, conversion: Conversion) -> Block:
    """The block of a recorded conversion with its linear operators, where these were not replaced too."""
    block = replace(conversion.block, where=view.where)
    if conversion.projections is not None:
        return block

    def behind(tensor: str) -> list[str]:
        return [node.output[0] for node in view.readers(tensor) if node.op_type in SAME_NUMBERS]

    readers = (index for name in reached([block.output], behind) for index in view.consumers.get(name, ()))
    second = tuple(flow.operators[index] for index in readers if index in flow.operators)
    return replace(block, first=flow.operators_of((block.gate, block.value)), second=second)
