"""Quantised numbers: x = (q - zero point) scale, and operators on them.

Rounding is an unknown function; a number that was dequantised with the same scale and zero point is not rounded again.
The grid of a Value records that: ("q", type) for quantised integers, and ("d", scale, lowest, highest) for the
dequantised numbers.
"""

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Unsupported, Value, is_float
from rewriter.evaluate.products import matmul
from rewriter.evaluate.scalar import add, mul
from rewriter.evaluate.table import Call, operator

_AXIS_ALONE = 13  # the first opset in which Softmax is over a single axis, not over all trailing ones


def _type(x: Any) -> np.dtype[Any] | None:
    """The type of quantised integers; None where it is not known."""
    if isinstance(x, Value):
        return np.dtype(x.grid[1]) if x.grid and x.grid[0] == "q" else None
    return None if x is None else np.asarray(x).dtype


def _range(call: Call, zero: Array, kind: np.dtype[Any]) -> list[Array]:
    """The lowest and the highest number of a type, less a zero point."""
    if "float" in kind.name:
        raise Unsupported(f"quantised to {kind.name}")
    limits = ml_dtypes.iinfo(kind)
    return [call.f.sub(call.entries(int(end)), zero) for end in (limits.min, limits.max)]


def _along(call: Call, x: Any, parameter: Any, axis: int, block: int = 0) -> Array:
    """Entries of a scale, or of a zero point, along an axis of x; a block of an axis shares one."""
    entries = call.lift(np.uint8(0) if parameter is None else parameter, scalar=False).entries
    if block and entries.ndim:
        return np.take(entries, np.arange(x.shape[axis]) // block, axis)
    if entries.ndim != 1 or x.ndim < 2:
        return entries
    shape = [1] * x.ndim
    shape[axis] = -1
    return entries.reshape(shape if entries.size > 1 else ())


def _grid(call: Call, scale: Array, zero: Array, kind: np.dtype[Any] | None) -> Any:
    """Scale and range of what quantised numbers are; None where these are not the same everywhere."""
    if scale.size != 1 or zero.size != 1 or kind is None:
        return None
    return ("d", scale.item(), *(end.item() for end in _range(call, zero, kind)))


def _saturated(call: Call, x: Array, zero: Array, kind: np.dtype[Any]) -> Value:
    """round(x) + zero, kept within a type: zero + clamp(round(x), lowest - zero, highest - zero)."""
    low, high = _range(call, zero, kind)
    rounded = call.f.function("clamp", *np.broadcast_arrays(x, low, high))
    return Value(call.f.add(rounded, zero), whole=True, grid=("q", kind.name))


def _acts_as_relu(call: Call, kind: np.dtype[Any], scale: Any, zero: Any) -> bool:
    """Whether the zero point is the lowest number, so that negative numbers are clipped to 0."""
    replaceable = not call.evaluator.program.overridable.isdisjoint(call.node.input)
    if replaceable or isinstance(scale, Value) or isinstance(zero, Value) or "float" in kind.name:
        return False
    lowest = ml_dtypes.iinfo(kind).min
    return bool((scale > 0).all() and (lowest == 0 if zero is None else (zero == lowest).all()))


# -- between integers and reals ----------------------------------------------------------------------------------------


@operator("QuantizeLinear")
def _quantize(call: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    stated = call.get("output_dtype") or TensorProto.UINT8
    kind = _type(zero) or np.dtype(helper.tensor_dtype_to_np_dtype(stated))
    x = call.lift(x)
    scales, zeros = (_along(call, x, each, axis, block) for each in (scale, zero))
    entries = call.f.positive(x.entries) if _acts_as_relu(call, kind, scale, zero) else x.entries
    numbers = call.f.mul(entries, call.f.inv(scales))
    if x.grid and x.grid == _grid(call, scales, zeros, kind):  # it was quantised so before
        return Value(call.f.add(numbers, zeros), whole=True, grid=("q", kind.name))
    return _saturated(call, numbers, zeros, kind)


@operator("DequantizeLinear")
def _dequantize(call: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    axis, block, kind = call.get("axis", 1), call.get("block_size", 0), _type(x)
    scales, zeros = (_along(call, x, each, axis, block) for each in (scale, zero))
    grid = _grid(call, scales, zeros, None if kind is None or is_float(np.zeros((), kind)) else kind)
    return Value(call.f.mul(call.f.sub(call.entries(x), zeros), scales), grid=grid)


@operator("DynamicQuantizeLinear")
def _dynamic(call: Call, x: Any) -> tuple[Value, Value, Value]:
    """The scale is (max(x, 0) - min(x, 0)) / 255, and the zero point saturate(round(-min / scale))."""
    f, x, nothing = call.f, call.lift(x), call.entries(0)
    low = f.minimum(call.apply("ReduceMin", x, keepdims=0).entries, nothing)
    high = f.maximum(call.apply("ReduceMax", x, keepdims=0).entries, nothing)
    scale = f.mul(f.sub(high, low), f.rational(Fraction(1, 255)))
    scale = np.where(low == high, call.entries(1), scale)
    inverse, kind = f.inv(scale), np.dtype(np.uint8)
    zero = _saturated(call, f.mul(f.neg(low), inverse), nothing, kind)
    return _saturated(call, f.mul(x.entries, inverse), zero.entries, kind), Value(scale), zero


# -- products ----------------------------------------------------------------------------------------------------------


_SCALED = {"MatMulInteger": (-2, -1), "QLinearMatMul": (-2, -1), "ConvInteger": (1, 0), "QLinearConv": (1, 0)}
"""Along which axes of their operands scales and zero points are, if not along axis 1."""


@operator("MatMulInteger", "ConvInteger")
def _integer_product(call: Call, x: Any, y: Any, x_zero: Any = None, y_zero: Any = None) -> Any:
    if call.get("channels_last"):
        raise Unsupported("channels_last")
    name, given = call.kind.removesuffix("Integer"), ((x, x_zero), (y, y_zero))
    axes = zip(given, _SCALED[call.kind], strict=True)
    sides = [call.apply("DequantizeLinear", each, np.float32(1), zero, axis=axis) for (each, zero), axis in axes]
    return Value(call.apply(name, *sides, **call.attributes).entries, whole=True)


@operator("MatMulIntegerToFloat")
def _matmul_to_float(
    call: Call, x: Any, y: Any, x_scale: Any, y_scale: Any, x_zero: Any = None, y_zero: Any = None, bias: Any = None
) -> Any:
    left = call.apply("DequantizeLinear", x, x_scale, x_zero, axis=-2)
    made = matmul(call, left, call.apply("DequantizeLinear", y, y_scale, y_zero, axis=-1))
    return made if bias is None else add(call, made, bias)


@operator("DynamicQuantizeMatMul")
def _dynamic_matmul(call: Call, x: Any, y: Any, y_scale: Any, *further: Any) -> Any:
    number, scale, zero = _dynamic(call, x)
    return _matmul_to_float(call, number, y, scale, y_scale, zero, *further)


@operator("QGemm")
def _qgemm(
    call: Call, x: Any, x_scale: Any, x_zero: Any, y: Any, y_scale: Any, y_zero: Any, bias: Any = None,
    scale: Any = None, zero: Any = None,
) -> Any:  # fmt: skip
    x, y = (call.move(t, np.transpose) if call.get(name) else t for t, name in ((x, "transA"), (y, "transB")))
    if bias is not None:
        scales = (call.lift(each, scalar=False) for each in (x_scale, y_scale))
        bias = call.apply("DequantizeLinear", bias, mul(call, *scales), axis=-1)
    made = _matmul_to_float(call, x, y, x_scale, y_scale, x_zero, y_zero, bias)
    result = mul(call, made, np.float32(call.get("alpha", 1.0)))
    return result if scale is None else call.apply("QuantizeLinear", result, scale, zero)


@operator(
    *("QLinearAdd", "QLinearMul", "QLinearWhere", "QLinearConcat", "QLinearSigmoid", "QLinearLeakyRelu"),
    *("QLinearSoftmax", "QLinearGlobalAveragePool", "QLinearMatMul", "QLinearConv"),
)
def _qlinear(call: Call, *operands: Any) -> Any:
    """An operator between DequantizeLinear and QuantizeLinear; each operand but a bias has a scale and a zero point."""
    name = call.kind.removeprefix("QLinear")
    condition = operands[:1] if name == "Where" else ()
    first = (*operands[2:], *operands[:2]) if name == "Concat" else operands[len(condition) :]
    *triples, (scale, *further) = [first[place : place + 3] for place in range(0, len(first), 3)]
    axes = _SCALED.get(call.kind, (1,) * len(triples))
    sides = [call.apply("DequantizeLinear", *each, axis=axis) for each, axis in zip(triples, axes, strict=True)]
    zero, bias = (*further, None, None)[:2]
    if bias is not None:
        scales = (call.lift(each[1], scalar=False) for each in triples)
        sides.append(call.apply("DequantizeLinear", bias, mul(call, *scales)))
    if call.get("channels_last") or (call.get("opset", _AXIS_ALONE) < _AXIS_ALONE and call.get("axis", -1) != -1):
        raise Unsupported("this layout")
    made = call.apply(name, *condition, *sides, **call.attributes)
    zero = np.zeros((), _type(triples[0][0]) or np.uint8) if zero is None else zero
    return call.apply("QuantizeLinear", made, scale, zero, axis=axes[0])


# -- weights in blocks -------------------------------------------------------------------------------------------------


def _unpacked(packed: Array, bits: int) -> Array:
    """Numbers that are packed into bytes along the last axis, the first one in the lowest bits."""
    if packed.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return packed.astype(np.int64)
    if bits not in (2, 4, 8) or packed.dtype.itemsize != 1:
        raise Unsupported(f"numbers of {bits} bits in {packed.dtype}")
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    made = packed if bits == 8 else np.stack(parts, -1).reshape(*packed.shape[:-1], -1)
    return made.astype(np.int64)


@operator("MatMulNBits")
def _matmul_of_bits(
    call: Call, x: Any, packed: Any, scales: Any, zeros: Any = None, group: Any = None, bias: Any = None
) -> Any:
    rows, columns, bits, block = (call.get(name, 4) for name in ("N", "K", "bits", "block_size"))
    if isinstance(packed, Value) or isinstance(group, Value):
        raise Unsupported("data decides a weight")
    if call.get("weight_prepacked", 0) > 0:
        raise Unsupported("a weight that is packed for one kernel")
    if group is not None and group.size and (bits == 2 or not (zeros is None or is_float(zeros))):
        raise Unsupported("blocks in another order, which the runtime reads otherwise than is specified")
    blocks = -(-columns // block)
    numbers = _unpacked(packed.reshape(rows, blocks, -1), bits).reshape(rows, -1)[:, :columns]
    if zeros is None:
        zeros = np.full((rows, blocks), 1 << (bits - 1))
    elif not is_float(zeros):
        zeros = _unpacked(zeros.reshape(rows, -1), bits)[:, :blocks]
    of_column = np.arange(columns) // block if group is None or not group.size else group[:columns]
    held = (call.lift(each, scalar=False) for each in (scales, zeros))
    given = (call.move(each, lambda t: t.reshape(rows, blocks)[:, of_column]) for each in held)
    weight = call.apply("DequantizeLinear", numbers, *given)
    made = matmul(call, x, call.move(weight, np.transpose))
    return made if bias is None else add(call, made, bias)


@operator("GatherBlockQuantized", table=True)
def _gather_of_bits(call: Call, packed: Any, index: Any, scales: Any, zeros: Any = None) -> Any:
    axis, block, bits = call.get("quantize_axis", 1), call.get("block_size", 128), call.get("bits", 4)
    whole = packed.dtype.name == "uint8"
    if isinstance(packed, Value) or (whole and axis % packed.ndim != packed.ndim - 1):
        raise Unsupported("a table that is packed along another axis")
    middle = np.full(scales.shape, 1 << (bits - 1) if whole else 0)
    zeros = middle if zeros is None else _unpacked(zeros, bits)[..., : scales.shape[-1]]
    table = call.apply("DequantizeLinear", _unpacked(packed, bits), scales, zeros, axis=axis, block_size=block)
    return call.apply("Gather", table, index, axis=call.get("gather_axis", 0))
