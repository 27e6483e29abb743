"""Nodes that no row computes: those on plain arrays, attention and fused norms, and If and Loop.

The first are run by the runtime's own kernels, bit by bit. The second are what the nodes compute that define them
(`rewriter.graph.attention`). The bodies of the last are evaluated as often as conditions and trip counts say, which
must be known.
"""

import hashlib
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Unsupported, content, is_float, plain, unchanging
from rewriter.evaluate.table import MICROSOFT, Call, operator, tuple_of
from rewriter.graph.constants import elem_type_of, model_of
from rewriter.graph.types import TensorType
from rewriter.graph.view import key_of
from rewriter.text import one_line

_SMALL, _MAX_HELD = 2**12, 4
"""Entries of results that are kept; and how many larger ones are, since evaluations run in lockstep."""
_MAX_IR = 11
_FLOAT = onnx.TensorProto.FLOAT
_LENGTHS = "GroupQueryAttention"  # its lengths are drawn as it takes them


class Kernels:
    """Runs each node in its own session, or by its row, and keeps small results, and the last large ones."""

    def __init__(self, opsets: Mapping[str, int], ir_version: int) -> None:
        self._opsets, self._ir_version = opsets, min(ir_version, _MAX_IR)
        self._kept: dict[tuple[object, ...], tuple[Any, ...]] = {}
        self._large: list[tuple[object, ...]] = []
        self._facts: dict[tuple[bytes, int], dict[str, Any]] = {}  # about large results, by how they were computed

    def run(
        self, node: onnx.NodeProto, operands: Sequence[Array | None], row: Callable[..., Any] | None = None
    ) -> tuple[Any, ...]:
        """The outputs of a node, which `row` computes, or else onnxruntime or onnx's evaluator. Raises Unsupported."""
        stated = key_on(node, operands)
        key = (*map(bool, node.output), stated)
        if key in self._kept:
            return self._kept[key]
        result = self._kept[key] = tuple_of(row(*operands)) if row else self._run(node, operands)
        if sum(np.size(each) for each in result if each is not None) <= _SMALL:
            return result
        self._large.append(key)
        if len(self._large) > _MAX_HELD:
            self._kept.pop(self._large.pop(0), None)
        for number, each in enumerate(result):
            if isinstance(each, np.ndarray):
                unchanging(each, self._facts.setdefault((stated, number), {}))
        return result

    def _run(self, node: onnx.NodeProto, operands: Sequence[Array | None]) -> tuple[Any, ...]:
        feeds = {name: each for name, each in zip(node.input, operands, strict=True) if each is not None}
        named = [name for name in node.output if name]
        made = iter(run_model(model_of([node], feeds, named, self._opsets, ir_version=self._ir_version), feeds))
        return tuple(next(made) if name else None for name in node.output)


def run_model(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> Sequence[Any]:
    """The outputs of a small model, as onnxruntime computes them, or onnx's evaluator. Raises Unsupported."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(feeds)))
    except Exception as error:  # noqa: BLE001 - onnxruntime raises its own of many kinds
        from onnx.reference import ReferenceEvaluator  # slow to import

        try:
            return list(ReferenceEvaluator(model).run(None, dict(feeds)))
        except Exception:  # noqa: BLE001 - and onnx's evaluator any
            raise Unsupported(f"no kernel computes it: {one_line(str(error), 120)}") from None


def key_on(node: onnx.NodeProto, operands: Iterable[Array | None], opset: int | None = None) -> bytes:
    """A digest of what a node computes: its operator, attributes, of an opset without stated defaults, and arrays."""
    apart = [each for each in node.attribute if opset is None or not _is_default(node, each, opset)]
    stated = sorted(attribute.SerializeToString() for attribute in apart)
    given = [None if each is None else (str(each.dtype), content(each)) for each in operands]
    return hashlib.blake2b(repr((key_of(node), stated, given)).encode()).digest()


def version_of(node: onnx.NodeProto, imported: Mapping[str, int]) -> int | None:
    """The last of the imported opsets that changed the operator of a node; without a schema, the imported one."""
    domain, kind = key_of(node)
    version = imported.get(domain)
    if version is None or not onnx.defs.has(kind, version, domain):
        return version
    return onnx.defs.get_schema(kind, version, domain).since_version


def _is_default(node: onnx.NodeProto, attribute: onnx.AttributeProto, opset: int) -> bool:
    usual = {"pads": 0, "strides": 1, "dilations": 1}.get(attribute.name)  # along each axis, as no schema says
    domain, kind = key_of(node)
    if usual is not None or not onnx.defs.has(kind, opset, domain):
        return {*attribute.ints} == {usual}
    known = onnx.defs.get_schema(kind, opset, domain).attributes.get(attribute.name)
    return known is not None and bool(known.default_value == attribute)


# -- operators that nodes define ---------------------------------------------------------------------------------------


@operator("Attention", "MultiHeadAttention")
@operator("GroupQueryAttention", table=True)
@operator("Attention", domain=MICROSOFT)
@operator("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
@operator("EmbedLayerNormalization", domain=MICROSOFT, table=True)
@operator("FusedMatMul", "FusedMatMulActivation", "TransposeMatMul", domain=MICROSOFT, product=True)
def _defined(call: Call, *operands: Any) -> tuple[Any, ...]:
    """What the nodes compute that define an operator at the shapes of its operands."""
    evaluator, node = call.evaluator, call.node
    given = dict(zip(node.input, operands, strict=True))
    known = {name: x for name, x in given.items() if x is not None}
    types = {name: TensorType(_FLOAT if is_float(x) else elem_type_of(x), x.shape) for name, x in known.items()}
    types[node.output[0]] = TensorType(_FLOAT)
    given[""] = None
    parts = evaluator.program.definition(node, types)
    if not known.keys().isdisjoint(name for part in parts for name in part.output):
        raise Unsupported("an operand has the name of a part of its definition")
    for part in parts:
        follows = part.op_type != "Shape" and not evaluator.decided.isdisjoint(part.input)
        inner = Call(part, part.op_type, evaluator.program.attributes(part), evaluator, follows)
        made = evaluator.part(inner, [given[name] for name in part.input], follows and node.op_type != _LENGTHS)
        given |= {**dict(zip(part.output, made, strict=False)), "": None}
        evaluator.decided |= set(part.output) if follows else set()
    return tuple(given.get(name) for name in node.output)


# -- If and Loop -------------------------------------------------------------------------------------------------------

CONTROL = {"If", "Loop"}
_MAX_ITERATIONS = 10_000


def control(call: Call, operands: Sequence[Any], environment: MutableMapping[str, Any]) -> tuple[Any, ...]:
    """The outputs of a node that has bodies. Raises Unsupported where data decides what is evaluated."""
    if call.kind == "Loop":
        return _loop(call, operands, environment)
    branch = call.get("then_branch" if plain(operands[0], "a branch").item() else "else_branch")
    made = call.evaluator.body(branch, environment)
    _spread(call, [value.name for value in branch.output], call.node.output)
    return tuple(made)


def _loop(call: Call, operands: Sequence[Any], environment: MutableMapping[str, Any]) -> tuple[Any, ...]:
    limit, condition, *state = operands
    body: onnx.GraphProto = call.get("body")
    times = math.inf if limit is None else int(plain(limit, "how often a loop runs").item())
    going = condition is None or bool(plain(condition, "whether a loop runs").item())
    carried, results = ([value.name for value in each] for each in (body.input[2:], body.output[1:]))
    _spread(call, call.node.input[2:], carried)
    rounds: list[list[Any]] = []
    while going and len(rounds) < times:
        number, more = np.array(len(rounds), np.int64), np.array(going)
        given = dict(zip((value.name for value in body.input), (number, more, *state), strict=True))
        goes_on, *made = call.evaluator.body(body, ChainMap(given, environment))
        going, state, yielded = bool(plain(goes_on, "when a loop ends").item()), made[: len(state)], made[len(state) :]
        _spread(call, results, carried)
        rounds.append(yielded)
        if len(rounds) > _MAX_ITERATIONS:
            raise Unsupported(f"more than {_MAX_ITERATIONS:,} iterations")
    _spread(call, results, call.node.output)
    infos = enumerate(body.output[1 + len(state) :])
    return (*state, *(_stacked(call, info, [each[place] for each in rounds]) for place, info in infos))


def _stacked(call: Call, info: onnx.ValueInfoProto, slices: Sequence[Any]) -> Any:
    """The values that the iterations yield, along a new first axis."""
    if slices:
        return call.apply("Concat", *(call.move(each, lambda t: t[None]) for each in slices), axis=0)
    kind = info.type.tensor_type
    dims = [each.dim_value if each.HasField("dim_value") else -1 for each in kind.shape.dim]
    if not kind.HasField("shape") or -1 in dims:
        raise Unsupported("a loop that never runs yields a tensor of unknown shape")
    return np.zeros([0, *dims], helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _spread(call: Call, names: Sequence[str], others: Sequence[str]) -> None:
    """What is known of tensors holds under the other names that they get in a body, or behind it."""
    for known in (call.evaluator.decided, call.evaluator.ordered, call.evaluator.stepped):
        known |= {other for name, other in zip(names, others, strict=False) if name in known}
