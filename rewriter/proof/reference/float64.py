"""The truth: a model evaluated in float64.

float16, bfloat16 and float32 become double everywhere: weights, constants, targets of Cast. Each operator is computed
by the first of these that can: onnxruntime's double kernel, a definition in numpy, onnx's reference evaluator. What
none of them knows (quantised and random operators, control flow) is refused with `NoReference`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rewriter.arrays import Array
from rewriter.errors import ModelError, RewriteError, ValidationError
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.files.walk import is_external, iter_tensors
from rewriter.graph.constants import computed, elem_type_of
from rewriter.graph.edit import inlined
from rewriter.graph.extract import bytes_of, reads
from rewriter.graph.view import attributes, key_of, label
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

Values = dict[str, Array]
Read = Callable[[TensorProto], Array]
"""The values of a tensor, widened. Raises NoReference."""


class NoReference(RewriteError):  # noqa: N818 - not an error: the proof does without
    """There is no float64 evaluation of the model; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Reference:
    """A model in float64: steps in order, each with the names that nothing behind it reads."""

    constants: Mapping[str, Array]
    steps: Sequence[tuple[Step, Sequence[str]]]
    outputs: Sequence[str]

    def run(self, feeds: Mapping[str, Array]) -> Values:
        """Run the model on the original's inputs, whose floats are widened.

        Returns:
            Maps an output to its array; float64 where the original gives floats.

        Raises:
            NoReference: an operator cannot be computed on these feeds.
        """
        # An input may override the initializer of its name.
        values: Values = {**self.constants, **{name: _widened(array) for name, array in feeds.items()}}
        for step, dead in self.steps:
            made = step.run(values)
            for name, value in made.items():
                # A kernel that silently computes in float32 would make the truth as inexact as the model.
                if is_float(value.dtype) and value.dtype != np.float64:
                    raise NoReference(f"the evaluator computes '{one_line(name, 80)}' in {value.dtype} only")
            values.update(made)
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
    if model.graph.sparse_initializer:
        raise NoReference("the model has sparse initializers")
    read = partial(_values, LoadedModel(model, None, base_dir, (), 0))
    constants = {tensor.name: read(tensor) for tensor in model.graph.initializer}
    outputs = [value.name for value in model.graph.output]
    nodes: list[onnx.NodeProto] = []
    # A dead operator without a float64 form does not matter.
    wanted, needed = set(outputs), list[onnx.NodeProto]()
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            needed.append(node)
            wanted.update(reads(node))
    for node in reversed(needed):
        if key_of(node) == ("", "Constant"):
            constants[node.output[0]] = _constant(node, read)
        else:
            nodes.append(_widened_node(node, read))
    steps = _steps(nodes, outputs, model.opset_import)
    last = {
        name: place for place, step in enumerate(steps) for node in step.nodes for name in (*reads(node), *node.output)
    }
    dead: list[list[str]] = [[] for _ in steps]
    for name, place in last.items():
        if name not in outputs:
            dead[place].append(name)
    return Reference(constants, list(zip(steps, dead, strict=True)), outputs)


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
    stated = attributes(node)
    value = next(iter(stated.values()), None)
    if isinstance(value, TensorProto):
        return read(value)
    if set(stated) <= {"value_float", "value_floats", "value_int", "value_ints"} and stated:
        return _widened(np.asarray(value, np.float32 if "float" in next(iter(stated)) else np.int64))
    raise NoReference(f"{one_line(label(node), 120)} holds no dense tensor of numbers")


def _widened_node(node: onnx.NodeProto, read: Read) -> onnx.NodeProto:
    """A copy of the node for float64 operands."""
    wide = onnx.NodeProto()
    wide.CopyFrom(node)
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


# -- steps -----------------------------------------------------------------------------------------------------------

_Opsets = Sequence[onnx.OperatorSetIdProto]


def _steps(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], opsets: _Opsets) -> list[Step]:
    """Consecutive operators with double kernels form one step, every other operator a step of its own."""
    last = {name: place for place, node in enumerate(nodes) for name in reads(node)}
    last |= dict.fromkeys(outputs, len(nodes))
    steps: list[Step] = []
    group: list[onnx.NodeProto] = []

    def close(end: int) -> None:
        if group:
            gives = [name for node in group for name in node.output if name and last.get(name, -1) >= end]
            steps.append(_Kernels(list(group), gives, opsets))
            group.clear()

    for place, node in enumerate(nodes):
        if _has_kernel(node):
            group.append(node)
        else:
            close(place)
            steps.append(_single(node, opsets))
    close(len(nodes))
    return steps


def _has_kernel(node: onnx.NodeProto) -> bool:
    if key_of(node)[0] or node.op_type not in KERNELS:
        return False
    # onnxruntime gives the mean and the deviation in float32.
    return node.op_type != "LayerNormalization" or len([each for each in node.output if each]) == 1


@dataclass(eq=False)
class _Kernels:
    """Operators that onnxruntime runs together, in a session per combination of the types that flow in.

    Whether a kernel exists depends on these types, so only the first run tells: if the operators do not load, each of
    them is tried alone, and computed in another way where that fails too.
    """

    nodes: Sequence[onnx.NodeProto]
    gives: Sequence[str]
    opsets: _Opsets
    _sessions: dict[tuple[tuple[str, int], ...], Session] = field(default_factory=dict)
    _alone: Sequence[Step] = ()

    def run(self, values: Values) -> Values:
        """Raises NoReference."""
        if not self._alone:
            made = {name for node in self.nodes for name in node.output}
            read = dict.fromkeys(name for node in self.nodes for name in reads(node) if name not in made)
            fed = {name: values[name] for name in read}
            kinds = tuple((name, elem_type_of(value)) for name, value in fed.items())
            try:
                if kinds not in self._sessions:
                    threads = 1 if sum(value.size for value in fed.values()) <= _SMALL else 0
                    self._sessions[kinds] = open_session(self._model(kinds), optimise=False, threads=threads)
            except ValidationError:
                several = len(self.nodes) > 1
                self._alone = [
                    _Kernels([node], [name for name in node.output if name], self.opsets)
                    if several
                    else _single(node, self.opsets)
                    for node in self.nodes
                ]
            else:
                try:
                    return self._sessions[kinds].run(fed)
                except ValidationError as error:
                    raise NoReference(f"onnxruntime cannot run it in float64: {one_line(error, 160)}") from error
        known = dict(values)
        for step in self._alone:
            known.update(step.run(known))
        return {name: known[name] for name in self.gives}

    def _model(self, kinds: Sequence[tuple[str, int]]) -> onnx.ModelProto:
        # Constants are fed too, so that steps share them.
        inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds]
        outputs = [onnx.ValueInfoProto(name=name) for name in self.gives]
        graph = helper.make_graph(self.nodes, "part", inputs, outputs)
        return helper.make_model(graph, opset_imports=self.opsets, ir_version=10)


@dataclass(frozen=True, eq=False)
class _Single:
    """An operator by itself."""

    nodes: Sequence[onnx.NodeProto]
    way: str
    compute: Callable[[Values], Sequence[Array | None]]

    def run(self, values: Values) -> Values:
        """Raises NoReference."""
        (node,) = self.nodes
        failed = f"{self.way} cannot run {one_line(label(node), 120)}"
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outputs = self.compute(values)
        except MemoryError:
            raise  # not the operator's fault: reporting that it has no float64 form would be wrong
        except Exception as error:
            raise NoReference(f"{failed}: {one_line(error, 160)}") from error
        made = zip(node.output, outputs, strict=False)
        found = {name: np.asarray(value) for name, value in made if name and value is not None}
        if not all(name in found for name in node.output if name):
            raise NoReference(f"{failed}: not all of its outputs")
        return found


Step = _Kernels | _Single


def _single(node: onnx.NodeProto, opsets: _Opsets) -> _Single:
    """An operator in numpy or by onnx's evaluator. Raises NoReference."""
    if (form := NUMPY_OPERATORS.get(key_of(node))) is not None:
        return _Single([node], "numpy", partial(_in_numpy, node, form))
    if key_of(node)[0] == "" and node.op_type in EVALUATED:
        return _Single([node], "onnx's reference evaluator", partial(_by_onnx, node, opsets))
    raise NoReference(f"{one_line(label(node), 120)} has no known float64 form")


def _in_numpy(node: onnx.NodeProto, form: Operator, values: Values) -> Sequence[Array | None]:
    made = form(attributes(node), *(values[name] if name else None for name in node.input))
    return made if isinstance(made, tuple) else (made,)


def _by_onnx(node: onnx.NodeProto, opsets: _Opsets, values: Values) -> Sequence[Array | None]:
    feeds = {name: values[name] for name in node.input if name}
    versions = {each.domain: each.version for each in opsets}
    found = iter(computed([node], feeds, [name for name in node.output if name], versions))
    return [next(found) if name else None for name in node.output]
