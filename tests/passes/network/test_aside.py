"""Convolutions and scores by relative position: they see the tokens alone, and bias tokens stay out of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from passes.network import planning
from passes.network.carry import carry
from passes.options import FormOptions, Options
from passes.plan import Plan, apply, make_plan
from rewriter import ExitStatus, rewrite
from tests.attention import Array
from tests.conftest import slow
from tests.oracle import evaluate, tensors
from tests.oracle_operators import softmax
from tests.textmodels import text_model, values

NETWORK = Options(form="masked", forms=FormOptions(bias_token="network"))
LONGEST = 12
EPSILON = float(np.float32(1e-5))

COUNT = "n1 = Shape<start = 1, end = 2>(x) n = Squeeze(n1) b1d = Shape<start = 0, end = 1>(x)"
PLACES = """
  i = Range(i0, n, i1) column = Unsqueeze(i, one) row = Unsqueeze(i, nought) distance = Sub(column, row)
  wide = Concat<axis = 0>(b1d, n1, n1)
"""
SHIFTED = """
  start = Sub(longest, n1) last0 = Add(longest, n1) last = Sub(last0, one) near = Slice(places, start, last, one)
  nt = Transpose<perm = [0, 2, 1]>(near) table = MatMul(q, nt) more = Pad(table, pads)
  twice = Add(n1, n1) tall = Concat<axis = 0>(b1d, twice, n1) turned = Reshape(more, tall)
  lower = Slice(turned, one, infinite, one) less = Sub(twice, one) flat = Concat<axis = 0>(b1d, n1, less)
  back = Reshape(lower, flat) relative = Slice(back, nought, n1, two)
"""
"""As in Transformer-XL and Conformer: 2 N - 1 scores by distance, shifted by one from each token to the next."""
LOOKED_UP = """
  tall = Concat<axis = 0>(b1d, one, one) tiled = Tile(buckets, tall) bt = Transpose<perm = [0, 2, 1]>(tiled)
  table = MatMul(q, bt) key_table = MatMul(k, bt)
  near = Add(distance, i4) bucket = Clip(near, i0, i7) index = Expand(bucket, wide)
  forward = GatherElements<axis = 2>(table, index)
  far = Neg(distance) near2 = Add(far, i4) bucket2 = Clip(near2, i0, i7) index2 = Expand(bucket2, wide)
  turned = GatherElements<axis = 2>(key_table, index2) backward = Transpose<perm = [0, 2, 1]>(turned)
  relative = Add(forward, backward)
"""
"""As in DeBERTa: content to position, and position to content."""
HEADS = """
  q0 = MatMul(t, Wq) q = Add(q0, bq) k = MatMul(t, Wk) v = MatMul(t, Wv)
"""
ATTEND = """
  kt = Transpose<perm = [0, 2, 1]>(k) content = MatMul(q, kt) scores = Add(content, relative)
  pattern = Softmax<axis = -1>(scores) mixed = MatMul(pattern, v) a1 = Add(t, mixed)
"""
CONVOLVED = """
  normed = LayerNormalization<axis = -1>(a1, gain, shift) channels = Transpose<perm = [0, 2, 1]>(normed)
  pointwise = Conv<kernel_shape = [1]>(channels, K0, kb) gate = Sigmoid(pointwise) gated = Mul(pointwise, gate)
  depthwise = Conv<kernel_shape = [3], pads = [1, 1], group = 4>(gated, Kd, kb) bent = Tanh(depthwise)
  rows = Transpose<perm = [0, 2, 1]>(bent) s1 = Add(a1, rows)
"""
"""As in Conformer. The norm's bias and that of the pointwise convolution make the rows of bias tokens other than 0."""
ALONE = "s1 = Identity(a1)"
MLP = """
  first = MatMul(s1, W1) y = Add(first, b1) g = Sigmoid(y) h = Mul(y, g) second = MatMul(h, W2)
  out = Add(second, s1)
"""
WAYS = {
    "shifted": SHIFTED + ATTEND + ALONE,
    "looked-up": LOOKED_UP + ATTEND + ALONE,
    "convolved": "relative = Identity(i0f)" + ATTEND + CONVOLVED,
    "all": SHIFTED + ATTEND + CONVOLVED,
}

RNG = np.random.default_rng(0)
WEIGHTS: dict[str, Any] = {
    **{name: RNG.normal(size=(4, 4)) for name in ("Wq", "Wk", "Wv")},
    "bq": RNG.normal(size=4),
    "places": RNG.normal(size=(1, 2 * LONGEST - 1, 4)),
    "buckets": RNG.normal(size=(1, 8, 4)),
    "K0": RNG.normal(size=(4, 4, 1)),
    "Kd": RNG.normal(size=(4, 1, 3)),
    **{name: RNG.normal(size=4) for name in ("kb", "gain", "shift")},
    "start_of_stream": np.zeros((1, 1, 4)),
    "i0f": np.asarray(0.0),
}
INTEGERS: dict[str, Any] = {
    **{f"i{number}": number for number in (0, 1, 4, 7)},
    "nought": [0],
    "one": [1],
    "two": [2],
    "longest": [LONGEST],
    "pads": [0, 0, 1, 0, 0, 0],
    "infinite": [2**62],
}


def model_of(way: str, mlp: str = MLP) -> onnx.ModelProto:
    integers = {name: onnx.numpy_helper.from_array(np.array(value), name) for name, value in INTEGERS.items()}
    model = text_model(
        f"{COUNT} {PLACES} t = Add(x, start_of_stream) {HEADS} {way} {mlp}",
        inputs="float[batch, tokens, 4] x" + (", float[batch, others, 3] z" if "Wz" in way else ""),
        opset=17,
        constants={**integers, **WEIGHTS},
    )
    read = {name for node in model.graph.node for name in node.input}
    kept = [each for each in model.graph.initializer if each.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def fed(batch: int, tokens: int) -> dict[str, Array]:
    rng = np.random.default_rng(31 * batch + tokens)
    return {"x": rng.normal(size=(batch, tokens, 4)).astype(np.float32)}


def weight(name: str) -> Array:
    return np.asarray(WEIGHTS[name], np.float32).astype(np.float64)


def by_distance(kind: str, q: Array, k: Array) -> Array:
    """Scores by relative position, token by token."""
    count = len(q)
    scores = np.zeros((count, count))
    for i in range(count):
        for j in range(count):
            if kind in ("shifted", "all"):
                scores[i, j] = q[i] @ weight("places")[0, LONGEST - 1 + j - i]
            if kind == "looked-up":
                scores[i, j] = q[i] @ weight("buckets")[0, np.clip(i - j + 4, 0, 7)]
                scores[i, j] += k[j] @ weight("buckets")[0, np.clip(i - j + 4, 0, 7)]
    return scores


def convolved(x: Array) -> Array:
    centred = x - x.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPSILON) * weight("gain") + weight("shift")
    point = normed @ weight("K0")[:, :, 0].T + weight("kb")
    gated = np.pad(point / (1.0 + np.exp(-point)), [(1, 1), (0, 0)])
    kernel = weight("Kd")[:, 0]
    return np.stack([np.tanh((gated[i : i + 3] * kernel.T).sum(axis=0) + weight("kb")) for i in range(len(x))])


def expected(kind: str, x: Array) -> Array:
    """One sequence [tokens, 4] through the network, written down from the papers' formulas."""
    q, k, v = x @ weight("Wq") + weight("bq"), x @ weight("Wk"), x @ weight("Wv")
    x = x + softmax(q @ k.T + by_distance(kind, q, k), -1) @ v
    if kind in ("convolved", "all"):
        x = x + convolved(x)
    w1, bias, w2 = (values(name).astype(np.float32).astype(np.float64) for name in ("W1", "b1", "W2"))
    y = x @ w1 + bias
    return np.asarray(y / (1.0 + np.exp(-y)) @ w2 + x)


def planned(way: str) -> Plan:
    plan = make_plan(model_of(WAYS[way]), NETWORK)
    assert len(plan.conversions) == 1, plan.left
    return plan


@pytest.mark.parametrize("way", WAYS)
def test_the_network_is_that_of_the_formulas(way: str) -> None:
    """The largest error measured is 1.4e-14, over outputs of up to 56."""
    result = apply(planned(way))
    onnx.checker.check_model(result)
    for batch, tokens in ((1, 1), (1, 2), (2, 5), (3, LONGEST)):
        feeds = fed(batch, tokens)
        found = evaluate(result, feeds)["out"]
        assert found.shape == (batch, tokens, 4)
        wanted = np.array([expected(way, row) for row in feeds["x"].astype(np.float64)])
        np.testing.assert_allclose(found, wanted, rtol=0.0, atol=1e-13)


def test_scores_and_stream_have_the_bias_tokens() -> None:
    """Only the table of positions and the convolution are without them."""
    made = tensors(apply(planned("all")), fed(2, 5))
    assert {name: made[name].shape[1:] for name in ("table", "relative", "depthwise")} == {
        "table": (5, 9),
        "relative": (5, 5),
        "depthwise": (4, 5),
    }
    assert {name: made[name].shape[1:] for name in ("content", "scores", "pattern", "pointwise", "s1")} == {
        **dict.fromkeys(("content", "scores", "pattern"), (6, 6)),
        "pointwise": (4, 6),
        "s1": (6, 4),
    }
    assert not made["pattern"][:, :5, 5:].any()
    assert made["pointwise"][:, :, 5:].any(), "a bias token that is 0 everywhere would be seen by nobody"


def test_the_report_names_them() -> None:
    report = rewrite(model_of(WAYS["all"]), form="masked", bias_token="network", dry_run=True)
    (note,) = [note for note in report.notes if "see the tokens alone" in note]
    assert "MatMul" in note
    assert "Conv" in note


@slow
@pytest.mark.parametrize("way", WAYS)
def test_the_proof_passes(way: str) -> None:
    report = rewrite(model_of(WAYS[way]), form="masked", bias_token="network")
    assert report.exit_status is ExitStatus.CONVERTED, report.validation and report.validation.failures


# -- planted bugs ------------------------------------------------------------------------------------------------


def _maker(model: onnx.ModelProto, tensor: str) -> onnx.NodeProto:
    maker: onnx.NodeProto = next(node for node in model.graph.node if tensor in node.output)
    return maker


def _reads(model: onnx.ModelProto, tensor: str) -> onnx.NodeProto:
    """The Slice that leaves the bias tokens out of the data of the node that makes `tensor`."""
    cut = _maker(model, _maker(model, tensor).input[0])
    assert cut.op_type == "Slice"
    return cut


def first_row_dropped(model: onnx.ModelProto, tensor: str) -> None:
    """The first row is left out instead of the bias token's."""
    cut = _reads(model, tensor)
    cut.input[1] = "sabotage/first"
    cut.input[2] = "bias_token/rows"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "sabotage/first"))


def bias_row_mixed_in(model: onnx.ModelProto, tensor: str) -> None:
    """The convolution sees the bias token behind the last token; its result is cut instead."""
    node, cut = _maker(model, tensor), _reads(model, tensor)
    nodes = [each for each in model.graph.node if each is not cut]
    node.input[0], cut.input[0] = cut.input[0], "sabotage/mixed"
    node.output[0], cut.output[0] = "sabotage/mixed", tensor
    copies = [onnx.NodeProto() for _ in range(len(nodes) + 1)]
    place = next(index for index, each in enumerate(nodes) if each is node) + 1
    for copy, each in zip(copies, [*nodes[:place], cut, *nodes[place:]], strict=True):
        copy.CopyFrom(each)
    del model.graph.node[:]
    model.graph.node.extend(copies)


@pytest.mark.parametrize(
    ("bug", "tensor"),
    [
        (first_row_dropped, "table"),
        pytest.param(first_row_dropped, "depthwise", marks=slow),
        (bias_row_mixed_in, "depthwise"),
    ],
)
def test_a_wrong_row_fails_the_proof(
    bug: Callable[[onnx.ModelProto, str], None], tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*arguments: Any) -> onnx.ModelProto:
        model = carry(*arguments)
        bug(model, tensor)
        onnx.checker.check_model(model)
        return model

    monkeypatch.setattr(planning, "carry", planted)
    report = rewrite(model_of(WAYS["all"]), form="masked", bias_token="network")
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.rewritten is None


# -- refusals ----------------------------------------------------------------------------------------------------

OTHER_KEYS = """
  ck = MatMul(z, Wz) ct = Transpose<perm = [0, 2, 1]>(ck) cq = MatMul(t, Wcq) content = MatMul(cq, ct)
  pattern = Softmax<axis = -1>(content) mixed = MatMul(pattern, ck) written = MatMul(mixed, Wo) s1 = Add(t, written)
"""
"""Attention whose keys are no part of the stream, as in a decoder that reads an encoder."""
STRIDED = """
  channels = Transpose<perm = [0, 2, 1]>(t) half = Conv<kernel_shape = [2], strides = [2]>(channels, Ks)
  content = MatMul(q, half) pattern = Softmax<axis = -1>(content)
  vt = Transpose<perm = [0, 2, 1]>(half) mixed = MatMul(pattern, vt) s1 = Add(t, mixed)
"""
"""Keys and values of every other token, as in pyramid vision transformers."""
FIRST = "relative = Identity(i0f)" + ATTEND
BEHIND = FIRST + CONVOLVED.replace("s1 = Add(a1, rows)", "s1 = Identity(rows)")
JOINED = FIRST + CONVOLVED.replace(
    "rows = Transpose<perm = [0, 2, 1]>(bent)",
    "alone = Transpose<perm = [0, 2, 1]>(bent) joined = Concat<axis = 2>(a1, alone) rows = MatMul(joined, Wj)",
)
REFUSED = (
    (OTHER_KEYS, "its second factor is neither constant nor computed from the stream, so Softmax"),
    (STRIDED, "its second factor is neither constant nor computed from the stream, so Softmax"),
    (BEHIND, "it mixes tokens, and a block reads only what follows from it"),
    (JOINED, "it concatenates the stream with another tensor"),
)


@pytest.mark.parametrize(("way", "reason"), REFUSED, ids=["cross-attention", "strided", "behind", "joined"])
def test_what_is_refused(way: str, reason: str) -> None:
    model = model_of(way)
    rng = np.random.default_rng(1)
    shapes = {"Ks": (4, 4, 2), "Wj": (8, 4), "Wz": (3, 2), "Wcq": (4, 2), "Wo": (2, 4)}
    for name, shape in shapes.items():
        tensor = onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        model.graph.initializer.append(tensor)
    plan = make_plan(model, NETWORK)
    assert not plan.conversions
    assert any(reason in left.miss.reason for left in plan.left), [left.miss.reason for left in plan.left]


def test_form_whole_names_the_operator() -> None:
    whole = Options(form="whole", forms=FormOptions(max_tokens=LONGEST))
    for way, operator in (("shifted", "MatMul"), ("convolved", "Conv")):
        plan = make_plan(model_of(WAYS[way]), whole)
        assert not plan.conversions
        (reason,) = [left.miss.reason for left in plan.left if "cannot be attention only" in left.miss.reason]
        assert operator in reason
