"""The audit names operators that float64 computes wrongly, and only those; what a rounding decides is named apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from rewriter.ort.sessions import open_session
from rewriter.proof.reference import engine
from rewriter.proof.reference.audit import Disagreement, _Auditor, _equal, _may_overflow, _worst, audit
from rewriter.proof.reference.decisions import DISCONTINUOUS, _differ, decided_by_rounding, discontinuous
from rewriter.proof.reference.engine import Values
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.proof.reference.kernels import double_kernel
from rewriter.proof.reference.operators.table import NUMPY_OPERATORS
from rewriter.proof.reference.scope import Node

Array = NDArray[Any]
Form = Callable[..., Any]

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((3, 4, 8)).astype(np.float32)
FLAT = "(float[3, 4, 8] x) => (float y)"


def parse(body: str, opset: int = 17, signature: str = FLAT, functions: str = "") -> onnx.ModelProto:
    versions = f'<ir_version: 8, opset_import: ["": {opset}, "local": 1]>'
    model = parser.parse_model(f"{versions} g {signature} {{ {body} }} {functions}")
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Form], None]:
    """Give an operator of the float64 evaluation another definition."""
    pretended: set[str] = set()

    def kernel(node: Node) -> Node | None:
        return None if node.proto.op_type in pretended else double_kernel(node)

    def set_form(name: str, form: Form) -> None:
        pretended.add(name)
        monkeypatch.setattr(engine, "double_kernel", kernel)
        monkeypatch.setitem(NUMPY_OPERATORS, ("", name), form)

    return set_form


def trained(attributes: Any, x: Array, scale: Array, bias: Array, *_: Array) -> Array:
    """BatchNormalization as onnx's reference evaluator computes it at opset 9 when a momentum is stated."""
    axes = (0, 2, 3)
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    each = (1, -1, 1, 1)
    return np.asarray((x - mean) / np.sqrt(var + attributes["epsilon"]) * scale.reshape(each) + bias.reshape(each))


def recogniser() -> tuple[onnx.ModelProto, Array]:
    """A convolution and a normalisation of opset 11 with a momentum, as in models that read text in pictures."""
    body = (
        "a = Conv<pads = [1, 1, 1, 1]>(x, w) b = BatchNormalization<momentum = 0.9, epsilon = 0.001>(a, s, t, m, v) "
        "c = HardSigmoid<alpha = 0.2, beta = 0.5>(b) y = Mul(b, c)"
    )
    model = parse(body, 11, "(float[1, 3, 6, 7] x) => (float y)")
    for name, shape in {"w": (4, 3, 3, 3), "s": (4,), "t": (4,), "m": (4,), "v": (4,)}.items():
        values = RANDOM.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(np.abs(values) if name == "v" else values, name))
    return model, RANDOM.standard_normal((1, 3, 6, 7)).astype(np.float32)


def test_batch_normalisation_with_a_momentum(pretend: Callable[[str, Form], None]) -> None:
    model, x = recogniser()
    plain, exact = open_session(model).run({"x": x})["y"], open_reference(model).run({"x": x})["y"]
    np.testing.assert_allclose(plain, exact, rtol=0, atol=1e-5)
    assert audit(model, None, {"x": x}) is None
    assert decided_by_rounding(model, None, {"x": x}) is None
    pretend("BatchNormalization", trained)
    assert np.abs(open_reference(model).run({"x": x})["y"] - plain).max() > 0.4 * np.abs(plain).max()
    found = audit(model, None, {"x": x})
    assert found is not None
    assert (found.node, found.op_type, found.output) == ("BatchNormalization 'b'", "BatchNormalization", "b")
    assert found.error > 0.1
    assert found.allowed < 1e-4
    assert not found.discontinuous


def off(by: float, form: Form) -> Form:
    return lambda _, *operands: np.asarray(form(*operands) * (1 + by))


WRONG: dict[str, tuple[str, str, Form]] = {
    "sum": ("y = MatMul(x, w)", "MatMul", off(1e-5, np.matmul)),
    "mean": ("y = ReduceMean<axes = [1]>(x)", "ReduceMean", off(1e-5, lambda x: x.mean(1, keepdims=True))),
    "elementwise": ("y = Exp(x)", "Exp", off(1e-5, np.exp)),
    "of-one": ("y = Tanh(x)", "Tanh", lambda _, x: np.tanh(x) + 1e-5),
    "of-operands": ("y = HardSwish(x)", "HardSwish", lambda _, x: x * np.clip(x / 6 + 0.50001, 0, 1)),
    "arithmetic": ("z = Exp(x) y = Div(x, z)", "Div", off(5e-7, np.divide)),
    "softmax": ("y = Softmax<axis = -1>(x)", "Softmax", lambda _, x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
    "any": ("y = ReduceL2<axes = [2]>(x)", "ReduceL2", off(1e-5, lambda x: np.sqrt((x * x).sum(2, keepdims=True)))),
    "exact": ("y = Relu(x)", "Relu", off(1e-7, lambda x: np.maximum(x, 0))),
    "integers": ("z = Shape(x) y = Cast<to = 1>(z)", "Shape", lambda _, x: np.array((*x.shape[:2], 9))),
    "booleans": ("n = Neg(x) z = Less(x, n) y = Cast<to = 1>(z)", "Less", lambda _, a, b: a <= b + 1e-9),
    "shape": ("y = Exp(x)", "Exp", lambda _, x: np.exp(x)[None]),
    "more-rows": ("y = Exp(x)", "Exp", lambda _, x: np.concatenate([np.exp(x), np.exp(x)])),
    "nan": ("y = Exp(x)", "Exp", lambda _, x: np.where(x > 2, np.nan, np.exp(x))),
    "infinite": ("y = Exp(x)", "Exp", lambda _, x: np.where(x > 2, np.inf, np.exp(x))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_operator_is_named(name: str, pretend: Callable[[str, Form], None]) -> None:
    body, kind, form = WRONG[name]
    x = X.copy()
    x[0, 0, 0], x[1, 2, 3] = 0, 3
    model = parse(body)
    model.graph.initializer.append(numpy_helper.from_array(X[0, :, :4].copy().T @ X[0, :, :4], "w0"))
    model.graph.initializer.append(numpy_helper.from_array(RANDOM.standard_normal((8, 5)).astype(np.float32), "w"))
    assert audit(model, None, {"x": x}) is None
    pretend(kind, form)
    found = audit(model, None, {"x": x})
    assert found is not None
    assert found.op_type == kind
    assert found.node.startswith(f"{kind} '")
    assert found.error > found.allowed
    assert found.discontinuous is (kind == "Less")
    infinite = name in {"shape", "more-rows", "nan", "infinite", "integers", "booleans"}
    assert np.isinf(found.error) == infinite


def test_what_computes_one_operator_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    look = _Auditor.look

    def spy(auditor: _Auditor, node: Node, values: Values) -> None:
        look(auditor, node, values)
        seen.append({each.gives[0] for each in auditor.programs})

    monkeypatch.setattr(_Auditor, "look", spy)
    assert audit(parse("a = Exp(x) b = Tanh(a) c = Neg(b) y = ReduceL2<axes = [2]>(c)"), None, {"x": X}) is None
    assert seen == [{"a"}, {"b"}, {"c"}, {"y"}]


def test_the_first_is_named(pretend: Callable[[str, Form], None]) -> None:
    model = parse("a = Exp(x) b = Neg(a) c = Tanh(b) d = Neg(c) y = Abs(d)")
    pretend("Tanh", off(1e-3, np.tanh))
    pretend("Abs", off(1e-3, np.abs))
    found = audit(model, None, {"x": X})
    assert found is not None
    assert (found.node, found.output) == ("Tanh 'c'", "c")


def test_the_second_output_is_named(pretend: Callable[[str, Form], None]) -> None:
    model = parse("k = Constant<value = int64[1] {2}>() a, b = TopK(x, k) c = Cast<to = 1>(b) y = Sub(a, c)")

    def swapped(_: Any, x: Array, k: Array) -> tuple[Array, Array]:
        order = np.argsort(-x, -1, kind="stable")[..., : k[0]]
        return np.take_along_axis(x, order, -1), order[..., ::-1]

    pretend("TopK", swapped)
    found = audit(model, None, {"x": X})
    assert found == Disagreement("TopK 'a'", "TopK", "b", np.inf, 0.0, True)


def test_operands_are_those_of_the_run() -> None:
    """An operator that only passes an error on is not named: 1e8 hides what float64 still knows."""
    model = parse("h = Constant<value = float {1e8}>() a = Add(x, h) b = Sub(a, h) y = Exp(b)")
    plain, exact = open_session(model, optimise=False).run({"x": X})["y"], open_reference(model).run({"x": X})["y"]
    assert np.abs(plain - exact).max() > 1
    assert audit(model, None, {"x": X}) is None
    assert decided_by_rounding(model, None, {"x": X}) is None


@pytest.mark.parametrize(
    ("body", "large"),
    [
        ("y = ReduceL2<axes = [2]>(x)", 1e25),
        ("y = Exp(x)", 200.0),
    ],
)
def test_leaving_the_range_of_float32_is_no_disagreement(body: str, large: float) -> None:
    model, x = parse(body), X.copy()
    x[0, 1, 2] = large
    assert not np.isfinite(open_session(model, optimise=False).run({"x": x})["y"]).all()
    assert np.isfinite(open_reference(model).run({"x": x})["y"]).all()
    assert audit(model, None, {"x": x}) is None


def test_half_precision() -> None:
    signature = "(float16[3, 4, 8] x) => (float16 y)"
    body = (
        "a = MatMul(x, w) b = Softmax(a) c = Exp(b) d = LayerNormalization(c, s) e = Cast<to = 1>(d) "
        "y = Cast<to = 10>(e)"
    )
    model = parse(body, signature=signature)
    for name, shape in {"w": (8, 300), "s": (300,)}.items():
        values = RANDOM.standard_normal(shape).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    assert audit(model, None, {"x": X.astype(np.float16)}) is None


BRANCH = (
    "y = If (c) <then_branch = t () => (float[3, 4, 8] r) { e = Exp(x) r = Neg(e) }, "
    "else_branch = e () => (float[3, 4, 8] s) { s = Tanh(x) }>"
)
LOOP = (
    "n = Constant<value = int64 {3}>() y = Loop(n, , x) <body = s (int64 i, bool g, float[3, 4, 8] a) => "
    "(bool h, float[3, 4, 8] b) { h = Identity(g) e = Tanh(a) k = Abs(e) b = Exp(k) }>"
)
CALLED = '<domain: "local", opset_import: ["": 17]> f (a) => (b) { e = Tanh(a) b = Exp(e) }'


def test_inside_bodies(pretend: Callable[[str, Form], None]) -> None:
    branching = parse(BRANCH, signature="(float[3, 4, 8] x, bool c) => (float y)")
    calling = parse("y = local.f(x)", functions=CALLED)
    trials: list[tuple[onnx.ModelProto, dict[str, Array]]] = [
        (branching, {"x": X, "c": np.array(True)}), (parse(LOOP), {"x": X}), (calling, {"x": X}),
    ]  # fmt: skip
    for model, feeds in trials:
        assert audit(model, None, feeds) is None
        assert decided_by_rounding(model, None, feeds) is None
    pretend("Exp", off(1e-3, np.exp))
    found = [audit(model, None, feeds) for model, feeds in trials]
    assert [each and each.node for each in found] == ["Exp 'e'", "Exp 'b'", "Exp 'b'"]
    assert audit(branching, None, {"x": X, "c": np.array(False)}) is None


def test_in_a_loop_an_operator_is_looked_at_three_times(pretend: Callable[[str, Form], None]) -> None:
    steps: list[Array] = []

    def seen(_: Any, x: Array) -> Array:
        steps.append(x)
        return np.tanh(x)

    pretend("Tanh", seen)
    model = parse(LOOP.replace("{3}", "{7}"))
    assert audit(model, None, {"x": X}) is None
    firsts = {each.tobytes() for each in steps}
    # Once for the result, and twice for what changed operands change.
    assert len(steps) == 9
    assert len(firsts) == 9


def test_operators_of_the_caller(pretend: Callable[[str, Form], None]) -> None:
    """They are computed, rounded to the type of their operands, and not compared."""
    model = parse("a = Exp(x) b = local.Twice(a) c = Tanh(b) d = Floor(b) y = Add(c, d)")
    kinds: list[Any] = []

    def twice(_: Any, x: Array) -> Array:
        kinds.append(x.dtype)
        return 2 * x + 0.1

    own = {("local", "Twice"): twice}
    assert audit(model, None, {"x": X}, own) is None
    assert decided_by_rounding(model, None, {"x": X}, own) is None
    assert set(kinds) == {np.dtype(np.float64)}
    pretend("Tanh", off(1e-3, np.tanh))
    found = audit(model, None, {"x": X}, own)
    assert found is not None
    assert found.node == "Tanh 'c'"


def test_operators_of_the_caller_have_the_type_of_their_operand() -> None:
    """Otherwise the next operator would be given two types."""
    model = parse("a = local.Twice(x) y = Add(a, x)")
    own = {("local", "Twice"): lambda _, x: 2 * x + 0.1}
    assert audit(model, None, {"x": X}, own) is None
    assert decided_by_rounding(model, None, {"x": X}, own) is None


def test_operators_of_the_caller_are_computed_once() -> None:
    """In the run alone: there is nothing to compare them with."""
    calls: list[Array] = []

    def twice(_: Any, x: Array) -> Array:
        calls.append(x)
        return np.asarray(2 * x)

    assert audit(parse("a = local.Twice(x) y = Exp(a)"), None, {"x": X}, {("local", "Twice"): twice}) is None
    assert len(calls) == 1


def test_only_an_overflow_that_may_be_excuses_infinities(pretend: Callable[[str, Form], None]) -> None:
    """Squares of operands stay in range here, and the result that float64 claims would be in range too."""
    x = np.where(X > 2, 100, X).astype(np.float32)
    model = parse("y = Exp(x)")
    assert np.isinf(open_session(model, optimise=False).run({"x": x})["y"]).any()
    assert audit(model, None, {"x": x}) is None
    pretend("Exp", lambda _, x: np.where(x > 90, 1e30, np.exp(x)))
    found = audit(model, None, {"x": x})
    assert found is not None
    assert (found.op_type, found.error) == ("Exp", np.inf)


def test_the_worst_is_where_the_allowance_is_exceeded(pretend: Callable[[str, Form], None]) -> None:
    """Rounding explains the larger error, at 10; not the smaller one, at -5."""
    x = np.zeros((3, 4, 8), np.float32)
    x[0, 0, :2] = 10, -5
    pretend("Exp", lambda _, x: np.exp(x) * np.where(x > 9, 1 + 1e-6, np.where(x < -4, 1 + 1e-4, 1)))
    found = audit(parse("y = Exp(x)"), None, {"x": x})
    assert found is not None
    assert found.error == pytest.approx(1e-4 * np.exp(-5), rel=1e-2)


def test_sequences(pretend: Callable[[str, Form], None]) -> None:
    model = parse("s = SequenceConstruct(x, x) i = Constant<value = int64 {1}>() z = SequenceAt(s, i) y = Exp(z)")
    assert audit(model, None, {"x": X}) is None
    pretend("SequenceAt", lambda _, s, __: s[0] * 1.001)
    found = audit(model, None, {"x": X})
    assert found is not None
    assert found.op_type == "SequenceAt"
    pretend("SequenceConstruct", lambda _, *tensors: list(tensors[:1]))
    found = audit(model, None, {"x": X})
    assert found == Disagreement("SequenceConstruct 's'", "SequenceConstruct", "s", np.inf, 0.0, False)


def test_without_a_reference() -> None:
    with pytest.raises(NoReference, match=r"^RandomNormalLike 'y' is random$"):
        audit(parse("y = RandomNormalLike(x)"), None, {"x": X})


# -- what a rounding decides ------------------------------------------------------------------------------------------

BUCKETS = "l = Log(x) k = Constant<value = float {0.6931472}>() d = Div(l, k)"
POWERS = (2.0 ** np.arange(1, 31)).astype(np.float32)
WHOLE = "(float[n] x) => (float y)"


@pytest.mark.parametrize(
    ("body", "label"),
    [
        ("c = Cast<to = 7>(d) y = Cast<to = 1>(c)", "Cast 'c'"),
        ("f = Floor(d) y = Neg(f)", "Floor 'f'"),
        ("c = Ceil(d) y = Neg(c)", "Ceil 'c'"),
        ("r = Round(d) s = Sub(d, r) t = Sign(s) y = Neg(t)", "Sign 't'"),
        ("r = Round(d) e = Equal(d, r) y = Cast<to = 1>(e)", "Equal 'e'"),
        ("r = Round(d) s = Sub(d, r) a = ArgMax(s) y = Cast<to = 1>(a)", "ArgMax 'a'"),
        ("r = Round(d) s = Sub(d, r) k3 = Constant<value = int64[1] {3}>() v, i = TopK(s, k3) y = Cast<to = 1>(i)",
         "TopK 'v'"),
        ("r = Round(d) y = Sub(d, r)", None),
    ],
)  # fmt: skip
def test_decisions(body: str, label: str | None) -> None:
    model = parse(f"{BUCKETS} {body}", signature=WHOLE)
    assert audit(model, None, {"x": POWERS}) is None
    assert decided_by_rounding(model, None, {"x": POWERS}) == label
    if "Arg" not in body and "TopK" not in body:
        assert decided_by_rounding(model, None, {"x": POWERS * np.float32(1.3)}) is None


def test_results_that_are_no_whole_numbers_are_no_decisions() -> None:
    """What is left of a division is near a half, and rounding moves it across."""
    model = parse(f"{BUCKETS.replace('Log(x)', 'Identity(x)')} o = Constant<value = float {{1.0}}>() "
                  "y = Mod<fmod = 1>(d, o)", signature=WHOLE)  # fmt: skip
    x = ((np.arange(64) + 0.5) * np.float32(0.6931472)).astype(np.float32)
    plain, exact = open_session(model, optimise=False).run({"x": x})["y"], open_reference(model).run({"x": x})["y"]
    assert (np.rint(plain) != np.rint(exact)).any()
    assert decided_by_rounding(model, None, {"x": x}) is None


def test_the_first_decision_is_named() -> None:
    model = parse(f"{BUCKETS} e = Exp(d) g = Greater(e, x) f = Floor(d) c = Cast<to = 7>(f) y = Cast<to = 1>(c)",
                  signature=WHOLE)  # fmt: skip
    model.graph.node[4].input[1] = "l"
    assert decided_by_rounding(model, None, {"x": POWERS}) == "Floor 'f'"


@pytest.mark.parametrize(("end", "computed"), [("y = Exp(n)", 1), ("e = Exp(n) g = Floor(e) y = Neg(g)", 2)])
def test_only_what_decisions_depend_on_is_computed(
    end: str, computed: int, pretend: Callable[[str, Form], None]
) -> None:
    seen: list[Array] = []
    pretend("Exp", lambda _, x: seen.append(x) or np.exp(x))  # type: ignore[func-returns-value]
    assert decided_by_rounding(parse(f"a = Exp(x) f = Floor(a) n = Neg(f) {end}"), None, {"x": X}) is None
    assert len(seen) == computed


def test_a_decision_inside_a_loop() -> None:
    body = (
        f"n = Constant<value = int64 {{3}}>() z = Loop(n, , x) <body = s (int64 i, bool g, float[n] a) => "
        f"(bool h, float[n] b) {{ h = Identity(g) j = Cast<to = 1>(i) {BUCKETS.replace('Log(x)', 'Log(a)')} "
        "t = Sub(i, i) f = Floor(d) b = Exp(f) }> y = Neg(z)"
    )
    model = parse(body, signature=WHOLE)
    assert decided_by_rounding(model, None, {"x": POWERS[:5]}) in {"Floor 'f'", None}
    assert decided_by_rounding(model, None, {"x": POWERS}) == "Floor 'f'"


def test_runs_that_part() -> None:
    """A decision in integers that takes another branch: the branch holds other operators."""
    body = (
        f"{BUCKETS} r = ReduceSum<keepdims = 0>(d) q = Mul(r, r) z = Mod<fmod = 1>(q, k) t = local.Odd(z) "
        "y = If(t) <then_branch = a () => (float[n] p) { p = Floor(x) }, "
        "else_branch = b () => (float[n] o) { o = Ceil(x) }>"
    )
    model = parse(body, signature=WHOLE)
    calls: list[Array] = []

    def odd(_: Any, x: Array) -> Array:
        calls.append(x)
        return np.asarray(len(calls) == 1)

    assert decided_by_rounding(model, None, {"x": POWERS}, {("local", "Odd"): odd}) == "Floor 'p'"


def test_only_one_run_decides() -> None:
    body = (
        f"{BUCKETS} t = local.Odd(d) y = If(t) <then_branch = a () => (float[n] p) {{ p = Floor(x) }}, "
        "else_branch = b () => (float[n] o) { o = Neg(x) }>"
    )
    model = parse(body, signature=WHOLE)
    for first, label in ((True, "Floor 'p'"), (False, "Floor 'p'")):
        answers = iter([np.asarray(first), np.asarray(not first)])
        own = {("local", "Odd"): lambda *_, answers=answers: next(answers)}
        assert decided_by_rounding(model, None, {"x": POWERS}, own) == label


def node(op_type: str, **attributes: Any) -> Node:
    return Node(helper.make_node(op_type, ["x"], ["y"], **attributes), 17, {})


def test_what_is_discontinuous() -> None:
    assert all(discontinuous(node(name)) for name in DISCONTINUOUS)
    assert {
        "Floor",
        "Round",
        "Equal",
        "Less",
        "ArgMax",
        "TopK",
        "NonZero",
        "Mod",
        "IsInf",
        "QuantizeLinear",
    } < DISCONTINUOUS
    assert not any(discontinuous(node(name)) for name in ("MatMul", "Where", "Relu", "Exp", "Clip", "Max"))
    assert [discontinuous(node("Cast", to=kind)) for kind in (1, 10, 11, 16)] == [False] * 4
    assert [discontinuous(node("Cast", to=kind)) for kind in (2, 6, 7, 9)] == [True] * 4
    assert discontinuous(node("Resize"))
    assert not discontinuous(node("Resize", mode="linear"))
    assert not discontinuous(node("GridSample"))
    assert discontinuous(node("GridSample", mode="nearest"))


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("made", "truth", "allowed", "overflows", "found"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, False, (0.0, 0.0)),
        ([1.0, 2.5], [1.0, 2.0], 0.25, False, (0.5, 0.25)),
        ([1.5, 2.25], [1.0, 2.0], [0.75, 0.0], False, (0.25, 0.0)),  # the excess counts, not the error
        ([1.5, 9.0], [1.0, 2.0], [0.0, 8.0], False, (0.5, 0.0)),
        ([INF, 1.0], [INF, 1.0], 0.5, False, (0.0, 0.0)),
        ([INF, 1.0], [3e39, 1.0], 0.5, False, (0.0, 0.5)),  # beyond the type
        ([INF, 1.0], [1.0, 1.0], 0.5, False, (INF, 0.5)),
        ([INF, 1.0], [1.0, 1.0], 0.5, True, (0.0, 0.5)),  # squares may have overflowed
        ([NAN, 1.0], [NAN, 1.0], 0.5, False, (0.0, 0.0)),
        ([NAN, 1.0], [1.0, 1.0], 0.5, False, (INF, 0.5)),
        ([1.0, 1.0], [NAN, 1.0], 0.5, False, (INF, 0.0)),
        ([1.0, 1.0], [INF, 1.0], 0.5, False, (INF, 0.0)),
        ([1.0, NAN], [1.0, 2.0], 0.5, False, (INF, 0.5)),
    ],
)
def test_the_worst_entry(made: Any, truth: Any, allowed: Any, overflows: bool, found: tuple[float, float]) -> None:
    """Results below the smallest normal number may be flushed, hence the addition to each allowance."""
    with np.errstate(all="ignore"):
        error, limit = _worst(np.array(made, np.float32), np.array(truth), np.asarray(allowed), overflows=overflows)
    assert error == found[0]
    assert limit == found[1] or limit == pytest.approx(found[1] + float(np.finfo(np.float32).tiny))


def test_results_of_another_shape_or_kind() -> None:
    one = np.ones(2, np.float32)
    for made, truth in ((one, np.ones(3)), (one, np.ones(2, np.int64)), (np.ones(2, np.int64), np.ones(2))):
        assert _worst(made, truth, np.asarray(9.0), overflows=True) == (INF, 0.0)
    assert _worst(np.array([1, 2]), np.array([1, 2]), np.asarray(9.0), overflows=False) == (0.0, 0.0)
    assert _worst(np.array([1, 2]), np.array([1, 3]), np.asarray(9.0), overflows=False) == (INF, 0.0)
    assert _worst(one[:0], np.ones(0), np.asarray(9.0), overflows=False) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("made", "truth", "equal"),
    [
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [1.0, 1.0], False),
        ([1.0, 1.0], [1.0, NAN], False),
        ([1.0], [[1.0]], False),
    ],
)
def test_equal_results(made: Any, truth: Any, equal: bool) -> None:
    """NaN equals NaN; sequences entry by entry, and by their number."""
    one, other = np.array(made, np.float32), np.array(truth)
    assert _equal(one, other) is _equal([one, one], [other, other]) is equal
    assert not _equal([one, one], [other])
    assert not _equal([one], [other, other])


@pytest.mark.parametrize(
    ("operands", "may"),
    [
        ([np.array([1.9e19], np.float32)], True),
        ([np.array([-1.9e19], np.float32)], True),
        ([np.array([1e18], np.float32)], False),
        ([np.array([NAN], np.float32)], True),
        ([np.array([1e18], np.float32), np.array([1.0, INF], np.float32)], True),
        ([np.array([2**62])], False),
        ([None], False),
        ([[np.array([1.0]), np.array([1e30])]], True),
        ([np.zeros(0, np.float32)], False),
    ],
)
def test_operands_whose_squares_overflow(operands: list[Any], may: bool) -> None:
    given = {str(number): operand for number, operand in enumerate(operands)}
    assert _may_overflow(given, np.dtype(np.float32)) is may
    assert _may_overflow(given, np.dtype(np.int64)) is False


@pytest.mark.parametrize(
    ("made", "exact", "differ"),
    [
        (np.array([2.0, -1.0], np.float32), np.array([2.0, -1.0]), False),
        (np.array([2.0, NAN], np.float32), np.array([2.0, NAN]), False),
        (np.array([2.0], np.float32), np.array([2.0 + 1e-9]), False),  # Hardmax of a sum, say: not quite whole
        (np.array([2.0], np.float32), np.array([3.0]), True),
        (np.array([2.0], np.float32), np.array([NAN]), True),
        (np.array([2, 3]), np.array([2, 3]), False),
        (np.array([2, 3]), np.array([2, 4]), True),
        (np.array([2, 3]), np.array([2, 3, 3]), True),
        (np.array([True]), np.array([False]), True),
    ],
)
def test_decisions_are_whole_numbers(made: Array, exact: Array, differ: bool) -> None:
    assert _differ(made, exact) is differ
