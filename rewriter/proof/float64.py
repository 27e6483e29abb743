"""The truth: a model evaluated in float64.

Comes in: a model. Goes out: `Reference`, which runs the same feeds in double precision, or `NoReference` with
the reason. Used by the validation, which asks of a rewritten model that it is as close to the truth as the
original is.

Where onnxruntime has a double kernel for every operator (`_DOUBLE_KERNELS`, each measured against numpy), it
runs the model, unoptimised, because fusions have float32 kernels. Otherwise onnx's reference evaluator does,
on numpy, with `NUMPY_OPERATORS` in place of operators that it lacks or computes in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import external_data_helper, helper

from rewriter.errors import ValidationError
from rewriter.proof.messages import one_line
from rewriter.proof.numpy_operators import NUMPY_OPERATORS, Operator
from rewriter.proof.roles import is_float
from rewriter.proof.sessions import open_session
from rewriter.proof.widen import NoReference, operators, to_double

__all__ = ["NoReference", "Reference", "open_reference", "to_double"]

ONNXRUNTIME = "onnxruntime double kernels"
EVALUATOR = "onnx reference evaluator"

_LARGEST = 2**31 - 2**24
"""Bytes that fit into one protobuf, with some left for the graph."""

_DOUBLE_KERNELS = frozenset(
    """
    Abs Add And ArgMax ArgMin BatchNormalization Cast CastLike Ceil Clip Concat Constant
    ConstantOfShape Cos CumSum DepthToSpace Div Dropout Einsum Equal Exp Expand Flatten Floor Gather
    GatherElements GatherND Gemm Greater GreaterOrEqual Identity If IsInf IsNaN LayerNormalization
    Less LessOrEqual Log LogSoftmax Loop MatMul Max MaxPool Min Mod Mul Neg NonZero Not Or Pad Pow
    RMSNormalization Range Reciprocal ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape
    Round ScatterElements ScatterND Shape Sigmoid Sign Sin Size Slice Softmax SpaceToDepth Split
    Sqrt Squeeze Sub Sum Tanh Tile Transpose Trilu Unsqueeze Where Xor
    """.split()  # noqa: SIM905 - a list of 80 names reads better so
)
"""Operators of ai.onnx that onnxruntime's CPU provider computes in double when given double."""


class _Engine(Protocol):
    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]: ...


@dataclass(frozen=True, eq=False)
class Reference:
    """A model in float64.

    Attributes:
        how: what computes it.
        _engine: the model, loaded.
    """

    how: str
    _engine: _Engine

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run the model on the feeds of the original; its floats are widened.

        Returns:
            Output name to array; float64 where the original gives floats.

        Raises:
            NoReference: the evaluator cannot run an operator on these feeds.
        """
        wide = {name: array.astype(np.float64) if is_float(array.dtype) else array for name, array in feeds.items()}
        return self._engine.run(wide)


def open_reference(model: onnx.ModelProto, base_dir: Path | None = None) -> Reference:
    """Load the float64 evaluation of `model`.

    Args:
        model: the model; external data may be loaded or not. It is not changed.
        base_dir: where its external data lies.

    Raises:
        NoReference: neither engine can, or the model is larger than 2 GB.
    """
    wide = to_double(_loaded(model, base_dir))
    local = {(function.domain, function.name) for function in wide.functions}
    used = operators(wide) - local
    if all(domain == "" and name in _DOUBLE_KERNELS for domain, name in used) and wide.ByteSize() < _LARGEST:
        try:
            return Reference(ONNXRUNTIME, open_session(wide, optimise=False))
        except ValidationError:
            pass  # a kernel is missing for these types after all: the evaluator remains
    return Reference(EVALUATOR, _Evaluator.of(wide))


def _loaded(model: onnx.ModelProto, base_dir: Path | None) -> onnx.ModelProto:
    tensors = list(_tensors(model))
    if sum(_size(tensor) for tensor in tensors) > _LARGEST:
        raise NoReference("larger than 2 GB")
    if not any(external_data_helper.uses_external_data(tensor) for tensor in tensors):
        return model
    if base_dir is None:
        raise NoReference("weights lie outside the model file and were not loaded")
    loaded = onnx.ModelProto()
    loaded.CopyFrom(model)
    try:
        external_data_helper.load_external_data_for_model(loaded, str(base_dir.resolve()))
    except Exception as error:
        raise NoReference(f"external data cannot be loaded: {one_line(error, 160)}") from error
    return loaded


def _tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    # The main graph holds the weights; subgraphs and functions share them or hold little.
    constants = [attribute.t for node in model.graph.node for attribute in node.attribute if attribute.HasField("t")]
    return [*model.graph.initializer, *constants]


def _size(tensor: onnx.TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    try:
        return count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        return count


@dataclass(frozen=True, eq=False)
class _Evaluator:
    """onnx's reference evaluator, with our operators."""

    evaluator: Any
    narrow: frozenset[str]

    @classmethod
    def of(cls, wide: onnx.ModelProto) -> _Evaluator:
        from onnx.reference import ReferenceEvaluator

        ours = [_operator_class(*key, form) for key, form in NUMPY_OPERATORS.items()]
        try:
            evaluator = ReferenceEvaluator(wide, new_ops=ours)
        except Exception as error:
            raise NoReference(f"onnx's reference evaluator cannot load it: {one_line(error, 160)}") from error
        narrow = {
            node.output[0]
            for node in wide.graph.node
            if node.op_type == "Cast" and any(item.i == onnx.TensorProto.FLOAT for item in node.attribute)
        }
        return cls(evaluator, frozenset(narrow))

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = self.evaluator.run(None, dict(feeds), intermediate=True)
        except Exception as error:
            raise NoReference(f"onnx's reference evaluator cannot run it: {one_line(error, 160)}") from error
        for name, value in results.items():
            if name not in self.narrow and _is_narrow(value):
                raise NoReference(f"the evaluator computes '{one_line(name, 80)}' in {value.dtype} only")
        return {name: np.asarray(results[name]) for name in self.evaluator.output_names}


def _is_narrow(value: object) -> bool:
    return isinstance(value, np.ndarray) and is_float(value.dtype) and value.dtype != np.float64


def _operator_class(domain: str, name: str, form: Operator) -> Any:
    """`form` as a class that the evaluator takes; it looks operators up by class name."""
    from onnx.reference.op_run import OpRun

    def run(self: Any, *operands: Any, **given: Any) -> tuple[Any, ...]:
        stated = {
            item.name: helper.get_attribute_value(item) for item in self.onnx_node.attribute if not item.ref_attr_name
        }
        linked = {item.name: given[item.name] for item in self.onnx_node.attribute if item.name in given}
        made = form({**linked, **stated}, *operands)
        outputs = made if isinstance(made, tuple) else (made,)
        wanted = outputs[: len(self.onnx_node.output)]
        if any(label and output is None for label, output in zip(self.onnx_node.output, wanted, strict=False)):
            raise NotImplementedError(f"{name} with all of its outputs")
        return tuple(np.zeros(0) if output is None else output for output in wanted)

    return type(name, (OpRun,), {"op_domain": domain, "_run": run, "__module__": __name__})
