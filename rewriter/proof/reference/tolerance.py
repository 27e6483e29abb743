"""Bound how far rounding alone can move an operator's result from its float64 evaluation on the same operands.

With eps the machine epsilon of the operator's element type, f the operator in float64, and x its operands:

- An operator that moves, selects or compares values is exact.
- A sum of n products differs by at most n eps f(|x|), whatever the order of summation (Higham, Accuracy and Stability
  of Numerical Algorithms, section 3.1).
- Softmax differs by a few eps sqrt(n) of each result, times the logarithm of the result, which is how far its operand
  lies below the largest.
- Arithmetic on two numbers rounds once.
- Any other elementwise operator differs by a few eps |f(x)|, by a few eps of what it scales (x in Gelu, 1 in Tanh), and
  by what a few eps in its operands change.
- Any other operator (normalisations, Attention, recurrent ones) differs by eps sqrt(n) of its largest result, with n
  the largest dimension, and by a few times what one eps in its operands changes in the kernel itself, which reveals a
  kernel that is unstable on these operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from rewriter.arrays import Array
from rewriter.proof.distance import largest, magnitude
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.reference.scope import Node
from rewriter.proof.reference.widen import widened

Operands = Mapping[str, Any]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EXACT = _names("""
    Abs And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil CenterCropPad Clip Compress Concat
    ConcatFromSequence ConstantOfShape DepthToSpace Dropout Equal Expand EyeLike Flatten Floor Gather GatherElements
    GatherND GlobalMaxPool Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Max MaxPool MaxUnpool Min Mod
    Neg NonMaxSuppression NonZero Not OneHot Or Pad ReduceMax ReduceMin Relu Reshape ReverseSequence Round Scatter
    SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Sign Size Slice
    SpaceToDepth Split SplitToSequence Squeeze TensorScatter Tile TopK Transpose Trilu Unique Unsqueeze Where Xor
""")
_SUMS = _names("""
    Col2Im Conv ConvTranspose CumSum Einsum FusedMatMul Gemm MatMul ReduceL1 ReduceSum ReduceSumSquare ScatterElements
    ScatterND Sum
""")
_MEANS = _names("AveragePool BatchNormalization GlobalAveragePool Mean ReduceMean")
_ARITHMETIC = _names("Add Cast CastLike Div LeakyRelu Mul PRelu Reciprocal Shrink Sqrt Sub ThresholdedRelu")
_ELEMENTWISE = _names("""
    Acos Acosh Asin Asinh Atan Atanh BiasGelu Celu Cos Cosh Elu Erf Exp FastGelu Gelu HardSigmoid HardSwish Log Mish Pow
    QuickGelu Selu Sigmoid Sin Sinh Softplus Softsign Swish Tan Tanh
""")
_OF_ONE = _names("Acos Asin Atan Celu Cos Elu Erf HardSigmoid Selu Sigmoid Sin Softplus Softsign Tanh")
"""Elementwise operators whose approximations have an absolute error of eps, also for results near 0."""

_OF_OPERANDS = _names("BiasGelu Celu Elu FastGelu Gelu HardSwish Mish QuickGelu Selu Softplus Swish")
"""Elementwise operators that are their operand times such an approximation."""

_SOFTMAX: Mapping[str, Callable[[Array], Array]] = {
    "Softmax": lambda r: r * (1 - np.log(np.maximum(r, np.finfo(np.float64).tiny))),
    "LogSoftmax": lambda r: 1 + np.abs(r),
}
"""The size of the numbers from which a result r is computed."""

_MASKED = 1e8
"""Entries of at least this magnitude are masks. They are not perturbed, since that could unmask what they hide."""

_SUBTRACTED, _KEPT = {"BatchNormalization": 3}, {"BatchNormalization": 4}
"""Operands of sums that are subtracted (the mean), and operands that are not summands (the variance)."""

_SIZES = {"Resize": 1, "Upsample": 1}
"""Operators to their number of data operands; the remaining ones are sizes and scales, which must stay as they are."""

# In eps: for a single rounding, which is at most half an eps; and for functions, whose kernels are less accurate.
_ONCE = 2.0
_FEW = 8.0
_DRAWS = 2


@dataclass(frozen=True, eq=False)
class Trial:
    """An operator on the operands that it had in a run of the model.

    Attributes:
        node: the operator in float64.
        operands: the operands by name, in the model's precision.
        truths: the operator's outputs in float64.
        exact: computes an operator in float64.
        kernel: computes this operator as the model does.
    """

    node: Node
    operands: Operands
    truths: Sequence[Array]
    exact: Callable[[Node, Operands], Sequence[Array]]
    kernel: Callable[[Operands], Sequence[Array]]


def allowances(trial: Trial, eps: float) -> list[Array]:
    """A bound on the rounding of each output, by entry or for all entries together."""
    kind = trial.node.proto.op_type
    if kind in _EXACT:
        return [np.zeros(()) for _ in trial.truths]
    if kind in _ARITHMETIC:
        return [_ONCE * eps * np.abs(truth) for truth in trial.truths]
    if kind in _SOFTMAX:
        return [eps * (_FEW + _root(trial)) * _SOFTMAX[kind](truth) for truth in trial.truths]
    of_kind = _of_sum if kind in _SUMS | _MEANS else _of_elementwise if kind in _ELEMENTWISE else _of_any
    return list(of_kind(trial, eps))


def _changed(operands: Operands, change: Callable[[str, Array], Array]) -> dict[str, Any]:
    """The operands, with every float array changed."""
    return {
        name: change(name, value) if isinstance(value, np.ndarray) and is_float(value.dtype) else value
        for name, value in operands.items()
    }


def _of_sum(trial: Trial, eps: float) -> Iterator[Array]:
    kind, names = trial.node.proto.op_type, trial.node.proto.input
    # f(|x|) comes from the operator itself, on the magnitudes of all operands and factors, and n from the operator on
    # ones: no operator's shapes, strides or subscripts have to be understood here.
    subtracted, kept = (names[table[kind]] if kind in table else None for table in (_SUBTRACTED, _KEPT))

    def size(name: str, value: Array) -> Array:
        wide = np.asarray(value, np.float64)
        return wide if name == kept else -np.abs(wide) if name == subtracted else np.abs(wide)

    sizes = trial.exact(_with_factors(trial.node, abs), _changed(trial.operands, size))
    if kind in _MEANS:
        counts: Sequence[Any] = [_averaged(trial, truth) for truth in trial.truths]
    else:
        ones = _changed(trial.operands, lambda _, value: np.ones(value.shape))
        counts = trial.exact(_with_factors(trial.node, lambda _: 1.0), ones)
    # Kernels sum products of half-precision numbers in float32 and round once at the end.
    inner = min(eps, 2.0**-23)
    for truth, each, count in zip(trial.truths, sizes, counts, strict=True):
        yield (count + _FEW) * inner * np.abs(each) + eps * np.abs(truth)


def _with_factors(node: Node, change: Callable[[float], float]) -> Node:
    """The node with changed float attributes: the factors of a sum (alpha, beta), but not an epsilon."""
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    for attribute in proto.attribute:
        if attribute.type == onnx.AttributeProto.FLOAT and attribute.name != "epsilon":
            attribute.f = change(attribute.f)
    return node if proto == node.proto else replace(node, proto=proto)


def _averaged(trial: Trial, truth: Array) -> float:
    """How many entries each mean is taken over, at most."""
    stated = {item.name: helper.get_attribute_value(item) for item in trial.node.proto.attribute}
    whole = sum(value.size for value in trial.operands.values() if isinstance(value, np.ndarray))
    return float(max(np.prod(stated.get("kernel_shape", 1)), whole / max(truth.size, 1)))


def _of_elementwise(trial: Trial, eps: float) -> Iterator[Array]:
    kind, wide = trial.node.proto.op_type, _changed(trial.operands, lambda _, value: widened(value))
    floats = {name: value for name, value in wide.items() if isinstance(value, np.ndarray) and is_float(value.dtype)}
    (truth,) = trial.truths
    scale = np.abs(truth) + (1.0 if kind in _OF_ONE else 0.0)
    if kind in _OF_OPERANDS:
        scale = scale + sum(np.abs(value) for value in floats.values())
    rounded = _FEW * eps * scale
    for name, value in floats.items():
        # Kernels round within the formula, which acts like a change of the operand: x in exp(x), for example.
        for factor in (1 + _FEW * eps, 1 - _FEW * eps):
            (moved,) = trial.exact(trial.node, {**wide, name: np.asarray(value * factor)})
            change = np.abs(moved - truth)
            rounded = rounded + np.where(np.isnan(change), 0, change)
    yield rounded


def _of_any(trial: Trial, eps: float) -> Iterator[Array]:
    generator, kind = np.random.default_rng(0), trial.node.proto.op_type
    data = trial.node.proto.input[: _SIZES.get(kind)]
    here = trial.kernel(trial.operands)
    spread = [0.0] * len(here)
    for _ in range(_DRAWS):
        moved = _changed(
            trial.operands, lambda name, value: _one_eps_off(value, eps, generator) if name in data else value
        )
        gaps = [_finite_gap(*pair) for pair in zip(trial.kernel(moved), here, strict=True)]
        spread = [max(pair) for pair in zip(spread, gaps, strict=True)]
    for truth, noise in zip(trial.truths, spread, strict=True):
        yield np.asarray(eps * (_FEW + _root(trial)) * magnitude(truth) + _FEW * noise)


def _root(trial: Trial) -> float:
    """The square root of the largest dimension."""
    shapes = [value.shape for value in trial.operands.values() if isinstance(value, np.ndarray)]
    return float(np.sqrt(max((max(shape, default=1) for shape in shapes), default=1)))


def _one_eps_off(value: Array, eps: float, generator: np.random.Generator) -> Array:
    moved = np.asarray(value * (1 + eps * generator.choice([-1.0, 1.0], value.shape)), value.dtype)
    return np.where(np.abs(value) < _MASKED, moved, value)


def _finite_gap(moved: Array, here: Array) -> float:
    gap = np.abs(moved.astype(np.float64) - here.astype(np.float64))
    return largest(gap[np.isfinite(gap)])
