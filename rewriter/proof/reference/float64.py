"""The truth: a model evaluated in float64.

float16, bfloat16 and float32 become double everywhere: weights, constants, targets of Cast. Each operator is computed
by the first of these that can: onnxruntime's double kernel, a definition in numpy, onnx's reference evaluator. Mixtures
of experts are written out in such operators. What none of them knows (quantised and random operators, control flow) is
refused with `NoReference`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rewriter.arrays import Array
from rewriter.errors import ModelError, RewriteError, ValidationError
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.constants import computed, elem_type_of
from rewriter.graph.edit import inlined
from rewriter.graph.extract import bytes_of, reads
from rewriter.graph.mixtures import with_plain_experts
from rewriter.graph.view import attributes, constant_of, key_of, label
from rewriter.graph.walk import is_external, iter_tensors
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.reference.operators import NUMPY_OPERATORS, Operator
from rewriter.text import one_line

KERNELS = frozenset(
    """
    Abs Add And ArgMax ArgMin BatchNormalization Cast CastLike Ceil Clip Concat ConstantOfShape Cos CumSum Div Dropout
    Einsum Equal Exp Expand Flatten Floor Gather GatherElements GatherND Gemm Greater GreaterOrEqual Identity IsInf
    IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax MatMul Max MaxPool Min Mod Mul Neg NonZero Not Or
    PRelu Pad Pow RMSNormalization Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round ScatterElements ScatterND Shape Sigmoid Sign Sin
    Size Slice Softmax Split Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose Trilu Unsqueeze Where Xor
    """.split()  # noqa: SIM905 - more readable for 100 names
)
"""Operators of the default domain that onnxruntime really computes in double on the CPU, in at least some opset.

Each was measured: results agree with onnx's definition, and they follow changes of the operands below float32's
resolution (tests/rewriter/proof/reference). Operators that it decomposes into others, with constants rounded to
float32, are excluded (Gelu, Swish, Attention).
"""

EVALUATED = frozenset(
    """
    Acos Acosh Asin Asinh Atan Atanh Celu Clip Conv Cosh Elu GlobalAveragePool HardSigmoid InstanceNormalization
    LeakyRelu Max Mean Min Mish NonZero OneHot PRelu Selu Shrink Sinh Softplus Softsign Swish Tan ThresholdedRelu
    """.split()  # noqa: SIM905 - more readable for 30 names
)
"""Operators of the default domain that onnx's reference evaluator computes as onnxruntime does.

Of others it follows the newest definition whatever the opset, or rounds, or covers common attributes only.
"""

LARGEST = 2**31
"""Maximum size of the weights, in bytes; in float64 they take two or four times as much."""

_SMALL = 2**18
"""Maximum number of fed elements for which one thread is faster than starting more."""

_NARROW = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
_EXACT = {
    TensorProto.DOUBLE, TensorProto.BOOL, TensorProto.UNDEFINED,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip

Operands = Sequence[Array | None]
Outputs = Sequence[Array | None]
Compute = Callable[[Operands], Outputs]
Read = Callable[[TensorProto], Array]
"""The values of a tensor, widened. Raises NoReference."""


class NoReference(RewriteError):  # noqa: N818 - not an error: the proof does without
    """There is no float64 evaluation of the model; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Reference:
    """A model in float64: nodes in order, each with what computes it and the names that nothing behind it reads."""

    constants: Mapping[str, Array]
    steps: Sequence[tuple[onnx.NodeProto, Compute, Sequence[str]]]
    outputs: Sequence[str]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model on the original's inputs, whose floats are widened.

        Returns:
            Maps an output to its array; float64 where the original gives floats.

        Raises:
            NoReference: an operator cannot be computed on these feeds.
        """
        # An input may override the initializer of its name.
        values = {**self.constants, **{name: _widened(array) for name, array in feeds.items()}}
        for node, compute, dead in self.steps:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = compute([values[name] if name else None for name in node.input])
            for name, value in zip(node.output, made, strict=False):
                if not name or value is None:
                    continue
                values[name] = found = np.asarray(value)
                # A kernel that silently computes in float32 would make the truth as inexact as the model.
                if is_float(found.dtype) and found.dtype != np.float64:
                    raise NoReference(f"the evaluator computes '{one_line(name, 80)}' in {found.dtype} only")
            if not all(name in values for name in node.output if name):
                raise NoReference(f"{one_line(label(node), 120)} gives not all of its outputs")
            for name in dead:
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}


def open_reference(model: onnx.ModelProto, base_dir: Path | None = None) -> Reference:
    """Load the float64 evaluation of `model`.

    Args:
        model: the model; its external data may be loaded or not. It is not changed.
        base_dir: directory of its external data.

    Raises:
        NoReference: an operator or a tensor has no float64 form, or the model is too large.
    """
    if sum(bytes_of(tensor) for tensor in iter_tensors(model)) > LARGEST:
        raise NoReference(f"larger than {round(LARGEST / 1e9)} GB")
    if model.functions:
        model = inlined(model)
    model = with_plain_experts(model)
    if model.graph.sparse_initializer:
        raise NoReference("the model has sparse initializers")
    read = partial(_values, LoadedModel(model, None, base_dir, (), 0))
    constants = {tensor.name: read(tensor) for tensor in model.graph.initializer}
    outputs = [value.name for value in model.graph.output]
    last = dict.fromkeys(outputs, -1)
    needed: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if last.keys() & {*node.output}:  # a dead operator without a float64 form does not matter
            needed.append(node)
            for name in reads(node):
                last.setdefault(name, id(node))
    steps = []
    for node in reversed(needed):
        if key_of(node) == ("", "Constant"):
            constants[node.output[0]] = _constant(node, read)
        else:
            dead = [name for name in (*reads(node), *node.output) if last.get(name, id(node)) == id(node)]
            wide = _widened_node(node, read)
            steps.append((wide, _computing(wide, model.opset_import), dead))
    return Reference(constants, steps, outputs)


# -- widening --------------------------------------------------------------------------------------------------------


def _widened(array: Array) -> Array:
    return array.astype(np.float64, copy=False) if is_float(array.dtype) else array


def _values(model: LoadedModel, tensor: TensorProto) -> Array:
    _check_type(tensor.data_type, f"tensor '{tensor.name}'")
    if is_external(tensor) and model.base_dir is None:
        raise NoReference("weights lie outside the model file and were not loaded")
    try:
        return _widened(read_tensor(model, tensor))
    except ModelError as error:
        what = "external data" if is_external(tensor) else "a weight"
        raise NoReference(f"{what} cannot be loaded: {one_line(error, 160)}") from error


def _check_type(elem_type: int, what: str) -> None:
    if elem_type not in _NARROW | _EXACT:
        name = next((key for key, value in TensorProto.DataType.items() if value == elem_type), str(elem_type))
        raise NoReference(f"{one_line(what, 120)} is of type {name.lower()}")


def _constant(node: onnx.NodeProto, read: Read) -> Array:
    value = constant_of(node)
    if value is None or value.data_type == TensorProto.STRING:
        raise NoReference(f"{one_line(label(node), 120)} holds no dense tensor of numbers")
    return read(value)


def _widened_node(node: onnx.NodeProto, read: Read) -> onnx.NodeProto:
    """A copy of the node for float64 operands."""
    wide = deepcopy(node)
    wide.domain = key_of(node)[0]
    if node.op_type == "ConstantOfShape" and not node.attribute:
        wide.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
    for attribute in wide.attribute:
        if attribute.name == "to" and attribute.type == onnx.AttributeProto.INT:
            _check_type(attribute.i, label(node))
            attribute.i = TensorProto.DOUBLE if attribute.i in _NARROW else attribute.i
        elif attribute.type == onnx.AttributeProto.TENSOR:
            attribute.t.CopyFrom(numpy_helper.from_array(read(attribute.t), attribute.t.name))
    return wide


# -- operators --------------------------------------------------------------------------------------------------------


def _computing(node: onnx.NodeProto, opsets: Sequence[onnx.OperatorSetIdProto]) -> Compute:
    """What computes an operator: the first that can for the types that flow in. Raises NoReference."""
    (domain, name), what = key_of(node), one_line(label(node), 120)
    ways: list[tuple[str, Compute]] = []
    # onnxruntime gives the mean and the deviation of a LayerNormalization in float32.
    if (
        not domain
        and name in KERNELS
        and (name != "LayerNormalization" or len([each for each in node.output if each]) == 1)
    ):
        ways.append(("onnxruntime", _by_kernel(node, opsets)))
    if (form := NUMPY_OPERATORS.get((domain, name))) is not None:
        ways.append(("numpy", partial(_in_numpy, node, form)))
    elif not domain and name in EVALUATED:
        ways.append(("onnx's reference evaluator", partial(_by_onnx, node, opsets)))
    if not ways:
        raise NoReference(f"{what} has no known float64 form")

    def compute(values: Operands) -> Outputs:
        for way, each in ways:
            try:
                return each(values)
            except _NoKernelError:
                continue
            except MemoryError:
                raise  # not the operator's fault: reporting that it has no float64 form would be wrong
            except Exception as error:
                raise NoReference(f"{way} cannot run {what}: {one_line(error, 160)}") from error
        raise NoReference(f"{what} has no known float64 form")

    return compute


class _NoKernelError(Exception):
    """onnxruntime has no kernel of an operator for these types."""


def _by_kernel(node: onnx.NodeProto, opsets: Sequence[onnx.OperatorSetIdProto]) -> Compute:
    """By onnxruntime; whether a kernel exists depends on the types that flow in."""
    plain = onnx.NodeProto(op_type=node.op_type, attribute=node.attribute)
    plain.input.extend(f"i{place}" if name else "" for place, name in enumerate(node.input))
    plain.output.extend(f"o{place}" if name else "" for place, name in enumerate(node.output))
    content = plain.SerializeToString(deterministic=True)
    version = next(each.version for each in opsets if not each.domain or each.domain == "ai.onnx")

    def compute(values: Operands) -> Outputs:
        fed = {name: value for name, value in zip(plain.input, values, strict=True) if value is not None}
        small = sum(value.size for value in fed.values()) <= _SMALL
        session = _kernel(content, tuple(map(elem_type_of, fed.values())), version, threads=1 if small else 0)
        made = session.run(fed)
        return [made.get(name) for name in plain.output]

    return compute


@lru_cache(maxsize=1024)
def _kernel(content: bytes, kinds: Sequence[int], version: int, *, threads: int) -> Session:
    node = onnx.NodeProto.FromString(content)
    names = [name for name in node.input if name]
    given = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True)]
    graph = helper.make_graph([node], "node", given, [onnx.ValueInfoProto(name=name) for name in node.output if name])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)
    try:
        session = open_session(model, optimise=False, threads=threads)
    except ValidationError as error:
        raise _NoKernelError from error
    if session.defined:
        raise _NoKernelError
    return session


def _in_numpy(node: onnx.NodeProto, form: Operator, values: Operands) -> Outputs:
    made = form(attributes(node), *values)
    return made if isinstance(made, tuple) else (made,)


def _by_onnx(node: onnx.NodeProto, opsets: Sequence[onnx.OperatorSetIdProto], values: Operands) -> Outputs:
    feeds = {name: value for name, value in zip(node.input, values, strict=True) if value is not None}
    versions = {each.domain: each.version for each in opsets}
    found = iter(computed([node], feeds, [name for name in node.output if name], versions))
    return [next(found) if name else None for name in node.output]
