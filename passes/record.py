"""The plan that a rewritten model carries: JSON in `ModelProto.metadata_props` under the key `attnonly.plan`.

Written by `with_record`, read by `read_record`, which checks shape and types but not the truth: a plan is a claim, and
whoever uses it checks it against the graph first (`passes.recognise`), or treats it as a claim to be proved.

    {
      "version": 1,                      what is described here; a reader refuses others
      "tool": "0.1.0",                   the version that wrote it
      "options": {"form": "compact"},    options of the last run that differ from their defaults
      "blocks": [{
        "name": "model.layers.0.mlp",
        "path": [["output of If", "then_branch"], ...],   the way from the main graph to the block's; usually []
        "activation": "silu",            a name in the table of activations, or `f` for a function that it does not name
        "parameters": ["0x1.0p+0"],      the activation's, in the order of the table
        "program": {"name": "silu", "heads": [{"beta": ..., "gamma": ..., "c": ..., "d": ...,
                    "bias_tokens": [[slope, offset, value], ...]}]},      heads only where they were fitted
        "bound": "0x0.0p+0",             the claimed error over max(1, |f|): program, rounded coefficients, and naming
        "rounding": "0x1.0p-22",         what evaluating the program adds, in the same unit
        "domain": null,                  largest |y| for which it holds; null: every real number
        "form": "local",
        "tensors": {"y": ..., "value": ..., "output": ...,       of the original's activation: f(y), or f(y) * value
                    "input": ..., "result": ..., "z": ...},      of a block that was replaced with its linear operators
        "weights": {"first": ..., "gate": ..., "second": ...},   of the same, as below
        "stream": {"bias_tokens": 1, "tensor": ..., "max_tokens": 512}    where the network's own stream
                                         carries bias tokens for the block; usually null
      }, ...]
    }

All real numbers are hexadecimal floats, exact as the tool had them. `value` is null where the block is no gate, or its
product stayed in the graph. `input`, `result`, `z` and `weights` are null where only the activation was replaced: its
linear operators are in the graph as they were. `y`, `value` and `output` do not exist in the file where they are given.
`z` is the tensor of the heads' outputs, null where the form has none. A stream of form `whole` is a `tensor` with
columns for an indicator and `bias_tokens` plus `max_tokens` positions behind those of the model. Bias tokens are its
last rows.

With `gate` null, a replaced block computes `f(x W1 + b1) W2 + b2`, W1 and b1 being `first`, W2 and b2 `second`;
otherwise `f(x Wg + bg) (x W1 + b1) W2 + b2`, where Wg and bg are `gate`. Neuron n has column n of W1 and Wg, and row n
of W2. Each is

    {"weight": tensor, "transposed": false, "in": 64, "out": 256, "start": 0, "stop": null,
     "biases": [{"name": tensor, "size": 256, "start": 0, "stop": null}]}

the columns `start:stop` of the constant matrix [in, out] ([out, in] if transposed), and the sum of the biases, each one
number per column, or one for all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import onnx

from passes.conversion import Conversion
from passes.match.projections import Projection, Vector
from passes.options import FORM_NAMES, Options
from passes.programs.head import BiasToken, Head
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

Read = TypeVar("Read")


class UnreadableError(ValueError):
    """A plan is not as described above; the message says where."""


@dataclass(frozen=True)
class Weights:
    """The linear operators of a block that was replaced with them.

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
    """The network's stream where it carries bias tokens for a block.

    Attributes:
        bias_tokens: how many: the last rows.
        tensor: the stream of form `whole`.
        max_tokens: columns for positions of tokens in form `whole`.
    """

    bias_tokens: int
    tensor: str = ""
    max_tokens: int = 0


@dataclass(frozen=True)
class BlockRecord:
    """What a plan says of one block.

    Attributes:
        name: the block.
        path: the way from the main graph to the graph that contains it.
        activation: name of the activation.
        parameters: its parameters.
        program: name of the head program.
        heads: the fitted heads; empty where the program follows from the activation.
        bound: the claimed error over max(1, |f|).
        rounding: what evaluating the program adds to it.
        domain: largest |y| for which it holds, possibly infinite.
        form: the form.
        y: the pre-activation.
        value: the factor of the activation, empty where there is none.
        output: the tensor with the activation's values.
        weights: the linear operators, if they were replaced too.
        stream: the network's stream, if that carries bias tokens for the block.
    """

    name: str
    path: Path
    activation: str
    parameters: tuple[float, ...]
    program: str
    heads: tuple[Head, ...]
    bound: float
    rounding: float
    domain: float
    form: str
    y: str
    value: str
    output: str
    weights: Weights | None
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
    blocks = [*earlier, *(_record_of(each, made) for each in conversions)]
    content = {
        "version": VERSION,
        "tool": tool_version(),
        "options": _unusual(options),
        "blocks": [_as_json(each) for each in blocks],
    }
    for entry in [entry for entry in model.metadata_props if entry.key == KEY]:
        model.metadata_props.remove(entry)
    model.metadata_props.add(key=KEY, value=json.dumps(content, separators=(",", ":"), ensure_ascii=False))
    return model


def tool_version() -> str:
    """The version of this package; `unknown` where it runs without being installed."""
    try:
        return version("attnonly")
    except PackageNotFoundError:
        return "unknown"


def _unusual(options: Options) -> dict[str, Any]:
    usual = values_of(Options())
    return {name: value for name, value in values_of(options).items() if value != usual[name]}


def _record_of(conversion: Conversion, made: set[str]) -> BlockRecord:
    block, named, program = conversion.block, conversion.block.identified, conversion.program
    z = f"{block.name}/heads/z"
    projections = conversion.projections
    fitted = named.activation.program is None and named.activation.gate is None
    weights = None
    if projections is not None:
        output = _at(projections.output, z if z in made else "")
        weights = Weights(projections.query, projections.value, output, projections.result)
    return BlockRecord(
        name=block.name,
        path=block.path,
        activation=named.activation.name,
        parameters=named.parameters,
        program=program.name,
        heads=_plain(program) if fitted else (),
        bound=conversion.max_error,
        rounding=program.rounding,
        domain=program.domain,
        form=conversion.form,
        y=block.gate,
        value="" if block.value == block.gate else block.value,
        output=block.output,
        weights=weights,
        stream=_stream_of(conversion),
    )


def _stream_of(conversion: Conversion) -> Stream | None:
    if not conversion.carried:
        return None
    return Stream(conversion.carried, conversion.stream, conversion.options.positions)


def _plain(program: Program) -> tuple[Head, ...]:
    """All heads of a program, with its linear term and its constant as one more."""
    program = program.as_heads
    rest = Head(beta=0.0, bias_tokens=(), c=program.linear, d=program.constant)
    return (*program.heads, rest) if program.linear or program.constant else program.heads


def _as_json(block: BlockRecord) -> dict[str, Any]:
    program: dict[str, Any] = {"name": block.program}
    if block.heads:
        program["heads"] = [_head_as_json(head) for head in block.heads]
    weights = block.weights
    ends: dict[str, str | None] = {"input": None, "result": None, "z": None}
    if weights is not None:
        ends = {"input": weights.query.data, "result": weights.result, "z": weights.output.data or None}
    return {
        "name": block.name,
        "path": block.path,
        "activation": block.activation,
        "parameters": [float(each).hex() for each in block.parameters],
        "program": program,
        "bound": float(block.bound).hex(),
        "rounding": float(block.rounding).hex(),
        "domain": float(block.domain).hex() if math.isfinite(block.domain) else None,
        "form": block.form,
        "tensors": {"y": block.y, "value": block.value or None, "output": block.output, **ends},
        "weights": None if weights is None else _weights_as_json(weights, gated=bool(block.value)),
        "stream": None if block.stream is None else _stream_as_json(block.stream),
    }


def _stream_as_json(stream: Stream) -> dict[str, Any]:
    return {"bias_tokens": stream.bias_tokens, "tensor": stream.tensor, "max_tokens": stream.max_tokens}


def _head_as_json(head: Head) -> dict[str, Any]:
    numbers = {name: getattr(head, name).hex() for name in ("beta", "gamma", "c", "d")}
    tokens = [[each.hex() for each in (token.slope, token.offset, token.value)] for token in head.bias_tokens]
    return {**numbers, "bias_tokens": tokens}


def _weights_as_json(weights: Weights, *, gated: bool) -> dict[str, Any]:
    return {
        "first": _projection_as_json(weights.value),
        "gate": _projection_as_json(weights.query) if gated else None,
        "second": _projection_as_json(weights.output),
    }


def _projection_as_json(matrix: Projection) -> dict[str, Any]:
    return {
        "weight": matrix.weight,
        "transposed": matrix.transposed,
        "in": matrix.in_features,
        "out": matrix.out_features,
        "start": matrix.start,
        "stop": matrix.stop,
        "biases": [
            {"name": each.name, "size": each.size, "start": each.start, "stop": each.stop} for each in matrix.biases
        ],
    }


def _at(matrix: Projection, data: str) -> Projection:
    """The matrix alone, without its place in the graph that it was planned on."""
    biases = tuple(Vector(each.name, each.size, each.start, each.stop) for each in matrix.biases)
    return Projection(
        data=data,
        weight=matrix.weight,
        transposed=matrix.transposed,
        in_features=matrix.in_features,
        out_features=matrix.out_features,
        biases=biases,
        start=matrix.start,
        stop=matrix.stop,
    )


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
    top = _Object(content, "the plan")
    if top.get("version", _integer) != VERSION:
        raise UnreadableError(f"its version is not {VERSION}")
    blocks = top.get("blocks", _listed(_block))
    for what, names in (("name", [each.name for each in blocks]), ("output", [each.output for each in blocks])):
        if len(set(names)) < len(names):
            raise UnreadableError(f"two blocks have the same {what}")
    return Record(top.get("tool", _text), top.get("options", _object), blocks)


class _Object:
    """A JSON object whose entries are read with a check."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise UnreadableError(f"{where} is no object")
        self._value, self._where = value, where

    def get(self, key: str, read: Callable[[Any, str], Read]) -> Read:
        """The value of a key that must be there."""
        if key not in self._value:
            raise UnreadableError(f"{self._where} has no '{key}'")
        return read(self._value[key], f"'{key}'" if self._where == "the plan" else f"{self._where}.{key}")


def _block(value: Any, where: str) -> BlockRecord:
    block = _Object(value, where)
    program, tensors = _Object(block.get("program", _any), where), _Object(block.get("tensors", _any), where)
    value_of_gate = tensors.get("value", _optional(_name, ""))
    given = block.get("weights", _any)
    ends = (
        tensors.get("input", _optional(_name, "")),
        tensors.get("result", _optional(_name, "")),
        tensors.get("z", _optional(_name, "")),
    )
    weights = None if given is None else _weights(_Object(given, f"{where}.weights"), ends, gated=bool(value_of_gate))
    heads = _listed(_head)(value["program"]["heads"], f"{where}.program.heads") if "heads" in value["program"] else ()
    bound, rounding = block.get("bound", _real), block.get("rounding", _real)
    domain = block.get("domain", _optional(_real, math.inf))
    if bound < 0.0 or rounding < 0.0 or domain <= 0.0:
        raise UnreadableError(f"{where} has a bound below 0 or an empty domain")
    form = block.get("form", _text)
    if form not in FORM_NAMES:
        raise UnreadableError(f"{where}.form is not one of {', '.join(FORM_NAMES)}")
    return BlockRecord(
        name=block.get("name", _name),
        path=block.get("path", _listed(_step)),
        activation=block.get("activation", _text),
        parameters=block.get("parameters", _listed(_real)),
        program=program.get("name", _text),
        heads=heads,
        bound=bound,
        rounding=rounding,
        domain=domain,
        form=form,
        y=tensors.get("y", _name),
        value=value_of_gate,
        output=tensors.get("output", _name),
        weights=weights,
        stream=block.get("stream", _optional(_stream, None)),
    )


def _stream(value: Any, where: str) -> Stream:
    given = _Object(value, where)
    return Stream(
        bias_tokens=given.get("bias_tokens", _integer),
        tensor=given.get("tensor", _name),
        max_tokens=given.get("max_tokens", _integer),
    )


def _weights(given: _Object, ends: tuple[str, str, str], *, gated: bool) -> Weights:
    data, result, z = ends
    if not data or not result:
        raise UnreadableError("a block with weights has no input or no result")
    first = given.get("first", _projection(data))
    gate = given.get("gate", _optional(_projection(data), None))
    if gated != (gate is not None):
        raise UnreadableError("a block has a value and no gate, or a gate and no value")
    return Weights(gate or first, first, given.get("second", _projection(z)), result)


def _projection(data: str) -> Callable[[Any, str], Projection]:
    def read(value: Any, where: str) -> Projection:
        given = _Object(value, where)
        return Projection(
            data=data,
            weight=given.get("weight", _name),
            transposed=given.get("transposed", _truth),
            in_features=given.get("in", _integer),
            out_features=given.get("out", _integer),
            biases=given.get("biases", _listed(_vector)),
            start=given.get("start", _integer),
            stop=given.get("stop", _optional(_integer, None)),
        )

    return read


def _vector(value: Any, where: str) -> Vector:
    given = _Object(value, where)
    start, stop = given.get("start", _integer), given.get("stop", _optional(_integer, None))
    return Vector(given.get("name", _name), given.get("size", _integer), start, stop)


def _head(value: Any, where: str) -> Head:
    given = _Object(value, where)
    numbers = {name: given.get(name, _real) for name in ("beta", "gamma", "c", "d")}
    return Head(**numbers, bias_tokens=given.get("bias_tokens", _listed(_token)))


def _token(value: Any, where: str) -> BiasToken:
    numbers = _listed(_real)(value, where)
    if len(numbers) != 3:
        raise UnreadableError(f"{where} is not slope, offset and value")
    return BiasToken(*numbers)


def _step(value: Any, where: str) -> tuple[str, str]:
    names = _listed(_name)(value, where)
    if len(names) != 2:
        raise UnreadableError(f"{where} is not a tensor and an attribute")
    return names[0], names[1]


def _listed(read: Callable[[Any, str], Read]) -> Callable[[Any, str], tuple[Read, ...]]:
    def every(value: Any, where: str) -> tuple[Read, ...]:
        if not isinstance(value, list):
            raise UnreadableError(f"{where} is no list")
        return tuple(read(each, f"{where}[{number}]") for number, each in enumerate(value))

    return every


def _optional(read: Callable[[Any, str], Read], missing: Read) -> Callable[[Any, str], Read]:
    return lambda value, where: missing if value is None else read(value, where)


def _any(value: Any, where: str) -> Any:
    del where
    return value


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableError(f"{where} is no object")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise UnreadableError(f"{where} is no text of at most {_LONGEST:,} characters")
    return value


def _name(value: Any, where: str) -> str:
    if not _text(value, where):
        raise UnreadableError(f"{where} is empty")
    return str(value)


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UnreadableError(f"{where} is neither true nor false")
    return value


def _integer(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**40:
        raise UnreadableError(f"{where} is no size")
    return value


def _real(value: Any, where: str) -> float:
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnreadableError(f"{where} is no hexadecimal number") from error
    if not math.isfinite(number):
        raise UnreadableError(f"{where} is not finite")
    return number
