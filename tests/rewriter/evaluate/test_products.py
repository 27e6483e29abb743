"""Products and convolutions: rows that `test_defined_rows.py` evaluates, masks, layouts, and products with weights."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.evaluate.arithmetic import Field, Modulus, Value, multiply
from rewriter.files.load import load_model
from rewriter.ort import write_optimised
from tests.rewriter.evaluate import single
from tests.rewriter.evaluate.judged import MICROSOFT, Case, any_of, contrib, dyadic, written

_RNG = np.random.default_rng(42)
_ORT, _ONNX = ("onnxruntime",), ("onnx",)
_x = partial(dyadic, _RNG)
_any = partial(any_of, _RNG)


def _matrices() -> list[Case]:
    shapes = [
        ((3, 4), (4, 5)),
        ((4,), (4, 5)),
        ((2, 3, 4), (4,)),
        ((4,), (4,)),
        ((4,), (2, 4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
    ]
    cases = [Case("MatMul", [_x(*one), _x(*two)]) for one, two in shapes]
    for one, two, bias in [(0, 0, None), (1, 0, (5,)), (0, 1, (3, 1)), (1, 1, ()), (0, 0, (3, 5)), (1, 0, (1, 5))]:
        operands = [_x(4, 3) if one else _x(3, 4), _x(5, 4) if two else _x(4, 5), None if bias is None else _x(*bias)]
        attributes = {"transA": one, "transB": two, "alpha": 0.75, "beta": _any(0.5, 1.0)}
        cases.append(Case("Gemm", operands if bias is not None else operands[:2], attributes))
    return cases


def _fused() -> Iterator[Case]:
    for one, two in itertools.product((0, 1), (0, 1)):
        attributes = {"transA": one, "transB": two, "alpha": 0.75}
        operands = [_x(2, 4, 3) if one else _x(2, 3, 4), _x(2, 5, 4) if two else _x(2, 4, 5)]
        yield contrib("FusedMatMul", operands, attributes)
        # [rows, batch, more, columns] and [rows, batch, columns] with transBatch
        operands = [_x(4, 2, 3) if one else _x(3, 2, 4), _x(5, 2, 4) if two else _x(4, 2, 5)]
        attributes = attributes | {"transBatchA": 1, "transBatchB": 1}
        yield contrib("FusedMatMul", operands, attributes)
        operands = [_x(2, 6, 4, 3) if one else _x(2, 6, 3, 4), _x(2, 6, 5, 4) if two else _x(2, 6, 4, 5)]
        operands = [np.ascontiguousarray(np.moveaxis(each, -2, 0)) for each in operands]
        yield contrib("FusedMatMul", operands, attributes)
    yield contrib("TransposeMatMul", [_x(4, 3), _x(4, 5)], {"transA": 1, "alpha": 0.5})
    for name, given in [("Relu", {}), ("LeakyRelu", {"activation_alpha": 0.25})]:
        attributes = dict[str, Any](given, transA=1, activation=name)
        yield contrib("FusedGemm", [_x(4, 3), _x(4, 5), _x(5)], attributes)


def _einsums() -> list[Case]:
    table = [
        ("ij,jk->ik", (3, 4), (4, 5)), ("ij,jk", (3, 4), (4, 5)), ("bhid,bhjd->bhij", (2, 3, 4, 5), (2, 3, 6, 5)),
        ("bij,bjk->kbi", (2, 3, 4), (2, 4, 5)), ("i,j->ij", (3,), (4,)), ("ij->ji", (3, 4)), ("ij->i", (3, 4)),
        ("ij->", (3, 4)), ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)), ("...ij,jk->...ik", (2, 6, 3, 4), (4, 5)),
        ("...i,...i", (2, 3, 4), (2, 3, 4)), ("b...,b->...b", (2, 3, 4), (2,)),
        ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
        ("ij,ij,ij->ij", (2, 3), (2, 3), (2, 3)), ("ijk,k->ij", (2, 3, 4), (4,)), ("tk,ktd->td", (5, 2), (2, 5, 3)),
        ("bik,lk,bl->bil", (2, 3, 4), (5, 4), (2, 5)), ("zba,a", (2, 3, 4), (4,)), ("ii->i", (3, 3)),
        ("bii,i->b", (2, 3, 3), (3,)), ("...d,de,be->b...", (2, 70), (70, 80), (3, 80)),
    ]  # fmt: skip
    cases = [Case("Einsum", [_x(*each) for each in shapes], {"equation": equation}) for equation, *shapes in table]
    equation = {"equation": "...ij,...jk->...ik"}
    return [*cases, Case("Einsum", [_x(3, 4), _x(2, 4, 5)], equation, judges=_ONNX)]


def _convolutions() -> Iterator[Case]:
    for rank in (1, 1, 2, 2, 2, 2, 2, 3):
        groups, sizes = _any(1, 2, 3), _RNG.integers(6, 9, rank).tolist()
        kernel = _RNG.integers(1, 4, rank).tolist()
        attributes: dict[str, Any] = {
            "group": groups, "strides": _RNG.integers(1, 3, rank).tolist(),
            "dilations": _RNG.integers(1, 3, rank).tolist(),
        }  # fmt: skip
        pads = _RNG.integers(0, 3, 2 * rank).tolist()
        data = _x(2, groups * 2, *sizes)
        yield Case("Conv", [data, _x(groups * 3, 2, *kernel), _x(groups * 3)], attributes | {"pads": pads}, judges=_ORT)
        yield Case("Conv", [data, _x(groups * 3, 2, *kernel)], {"group": groups, "pads": pads})
    for mode in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        data, weight = _x(1, 2, 7, 8), _x(3, 2, 2, 3)
        yield Case("Conv", [data, weight], {"auto_pad": mode, "strides": [2, 1]}, judges=_ORT)
    operands = [_x(1, 2, 5, 5), _x(3, 2, 2, 2), _x(3), _x(1, 3, 4, 4)]
    yield contrib("FusedConv", operands, {"activation": "Relu"})
    for name, parameters in (("Clip", [-1.0, 1.0]), ("HardSigmoid", [0.5, 0.25])):
        yield contrib("FusedConv", operands[:3], {"activation": name, "activation_params": parameters})
    yield contrib("FusedConv", operands[:3])


CASES = [*_matrices(), *_fused(), *_einsums(), *_convolutions()]
RATIONAL = [case for case in CASES if "activation" not in case.attributes]
PARTS = [
    (
        Case("FusedMatMul", [_x(2, 4, 3), _x(2, 5, 4)], {"transA": 1, "transB": 1, "alpha": 0.3}, domain=MICROSOFT),
        """a = Transpose <perm=[0, 2, 1]> (x0) b = Transpose <perm=[0, 2, 1]> (x1) c = MatMul(a, b)
        f = Constant <value_float=0.3> () y0 = Mul(c, f)""",
    ),
    (
        Case("Gemm", [_x(4, 3), _x(4, 5), _x(5)], {"transA": 1, "alpha": 0.3, "beta": 0.7}),
        """a = Transpose <perm=[1, 0]> (x0) b = MatMul(a, x1) f = Constant <value_float=0.3> () c = Mul(b, f)
        g = Constant <value_float=0.7> () d = Mul(x2, g) y0 = Add(c, d)""",
    ),
]  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_pass_through_a_product_that_data_does_not_change(side: str) -> None:
    mask = np.array([[True, False, True, False], [False, True, True, True], [True, True, True, True]])
    factors = np.array([[1, 0, -1], [0, 2, 1], [3, 0, 0], [-1, -1, 0]])
    turn = "" if side == "left" else "<perm=[1, 0]>"
    masked = "low = Constant <value_float=-10000.0> () s = Where(x1, x0, low) u = Where(x3, x2, low)"
    product = f"t = Transpose {turn} (s) y0 = MatMul(u, t)" if turn else "y0 = MatMul(s, u)"
    wanted = ~mask @ factors
    some = factors + np.array([[0], [0.37], [0], [0]])  # data multiplies a column: no mask
    for other, counts in (
        (factors.astype(np.float32), wanted),
        (_x(4, 3), None),
        (some.astype(np.float32), ~mask[:, [0, 2, 3]] @ factors[[0, 2, 3]]),
        (np.where(factors == 3, 4, factors).astype(np.float32), ~mask[:, [0, 1, 3]] @ factors[[0, 1, 3]]),
    ):
        given = other.T.copy() if turn else other
        case = Case("Where", [_x(3, 4), mask, given, given != 4])  # a mask on either side
        found = single.values(written(case, f"{masked} {product}"), case.made[1], single.field(False))[0].masks
        assert (found is None) == (counts is None)  # data decides how much of a mask is in it
        if counts is not None:
            np.testing.assert_array_equal(found, counts.T if turn else counts)


def test_layout_in_blocks_of_channels(tmp_path: Path) -> None:
    """What onnxruntime makes of convolutions on a CPU."""
    data = [_x(1, 3, 8, 8), _x(32, 3, 3, 3), _x(32), _x(32, 1, 3, 3), _x(24, 32, 3, 2)]
    case = Case("Conv", data)
    model = written(
        case,
        """a = Conv <pads=[1, 1, 1, 1]> (x0, x1, x2) b = Relu(a) c = Conv <group=32> (b, x3)
        y0 = Conv(c, x4)""",
    )
    feeds = {"x0": data[0]}
    for place, weight in list(enumerate(data))[1:]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"x{place}"))
    del model.graph.input[1:]
    blocks = onnx.load(write_optimised(load_model(model), "all", tmp_path))
    assert "com.microsoft.nchwc" in {node.domain for node in blocks.graph.node}
    np.testing.assert_array_equal(single.in_field(blocks, feeds)[0], single.in_field(model, feeds)[0])


_WEIGHTS = [
    *((kind, (64, 65), []) for kind in (np.float32, np.float16, np.float64)), (np.float32, (9000, 2), [-1e30]),
    *((np.float32, (64, 65), each) for each in ([1e30, 1e-12, 1e-40], 10.0 ** -np.arange(40), [-np.inf, 1.0])),
    *((np.float64, (64, 65), each) for each in ([-(2.0**60)], [0.3] * 9, [1e300, 0.1])), (np.float64, (1, 1), [1e-300]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape", "unusual"), _WEIGHTS)
def test_products_with_weights_are_exact(kind: Any, shape: tuple[int, int], unusual: list[float]) -> None:
    """Of two fields at once, beside Python's integers; the second weight has other signs."""
    weight = _x(*shape).astype(kind)
    weight.flat[: 3 * len(unusual) : 3] = unusual
    fields = [Field(Modulus(), each) for each in (b"a", b"b")]
    entries = [_RNG.integers(field.p - 9, field.p, (2 + n, shape[0])) for n, field in enumerate(fields)]
    operands = [*zip(fields, entries, (weight, -weight), strict=True)]
    multiply([(field, Value(x), each) for field, x, each in operands])
    for field, x, weight in operands:
        residues = field.lift(weight, scalar=False).entries.astype(object)
        np.testing.assert_array_equal(field.modulus.weighted(field, x, weight), x.astype(object) @ residues % field.p)
