"""Quantised operators: rows that `test_defined_rows.py` evaluates, and what is quantised twice."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from rewriter.evaluate.arithmetic import Unsupported
from tests.rewriter.evaluate import single
from tests.rewriter.evaluate.judged import BOTH, MICROSOFT, Case, contrib, dyadic, normal, written

_RNG = np.random.default_rng(42)
_ORT, _ONNX = ("onnxruntime",), ("onnx",)
_INT4, _UINT4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)
_x = partial(dyadic, _RNG)


def _q(kind: Any, *shape: int) -> np.ndarray:
    limits = ml_dtypes.iinfo(kind)
    return np.asarray(_RNG.integers(limits.min, int(limits.max) + 1, shape)).astype(kind)


def _weight(kind: Any, *shape: int) -> np.ndarray:
    """Of 7 bits if signed: without VNNI, kernels saturate sums of two products of 8 bits at 16 bits."""
    return np.asarray(_q(kind, *shape) // (2 if kind is np.int8 else 1), kind)


def _scale(*shape: int) -> np.ndarray:
    """Powers of two: a quotient is not rounded, and a tie is one for every kernel."""
    return np.asarray(2.0 ** _RNG.integers(-6, -2, shape), np.float32)


def _linear() -> Iterator[Case]:
    for kind in (np.uint8, np.int8, np.uint16, np.int16, _UINT4, _INT4):
        for shape, axis, block in [
            ((), 1, 0), ((4,), None, 0), ((3,), 0, 0), ((2,), -1, 0), ((3, 2, 2), 1, 2), ((3, 4, 1), -1, 2),
            ((3, 4, 1), 2, 3),
        ]:  # fmt: skip
            attributes = ({} if axis is None else {"axis": axis}) | ({"block_size": block} if block else {})
            scale, zero = _scale(*shape), np.asarray(_q(kind, *shape).astype(np.int64) // 2).astype(kind)
            judges = _ONNX if kind in (_INT4, _UINT4) or block > 2 else BOTH
            yield Case("QuantizeLinear", [_x(3, 4, 2) * 4, scale, zero], attributes, judges=judges)
            judges = _ONNX if block > 2 else BOTH
            yield Case("DequantizeLinear", [_q(kind, 3, 4, 2), scale, zero], attributes, judges=judges, data=[0])
    for kind in (np.uint8, np.int8):
        yield Case("QuantizeLinear", [_x(3, 4) * 8, _scale(), _q(kind)], opset=10)
        operands = [_q(kind, 3, 4), _scale(), _q(kind)]
        yield Case("DequantizeLinear", operands, opset=10, judges=_ORT, data=[0])
    yield Case("QuantizeLinear", [_x(3, 4), _scale()], opset=13)
    yield Case("QuantizeLinear", [_x(3, 4), _scale()], {"output_dtype": onnx.TensorProto.INT8}, judges=_ONNX)
    yield contrib("QuantizeLinear", [_x(3, 4), _scale(4), _q(np.uint8, 4)], {"axis": 1})
    yield Case("DequantizeLinear", [_q(np.int32, 3, 4), _scale()], opset=13, judges=_ORT, data=[0])


def _dynamic() -> Iterator[Case]:
    for data in (_x(3, 4), np.abs(_x(3, 4)) + 1, -np.abs(_x(3, 4)) - 1, np.zeros((2, 2), np.float32)):
        yield Case("DynamicQuantizeLinear", [data], outputs=3, judges=BOTH if data.any() else _ORT)
    for bias in (None, _x(5)):
        operands = [normal(_RNG, 3, 4), _weight(np.int8, 4, 5), _scale(5), _q(np.int8, 5), bias]
        yield contrib("DynamicQuantizeMatMul", operands)


def _products() -> Iterator[Case]:
    for left, right in ((np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)):
        x, y = _q(left, 2, 3, 4), _weight(right, 4, 5)
        yield Case("MatMulInteger", [x, y], data=[0])
        yield Case("MatMulInteger", [x, y, _q(left), _q(right)], data=[0])
        yield Case("MatMulInteger", [x, y, _q(left), _q(right, 5)], data=[0], judges=_ORT)
        for columns in ((), (5,)):
            one, two = [_scale(), _q(left)], [_scale(*columns), _q(right, *columns)]
            yield contrib("MatMulIntegerToFloat", [x, y, one[0], two[0], one[1], two[1], _x(5)], data=[0])
            # A sum of 4 products of 8 bits, scaled so that it saturates at times.
            rounded = [16 * _scale(1), _q(left)]
            if (left, right) != (np.int8, np.uint8):
                judges = BOTH if not columns else _ORT
                yield Case("QLinearMatMul", [x, *one, y, *two, *rounded], data=[0], judges=judges)
            turned = [_q(left, 3, 4), *one, _weight(right, 5, 4), *two, _q(np.int32, 5) // 2**20]
            given = {"transB": 1, "alpha": 0.5}
            if left == np.uint8:
                yield contrib("QGemm", [*turned, *rounded], given, data=[0])
                yield contrib("QGemm", turned, given, data=[0])
    data, weight = _q(np.uint8, 1, 4, 5, 6), _weight(np.int8, 6, 2, 3, 2)
    attributes: dict[str, Any] = {"group": 2, "pads": [1, 0, 1, 1], "strides": [2, 1]}
    unsigned = _q(np.uint8, 6, 2, 3, 2)
    yield Case("ConvInteger", [data, unsigned, _q(np.uint8), _q(np.uint8)], attributes, data=[0], judges=_ORT)
    for channels in ((), (6,)):
        operands = [data, _scale(), _q(np.uint8), weight, _scale(*channels), np.zeros(channels, np.int8)]
        operands += [np.float32(16) * _scale(), _q(np.uint8), _q(np.int32, 6) // 2**20]
        yield Case("QLinearConv", operands, attributes, data=[0], judges=_ORT)


def _single() -> Iterator[Case]:
    x, y = _q(np.uint8, 2, 4, 6, 6), _q(np.uint8, 4, 6, 6)
    one, two, out = ([_scale(), _q(np.uint8)] for _ in range(3))
    for name in ("QLinearAdd", "QLinearMul"):
        yield contrib(name, [x, *one, y, *two, np.float32(2) * out[0], out[1]], data=[0, 3])
    singles: list[tuple[str, dict[str, Any]]] = [
        ("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.25}), ("QLinearGlobalAveragePool", {}),
        ("QLinearSoftmax", {"axis": -1, "opset": 13}),
    ]  # fmt: skip
    for name, attributes in singles:
        yield contrib(name, [x, *one, *out], attributes, data=[0])
    yield contrib("QLinearConcat", [*out, x, *one, x, *two], {"axis": 1}, data=[2, 5])
    condition = _RNG.random((2, 4, 6, 6)) < 0.5
    yield contrib("QLinearWhere", [condition, x, *one, x[::-1].copy(), *two, *out], data=[1, 4])


def _packed() -> Iterator[Case]:
    """Weights in blocks."""
    rows, columns, block = 5, 40, 16
    blocks = -(-columns // block)
    for bits in (2, 4, 8):
        packed = _q(np.uint8, rows, blocks, block * bits // 8)
        attributes = {"N": rows, "K": columns, "bits": bits, "block_size": block}
        zeros = _q(np.uint8, rows, -(-blocks * bits // 8))
        for zero, bias in ((None, None), (zeros, None), (None, _x(rows)), (zeros, _x(rows)), (_x(rows, blocks), None)):
            if zero is not None and zero.dtype == np.float32 and bits != 4:
                continue
            operands = [_x(2, 3, columns), packed, _scale(rows, blocks), zero, None, bias]
            yield contrib("MatMulNBits", operands, attributes)
    index = _RNG.integers(0, 6, (2, 3))
    for kind, width in ((_INT4, 32), (_UINT4, 32), (np.uint8, 16), (np.uint8, 32)):
        bits = 8 if (kind, width) == (np.uint8, 32) else 4
        for stated in (False, True):
            zero = _q(kind, 6, 1 if kind == np.uint8 and bits == 4 else 2) if stated else None
            attributes = {"bits": bits, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
            yield contrib("GatherBlockQuantized", [_q(kind, 6, width), index, _scale(6, 2), zero], attributes)


def _mixtures() -> Iterator[Case]:
    experts, tokens, width, inner = 4, 5, 32, 16
    activations: list[dict[str, Any]] = [
        {"activation_type": "relu"}, {"activation_type": "gelu"}, {"activation_type": "silu"},
        {
            "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.5, "activation_beta": 1.0,
            "swiglu_limit": 2.0,
        },
    ]  # fmt: skip
    for activation in activations:
        double = 2 if activation["activation_type"] == "swiglu" else 1
        attributes = {"k": 2, "normalize_routing_weights": 1, **activation}
        data, router = normal(_RNG, 1, tokens, width), normal(_RNG, tokens, experts)
        first, second = normal(_RNG, experts, double * inner, width) / 4, normal(_RNG, experts, width, inner) / 4
        biases = _x(experts, double * inner), _x(experts, width)
        operands: list[Any] = [data, router, first, biases[0], second, biases[1]]
        yield contrib("MoE", operands, attributes, constants=range(2, 6))
        one = {**attributes, "k": 1, "normalize_routing_weights": 0}
        yield contrib("MoE", operands, one, constants=range(2, 6))
        for bits, block in ((4, 0), (8, 0), (4, 16)):
            packed = [_q(np.uint8, *each.shape[:2], each.shape[2] * bits // 8) for each in (first, second)]
            blocks = [(each.shape[2] // block,) if block else () for each in (first, second)]
            scales = [_scale(*each.shape[:2], *more) / 4 for each, more in zip((first, second), blocks, strict=True)]
            operands = [data, router, packed[0], scales[0], biases[0], packed[1], scales[1], biases[1]]
            given = {**attributes, "expert_weight_bits": bits} | ({"block_size": block} if block else {})
            yield contrib("QMoE", operands, given, constants=range(2, 8))
            sizes = [(*each.shape[:2], *more) for each, more in zip((first, second), blocks, strict=True)]
            zeros = [_q(np.uint8, *size[:-1], -(-size[-1] * bits // 8)) for size in sizes]
            shares = np.abs(normal(_RNG, tokens, experts))
            stated = [*operands, None, None, None, *zeros, None, shares]
            given = {**given, "normalize_routing_weights": 0}
            weights = [place for place in range(2, 14) if stated[place] is not None]
            yield contrib("QMoE", stated, given, constants=weights)


CASES = [*_linear(), *_dynamic(), *_products(), *_single(), *_packed(), *_mixtures()]
_EXACT = (
    "DequantizeLinear",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "ConvInteger",
    "MatMulNBits",
    "GatherBlockQuantized",
)
RATIONAL = [case for case in CASES if case.operator in _EXACT]


_ONE = [_q(np.uint8, 3, 4), np.float32(0.25), np.uint8(7)]
_TWO = [_q(np.uint8, 3, 4), np.float32(0.5), np.uint8(3)]
_OUT = [np.float32(2), np.uint8(9)]
PARTS = [
    (
        Case("QLinearAdd", [*_ONE, *_TWO, *_OUT], domain=MICROSOFT, data=[0, 3]),
        """a = DequantizeLinear(x0, x1, x2) b = DequantizeLinear(x3, x4, x5) c = Add(a, b)
        y0 = QuantizeLinear(c, x6, x7)"""),
    (
        Case("QLinearMatMul", [*_ONE, _q(np.int8, 4, 5), np.float32(0.5), np.int8(3), *_OUT], data=[0]),
        """a = DequantizeLinear(x0, x1, x2) b = DequantizeLinear(x3, x4, x5) c = MatMul(a, b)
        y0 = QuantizeLinear(c, x6, x7)"""),
    (
        Case(
            "QGemm", [*_ONE, _q(np.int8, 5, 4), np.float32(0.5), np.int8(3)], {"transB": 1}, domain=MICROSOFT, data=[0]
        ),
        """a = DequantizeLinear(x0, x1, x2) b = DequantizeLinear(x3, x4, x5) t = Transpose <perm=[1, 0]> (b)
        y0 = MatMul(a, t)"""),
    (
        Case("DynamicQuantizeMatMul", [_x(3, 4), _q(np.int8, 4, 5), np.float32(0.25), np.int8(3)], domain=MICROSOFT),
        """q, s, z = DynamicQuantizeLinear(x0) i = MatMulInteger(q, x1, z, x3) c = Cast <to=1> (i) f = Mul(s, x2)
        y0 = Mul(c, f)"""),
]  # fmt: skip


@pytest.mark.parametrize(("scale", "same"), [("x1", True), ("x3", False)])
def test_what_was_quantised_is_not_rounded_again_with_the_same_scale(scale: str, same: bool) -> None:
    case = Case("QuantizeLinear", [normal(_RNG, 3, 4), np.float32(0.25), np.uint8(128), np.float32(0.5)])
    once = written(case, "q = QuantizeLinear(x0, x1, x2) y0 = Transpose <perm=[1, 0]> (q)")
    twice = written(
        case,
        f"""q = QuantizeLinear(x0, x1, x2) d = DequantizeLinear(q, x1, x2) t = Transpose <perm=[1, 0]> (d)
        y0 = QuantizeLinear(t, {scale}, x2)""",
    )
    _, feeds = case.made
    one, two = (single.in_field(each, feeds)[0] for each in (once, twice))
    assert np.array_equal(one, two) == same
    twice.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    np.testing.assert_array_equal(single.in_floats(twice, feeds)[0], single.by_onnxruntime(twice, feeds)[0])


def test_weights_that_are_packed_for_one_kernel_are_not_read() -> None:
    attributes = {"N": 5, "K": 16, "bits": 4, "block_size": 16, "weight_prepacked": 1}
    model, feeds = contrib("MatMulNBits", [_x(3, 16), _q(np.uint8, 5, 1, 8), _scale(5, 1)], attributes).made
    with pytest.raises(Unsupported, match="packed for one kernel"):
        single.in_field(model, feeds)
