"""Planted differences are named where they are; other spellings are not named, and counted as regions that agree."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.evaluate.arithmetic import Field, Modulus
from rewriter.evaluate.evaluator import Program
from rewriter.files.load import load_model
from rewriter.proof.values.departure import Departure, departure, isolated, partners
from rewriter.proof.values.walk import Kept
from tests.textmodels import Array, text_model

MICROSOFT = {"com.microsoft": 1}
FEEDS = {"x": np.zeros((2, 3, 4), np.float32)}
VECTORS = {"c": np.arange(4.0), "d": np.array([3.0, 1, 4, 1])}
TWO_OUTPUTS = "float[batch, tokens, 4] first, float[batch, tokens, 4] second"
MLP = "p = MatMul(x, W1) y = Add(p, b1) {} q = MatMul(h, W2) out = Add(q, b2)"
TANH = MLP.format('h = Gelu<approximate = "tanh">(y)')


def evaluated(model: onnx.ModelProto, feeds: Mapping[str, Array] = FEEDS, **options: Any) -> Kept:
    field = Field(Modulus(2**31 - 1), b"key")
    prints = Kept(Program(load_model(model)), field, feeds, printing=True, **options)
    prints.run()
    return prints


def departed(a: str, b: str, feeds: Mapping[str, Array] = FEEDS, **options: Any) -> Departure:
    options = {"opset": 20, "ir": 9, "domains": MICROSOFT, **options}
    return departure(*(evaluated(text_model(text, **options), feeds) for text in (a, b)))


FUSED = MLP.format("h = com.microsoft.BiasGelu(p, b1)").replace("y = Add(p, b1)", "")
GELU = ("Gelu -> 'h'", "MatMul -> 'q'", "Add -> 'out'")
SUM = ("Add -> 'y'", "Gelu -> 'h'", "MatMul -> 'q'")


@pytest.mark.parametrize(
    ("b", "node", "operands", "candidates"),
    [
        (FUSED, "com.microsoft::BiasGelu 'h'", {"p": "p"}, SUM),
        (MLP.format("h = Gelu(y)"), "Gelu 'h'", {"y": "y"}, GELU),
        (
            "a = MatMul(x, W1) b = Add(a, b1) c = Gelu(b) d = MatMul(c, W2) out = Add(b2, d)",
            "Gelu 'c'",
            {"b": "y"},
            GELU,
        ),
        (TANH.replace("Add(p, b1)", "Sub(p, b1)"), "Sub 'y'", {"p": "p"}, SUM),
        (TANH.replace("Add(q, b2)", "Add(x, q)"), "Add 'out'", {"x": "x", "q": "q"}, ("Add -> 'out'", "MatMul -> 'p'")),
    ],
)
def test_the_first_difference(b: str, node: str, operands: dict[str, str], candidates: tuple[str, ...]) -> None:
    """Whatever tensors are called; with what A computes from the same operands."""
    found = departed(TANH, b)
    assert (found.node, dict(found.operands), found.candidates) == (node, operands, candidates)
    names = ", ".join(map(repr, operands))
    text = f"{node} computes from {names} something that A does not compute; A: {', '.join(candidates)}"
    assert found.lines()[0] == f"first difference: {text}"


@pytest.mark.parametrize(
    "b",
    [
        TANH,
        TANH.replace("p = MatMul(x, W1) y = Add(p, b1)", "y = com.microsoft.FusedMatMul(x, W1b)"),
        "p = MatMul(x, W1) h = com.microsoft.FastGelu(p, b1) q = MatMul(h, W2) out = Add(b2, q)",
        "p = MatMul(x, W1) y = Add(p, b1) t = Transpose<perm = [0, 2, 1]>(y) u = Transpose<perm = [0, 2, 1]>(t)"
        'h = Gelu<approximate = "tanh">(u) q = MatMul(h, W2) out = Add(q, b2)',
    ],
)
def test_other_spellings_are_no_difference(b: str) -> None:
    if "W1b" in b:
        b = b.replace("W1b", "W1").replace("y =", "p =").replace("h = Gelu", "y = Add(b1, p) h = Gelu")
    found = departed(TANH, b)
    assert (found.first, found.missing) == (None, None)
    assert all(each.same for each in found.regions)
    assert found.lines()[0].startswith(f"{found.matched} of {found.of} tensors of B have")


def test_a_spelling_before_the_difference() -> None:
    """A sum in another order is not the first difference; the activation behind it is."""
    a = "s = Add(x, c) t = Add(s, d) r = Relu(t) out = Add(r, c)"
    b = "s = Add(d, x) t = Add(c, s) r = Tanh(t) out = Add(r, c)"
    found = departed(a, b, constants=VECTORS)
    assert (found.node, found.operands) == ("Tanh 'r'", (("t", "t"),))
    assert found.missing == "Relu -> 'r'"
    differing, spelled = found.regions
    assert (differing.nodes, differing.same, differing.begins, differing.ends) == (2, False, ("t",), ("out",))
    assert (spelled.nodes, spelled.same, spelled.begins, spelled.ends) == (2, True, ("x",), ("t",))
    assert (spelled.counterpart, spelled.counterpart_operators) == (2, "2 Add")
    assert "2 nodes (2 Add) from 'x' to 't': computes the same as 2 nodes of A (2 Add)" in found.lines()
    assert "2 nodes (Tanh, Add) from 't' to 'out': differs from 2 nodes of A (Relu, Add)" in found.lines()


def test_a_fused_node_beside_its_parts() -> None:
    found = departed(
        "y = Mul(x, x) h = Sqrt(y) out = Neg(h)", "n = Neg(x) y = Mul(n, x) z = Neg(y) h = Sqrt(z) out = Neg(h)"
    )
    assert [(each.nodes, each.counterpart, each.counterpart_operators) for each in found.regions] == [(3, 1, "Mul")]
    assert found.first is None


def test_constants_and_orders_of_entries() -> None:
    found = departed(TANH, TANH.replace("b1", "c1"))
    assert (found.node, found.constants) == ("Add 'y'", ("c1",))
    assert "constants that A does not have: 'c1'" in found.lines()
    assert departed(TANH, TANH.replace("Add(p, b1)", "Sub(p, b1)")).constants == ()
    stated = "n = Constant<value = float[8] {1, 2, 3, 4, 5, 6, 7, 8}>()"
    assert departed(TANH, f"{stated} {TANH.replace('b1', 'n')}").constants == ("n",)
    a, b = (f"{stated} {TANH.replace('Add(p, b1)', f'{kind}(p, n)')}" for kind in ("Add", "Sub"))
    assert departed(a, b).constants == ()
    a = "t = Transpose<perm = [0, 2, 1]>(x) s = Softmax<axis = -1>(t) out = Transpose<perm = [0, 2, 1]>(s)"
    wrong = a.replace("axis = -1", "axis = 1")
    assert departed(a, wrong).rearranged == ()
    transposed = a.replace("t = Transpose<perm = [0, 2, 1]>(x)", "t = Transpose<perm = [0, 1, 2]>(x)")
    assert departed(a, transposed).node == "Softmax 's'"
    rolled = departed(a.replace("[0, 2, 1]>(x)", "[2, 0, 1]>(x)"), a.replace("[0, 2, 1]>(x)", "[1, 0, 2]>(x)"))
    assert rolled.rearranged == ("t",)
    assert "the same entries in another order or shape: 't'" in rolled.lines()


def test_a_region_with_two_ends() -> None:
    """One that A has, and one that it does not have."""
    a = "s = Add(x, c) first = Add(s, d) second = Neg(s)"
    b = "s = Add(x, d) first = Add(s, c) second = Neg(s)"
    found = departed(a, b, outputs=TWO_OUTPUTS, constants=VECTORS)
    assert found.node == "Add 's'"
    assert [(each.same, each.ends) for each in found.regions] == [(False, ("second", "first"))]


def test_a_reshape_of_an_operand_is_the_operand() -> None:
    a = "y = Tanh(x) t = Transpose<perm = [0, 2, 1]>(y) h = Relu(t) out = Transpose<perm = [0, 2, 1]>(h)"
    found = departed(a, "z = Tanh(x) out = Abs(z)")
    assert found.candidates == ("Relu -> 'h'", "Transpose -> 'out'")
    b = "y = Tanh(x) u = Transpose<perm = [1, 0, 2]>(y) h = Abs(u) out = Transpose<perm = [1, 0, 2]>(h)"
    moved = departed(a, b)
    assert (moved.operands, moved.rearranged) == ((("u", "y"),), ("u",))


def test_a_tensor_of_which_only_sizes_are_read() -> None:
    expanded = "t = Tanh(x) {} e = Expand({}, s) out = Mul({}, e)"
    a = expanded.format("s = Shape(t)", "$2.0", "t")
    b = expanded.format("n = Neg(t) s = Shape(n) d = Add(t, $1e-20)", "$2.0", "d")
    assert departed(a, b).node == "Add 'd'"
    assert departed(a, expanded.format("n = Neg(t) s = Shape(n)", "$2.0", "t")).node == "Neg 'n'"


def test_another_table() -> None:
    """A node that reads no data but token ids."""
    texts = "out = Gather(W1, ids)", "out = Gather(V1, ids)"
    found = departed(*texts, {"ids": np.zeros((2, 3), np.int64)}, inputs="int64[batch, tokens] ids")
    assert found.first == "Gather 'out' computes from 'ids' something that A does not compute"
    assert found.constants == ("V1",)


def test_outputs_that_are_swapped() -> None:
    found = departed("first = Relu(x) second = Tanh(x)", "first = Tanh(x) second = Relu(x)", outputs=TWO_OUTPUTS)
    assert (found.node, found.first) == (None, "output 'first' has the values of 'second' of A")
    assert found.matched == found.of == 3


BRANCH = """flag = Constant<value = bool[1] {1}>()
out = If (flag) <then_branch = g () => (float[b, t, 4] r) { y = Tanh(x) r = ACT(y) },
                 else_branch = g () => (float[b, t, 4] e) { e = Neg(x) }>"""


def test_inside_a_branch() -> None:
    found = departed(BRANCH.replace("ACT", "Relu"), BRANCH.replace("ACT", "Abs"))
    assert (found.node, found.output) == ("Abs 'r'", "r")
    assert [(each.nodes, each.operators) for each in found.regions] == [(2, "Abs, If")]
    assert departed(BRANCH.replace("ACT", "Relu"), "y = Tanh(x) out = Relu(y)").first is None
    assert departed("y = Tanh(x) out = Relu(y)", BRANCH.replace("ACT", "Relu")).first is None


def test_partners_prefer_the_same_name() -> None:
    text = "y = Tanh(x) z = Tanh(x) out = Add(y, z)"
    a, b = (evaluated(text_model(each)) for each in (text, text.replace("z", "w")))
    assert {name: ours for name, (ours, _) in partners(a, b).items()} == {"x": "x", "y": "y", "w": "y", "out": "out"}
    assert partners(a, a)["z"][0] == "z"


def layers(*activations: str) -> onnx.ModelProto:
    """Residual layers, each with an activation of y0, y1, ...: h0, h1, ..."""
    text = "x0 = Identity(x)"
    for n, activation in enumerate(activations):
        text += f" p{n} = MatMul(x{n}, W1) y{n} = Add(p{n}, b1) {activation.format(y=f'y{n}', h=f'h{n}', p=f'p{n}')}"
        text += f" q{n} = MatMul(h{n}, W2) o{n} = Add(q{n}, b2) x{n + 1} = Add(x{n}, o{n})"
    return text_model(f"{text} out = Identity(x{len(activations)})", opset=20, ir=9, domains=MICROSOFT)


GELU_OF, ERF = '{h} = Gelu<approximate = "tanh">({y})', "{h} = Gelu({y})"
FUSED_OF = "{h} = com.microsoft.BiasGelu({p}, b1)"
SPELLED = "{h}a = Neg({y}) {h}b = Neg({h}a) {h} = com.microsoft.FastGelu({h}b)"


@pytest.mark.parametrize(
    ("activations", "regions"),
    [
        ((GELU_OF, ERF, GELU_OF, GELU_OF), [("y1", "h1", 1, 1, False)]),
        ((FUSED_OF, GELU_OF, GELU_OF, FUSED_OF), [("p0", "h0", 1, 2, False), ("p3", "h3", 1, 2, False)]),
        ((ERF, SPELLED, ERF, GELU_OF), [("y0", "h0", 1, 1, False), ("y2", "h2", 1, 1, False)]),
        ((GELU_OF, GELU_OF, GELU_OF, GELU_OF), []),
    ],
)
def test_differences_are_isolated(activations: tuple[str, ...], regions: list[Any]) -> None:
    """What lies behind one of them is compared with B's value in its place."""
    a, b = layers(*[GELU_OF] * 4), layers(*activations)
    found = isolated(lambda values: evaluated(a, replaced=values), evaluated(b))
    differing = [each for each in found.regions if not each.same]
    assert [(*each.begins, *each.ends, each.nodes, each.counterpart, each.same) for each in differing] == regions
    whole = departure(evaluated(a), evaluated(b))
    assert (found.first, found.matched, found.of) == (whole.first, whole.matched, whole.of)
    assert len([each for each in whole.regions if not each.same]) == bool(regions)


def test_what_only_moves_a_difference_is_no_other() -> None:
    a, b = (text_model(f"y = {name}(x) t = Transpose<perm = [1, 0, 2]>(y) out = Exp(t)") for name in ("Relu", "Tanh"))
    found = isolated(lambda values: evaluated(a, replaced=values), evaluated(b))
    assert [(each.operators, each.ends) for each in found.regions] == [("Tanh", ("y",))]


def test_nothing_to_isolate() -> None:
    """Every tensor differs, so that no value of B helps A: few evaluations, and one region."""
    a, b = layers(GELU_OF), text_model("p = Tanh(x) out = Neg(p)")
    calls: list[int] = []

    def evaluate(values: Mapping[str, Any]) -> Kept:
        calls.append(len(values))
        return evaluated(a, replaced=values)

    found = isolated(evaluate, evaluated(b))
    assert len(calls) <= 9
    assert (found.node, [each.nodes for each in found.regions]) == ("Tanh 'p'", [2])


def test_hostile_names_and_json() -> None:
    model = text_model(TANH.replace("Add(p, b1)", "Sub(p, b1)"), opset=20)
    model.graph.node[1].name = "evil\n\x1b[2J" + "long" * 1000
    found = departure(evaluated(text_model(TANH, opset=20)), evaluated(model))
    assert all(line.isprintable() and len(line) < 600 for line in found.lines())
    assert json.loads(json.dumps(asdict(found)))["node"].startswith("Sub 'evil")


def test_a_long_chain_is_quick() -> None:
    """A thousand nodes behind a difference, more than functions may call each other, are one region."""
    chain = "".join(f"t{place + 1} = Neg(t{place}) " for place in range(1100))
    found = departed(f"t0 = Relu(x) {chain} out = Neg(t1100)", f"t0 = Tanh(x) {chain} out = Neg(t1100)")
    assert (found.node, [each.nodes for each in found.regions]) == ("Tanh 't0'", [1102])
