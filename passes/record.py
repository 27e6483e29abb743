"""The plan that a rewritten model carries: JSON in `ModelProto.metadata_props` under the key `attnonly.plan`.

It is the `Conversion` of every block, field by field:

    {"version": 2, "options": {"form": "compact"}, "blocks": [{"program": {...}, ...}]}

with the options of the last run. Real numbers are hexadecimal floats; defaults are omitted. `read_record` checks shape
and types alone. A block counts as heads (`recognise`) if its program computes the activation that the plan names, and
if the file has exactly the nodes and constants that the form emits for it. Otherwise the plan is ignored with a note.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms import FORMS
from passes.match.blocks import Block, Dataflow
from passes.match.identify import in_table
from passes.match.linear import LinearOperator
from passes.options import COMPACT, STAGED, WHOLE, Options
from passes.programs.activations import ACTIVATIONS, LINEAR, UNNAMED, Activation
from passes.programs.program import grid
from rewriter.graph.constants import UNFIT, Constants, Read
from rewriter.graph.view import SAME_NUMBERS, GraphView, Place, all_views
from rewriter.options import values_of

KEY = "attnonly.plan"  # of the metadata entry
VERSION = 2  # the only one that is read and written
MAX_BYTES = 2**24  # of a plan; a block takes about a kilobyte
_MAX_NAME = 2**14
_MAX_POSITION_ENTRIES = 2**26  # of a table of positions
_LARGEST_POINT = 1e3  # at which a program is compared with its activation
_COMPARED = ("op_type", "domain", "input", "output", "attribute")  # of nodes
_ROUNDING = 1e-7  # of that comparison in float64, where gates are differences of large terms


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
    record = Record(unusual, tuple(map(_without_places, conversions)))
    for entry in [entry for entry in model.metadata_props if entry.key == KEY]:
        model.metadata_props.remove(entry)
    text = json.dumps({"version": VERSION} | _as_json(record), separators=(",", ":"), ensure_ascii=False)
    model.metadata_props.add(key=KEY, value=text)
    return model


def _without_places(conversion: Conversion) -> Conversion:
    """Without the nodes of the original, which the file does not have."""
    region = replace(conversion.block.region, nodes=())
    block = replace(conversion.block, where="", region=region, first=(), second=())
    return replace(conversion, block=block, by_reference="")


def _as_json(value: Any) -> Any:
    if isinstance(value, Activation):
        return value.name
    if is_dataclass(value):
        given = ((field, getattr(value, field.name)) for field in fields(value))
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
    if not isinstance(content, dict):
        raise PlanError("the plan is not an object")
    if type(content.get("version")) is not int or content["version"] != VERSION:
        raise PlanError(f"its version is not {VERSION}")
    record: Record = _parsed(Record, content, "the plan")
    if len({each.block.place for each in record.blocks}) < len(record.blocks):
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
        missing = [each.name for each in fields(kind) if each.default is MISSING and each.name not in value]
        if missing:
            raise PlanError(f"{where} has no '{missing[0]}'")
        hints = _hints_of(kind)
        given = {name: _parsed(hints[name], each, f"{where}.{name}") for name, each in value.items() if name in hints}
        return kind(**given)
    return float.fromhex(value) if kind is float else value


# -- the heads of earlier runs -------------------------------------------------------------------------------------


def inline_values(tensor: onnx.TensorProto) -> np.ndarray:
    """The values of a tensor in the model itself. Raises ValueError if they are elsewhere."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ValueError("its values are in another file")
    return onnx.numpy_helper.to_array(tensor)


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
            names, called = _heads(model, view, conversion, read)
            made.append(conversion)
            outputs.update((view.path, name) for name in names)
            functions.update((function.domain, function.name) for function in called)
        except (KeyError, PlanError) as error:
            reason = "the graph that should contain it does not exist" if isinstance(error, KeyError) else error
            notes.append(f"the plan in the file's metadata is ignored for block {each.block.name}: {reason}")
    return Recognised(tuple(made), frozenset(outputs), frozenset(functions), tuple(notes))


def _heads(
    model: onnx.ModelProto, view: GraphView, conversion: Conversion, read: Read
) -> tuple[set[str], Sequence[onnx.FunctionProto]]:
    """What the nodes of a block's heads make, and their functions. Raises PlanError where the model lacks them."""
    _check_activation(conversion)
    _check_weights(view, conversion)
    try:
        with np.errstate(all="ignore"):
            written = FORMS[conversion.form].emit(view, conversion)
    except (ArithmeticError, *UNFIT) as error:
        raise PlanError(f"no heads can be written for {conversion.program.name}") from error
    values, outputs = Constants(view, read), set[str]()
    for part in (written, *written.further):
        for node in part.nodes:
            there = view.made_by(node.output[0])
            if there is None or any(getattr(there, field) != getattr(node, field) for field in _COMPARED):
                raise PlanError(f"'{node.output[0]}' is not what the heads of the plan would be")
            outputs.update(node.output)
        for tensor in part.initializers:
            wanted = onnx.numpy_helper.to_array(tensor)
            try:
                found = values.of(tensor.name)
            except Exception as error:  # without the values the plan cannot be checked
                raise PlanError(f"'{tensor.name}' cannot be read") from error
            if found.dtype != wanted.dtype or not np.array_equal(found, wanted):
                raise PlanError(f"'{tensor.name}' has other values than the heads of the plan")
            outputs.add(tensor.name)  # of a Constant node in old models
    for function in written.functions:
        if function not in model.functions:
            raise PlanError(f"its function '{function.name}' is another one")
    return outputs, written.functions


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


def _check_activation(conversion: Conversion) -> None:
    named, program, block = conversion.block.identified, conversion.program, conversion.block
    if not in_table(named):
        return
    if len(named.activation.parameters) != len(named.parameters):
        raise PlanError(f"the table has no activation '{named.activation.name}' with so many parameters")
    with np.errstate(all="ignore"):
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
    first = flow.operators_of((block.gate, block.value))
    return replace(block, first=first, second=tuple(_readers(view, flow, block.output)))


def _readers(view: GraphView, flow: Dataflow, tensor: str) -> Iterator[LinearOperator]:
    for index in view.consumers.get(tensor, ()):
        node = view.nodes[index]
        if index in flow.operators:
            yield flow.operators[index]
        elif node.op_type in SAME_NUMBERS and node.input[0] == tensor:
            yield from _readers(view, flow, node.output[0])
