"""The truth: a model evaluated in float64.

float16, bfloat16 and float32 become double everywhere: weights, constants, targets of Cast. The operators are those of
onnx's reference evaluator, except a few that it lacks, or computes differently from their specification (`OPERATORS`);
fused operators, attention and mixtures of experts are expanded. Operators that round to integers on purpose, draw
random numbers, or take minutes are refused.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from onnx import TensorProto, numpy_helper

from rewriter.arrays import Array, tensors_of
from rewriter.errors import ModelError, RewriteError
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.attention import with_plain
from rewriter.graph.edit import inlined, set_nodes
from rewriter.graph.elementwise import MICROSOFT, OWN
from rewriter.graph.extract import bytes_of
from rewriter.graph.fused import FUSED, with_parts
from rewriter.graph.mixtures import with_plain_experts
from rewriter.graph.types import elem_name
from rewriter.graph.view import attributes as attributes_of
from rewriter.graph.view import constant_of, key_of, label, needed, opsets
from rewriter.graph.walk import all_graphs, is_external, iter_tensors, reads
from rewriter.proof.inputs.specs import is_float, numpy_type
from rewriter.text import one_line

LARGEST = 2**31
"""Maximum size of the weights, in bytes; in float64 they take two or four times as much."""

_REFUSED = re.compile(
    "Quant|Integer|QLinear|Random|Multinomial|Bernoulli|Hardmax|"
    "^(Average|Max|Lp)Pool|ConvTranspose|DeformConv|GridSample|RoiAlign|NonMaxSuppression"
)
"""Operators that decide by rounding, or draw random numbers: in float64 the model would be a different function; and
operators that onnx computes point by point in Python, which takes minutes."""

_NARROW = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
Attributes = Mapping[str, Any]
Operator = Callable[..., Array]
Read = Callable[[TensorProto], Array]
"""The values of a tensor, widened. Raises NoReference."""


class NoReference(RewriteError):  # noqa: N818 - not an error: the proof does without
    """The model has no float64 evaluation; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Reference:
    """A model in float64: operators in order, each with the tensors that are dead after it."""

    constants: Mapping[str, Array]
    steps: Sequence[tuple[Any, Sequence[str]]]
    outputs: Sequence[str]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model on the original's inputs; floats become float64. Raises NoReference if an operator fails."""
        # An input may override the initializer of its name.
        values: dict[str, Any] = {"": None, **self.constants}
        values |= {name: _widened(array) for name, array in feeds.items()}
        for node, dead in self.steps:
            try:
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    context = {"context": values} if node.need_context() else {}
                    made = node.run(*(values[name] for name in node.input), **context)
            except MemoryError:
                raise  # not the operator's fault: reporting that it has no float64 form would be wrong
            except Exception as error:
                raise NoReference(f"onnx's evaluator cannot run the model: {one_line(error, 160)}") from error
            if node.op_type == "Gather":
                made = [_widened(value) for value in made]
            for name, value in zip(node.output, made, strict=False):
                values[name] = value if name else None
                # An operator that silently computes in float32 would make the truth as inexact as the model.
                if isinstance(value, np.ndarray) and is_float(value.dtype) and value.dtype != np.float64:
                    raise NoReference(f"the evaluator computes '{one_line(name, 80)}' in {value.dtype} only")
            for name in dead:  # onnx's own loop would keep all values, which may be large attention patterns
                values.pop(name, None)
        return tensors_of({name: values[name] for name in self.outputs})


def open_reference(model: onnx.ModelProto, base_dir: Path | None = None) -> Reference:
    """Load the float64 evaluation of `model`, which is not changed; `base_dir` has its external data, if any.

    Raises:
        NoReference: an operator or a tensor has no float64 form, or the model is too large.
    """
    from onnx.reference import ReferenceEvaluator

    if sum(bytes_of(tensor) for tensor in iter_tensors(model)) > LARGEST:
        raise NoReference(f"larger than {round(LARGEST / 1e9)} GB")
    read = partial(_values, LoadedModel(model, None, base_dir, (), 0))
    copy = with_plain(with_plain_experts(inlined(model)))
    copy = with_parts(copy, lambda node: FUSED[key_of(node)](node) if key_of(node) in FUSED else None)
    del copy.functions[:]  # the remaining ones import another operator set
    outputs = [value.name for value in copy.graph.output]
    # A dead operator without a float64 form does not matter.
    set_nodes(copy.graph, [copy.graph.node[place] for place in needed(copy.graph.node, outputs)])
    # Only the rows of embeddings that are read become double: the whole table is a third of a small model.
    others = [name for node in copy.graph.node for name in reads(node)[node.op_type == "Gather" :]]
    tables = {node.input[0] for node in copy.graph.node if node.op_type == "Gather"}.difference(others, outputs)
    constants = {tensor.name: read(tensor, wide=tensor.name not in tables) for tensor in copy.graph.initializer}
    del copy.graph.initializer[:]
    for graph in all_graphs(copy.graph):
        for tensor in graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(read(tensor), tensor.name))
        for node in graph.node:
            _widen(node, read)
    try:
        nodes = ReferenceEvaluator(copy, new_ops=_operators(opsets(copy.opset_import).get("", 1))).rt_nodes_
    except Exception as error:
        raise NoReference(f"onnx's evaluator cannot load the model: {one_line(error, 160)}") from error
    last = {name: place for place, node in enumerate(copy.graph.node) for name in (*reads(node), *node.output)}
    dead: dict[int, list[str]] = defaultdict(list)
    for name in last.keys() - {*outputs, ""}:  # omitted outputs stay None
        dead[last[name]].append(name)
    return Reference(constants, [(node, dead[place]) for place, node in enumerate(nodes)], outputs)


def _widened(array: Array) -> Array:
    return array.astype(np.float64, copy=False) if is_float(array.dtype) else array


def _values(model: LoadedModel, tensor: TensorProto, *, wide: bool = True) -> Array:
    _check_type(tensor.data_type, f"tensor '{tensor.name}'")
    if is_external(tensor) and model.base_dir is None:
        raise NoReference("weights lie outside the model file and were not loaded")
    try:
        array = read_tensor(model, tensor)
        return _widened(array) if wide else array
    except ModelError as error:
        what = "external data" if is_external(tensor) else "a weight"
        raise NoReference(f"{what} cannot be loaded: {one_line(error, 160)}") from error


def _check_type(elem_type: int, what: str) -> None:
    if elem_type != TensorProto.UNDEFINED and numpy_type(elem_type) is None:
        raise NoReference(f"{one_line(what, 120)} is of type {elem_name(elem_type)}")


def _widen(node: onnx.NodeProto, read: Read) -> None:
    node.domain, what = key_of(node)[0], one_line(label(node), 120)
    if _REFUSED.search(node.op_type):
        raise NoReference(f"{what} has no known float64 form")
    if node.op_type == "Constant":
        value = constant_of(node)
        if value is None or value.data_type == TensorProto.STRING:
            raise NoReference(f"{what} holds no dense tensor of numbers")
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("value", value))
    elif node.op_type == "ConstantOfShape" and not node.attribute:
        node.attribute.append(onnx.helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.type == onnx.AttributeProto.INT:
            _check_type(attribute.i, what)
            attribute.i = TensorProto.DOUBLE if attribute.i in _NARROW else attribute.i
        elif attribute.type == onnx.AttributeProto.TENSOR:
            attribute.t.CopyFrom(numpy_helper.from_array(read(attribute.t), attribute.t.name))


def _number(attributes: Attributes, name: str, default: float) -> float:
    """A float attribute, which ONNX stores in float32: rounded to float32, then exact."""
    return float(np.float32(attributes.get(name, default)))


# -- operators in numpy ----------------------------------------------------------------------------------------------


def _activation(key: tuple[str, str]) -> Operator:
    return lambda attributes, *operands: np.asarray(OWN[key](operands, attributes))


def _rms_norm(attributes: Attributes, x: Array, scale: Array) -> Array:
    """onnxruntime's SimplifiedLayerNormalization: over the axes from `axis` on."""
    axes = tuple(range(int(attributes.get("axis", -1)) % x.ndim, x.ndim))
    return np.asarray(x / np.sqrt((x * x).mean(axes, keepdims=True) + _number(attributes, "epsilon", 1e-5)) * scale)


def _rotary(attributes: Attributes, x: Array, positions: Array, cos: Array, sin: Array) -> Array:
    """onnxruntime's RotaryEmbedding: that of ONNX with operands in another order."""
    from onnx.reference.ops.op_rotary_embedding import rotary_embedding

    if positions.ndim == 1:  # the position of the first token
        positions = np.broadcast_to(positions + np.arange(x.shape[-2]), (len(x), x.shape[-2]))
    given = {key: attributes.get(key, 0) for key in ("interleaved", "rotary_embedding_dim", "num_heads")}
    return np.asarray(rotary_embedding(x, cos, sin, positions, **given)) * _number(attributes, "scale", 1.0)


# -- operators that onnx's evaluator computes differently --------------------------------------------------------------


def _log_softmax(attributes: Attributes, x: Array) -> Array:
    """Before opset 13: over all axes from `axis` on."""
    rows = x.reshape(*x.shape[: int(attributes.get("axis", 1)) % x.ndim], -1)
    shifted = rows - rows.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).reshape(x.shape)


def _batch_norm(attributes: Attributes, x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array:
    """BatchNormalization of inference: before opset 14 onnx takes the statistics of the batch instead."""
    if attributes.get("training_mode"):
        raise NotImplementedError("BatchNormalization in training")
    shape = (*scale.shape, *(1,) * (x.ndim - 1 - scale.ndim))
    scale, bias, mean, variance = (each.reshape(shape) for each in (scale, bias, mean, variance))
    return (x - mean) / np.sqrt(variance + _number(attributes, "epsilon", 1e-5)) * scale + bias


def _gather_elements(attributes: Attributes, x: Array, index: Array) -> Array:
    """GatherElements; onnx's fails on more than 64 rows."""
    axis = int(attributes.get("axis", 0))
    return np.take_along_axis(x, np.where(index < 0, index + x.shape[axis], index), axis)


_ACTIVATIONS = (
    *(("", name) for name in ("Erf", "Gelu", "HardSwish")),
    *((MICROSOFT, name) for name in ("Gelu", "FastGelu", "QuickGelu")),
)

OPERATORS: Mapping[tuple[str, str], Operator] = {
    **{key: _activation(key) for key in _ACTIVATIONS},
    ("", "GatherElements"): _gather_elements,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("", "BatchNormalization"): _batch_norm,
    (MICROSOFT, "RotaryEmbedding"): _rotary,
}
"""Operators that onnx's evaluator lacks, decomposes into others with constants rounded to float32, or computes
differently from their version's specification: each is a function of attributes and operands."""

_BEFORE_13: Mapping[tuple[str, str], Operator] = {
    ("", "Softmax"): lambda attributes, x: np.exp(_log_softmax(attributes, x)),
    ("", "LogSoftmax"): _log_softmax,
}


def _operators(opset: int) -> list[type]:
    from onnx.reference.ops.op_dequantize_linear import DequantizeLinear_25

    known = {**OPERATORS, **(_BEFORE_13 if opset < 13 else {})}
    # onnx's evaluator lacks the earlier versions of DequantizeLinear, which computed the same.
    earlier = [type("DequantizeLinear", (DequantizeLinear_25,), {"op_domain": ""})] if opset < 19 else []
    return [_as_class(*key, form) for key, form in known.items()] + earlier


def _as_class(domain: str, name: str, form: Operator) -> type:
    from onnx.reference.op_run import OpRun

    def run(self: Any, *operands: Array | None, **_: Any) -> tuple[Array]:
        return (form(attributes_of(self.onnx_node), *operands),)

    return type(name, (OpRun,), {"op_domain": domain, "_run": run})
