"""onnxruntime deletes products with float64 constants that are 1 as float32 (docs/decisions/0012)."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

from rewriter.ort.sessions import open_session

DELETED = (1.0 + 2.0**-24, 1.0 - 2.0**-25)
KEPT = (1.0 + 2.0**-23, 1.0 - 2.0**-24)


def runs_as(operator: str, constant: float, elem: str, *, optimise: bool = True) -> np.ndarray:
    """The operator between two others: onnxruntime deletes no node whose result the caller sees."""
    dtype = np.dtype({"double": np.float64, "float": np.float32}[elem])
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g ({elem}[n] x) => ({elem}[n] y)
        {{ w = Neg(x) v = {operator}(w, c) y = Neg(v) }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(constant, dtype), "c"))
    return open_session(model, optimise=optimise).run({"x": np.asarray([3.0, -7.0], dtype)})["y"]


def deletes(operator: str, constant: float, elem: str = "double") -> bool:
    same = np.array_equal(runs_as(operator, constant, elem), [3.0, -7.0])
    assert not np.array_equal(runs_as(operator, constant, elem, optimise=False), [3.0, -7.0])
    return same


@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_what_is_deleted(operator: str) -> None:
    if not deletes(operator, DELETED[0]):
        pytest.skip("this onnxruntime compares float64 constants as float64")
    assert [deletes(operator, each) for each in DELETED] == [True, True]
    assert [deletes(operator, each) for each in KEPT] == [False, False]


@pytest.mark.parametrize("operator", ["Mul", "Div"])
@pytest.mark.parametrize("constant", [1.0 + 2.0**-23, 1.0 - 2.0**-24])
def test_float32_is_compared_as_it_is(operator: str, constant: float) -> None:
    assert not deletes(operator, constant, "float")
