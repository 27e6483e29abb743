"""The plan that a rewritten model carries: JSON in `ModelProto.metadata_props` under the key `attnonly.plan`.

It is the dataclasses of this file, field by field, as written by `with_record`:

    {"version": 1, "tool": "0.1.0", "options": {"form": "compact"}, "blocks": [{"name": "model.layers.0.mlp", ...}]}

with the options of the last run that differ from their defaults, and a `BlockRecord` for every block. Real numbers are
hexadecimal floats, exact as the tool had them; fields at their defaults are left out. `read_record` checks shape and
types but not the truth: a plan is a claim, and whoever uses it checks it against the graph first (`passes.recognise`),
or treats it as a claim to be proved. A reader refuses versions other than its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import onnx

from passes.conversion import Conversion
from passes.match.projections import Projection
from passes.options import FORM_NAMES, Options
from passes.programs.head import Head
from passes.programs.program import Program
from rewriter.graph.view import Path, all_graphs
from rewriter.options import values_of

KEY = "attnonly.plan"
"""The key of the metadata entry."""

VERSION = 1
"""The only version that is read and written."""

MOST_BYTES = 2**24
"""A longer plan is not read; a block takes about a kilobyte."""

_LONGEST = 2**14
"""The longest name."""

_INDICES = frozenset(("nodes", "node", "slot"))
"""Fields of a `Projection` that say where it stands in the graph that it was planned on."""


class UnreadableError(ValueError):
    """A plan is not as described above; the message says where."""


@dataclass(frozen=True)
class BlockWeights:
    """The linear operators of a block that was replaced with them.

    With `value` equal to `query` the block computes `f(x W1 + b1) W2 + b2`, otherwise `f(x Wg + bg) (x W1 + b1) W2 +
    b2`. Neuron n has column n of W1 and Wg, and row n of W2.

    Attributes:
        query: gives the pre-activation y.
        value: gives the factor of the activation; `query` itself where the block is no gate.
        output: W2; its `data` is the tensor of the heads' outputs, empty where there is none.
        result: the output of the block.
    """

    query: Projection
    value: Projection
    output: Projection
    result: str


@dataclass(frozen=True)
class Stream:
    """The network's stream where it carries bias tokens for a block: they are its last rows.

    Attributes:
        bias_tokens: how many.
        tensor: the stream, with columns for an indicator and `bias_tokens` plus `max_tokens` positions behind those of
            the model.
        max_tokens: columns for positions of tokens.
    """

    bias_tokens: int
    tensor: str = ""
    max_tokens: int = 0


@dataclass(frozen=True)
class BlockRecord:
    """What a plan says of one block. Of y, value and output, none exists in a file whose block has `weights`.

    Attributes:
        name: the block.
        path: the way from the main graph to the graph that contains it.
        activation: name in the table of activations, or `f` for a function that it does not name.
        parameters: its parameters.
        program: name of the head program.
        bound: the claimed error over max(1, |f|): program, rounded coefficients, and naming.
        rounding: what evaluating the program adds to it.
        form: the form.
        y: the pre-activation.
        output: the tensor with the activation's values.
        value: the factor of the activation, empty where there is none or its product stayed in the graph.
        heads: the fitted heads; empty where the program follows from the activation.
        domain: largest |y| for which the bound holds.
        weights: the linear operators, if they were replaced too.
        stream: the network's stream, if that carries bias tokens for the block.
    """

    name: str
    path: Path
    activation: str
    parameters: tuple[float, ...]
    program: str
    bound: float
    rounding: float
    form: str
    y: str
    output: str
    value: str = ""
    heads: tuple[Head, ...] = ()
    domain: float = math.inf
    weights: BlockWeights | None = None
    stream: Stream | None = None


@dataclass(frozen=True)
class Record:
    """A plan as a file carries it.

    Attributes:
        tool: the version of the tool that wrote it.
        options: the options that differ from their defaults.
        blocks: the blocks that are heads.
    """

    tool: str
    options: Mapping[str, Any]
    blocks: tuple[BlockRecord, ...]


# -- writing -----------------------------------------------------------------------------------------------------


def with_record(
    model: onnx.ModelProto, conversions: Iterable[Conversion], options: Options, earlier: Sequence[BlockRecord] = ()
) -> onnx.ModelProto:
    """Put the plan into `model`, which is changed: the blocks of earlier runs, and those that were converted now."""
    made = {name for graph in all_graphs(model.graph) for node in graph.node for name in node.output}
    usual = values_of(Options())
    unusual = {name: value for name, value in values_of(options).items() if value != usual[name]}
    record = Record(tool_version(), unusual, (*earlier, *(_record_of(each, made) for each in conversions)))
    for entry in [entry for entry in model.metadata_props if entry.key == KEY]:
        model.metadata_props.remove(entry)
    text = json.dumps({"version": VERSION} | _as_json(record), separators=(",", ":"), ensure_ascii=False)
    model.metadata_props.add(key=KEY, value=text)
    return model


def tool_version() -> str:
    """The version of this package; `unknown` where it runs without being installed."""
    try:
        return version("attnonly")
    except PackageNotFoundError:
        return "unknown"


def _record_of(conversion: Conversion, made: set[str]) -> BlockRecord:
    block, named, program = conversion.block, conversion.block.identified, conversion.program
    z = f"{block.name}/heads/z"
    projections, weights, stream = conversion.projections, None, None
    if projections is not None:
        output = replace(projections.output, data=z if z in made else "")
        weights = BlockWeights(projections.query, projections.value, output, projections.result)
    if conversion.carried:
        stream = Stream(conversion.carried, conversion.stream, conversion.options.positions)
    return BlockRecord(
        name=block.name,
        path=block.path,
        activation=named.activation.name,
        parameters=tuple(map(float, named.parameters)),
        program=program.name,
        bound=float(conversion.max_error),
        rounding=float(program.rounding),
        form=conversion.form,
        y=block.gate,
        output=block.output,
        value="" if block.value == block.gate else block.value,
        heads=_plain(program) if named.activation.program is None and named.activation.gate is None else (),
        domain=float(program.domain),
        weights=weights,
        stream=stream,
    )


def _plain(program: Program) -> tuple[Head, ...]:
    """All heads of a program, with its linear term and its constant as one more."""
    program = program.as_heads
    rest = Head(beta=0.0, bias_tokens=(), c=program.linear, d=program.constant)
    return (*program.heads, rest) if program.linear or program.constant else program.heads


def _as_json(value: Any) -> Any:
    if is_dataclass(value):
        given = ((field, getattr(value, field.name)) for field in fields(value) if field.name not in _INDICES)
        return {field.name: _as_json(each) for field, each in given if each != field.default}
    if isinstance(value, tuple):
        return [_as_json(each) for each in value]
    return value.hex() if isinstance(value, float) else value


# -- reading -----------------------------------------------------------------------------------------------------


def read_record(model: onnx.ModelProto) -> Record | None:
    """The plan that a model carries; None if it carries none.

    Raises:
        UnreadableError: it is not as described above.
    """
    found = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if not found:
        return None
    if len(found) > 1:
        raise UnreadableError("there are several")
    if len(found[0]) > MOST_BYTES:
        raise UnreadableError(f"it has {len(found[0]):,} characters, more than {MOST_BYTES:,}")
    try:
        content = json.loads(found[0])
    except (ValueError, RecursionError) as error:
        raise UnreadableError("it is not JSON") from error
    if not isinstance(content, dict):
        raise UnreadableError("the plan is no object")
    if type(content.get("version")) is not int or content["version"] != VERSION:
        raise UnreadableError(f"its version is not {VERSION}")
    record: Record = _parsed(Record, content, "the plan")
    for what, names in (
        ("name", [each.name for each in record.blocks]),
        ("output", [each.output for each in record.blocks]),
    ):
        if len(set(names)) < len(names):
            raise UnreadableError(f"two blocks have the same {what}")
    for block in record.blocks:
        _check(block)
    return record


def _check(block: BlockRecord) -> None:
    """What the types of the fields do not say."""
    names = [block.name, block.y, block.output, *(step for steps in block.path for step in steps)]
    weights = block.weights
    if weights is not None:
        if weights.query.data != weights.value.data or (weights.query == weights.value) is bool(block.value):
            raise UnreadableError("a block has a value and no gate, or a gate and no value")
        names += [weights.query.data, weights.result]
        for each in (weights.query, weights.value, weights.output):
            names += [each.weight, *(bias.name for bias in each.biases)]
    if not all(names):
        raise UnreadableError("a block or a tensor has an empty name")
    if block.bound < 0.0 or block.rounding < 0.0 or block.domain <= 0.0:
        raise UnreadableError("a block has a bound below 0 or an empty domain")
    if block.form not in FORM_NAMES:
        raise UnreadableError(f"the form of a block is not one of {', '.join(FORM_NAMES)}")


@cache
def _fields(kind: type) -> Mapping[str, tuple[Any, bool]]:
    """The fields of a dataclass that are read: their types, and whether they have a default."""
    hints = get_type_hints(kind)
    given = (field for field in fields(kind) if field.name not in _INDICES)
    return {field.name: (hints[field.name], field.default is not MISSING) for field in given}


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """A value of the given type from JSON."""
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            raise UnreadableError(f"{where} is no object")
        known = _fields(kind)
        missing = next((name for name, (_, default) in known.items() if not default and name not in value), None)
        if missing is not None:
            raise UnreadableError(f"{where} has no '{missing}'")
        return kind(
            **{name: _parsed(known[name][0], each, f"{where}.{name}") for name, each in value.items() if name in known}
        )
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UnreadableError(f"{where} is no list")
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise UnreadableError(f"{where} has {len(value)} entries, not {len(kinds)}")
        return tuple(
            _parsed(each, item, f"{where}[{number}]")
            for number, (each, item) in enumerate(zip(kinds, value, strict=True))
        )
    if get_origin(kind) is UnionType:  # X | None
        return None if value is None else _parsed(arguments[0], value, where)
    if kind is float:
        return _real(value, where)
    fits = {
        str: isinstance(value, str) and len(value) <= _LONGEST,
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40,
    }.get(kind, isinstance(value, dict))  # the options
    if not fits:
        raise UnreadableError(f"{where} is {_NOT.get(kind, 'no object')}")
    return value


_NOT = {str: f"no text of at most {_LONGEST:,} characters", bool: "neither true nor false", int: "no size"}


def _real(value: Any, where: str) -> float:
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnreadableError(f"{where} is no hexadecimal number") from error
    if not math.isfinite(number):
        raise UnreadableError(f"{where} is not finite")
    return number
