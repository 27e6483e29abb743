"""The plan that a rewritten model carries: JSON in `ModelProto.metadata_props` under the key `attnonly.plan`.

It is the dataclasses of this file, field by field:

    {"version": 1, "tool": "0.1.0", "options": {"form": "compact"}, "blocks": [{"name": "model.layers.0.mlp", ...}]}

with the options of the last run that differ from their defaults. Real numbers are hexadecimal floats; fields at their
defaults are left out. `read_record` checks shape and types but not the truth: a plan is a claim, to be checked against
the graph (`passes.recognise`) or to be proved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import onnx

from passes.conversion import Conversion, Heads
from passes.options import FORM_NAMES, WHOLE, Options
from rewriter.graph.view import Path, Place
from rewriter.options import values_of

KEY = "attnonly.plan"  # of the metadata entry
VERSION = 1  # the only one that is read and written
MAX_BYTES = 2**24  # of a plan; a block takes about a kilobyte
_MAX_NAME = 2**14
_MAX_POSITION_ENTRIES = 2**26  # of a table of positions


class UnreadableError(ValueError):
    """A plan is not as described above."""


@dataclass(frozen=True, kw_only=True)
class BlockRecord(Heads):
    """The entry of one block in a plan: what its heads compute, and from what they were emitted."""

    name: str
    path: Path
    activation: str  # name in the table of activations, or `f` for a function that it does not name
    parameters: tuple[float, ...]
    bound: float  # the claimed error over max(1, |f|): program, rounded coefficients, and naming
    y: str  # the pre-activation; like value and output not a tensor of a file whose block has `projections`
    output: str
    types: tuple[int, int, int]  # element types of output, y and value
    value: str = ""  # the factor of the activation, empty where there is none or its product stayed in the graph

    @property
    def place(self) -> Place:
        """The graph and the output, which identify a block."""
        return self.path, self.output


@dataclass(frozen=True)
class Record:
    """A plan as a file carries it: the version of the tool, options that differ from their defaults, and blocks."""

    tool: str
    options: Mapping[str, Any]
    blocks: tuple[BlockRecord, ...]


def with_record(
    model: onnx.ModelProto, conversions: Iterable[Conversion], options: Options, earlier: Sequence[BlockRecord] = ()
) -> onnx.ModelProto:
    """Put the plan into `model`, in place: the blocks of earlier runs, and the ones converted now."""
    usual = values_of(Options())
    unusual = {name: value for name, value in values_of(options).items() if value != usual[name]}
    try:
        tool = version("attnonly")
    except PackageNotFoundError:  # it runs without being installed
        tool = "unknown"
    record = Record(tool, unusual, (*earlier, *map(_record_of, conversions)))
    for entry in [entry for entry in model.metadata_props if entry.key == KEY]:
        model.metadata_props.remove(entry)
    text = json.dumps({"version": VERSION} | _as_json(record), separators=(",", ":"), ensure_ascii=False)
    model.metadata_props.add(key=KEY, value=text)
    return model


def _record_of(conversion: Conversion) -> BlockRecord:
    block, named = conversion.block, conversion.block.identified
    return BlockRecord(
        name=block.name,
        path=block.path,
        activation=named.activation.name,
        parameters=tuple(map(float, named.parameters)),
        bound=float(conversion.max_error),
        y=block.gate,
        output=block.output,
        types=(block.elem_type, block.gate_type, block.value_type),
        value="" if block.value == block.gate else block.value,
        **conversion.keywords,
    )


def _as_json(value: Any) -> Any:
    if is_dataclass(value):
        given = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: _as_json(each) for field, each in given if each != field.default}
    if isinstance(value, tuple):
        return [_as_json(each) for each in value]
    return value.hex() if isinstance(value, float) else value


def read_record(model: onnx.ModelProto) -> Record | None:
    """The plan that a model carries; None if it carries none. Raises UnreadableError where it is not as above."""
    found = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if not found:
        return None
    if len(found) > 1:
        raise UnreadableError("there are several")
    if len(found[0]) > MAX_BYTES:
        raise UnreadableError(f"it has {len(found[0]):,} characters, more than {MAX_BYTES:,}")
    try:
        content = json.loads(found[0])
    except (ValueError, RecursionError) as error:
        raise UnreadableError("it is not JSON") from error
    if not isinstance(content, dict):
        raise UnreadableError("the plan is not an object")
    if type(content.get("version")) is not int or content["version"] != VERSION:
        raise UnreadableError(f"its version is not {VERSION}")
    record: Record = _parsed(Record, content, "the plan")
    for what, keys in (
        ("name", {each.name for each in record.blocks}),
        ("output", {each.place for each in record.blocks}),
    ):
        if len(keys) < len(record.blocks):
            raise UnreadableError(f"two blocks have the same {what}")
    for block in record.blocks:
        _check(block)
    return record


def _check(block: BlockRecord) -> None:
    names = [block.name, block.y, block.output, *(step for steps in block.path for step in steps)]
    whole, width = block.projections, 1
    if whole is not None:
        if whole.query.data != whole.value.data or (whole.query == whole.value) is bool(block.value):
            raise UnreadableError("a block has a value and no gate, or a gate and no value")
        width = max(whole.query.in_features, whole.output.out_features)
        names += [whole.query.data, whole.result]
        for each in (whole.query, whole.value, whole.output):
            names += [each.weight, *(bias.name for bias in each.biases)]
    if not all(names):
        raise UnreadableError("a block or a tensor has an empty name")
    if not 0.0 <= block.bound < math.inf or block.program.domain <= 0.0:
        raise UnreadableError("a block has a bound below 0 or an empty domain")
    rows = (
        block.carried
        + block.options.positions
        + max((len(head.bias_tokens) for head in block.program.heads), default=0)
    )
    if rows * max(rows, width) > _MAX_POSITION_ENTRIES:
        raise UnreadableError("a block has too many positions or bias tokens")
    if block.form not in FORM_NAMES:
        raise UnreadableError(f"the form of a block is not one of {', '.join(FORM_NAMES)}")
    if block.carried and block.form != WHOLE:
        raise UnreadableError("a block of another form than whole shares bias tokens")


@cache
def _fields(kind: type) -> Mapping[str, tuple[Any, bool]]:
    hints = get_type_hints(kind)
    return {field.name: (hints[field.name], field.default is not MISSING) for field in fields(kind)}


def _parsed(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            raise UnreadableError(f"{where} is not an object")
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
            raise UnreadableError(f"{where} is not a list")
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
        try:
            number = float.fromhex(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UnreadableError(f"{where} is not a hexadecimal number") from error
        if math.isnan(number):
            raise UnreadableError(f"{where} is not a number")
        return number
    fits, what = {
        str: (isinstance(value, str) and len(value) <= _MAX_NAME, f"not a text of at most {_MAX_NAME:,} characters"),
        bool: (isinstance(value, bool), "neither true nor false"),
        int: (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40, "not a size"),
    }.get(kind, (isinstance(value, dict), "not an object"))  # the options
    if not fits:
        raise UnreadableError(f"{where} is {what}")
    return value
