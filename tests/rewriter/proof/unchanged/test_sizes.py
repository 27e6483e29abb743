"""Numbers that are computed from shapes, as opposed to shapes that say how numbers are laid out."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from rewriter import rewrite, validate
from rewriter.proof.unchanged.sizes import depends_on_size
from tests.committed import FOLDER

SIZE = "s = Shape(x) one = Constant<value = int64 {1}>() n = Gather(s, one) "
CHOSEN = "k = Constant<value = int64 {41}>() at = Equal(n, k) "


def dependent(body: str, functions: str = "") -> bool:
    versions = '<ir_version: 9, opset_import: ["": 17, "local": 1]>'
    model = parser.parse_model(f"{versions} g (float[b, n] x) => (float[b, n] y) {{ {body} }} {functions}")
    known = {(each.domain, each.name, each.overload): each for each in model.functions}
    return depends_on_size(model.graph.node, "y", known)


@pytest.mark.parametrize(
    "body",
    [
        "y = Exp(x)",
        "s = Shape(x) flat = Constant<value = int64[1] {-1}>() f = Reshape(x, flat) e = Exp(f) y = Reshape(e, s)",
        f"{SIZE} z = Constant<value = int64[1] {{0}}>() u = Unsqueeze(n, z) p = Slice(x, z, u) y = Exp(p)",
        f"{SIZE} c = Constant<value = bool {{1}}>() y = Loop(n, c, x) <body = r (int64 i, bool g, float[b, n] a) => "
        "(bool h, float[b, n] m) { h = Identity(g) m = Exp(a) }>",
        "s = Shape(x) z = ConstantOfShape(s) y = Add(z, x)",
    ],
)
def test_shapes_that_lay_out(body: str) -> None:
    assert not dependent(body)


@pytest.mark.parametrize(
    "body",
    [
        f"{SIZE} f = Cast<to = 1>(n) y = Mul(x, f)",
        f"{SIZE} {CHOSEN} off = Not(at) f = Cast<to = 1>(off) y = Mul(x, f)",
        f"{SIZE} {CHOSEN} e = Neg(x) y = Where(at, e, x)",
        f"{SIZE} {CHOSEN} y = If(at) <then_branch = t () => (float[b, n] p) {{ p = Neg(x) }}, "
        "else_branch = e () => (float[b, n] q) { q = Identity(x) }>",
        f"{SIZE} c = Constant<value = bool {{1}}>() y = Loop(n, c, x) <body = r (int64 i, bool g, float[b, n] a) => "
        "(bool h, float[b, n] m) { h = Identity(g) f = Cast<to = 1>(i) m = Mul(a, f) }>",
        f"{SIZE} c = Constant<value = bool {{1}}>() y = If(c) <then_branch = t () => (float[b, n] p) "
        "{ f = Cast<to = 1>(n) p = Mul(x, f) }, else_branch = e () => (float[b, n] q) { q = Identity(x) }>",
        "n = Size(x) f = Cast<to = 1>(n) y = Mul(x, f)",
    ],
)
def test_numbers_from_shapes(body: str) -> None:
    assert dependent(body)


def test_functions_are_followed() -> None:
    head = '<domain: "local", opset_import: ["": 17, "local": 1]>'
    scale = f"{head} f (a) => (b) {{ n = Size(a) c = Cast<to = 1>(n) b = Mul(a, c) }}"
    assert dependent("y = local.f(x)", scale)
    assert not dependent("y = local.f(x)", f"{head} f (a) => (b) {{ s = Shape(a) b = Reshape(a, s) }}")
    assert dependent("n = Size(x) c = Cast<to = 1>(n) y = local.f(c)", f"{head} f (a) => (b) {{ b = Exp(a) }}")


def test_heads_that_fail_at_one_length_are_refused(tmp_path: Path) -> None:
    """At 41 tokens, which nothing runs."""
    original, path = FOLDER / "gelu-encoder.onnx", tmp_path / "out.onnx"
    rewrite(original, path)
    model = onnx.load(path)
    (place,) = (i for i, node in enumerate(model.graph.node) if "gelu" in node.output)
    model.graph.node[place].output[0] = "before"
    added = parser.parse_graph(
        "g (float[b, n] before) => (float[b, n] gelu) { s = Shape(before) one = Constant<value = int64 {1}>() "
        "n = Gather(s, one) k = Constant<value = int64 {41}>() at = Equal(n, k) off = Not(at) f = Cast<to = 1>(off) "
        "gelu = Mul(before, f) }"
    )
    for node in reversed(added.node):
        node.output[0] = node.output[0] if node.output[0] == "gelu" else f"added/{node.output[0]}"
        node.input[:] = [name if name == "before" else f"added/{name}" for name in node.input]
        model.graph.node.insert(place + 1, node)
    onnx.save(model, path)
    found = validate(original, path)
    assert found.exit_status != 0
    assert any("depends on the sizes of batch and sequence" in failure for failure in found.failures)
