"""The index of a graph: what the bodies of control flow read from around them."""

from __future__ import annotations

import onnx

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
