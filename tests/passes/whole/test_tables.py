"""What is added to scores, by value: by positions alone it moves into W_QK, data stays, the rest is refused by name."""

import numpy as np
import onnx
import pytest

from passes.forms.softmax import PREFIX
from passes.options import Options
from passes.plan import Plan, apply, make_plan
from tests.attention import Array
from tests.oracle import evaluate, tensors
from tests.textmodels import integers, text_model

LONGEST = 16

PLACES = """
  shape = Shape(t) count = Gather(shape, one) last = Squeeze(count) i0 = Range(first, last, by)
  row = Unsqueeze(i0, one) column = Unsqueeze(i0, zero)
"""
EARLIER = "earlier = LessOrEqual(column, row)"

MASKS: dict[str, tuple[str, str]] = {
    "causal, added": (f"{EARLIER} allowed = Identity(earlier)", "causal"),
    "sliding window": (
        f"{EARLIER} back = Sub(row, three) near = Greater(column, back) allowed = And(earlier, near)",
        "window",
    ),
    "blocks": ("a = Div(row, three) b = Div(column, three) allowed = Equal(a, b)", "blocks"),
}
ADDED = "low = Where(allowed, nought, lowest) masked = Add(scores, low)"
CHOSEN = "masked = Where(allowed, scores, lowest)"


def expected(kind: str, length: int) -> Array:
    i, j = np.arange(length)[:, None], np.arange(length)
    return np.asarray({"causal": j <= i, "window": (j <= i) & (j > i - 3), "blocks": i // 3 == j // 3}[kind])


def post_norm(mask: str, *, lowest: float = -1e9) -> onnx.ModelProto:
    """A decoder layer with the norms behind its residual additions, over heads of all columns."""
    return text_model(
        f"""
        t = Add(x, p) {PLACES} kt = Transpose<perm = [0, 2, 1]>(t) product = MatMul(t, kt) scores = Mul(product, half)
        {mask} pattern = Softmax<axis = -1>(masked) mixed = MatMul(pattern, t) x0 = Add(t, mixed)
        x1 = LayerNormalization<epsilon = 1e-5>(x0, gain, shift)
        first_1 = MatMul(x1, W1) y = Add(first_1, b1) s = Sigmoid(y) h = Mul(y, s) second = MatMul(h, W2)
        out_0 = Add(second, x1) out = LayerNormalization<epsilon = 1e-5>(out_0, gain, shift)
        """,
        inputs="float[batch, tokens, 4] x, float[batch, 1, tokens] given",
        outputs="float[batch, tokens, 4] out",
        constants={
            "p": np.zeros((1, 1, 4)),
            **integers(zero=[0], one=[1], three=[3], first=0, by=1),
            "half": np.asarray(0.5),
            "nought": np.asarray(0.0),
            "by_head": np.asarray(-0.25),
            "table": np.asarray([0.3, -0.7, 1.1, 0.2]),
            "lowest": np.asarray(lowest),
            "gain": np.linspace(0.5, 1.5, 4),
            "shift": np.linspace(-0.5, 0.5, 4),
        },
    )


def plan_of(model: onnx.ModelProto) -> Plan:
    return make_plan(model, Options(form="whole", max_tokens=LONGEST))


def fed(batch: int, length: int) -> dict[str, Array]:
    rng = np.random.default_rng(length)
    x = 2.0 * rng.normal(size=(batch, length, 4))
    return {"x": x.astype(np.float32), "given": np.zeros((batch, 1, length), np.float32)}


def assert_same(model: onnx.ModelProto, *sizes: tuple[int, int]) -> onnx.ModelProto:
    """The model in form `whole`, which computes the same for these batches and lengths."""
    plan = plan_of(model)
    assert len(plan.conversions) == 1, plan.left
    assert not any("depends on data" in note for note in plan.notes)
    result = apply(plan)
    for batch, length in sizes:
        before, after = (evaluate(each, fed(batch, length))["out"] for each in (model, result))
        np.testing.assert_allclose(after, before, rtol=0.0, atol=2e-14)
    return result


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", [ADDED, CHOSEN], ids=["added", "chosen"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lowest", [-1e9, -np.inf])
def test_masks_by_position_move_into_w_qk(name: str, how: str, lowest: float) -> None:
    made, kind = MASKS[name]
    result = assert_same(post_norm(f"{made} {how}", lowest=lowest), (1, 1), (2, 7), (3, LONGEST))
    assert {node.op_type for node in result.graph.node} & {"LessOrEqual", "Range", "Sigmoid"} == set()
    weight = tensors(result, fed(1, 2))[f"{PREFIX}/W_QK_positions_0"]
    np.testing.assert_array_equal(weight[1:, 1:] == 0.0, expected(kind, LONGEST))


FAR = "gap = Sub(column, row) far = Cast<to = 1>(gap)"
MOVED = {
    "nothing, and heads are kept from bias tokens": "masked = Identity(scores)",
    "a bias by distance, as in ALiBi": f"{FAR} slopes = Mul(far, by_head) masked = Add(scores, slopes)",
    "the same, subtracted": f"{FAR} slopes = Mul(far, by_head) masked = Sub(scores, slopes)",
    "a learned table": f"{FAR} i = Clip(gap, first, three) bias = Gather(table, i) masked = Add(scores, bias)",
    "a mask that is scaled": f"{EARLIER} l = Where(earlier, nought, lowest) m = Add(scores, l) masked = Mul(m, half)",
    "a mask under another": f"{EARLIER} m = Where(earlier, scores, lowest) masked = Max(m, lowest)",
    "two masks": f"{EARLIER} m = Where(earlier, scores, lowest) n = Not(earlier) masked = Where(n, lowest, m)",
    "a cap before the mask": f"{EARLIER} c = Tanh(scores) d = Mul(c, half) masked = Where(earlier, d, lowest)",
    "other axes": "m = Unsqueeze(scores, one) masked = Squeeze(m, one)",
    "other axes behind a bias and a mask": (
        f"{FAR} slopes = Mul(far, by_head) m = Add(scores, slopes) n = Unsqueeze(m, one) "
        f"{EARLIER} masked_4 = Where(earlier, n, lowest) masked = Squeeze(masked_4, one)"
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MOVED)
def test_what_positions_add_moves_into_w_qk(name: str) -> None:
    assert_same(post_norm(MOVED[name]), (1, 1), (2, 7), (3, LONGEST))


PADDED = "padding = Greater(given, nought) low = Where(padding, nought, lowest)"
STAYS = {
    "any data": "masked = Add(scores, given)",
    "a mask by data": f"{PADDED} masked = Add(scores, low)",
    "a choice by data": "padding = Greater(given, nought) masked = Where(padding, scores, lowest)",
    "a table and data": f"{FAR} slopes = Mul(far, half) {PADDED} both = Add(slopes, low) masked = Add(scores, both)",
    "the scores again": "masked = Add(scores, scores)",
    "a mask by the length": (
        "from_end = Sub(count, row) near = Less(column, from_end) masked = Where(near, scores, lowest)"
    ),
    "another mask for each sequence": (
        "size = Gather(shape, zero) end = Squeeze(size) n0 = Range(first, end, by) n1 = Unsqueeze(n0, one) "
        "number = Unsqueeze(n1, one) near = LessOrEqual(column, number) masked = Where(near, scores, lowest)"
    ),
    "other axes behind data": f"{FAR} m = Add(scores, given) n = Unsqueeze(m, one) masked = Squeeze(n, one)",
    "other axes behind what all of a batch share": (
        "shared = ReduceMax<keepdims = 1>(given) both = Add(shared, by_head) m = Add(scores, both) "
        "n = Unsqueeze(m, one) o = Add(n, half) masked = Squeeze(o, one)"
    ),
}

WHY = {"a mask by the length": "depends on the length", "another mask for each sequence": "differs between sequences"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("lowest", [-1e9, -np.inf])
@pytest.mark.parametrize("name", STAYS)
def test_what_depends_on_data_stays_and_is_named(name: str, lowest: float) -> None:
    model = post_norm(STAYS[name], lowest=lowest)
    plan = plan_of(model)
    assert any(f"{WHY.get(name, 'depends on data')} and stays an addition" in note for note in plan.notes), plan.left
    given = fed(2, 7)
    given["given"] = np.asarray([[[1, 1, 1, 1, 1, 0, 0]], [[0, 1, 1, 0, 1, 1, 1]]], np.float32)
    if "choice" in name and lowest > -np.inf:  # all keys of a token weigh the same then
        given["given"][1] = 0.0
    before, after = (evaluate(each, given)["out"] for each in (model, apply(plan)))
    np.testing.assert_allclose(after, before, rtol=0.0, atol=2e-14)


REFUSED: tuple[tuple[str, str], ...] = (
    ("masked = Sigmoid(scores)", "Sigmoid 'masked': its scores are not a product of queries and keys"),
    (
        "later = Less(row, column) masked = Where(later, scores, lowest)",
        "Where 'masked': what it adds to the scores is not finite, or -infinity for all keys of a token",
    ),
    (
        f"{PADDED} added = Add(scores, low) masked = Mul(added, half)",
        "Mul 'masked': it changes the scores in a way that W_QK cannot hold",
    ),
    ("masked = Mul(scores, given)", "Mul 'masked': it changes the scores in a way that W_QK cannot hold"),
)


@pytest.mark.parametrize(("mask", "reason"), REFUSED, ids=[entry[1] for entry in REFUSED])
def test_what_w_qk_cannot_hold_is_refused_by_its_name(mask: str, reason: str) -> None:
    model = post_norm(mask, lowest=-np.inf if "infinity" in reason else -1e9)
    for node in model.graph.node:
        node.name = node.output[0]
    plan = plan_of(model)
    assert not plan.conversions
    assert any(reason in left.miss.reason for left in plan.left), plan.left
    assert all("use form masked" in left.miss.reason for left in plan.left)


@pytest.mark.parametrize("lowest", [-1e9, -10000.0, float(np.finfo(np.float32).min), -1e38])
def test_tokens_that_may_attend_to_nothing_get_what_the_original_gives_them(lowest: float) -> None:
    """Padding on the left of a causal sequence: all scores are lowered, and softmax weighs what remains."""
    made = (
        f"{EARLIER} padding = Greater(given, nought) allowed = And(earlier, padding) "
        "low = Where(allowed, nought, lowest) masked = Add(scores, low)"
    )
    model = post_norm(made, lowest=lowest)
    plan = plan_of(model)
    assert any("'low' depends on data and stays" in note for note in plan.notes), plan.left
    result = apply(plan)
    given = fed(3, 9)
    given["given"] = np.ones((3, 1, 9), np.float32)
    given["given"][1, 0, :4] = given["given"][2, 0, -3:] = 0.0
    before, after = (evaluate(each, given)["out"] for each in (model, result))
    np.testing.assert_allclose(after, before, rtol=0.0, atol=1e-12 if lowest > -1e6 else 2e-14)
