"""What the proof of a block is tried on: sizes that the block takes, and inputs small and large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import rewrite
from rewriter.files.load import LoadedModel
from rewriter.proof.blocks import block as blocks
from rewriter.proof.blocks.block import (
    BlockItem,
    _Evaluated,
    _Whole,
    block_item,
    block_needs,
    made_inputs,
    prove_block,
)
from rewriter.proof.blocks.spread import accepted
from rewriter.proof.blocks.sublayer import _FEW_SCALES, _SCALES, Heads, prove_heads
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.planned import planned_side
from rewriter.proof.run.whole import Way
from tests.plans import Exp, Silu
from tests.textmodels import SILU, mlp, text_model, values

EPS = 2.0**-23


def side(shape: str, kind: str = "float") -> Side:
    model = text_model("out = Abs(x)", inputs=f"{kind}[{shape}] x", outputs=f"{kind}[{shape}] out")
    return Side.of(LoadedModel(model, None, None, (), 0))


def claim(width: int | None = 4) -> Claim:
    return Claim("mlp", ("x",), "out", ("x",), ("out",), 0.0, 0.0, onnx.TensorProto.FLOAT, Silu(), width=width)


def test_sizes_that_the_block_refuses_are_left_out() -> None:
    cases = [Case(f"batch {batch}", {"x": np.ones((batch, 3, 4), np.float32)}) for batch in (1, 2, 3)]
    assert accepted(side("batch, tokens, 4").model, cases) == cases
    assert accepted(side("2, 3, 4").model, cases) == [cases[1]]
    assert accepted(side("7, 3, 4").model, cases) == []


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ("batch, tokens, 4", (2, 19, 4)),
        ("tokens, 4", (19, 4)),
        ("a, b, c, 4", (2, 1, 19, 4)),
        ("a, b, c, d, 4", (2, 1, 1, 19, 4)),
    ],
)
def test_made_inputs(shape: str, made: tuple[int, ...]) -> None:
    """Several batches and tokens, of the model's type, the same for the same seed."""
    (feeds,) = made_inputs(side(shape), claim(), seed=5)
    assert feeds["x"].shape == made
    assert feeds["x"].dtype == np.float32
    assert 0.5 < feeds["x"].std() < 1.5
    (again,), (other,) = (made_inputs(side(shape), claim(), seed=seed) for seed in (5, 6))
    np.testing.assert_array_equal(feeds["x"], again["x"])
    assert not np.array_equal(feeds["x"], other["x"])


def test_made_inputs_have_the_type_of_the_tensor() -> None:
    (feeds,) = made_inputs(side("tokens, 4", "float16"), claim(), seed=5)
    assert feeds["x"].dtype == np.float16


def test_nothing_is_made_where_the_width_is_unknown_or_more_is_read() -> None:
    assert made_inputs(side("batch, tokens, 4"), claim(None), seed=5) == []
    two = text_model("out = Add(x, z)", inputs="float[2, 4] x, float[2, 4] z", outputs="float[2, 4] out")
    assert made_inputs(Side.of(LoadedModel(two, None, None, (), 0)), claim(), seed=5) == []


@pytest.mark.parametrize("missing", [None, 0, 1, 2, 3])
def test_one_missing_evaluation_is_as_good_as_none(missing: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None if place == missing else [{"out": np.full(1, place)}] for place in range(4)])
    monkeypatch.setattr(blocks, "_wide", lambda *_: next(answers))
    one = side("tokens, 4")
    found = _Evaluated.of(BlockItem(claim(), "", one, one, one, (), ()), [])
    assert (found is None) is (missing is not None)
    if found is not None:
        assert [values[0].item() for values in found.of_output("out")] == [0, 1, 2, 3]


def test_scales_of_real_inputs() -> None:
    """As they are, nothing, and far below and above: every part of an activation is met."""
    for scales, least, most in ((_SCALES, 1e-5, 1e3), (_FEW_SCALES, 1.0, 4.0)):
        assert 1.0 in scales
        assert min(abs(scale) for scale in scales if scale) <= least
        assert max(scales) >= most
    assert 0.0 in _SCALES


def test_the_figures_of_a_block() -> None:
    """They are those of the worst part, and nothing is added to them."""
    validation = rewrite(mlp(SILU)).validation
    assert validation is not None
    (proof,) = validation.blocks
    assert proof.exact_error is not None
    assert proof.block_error is not None
    assert proof.block_original_error is not None
    assert proof.block_allowed is not None
    assert proof.region_original_error is not None
    assert proof.exact_error < 1e-12
    assert EPS / 8 < proof.region_error < 8 * EPS
    assert EPS / 8 < proof.region_original_error < 64 * EPS
    assert 0 < proof.block_error < proof.block_allowed < 1.0
    assert 0 < proof.block_original_error < proof.block_allowed
    assert proof.region_ratio == pytest.approx(proof.region_error / proof.region_original_error, rel=0.5)


@pytest.mark.parametrize("known", [0.0, None, 0.25])
def test_figures_of_several_outputs(known: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest; an output without a figure does not count."""
    parts = iter([_Whole(known, known, ("first",), known, known), _Whole(0.125, 0.125, ("second",), 0.125, 0.125)])
    monkeypatch.setattr(blocks, "_judge", lambda *_: next(parts))
    monkeypatch.setattr(blocks._Evaluated, "of", lambda *_: object())
    monkeypatch.setattr(blocks, "_variants", lambda *_: [])
    one = side("tokens, 4")
    two = replace(claim(), block_outputs=("out", "other"))
    found = blocks._prove_whole(BlockItem(two, "", one, one, one, ({"x": np.ones((1, 3, 4), np.float32)},), ()))
    largest = max(known or 0.0, 0.125)
    assert found == _Whole(largest, largest, ("first", "second"), largest, largest)


def test_no_inputs_no_proof() -> None:
    one = side("tokens, 4")
    heads = Heads(one.model, one.model, one.model, ())
    proof = prove_heads(heads, claim(), ())
    assert (proof.exact_error, proof.error, proof.original_error) == (None, 0.0, 0.0)
    assert proof.failures == ("mlp: there are no inputs to prove it on",)


# -- blocks of a small model -------------------------------------------------------------------------------------------

WAYS = (Way("cpu", optimise=False), Way("cpu", optimise=True))
FIRST = "first = MatMul(x, W1) y = Add(first, b1)"
SECOND = "second = MatMul(h, W2) out = Add(second, b2)"
BLOCK = replace(claim(), inputs=("y",), output="h", rounding=1e-6)


def whole(body: str = f"{FIRST} {SILU} {SECOND}", weights: Mapping[str, np.ndarray] | None = None) -> Side:
    """The model that holds the block, with these weights changed."""
    changed = {name: values(name) + change for name, change in (weights or {}).items()}
    model = text_model(body, constants=changed)
    return Side.of(LoadedModel(model, None, None, (), 0))


def inputs(scale: float = 1.0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [{"x": scale * rng.normal(size=(1, length, 4)).astype(np.float32)} for length in (5, 7)]


def proof_of(rewritten: Side, *, given: list[dict[str, np.ndarray]] | None = None, **further: Any) -> blocks.BlockProof:
    original = whole()
    made = block_item(original, rewritten, original, BLOCK, inputs() if given is None else given, WAYS, **further)
    return prove_block(made)


def test_the_same_block_is_proved() -> None:
    proof = proof_of(whole())
    assert proof.passed
    assert proof.failures == ()
    assert proof.name == "mlp"
    assert proof.block_error == proof.block_original_error
    assert proof.block_error is not None
    assert proof.block_allowed is not None
    assert 0 < proof.block_error < proof.block_allowed < 1e-4
    assert proof.block_ratio == 1.0
    # FACTOR times the rounding of the original, which is that of its worst channel or more.
    assert proof.block_allowed >= 4.0 * proof.block_error


@pytest.mark.parametrize("name", ["W1", "W2", "b1", "b2"])
def test_another_weight_is_a_failure(name: str) -> None:
    change = np.zeros_like(values(name))
    change.flat[-1] = 1e-3
    proof = proof_of(whole(weights={name: change}))
    assert not proof.passed
    texts = [failure.split(" error ")[0].split(" by ")[0] for failure in proof.failures]
    assert texts.count("mlp: in float64 the block differs from its plan") >= 1
    for way in WAYS:
        assert any(
            failure.startswith("mlp: on its inputs the block's error") and failure.endswith(f" on {way}")
            for failure in proof.failures
        )
    assert len(set(proof.failures)) == len(proof.failures)
    assert proof.block_error is not None
    assert proof.block_error > 1e-5
    assert proof.block_ratio is not None
    assert proof.block_ratio > 10.0


def test_without_inputs_the_heads_alone_are_proved() -> None:
    proof = proof_of(whole(weights={"W2": np.ones((8, 4))}), given=[])
    assert proof.passed
    assert (proof.block_error, proof.block_ratio, proof.block_original_error, proof.block_allowed) == (None,) * 4


@pytest.mark.parametrize(
    ("body", "leak"),
    [
        (f"{FIRST} s = Sigmoid(first) h = Mul(y, s) {SECOND}", "s"),  # past the pre-activation
        (f"{FIRST} {SILU} t = Mul(h, x2) {SECOND.replace('(h,', '(t,')}", "x2"),  # another input of the model
    ],
    ids=["region", "block"],
)
def test_heads_that_read_something_else_are_not_tried(body: str, leak: str) -> None:
    """However close their numbers come: the leak is the fault."""
    model = text_model(body, inputs="float[batch, tokens, 4] x, float x2")
    proof = proof_of(Side.of(LoadedModel(model, None, None, (), 0)))
    assert proof.failures == (f"mlp: its heads read '{leak}', which the original's block does not",)
    assert not proof.passed
    assert (proof.exact_error, proof.block_error, proof.block_ratio) == (None, None, None)
    assert proof.region_error == proof.region_ratio == np.inf


def test_what_does_not_run_is_a_failure_of_its_block() -> None:
    proof = proof_of(whole(f"{FIRST} s = custom.Unheard(y) h = Mul(y, s) {SECOND}"))
    (failure,) = proof.failures
    assert failure.startswith("mlp: ")
    assert "\n" not in failure
    assert proof.region_error == np.inf


def test_what_a_block_needs() -> None:
    assert block_needs(whole(), BLOCK) == ("x",)
    shaped = whole(
        f"n = Shape(x) {FIRST} {SILU} w = Expand(h, n2) {SECOND}".replace("n2", "n").replace("(h, W2)", "(w, W2)")
    )
    assert set(block_needs(shaped, replace(BLOCK, block_inputs=("first",)))) == {"first", "n"}
    two = replace(BLOCK, block_inputs=("y",), block_outputs=("second",))
    assert block_needs(whole(), two) == ("y",)


@pytest.mark.parametrize(
    ("original", "made", "said"),
    [
        ("1.0", "1.0", None),
        ("1.0", "1.01", "in float64 the heads differ from their program by"),
        ("3.0", "1.0", "the head program's error exceeds the certified 0.5 by"),
    ],
)
def test_an_overflow_in_one_place_hides_nothing_in_another(original: str, made: str, said: str | None) -> None:
    """Heads of a block that was replaced as a whole, at pre-activations whose exponential is beyond float64."""
    shape = "float[batch, tokens, 4]"
    wide = "float[batch, tokens, 8]"

    def part(body: str, given: str, found: str) -> LoadedModel:
        return LoadedModel(text_model(body, inputs=given, outputs=found), None, None, (), 0)

    claimed = replace(BLOCK, planned=Exp(), heads="heads", max_error=0.5, rounding=1.0)
    x = np.zeros((1, 3, 4), np.float32)
    x[0, 1], x[0, 2] = 0.1, 1e3
    heads = Heads(
        before=part(
            f"{FIRST} e = Exp(y) h = Mul(e, ${original}) {SECOND}", f"{shape} x", f"{wide} y, {wide} h, {shape} out"
        ),
        front=part(f"{FIRST} e = Exp(y) heads = Mul(e, ${made})", f"{shape} x", f"{wide} heads"),
        behind=part(SECOND.replace("(h,", "(heads,"), f"{wide} heads", f"{shape} out"),
        cases=({"x": x},),
    )
    failures = prove_heads(heads, claimed, ()).failures
    if said is None:
        assert failures == ()
    else:
        assert any(failure.startswith(f"mlp: {said}") for failure in failures)


NINE = "m = MatMul(h, W2) n = Size(x) k = Cast<to=1>(n) d = Sub(k, $36.0) g = Abs(d) q = Min(g, $1.0) "
"""`q` is 0 for 36 numbers, as of one sequence of 9 tokens, and 1 for any other size."""


def test_every_position_slot_is_tried() -> None:
    """The block is off for one sequence of its maximum length alone; the first way is enough to see that."""
    second = NINE + "p = Sub($1.0, q) e = Mul(p, $0.001) s2 = Add(m, e) out = Add(s2, b2)"
    wrong = whole(f"{FIRST} {SILU} {second}")
    assert proof_of(wrong).passed
    original, nine = whole(), replace(BLOCK, longest=9)
    (failure,) = prove_block(block_item(original, wrong, original, nine, inputs(), WAYS)).failures
    assert failure.startswith("mlp: on 9 tokens the block's error 0.001 in channel ")
    assert failure.endswith(f" on {WAYS[0]}")
    assert prove_block(block_item(original, whole(), original, nine, inputs(), WAYS)).passed


def test_what_a_plan_rounds_is_granted_on_every_slot() -> None:
    """As for other inputs: the plan's own rounding is no error of the block."""
    second = NINE + "p = Sub($1.0, q) e = Mul(p, $0.001) s2 = Add(m, e) out = Add(s2, b2)"
    original, nine = whole(), replace(BLOCK, longest=9, planned=Silu(rounding=0.01))
    planned = planned_side(original, [nine])
    assert prove_block(block_item(original, whole(f"{FIRST} {SILU} {second}"), planned, nine, inputs(), WAYS)).passed


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_variants_need_every_evaluation(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, nine = whole(), replace(BLOCK, longest=9)
    item = block_item(original, whole(weights={"b2": np.ones(4)}), original, nine, inputs(), WAYS)
    cases = [Case("one", each) for each in inputs()]
    assert len(blocks._variants(item, cases)) == 1
    count, wide = iter(range(3)), blocks._wide
    monkeypatch.setattr(blocks, "_wide", lambda *given: None if next(count) == missing else wide(*given))
    assert blocks._variants(item, cases) == []


def test_a_length_that_the_original_refuses_is_not_tried() -> None:
    """Its positions end before the claim's do."""
    body = f"{FIRST.replace('x, W1', 'px, W1').replace('first', 'px = Add(x, five) first', 1)} {SILU} {SECOND}"
    fixed = text_model(body, constants={"five": np.zeros((5, 4))})
    original = Side.of(LoadedModel(fixed, None, None, (), 0))
    other = text_model(body, constants={"five": np.zeros((5, 4)), "b2": values("b2") + 1.0})
    rewritten = Side.of(LoadedModel(other, None, None, (), 0))
    item = block_item(original, rewritten, original, replace(BLOCK, longest=9), inputs()[:1], WAYS)
    assert blocks._variants(item, [Case("five", inputs()[0])]) == []


def test_the_allowance_is_rounding_and_the_largest_certified_error() -> None:
    assert blocks._total(1.0, np.array([0.25, 0.5])) == 1.5
    assert blocks._total(1.0, np.zeros(0)) == 1.0


def test_small_chunks_are_tried_where_the_longest_sequence_is_not() -> None:
    """The original takes two sequences only; the block is off where the bound on its patterns is lowered."""
    pair = f"px = Reshape(x, pair) {FIRST.replace('x, W1', 'px, W1')} {SILU}"
    constants = {
        "pair": onnx.numpy_helper.from_array(np.array([2, -1, 4]), "pair"),
        "limit": onnx.numpy_helper.from_array(np.array([2**20]), "limit"),
    }
    lowered = "f = Cast<to=1>(limit) d = Sub($1048576.0, f) e = Mul(d, $0.000001)"
    second = f"m = MatMul(h, W2) {lowered} n = Add(m, e) out = Add(n, b2)"
    original, rewritten = (
        Side.of(LoadedModel(text_model(f"{pair} {body}", constants=constants), None, None, (), 0))
        for body in (SECOND, second)
    )
    claimed = replace(BLOCK, longest=9, chunk_size="limit", neurons=8, bias_tokens=1)
    given = [{"x": np.random.default_rng(7).normal(size=(2, tokens, 4)).astype(np.float32)} for tokens in (5, 7)]
    failures = prove_block(block_item(original, rewritten, original, claimed, given, WAYS)).failures
    assert [failure.partition(" the block's error ")[0] for failure in failures] == [
        "mlp: in chunks of 3 heads",
        "mlp: in chunks of 6 queries",
    ]


def test_small_outputs_have_small_roundings() -> None:
    """Ratios are over the rounding at the output's own scale, of a thousandth here, and not at 1."""
    tiny = {name: values(name) * (2.0**-10 - 1.0) for name in ("W2", "b2")}
    original = whole(weights=tiny)
    proof = prove_block(block_item(original, whole(weights=tiny), original, BLOCK, inputs(), WAYS))
    assert proof.passed
    assert proof.block_ratio is not None
    assert proof.block_ratio > 0.1
