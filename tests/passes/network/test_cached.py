"""Bias tokens in a decoder with a cache: its keys come first, and what it returns has no rows of bias tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from passes.options import FormOptions, Options
from passes.plan import Plan, apply, make_plan
from rewriter import ExitStatus, rewrite
from tests.attention import Array
from tests.oracle import evaluate, tensors
from tests.textmodels import text_model

NETWORK = Options(form="masked", forms=FormOptions(bias_token="network"))
WHOLE = Options(form="whole", forms=FormOptions(max_tokens=16))

MASK = """
  new = Shape<start = 1, end = 2>(x) old = Shape<start = 2, end = 3>(past_k) all = Add(new, old)
  n = Squeeze(new) p = Squeeze(old) total = Squeeze(all)
  rows0 = Range(i0, n, i1) rows1 = Add(rows0, p) rows = Unsqueeze(rows1, one) columns = Range(i0, total, i1)
  earlier = LessOrEqual(columns, rows) low = Where(earlier, nought, lowest)
"""
HEADS = """
  q1 = MatMul(t, Wq) q2 = Reshape(q1, split) q = Transpose<perm = [0, 2, 1, 3]>(q2)
  k1 = MatMul(t, Wk) k2 = Reshape(k1, split) k3 = Transpose<perm = [0, 2, 1, 3]>(k2)
  v1 = MatMul(t, Wv) v2 = Reshape(v1, split) v3 = Transpose<perm = [0, 2, 1, 3]>(v2)
"""
CACHE = "k = Concat<axis = 2>(past_k, k3) v = Concat<axis = -2>(past_v, v3)"
ATTEND = """
  kt = Transpose<perm = [0, 1, 3, 2]>(k) product = MatMul(q, kt) scores = Mul(product, half) masked = Add(scores, low)
  pattern = Softmax<axis = -1>(masked) mixed = MatMul(pattern, v) back = Transpose<perm = [0, 2, 1, 3]>(mixed)
  z = Reshape(back, join) written = MatMul(z, Wo) s1 = Add(written, t)
"""
MLP = """
  first_1 = MatMul(s1, W1) y = Add(first_1, b1) g = Sigmoid(y) h = Mul(y, g) second = MatMul(h, W2)
  out = Add(second, s1)
"""


def decoder(cache: str = CACHE, attend: str = ATTEND) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    integers: dict[str, Any] = {"split": [0, 0, 2, 2], "join": [0, 0, 4], "one": [1], "i0": 0, "i1": 1}
    return text_model(
        f"t = Add(x, place) {MASK} {HEADS} {cache} {attend} {MLP}",
        inputs="float[batch, tokens, 4] x, float[batch, 2, past, 2] past_k, float[batch, 2, past, 2] past_v",
        outputs="float[batch, tokens, 4] out, float[batch, 2, total, 2] k, float[batch, 2, total, 2] v",
        opset=17,
        constants={
            **{name: onnx.numpy_helper.from_array(np.array(value), name) for name, value in integers.items()},
            **{name: rng.normal(size=(4, 4)) for name in ("Wq", "Wk", "Wv", "Wo")},
            "place": np.zeros((1, 1, 4)),
            "half": np.asarray(0.5),
            "nought": np.asarray(0.0),
            "lowest": np.asarray(-1e9),
        },
    )


def fed(batch: int, tokens: int, past: int) -> dict[str, Array]:
    rng = np.random.default_rng(7 * tokens + past)
    shapes = {"x": (batch, tokens, 4), "past_k": (batch, 2, past, 2), "past_v": (batch, 2, past, 2)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def planned(model: onnx.ModelProto) -> Plan:
    plan = make_plan(model, NETWORK)
    assert len(plan.conversions) == 1, plan.left
    return plan


SIZES = [(1, 1, 0), (2, 5, 0), (1, 1, 6), (3, 4, 5), (2, 1, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_the_cache_are_those_of_the_original(sizes: tuple[int, int, int]) -> None:
    model = decoder()
    result = apply(planned(model))
    onnx.checker.check_model(result)
    expected, found = (evaluate(each, fed(*sizes)) for each in (model, result))
    assert list(found) == ["out", "k", "v"]
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0.0, atol=1e-13, err_msg=name)


def test_no_token_attends_to_a_bias_token() -> None:
    model = decoder()
    batch, tokens, past = 2, 3, 4
    made = tensors(apply(planned(model)), fed(batch, tokens, past))
    expected = tensors(model, fed(batch, tokens, past))["pattern"]
    pattern = made["pattern"]
    assert pattern.shape == (batch, 2, tokens + 1, past + tokens + 1)
    np.testing.assert_allclose(pattern[:, :, :-1, :-1], expected, rtol=0.0, atol=1e-15)
    assert not pattern[:, :, :-1, -1].any()
    np.testing.assert_array_equal(pattern[:, :, -1], np.broadcast_to(np.eye(8)[-1], (batch, 2, 8)))


def test_the_proof_passes() -> None:
    report = rewrite(decoder(), form="masked", bias_token="network")
    assert report.exit_status is ExitStatus.CONVERTED, report.validation and report.validation.failures


BEHIND = "k = Concat<axis = 2>(k3, past_k) v = Concat<axis = -2>(v3, past_v)"
REPEATED = ATTEND.replace(
    "kt = Transpose<perm = [0, 1, 3, 2]>(k)", "ke = Expand(k, wide) kt = Transpose<perm = [0, 1, 3, 2]>(ke)"
)

LONGER = ATTEND.replace("s1 = Add(written, t)", "s0 = Add(written, t) s1 = Concat<axis = 1>(more, s0)")


def test_what_is_refused() -> None:
    model = decoder(attend=LONGER)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 1, 4), np.float32), "more"))
    (left,) = make_plan(model, NETWORK).left
    assert "other rows are put in front of the stream that 's1' is" in left.miss.reason
    mixed = ATTEND.replace("MatMul(pattern, v)", "MatMul(pattern, v3)")
    (left,) = make_plan(decoder(attend=mixed), NETWORK).left
    assert "its pattern is over other keys than its values" in left.miss.reason
    (left,) = make_plan(decoder(BEHIND), NETWORK).left
    assert "it appends tokens" in left.miss.reason
    model = decoder(attend=REPEATED)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1, 1, 1]), "wide"))
    (left,) = make_plan(model, NETWORK).left
    assert "it repeats the keys of a cache" in left.miss.reason
    (left,) = make_plan(decoder(), WHOLE).left
    assert "its keys begin with those of a cache, which have no column for their positions" in left.miss.reason
