"""The index of a graph: what the bodies of control flow read from around them."""

from __future__ import annotations

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.extract import cut
from rewriter.graph.view import captured_names, view_model

LOOP = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n] x, float[n] scale) => (float[n] out) {
  trips = Constant<value = int64 {3}>()
  always = Constant<value = bool {1}>()
  out = Loop(trips, always, x) <body = step (int64 i, bool going, float[n] state) => (bool on, float[n] next) {
    on = Identity(going)
    inner = Mul(state, scale)
    next = Add(inner, x)
  }>
}
"""


def test_a_body_captures_what_is_made_around_it_and_nothing_else() -> None:
    model = onnx.parser.parse_model(LOOP)
    assert captured_names(model.graph.node[2]) == {"scale", "x"}


def test_a_part_with_a_loop_has_no_inputs_from_inside_the_body() -> None:
    model = onnx.parser.parse_model(LOOP)
    assert cut(view_model(model), ["x"], ["out"]).inputs == ("x", "scale")


def test_a_name_that_one_branch_defines_is_captured_by_the_other() -> None:
    """An initializer of a body may have the name of an outer tensor; the other body still reads that tensor."""
    shape = "float[4]"
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g ({shape} x, bool c) => ({shape} y) {{ t = Neg(x) '
        f"y = If (c) <then_branch = a () => ({shape} p) <{shape} t = {{1, 2, 3, 4}}> {{ p = Abs(t) }}, "
        f"else_branch = b () => ({shape} q) {{ q = Abs(t) }}> }}"
    )
    assert captured_names(model.graph.node[1]) == {"t"}


def test_integers_are_folded_exactly() -> None:
    """The largest int64 is not a float64."""
    large = 2**63 - 1
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[1] x) => (float[1] y) '
        f"{{ c = Constant<value_int = {large}>() i = Identity(c) n = Neg(c) y = Identity(x) }}"
    )
    constants = Constants(view_model(model))
    assert [int(value) for name in ("i", "n") if (value := constants.value(name)) is not None] == [large, -large]
