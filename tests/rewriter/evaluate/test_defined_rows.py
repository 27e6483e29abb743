"""The rows of all tables beside onnxruntime and onnx, in a field, and beside what defines them."""

from typing import Any

import numpy as np
import pytest
from onnx import inliner, shape_inference

from tests.rewriter.evaluate import test_attention_rows as attention
from tests.rewriter.evaluate import test_moves as moves
from tests.rewriter.evaluate import test_products as products
from tests.rewriter.evaluate import test_quantised_rows as quantised
from tests.rewriter.evaluate import test_reductions as reductions
from tests.rewriter.evaluate import test_scalar as arithmetic
from tests.rewriter.evaluate.judged import Case, assert_judged, assert_same_in_field, written
from tests.rewriter.evaluate.single import (
    assert_as_others,
    assert_equal_in_both,
    drawn,
    in_field,
    name_of,
    settings,
    single,
)

ROWS = [
    *(
        (name, [(2, 4)], {})
        for name in ("Gelu", "HardSwish", "Mish", "Softplus", "Softsign", "Relu", "Softmax", "LogSoftmax", "ReduceL1")
    ),
    *(
        (name, [(2, 3, 4), np.array([1])], {})
        for name in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare")
    ),
    ("ReduceLogSumExp", [(2, 4)], {"keepdims": 0}),
    ("Gelu", [(2, 4)], {"approximate": "tanh"}),
    ("Elu", [(2, 4)], {"alpha": 0.75}),
    ("Selu", [(2, 4)], {"alpha": 1.5, "gamma": 0.75}),
    ("LeakyRelu", [(2, 4)], {"alpha": 0.25}),
    ("ThresholdedRelu", [(2, 4)], {"alpha": 0.25}),
    ("Celu", [(2, 4)], {"alpha": 0.25}),
    ("Shrink", [(2, 4)], {"lambd": 1.5, "bias": 0.5}),
    ("Swish", [(2, 4)], {"alpha": 0.5}),
    ("SwiGLU", [(2, 4), (2, 4)], {"alpha": 0.5}),
    ("PRelu", [(2, 4), (4,)], {}),
    ("Clip", [(2, 4), (), ()], {}),
    ("LayerNormalization", [(2, 3, 4), (4,), (4,)], {}),
    ("LayerNormalization", [(2, 3, 4), (3, 4), (3, 4)], {"axis": 1, "epsilon": 0.5}),
    ("RMSNormalization", [(2, 3, 4), (3, 4)], {"axis": -2}),
    ("GroupNormalization", [(2, 4, 3), (4,), (4,)], {"num_groups": 2}),
]


@pytest.mark.parametrize(("operator", "shapes", "attributes"), ROWS, ids=name_of)
def test_rows_are_what_onnx_defines(operator: str, shapes: list[Any], attributes: dict[str, Any]) -> None:
    """In the field, with the definition inlined by onnx."""
    model, feeds = single(operator, drawn(shapes, 1), opset=28, attributes=attributes)
    typed = shape_inference.infer_shapes(model)
    defined = inliner.inline_selected_functions(typed, [("", operator)], inline_schema_functions=True)
    assert operator not in {node.op_type for node in defined.graph.node}
    left, right = (in_field(each, feeds, snaps=True)[0] for each in (model, defined))
    np.testing.assert_array_equal(left, right)


RATIONAL = [*arithmetic.RATIONAL, *moves.MOVES, *reductions.RATIONAL]


@pytest.mark.parametrize(
    ("operator", "shapes", "given"), [*RATIONAL, *arithmetic.FUNCTIONS, *reductions.OTHERS], ids=name_of
)
def test_rows_of_arithmetic_moves_and_reductions(operator: str, shapes: list[Any], given: dict[str, Any]) -> None:
    assert_as_others(operator, shapes, **settings(given))


@pytest.mark.parametrize(("operator", "shapes", "given"), RATIONAL, ids=name_of)
def test_rational_rows_in_the_field(operator: str, shapes: list[Any], given: dict[str, Any]) -> None:
    stated = settings(given)
    stated.pop("without", None)
    assert_equal_in_both(*single(operator, drawn(shapes, 4), **stated))


@pytest.mark.parametrize("case", [*attention.CASES, *products.CASES, *quantised.CASES], ids=str)
def test_rows_agree_with_their_judges(case: Case) -> None:
    assert_judged(case)


@pytest.mark.parametrize("case", [*products.RATIONAL, *quantised.RATIONAL], ids=str)
def test_rational_cases_in_the_field(case: Case) -> None:
    assert_equal_in_both(*case.made, case.quantised)


@pytest.mark.parametrize(("case", "text"), [*attention.PARTS, *products.PARTS, *quantised.PARTS], ids=str)
def test_a_fused_operator_is_its_parts(case: Case, text: str) -> None:
    assert_same_in_field(case, written(case, text, opset=23))
