from typing import Any

import numpy as np
import pytest

from rewriter.evaluate.arithmetic import Unsupported
from tests.rewriter.evaluate.single import (
    assert_same_law,
    drawn,
    in_field,
    in_floats,
    ints,
    settings,
    single,
    text_model,
)

MICROSOFT = {"domain": "com.microsoft", "without": "onnx"}
IDS, KINDS = np.array([[1, 4, 0], [2, 2, 3]], np.int32), np.array([[0, 1, 1], [1, 0, 0]], np.int32)
POSITIVE = np.array([0.5, 1, 2, 0.25], np.float32)
SHAPE, OF_OLD = (2, 3, 4), {"opset": 11, "without": "onnx"}

RATIONAL = [
    ("ReduceSum", [SHAPE, ints(-1, 0)], {}),
    ("ReduceSum", [SHAPE, ints(1)], {"keepdims": 0}),
    ("ReduceSum", [SHAPE], {"axes": [1], "opset": 11, "without": "float64"}),
    ("ReduceSum", [SHAPE, ints()], {"noop_with_empty_axes": 1}),
    ("ReduceMean", [(2, 4, 4), ints(1, 2)], {}),
    ("ReduceMean", [(2, 4)], {}),
    ("ReduceSumSquare", [SHAPE, ints(2)], {}),
    ("ReduceProd", [(2, 5), ints(1)], {}),
    ("ReduceProd", [(2, 3), ints(0, 1)], {"keepdims": 0}),
    ("GlobalAveragePool", [(2, 3, 2, 4)], {}),
    *(
        ("CumSum", [SHAPE, np.array(axis)], {"reverse": reverse, "exclusive": exclusive})
        for axis, reverse, exclusive in ((1, 0, 0), (-1, 1, 0), (0, 0, 1), (-2, 1, 1))
    ),
]
OTHERS = [
    ("ReduceMax", [SHAPE, ints(0, 2)], {}),
    ("ReduceMax", [SHAPE], {"axes": [-1], "keepdims": 0, "opset": 13}),
    ("ReduceMin", [SHAPE, ints(1)], {"keepdims": 0}),
    ("ReduceL1", [SHAPE, ints(-1)], {}),
    ("ReduceL2", [SHAPE, ints(0, 1)], {}),
    ("ReduceLogSum", [np.arange(1, 25, dtype=np.float32).reshape(SHAPE), ints(1)], {}),
    ("ReduceLogSumExp", [SHAPE, ints(1, 2)], {"keepdims": 0}),
    ("ReduceLogSumExp", [np.array([[900, 899], [-900, -901]], np.float32), ints(1)], {"without": "float64"}),
    ("GlobalMaxPool", [(2, 3, 2, 4)], {}),
    *(("Softmax", [SHAPE], given) for given in ({}, {"axis": 1, "opset": 13}, OF_OLD, OF_OLD | {"axis": -1})),
    *(("LogSoftmax", [SHAPE], given) for given in ({"axis": 0}, OF_OLD)),
    ("ArgMax", [SHAPE], {"axis": 1}),
    ("ArgMax", [np.array([[1, 3, 3], [2, 2, 0]], np.float32)], {"axis": 1, "select_last_index": 1, "keepdims": 0}),
    ("ArgMin", [np.array([[1, 1, 3], [2, 2, 2]], np.float32)], {"axis": -1, "keepdims": 0}),
    ("TopK", [(2, 7), ints(3)], {"outputs": 2}),
    ("TopK", [(5, 2), ints(2)], {"outputs": 2, "axis": 0, "largest": 0}),
    ("TopK", [np.array([[1, 3, 3, 3], [2, 2, 0, 2]], np.float32), ints(2)], {"outputs": 2}),
    ("TopK", [(2, 7)], {"outputs": 2, "k": 3, "opset": 9}),
    ("LayerNormalization", [SHAPE, (4,), (4,)], {"outputs": 3, "without": "float64"}),
    ("LayerNormalization", [SHAPE, (3, 4)], {"axis": 1, "epsilon": 0.1, "without": "float64"}),
    ("SimplifiedLayerNormalization", [SHAPE, (4,)], {"outputs": 2, "without": "onnx"}),
    ("RMSNormalization", [SHAPE, (3, 4)], {"axis": -2, "opset": 23, "without": "float64"}),
    ("SkipLayerNormalization", [SHAPE, SHAPE, (4,), (4,), (4,)], MICROSOFT | {"epsilon": 0.1, "outputs": 4}),
    ("SkipLayerNormalization", [SHAPE, (3, 4), (4,)], MICROSOFT),
    ("SkipSimplifiedLayerNormalization", [SHAPE, SHAPE, (4,), (4,)], MICROSOFT | {"epsilon": 1e-5}),
    ("EmbedLayerNormalization", [IDS, KINDS, (5, 4), (6, 4), (2, 4), (4,), (4,)], MICROSOFT | {"outputs": 2}),
    ("EmbedLayerNormalization", [IDS, None, (5, 4), (6, 4), None, (4,), (4,), None, IDS],
        MICROSOFT | {"outputs": 3, "epsilon": 0.5}),
    ("EmbedLayerNormalization", [IDS, KINDS, (5, 4), (6, 4), (2, 4), (4,), (4,), KINDS], MICROSOFT | {"outputs": 2}),
    ("InstanceNormalization", [(2, 3, 2, 4), (3,), (3,)], {"without": "float64"}),
    ("GroupNormalization", [(2, 6, 3), (6,), (6,)], {"num_groups": 2, "without": "float64"}),
    ("BatchNormalization", [(2, 4, 3), (4,), (4,), (4,), POSITIVE], {"without": "float64"}),
    ("MeanVarianceNormalization", [(2, 3, 2, 4)], {"without": "float64"}),
    ("MeanVarianceNormalization", [(2, 3, 4)], {"axes": [1], "without": "onnxruntime float64"}),
]  # fmt: skip


LAWS = {  # beside the definitions of `test_defined_rows.py`
    "Softmax": ("y = Softmax(x)", "e = Exp(x) s = ReduceSum(e, last) y = Div(e, s)"),
    "Softmax, shifted over more": (
        "y = Softmax(x)",
        "m = ReduceMax(x) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last) y = Div(e, s)"),
    "Softmax of old": ("y = Softmax <axis = 0> (x)", "t = Transpose(x) s = Softmax(t) y = Transpose(s)"),
    "Softmax with a mask": (
        "m = Add(x, low) y = Softmax(m)",
        "a = Add(x, low) m = ReduceMax(a, last) d = Sub(a, m) e = Exp(d) s = ReduceSum(e, last) y = Div(e, s)"),
    "Softmax with a mask by Where": (
        "m = Add(x, low) y = Softmax(m)",
        "k = Equal(low, none) m = Where(k, x, low) y = Softmax(m)"),
    "a sum over no axis": (
        "e = Exp(x) s = ReduceSum <noop_with_empty_axes = 1> (e) l = Log(s) y = Exp(l)",
        "e = Exp(x) t = Identity(e) l = Log(t) y = Exp(l)"),
    "ReduceLogSumExp, shifted": (
        "y = ReduceLogSumExp(x, last)",
        "m = ReduceMax(x, last) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last) l = Log(s) y = Add(l, m)"),
    "a row that is masked, shifted": (
        "r = Unsqueeze(low, last) t = Transpose(x) m = Add(t, r) y = Softmax(m)",
        "r = Unsqueeze(low, last) t = Transpose(x) a = Add(t, r) m = ReduceMax(a, last) d = Sub(a, m) e = Exp(d)"
        " s = ReduceSum(e, last) y = Div(e, s)"),
    "an offset of every entry": ("m = Add(x, all) y = Softmax(m)", "y = Softmax(x)"),
    "a row that is masked": (
        "r = Unsqueeze(low, last) t = Transpose(x) m = Add(t, r) y = Softmax(m)",
        "k = Equal(low, none) r = Unsqueeze(k, last) t = Transpose(x) z = Sub(t, t) m = Where(r, t, z) y = Softmax(m)"),
    "a number for every entry": ("m = Add(x, low_all) y = Softmax(m)", "y = Softmax(x)"),
    "two masks": ("m = Add(x, low) n = Add(m, low) y = Softmax(n)", "m = Add(x, low) y = Softmax(m)"),
    "LogSoftmax by the sum": (
        "y = LogSoftmax(x)",
        "m = ReduceMax(x, last) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last) l = Log(s) y = Sub(d, l)"),
    "LogSoftmax by ReduceLogSumExp": ("y = LogSoftmax(x)", "l = ReduceLogSumExp(x, last) y = Sub(x, l)"),
    "ReduceMean": ("y = ReduceMean(x, last)", "s = ReduceSum(x, last) y = Div(s, four)"),
    "ReduceMax": ("a = ReduceMax(x, last) y = ReduceMax(a, first)", "y = ReduceMax(x)"),
    "ReduceMax by TopK": ("y = ReduceMax(x, last)", "y, i = TopK(x, one)"),
    "ReduceMin by ArgMin": (
        "y = ReduceMin(x, last)",
        "i = ArgMin <axis = 1> (x) y = GatherElements <axis = 1> (x, i)"),
    "LayerNormalization, its deviation": (
        "a, m, y = LayerNormalization(x, w, b)",
        "m = ReduceMean(x, last) d = Sub(x, m) q = Mul(d, d) z = ReduceMean(q, last) e = Add(z, eps)"
        " y = Pow(e, minus)"),
    "SimplifiedLayerNormalization": ("y = SimplifiedLayerNormalization(x, w)", "y = RMSNormalization(x, w)"),
    "BatchNormalization": (
        "p = Mul(b, b) y = BatchNormalization(x, w, b, w, p)",
        "p = Mul(b, b) d = Sub(x, w) e = Add(p, eps) r = Sqrt(e) n = Div(d, r) s = Mul(n, w) y = Add(s, b)"),
    "InstanceNormalization": (
        "t = Unsqueeze(x, first) i = InstanceNormalization(t, v, v) y = Squeeze(i, first)",
        "n = LayerNormalization(x, ones) c = Unsqueeze(v, last) s = Mul(n, c) y = Add(s, c)"),
}  # fmt: skip
CONSTANTS = {
    **{name: f"value_float = {each}" for name, each in {"eps": 1e-5, "two": 2.0, "four": 4.0, "minus": -0.5}.items()},
    "none": "value = float[4] {0, 0, 0, 0}",
    "low": "value = float[4] {0, -3e38, -3e38, 0}",
    "all": "value = float[4] {-3e38, -3e38, -3e38, -3e38}",
    "low_all": "value = float[4] {-300, -300, -300, -300}",
    "ones": "value = float[4] {1, 1, 1, 1}",
    "v": "value = float[2] {0.5, 3}",
    **{name: f"value_ints = [{each}]" for name, each in {"first": 0, "last": -1, "one": 1}.items()},
}
GIVEN = " ".join(f"{name} = Constant <{each}> ()" for name, each in CONSTANTS.items())
FEEDS = {
    "x": np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32),
    "w": np.array([0.5, -1, 2, 3], np.float32),
    "b": np.array([1, 0, -0.25, 2], np.float32),
}


def law(nodes: str) -> Any:
    return text_model(f"{GIVEN} {nodes}", "float[2, 4] x, float[4] w, float[4] b", opset=23)


@pytest.mark.parametrize(("one", "other"), LAWS.values(), ids=LAWS)
def test_laws_of_reductions(one: str, other: str) -> None:
    if "all)" in one or "r)" in one:  # in floats the mask swallows the scores
        left, right = (in_field(law(each), FEEDS, snaps=True)[0] for each in (one, other))
        np.testing.assert_array_equal(left, right)
        return
    assert_same_law(law(one), law(other), FEEDS)


DIFFERENT = {
    "a sum over another axis": (
        "y = Softmax(x)",
        "m = ReduceMax(x, last) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, first) y = Div(e, s)"),
    "a maximum along another axis": (
        "y = Softmax(x)",
        "m = ReduceMax(x, first) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last) y = Div(e, s)"),
    "a maximum without its axis": (
        "t = Concat <axis = 0> (x, x) y = Softmax(t)",
        "t = Concat <axis = 0> (x, x) m = ReduceMax <keepdims = 0> (t, last) d = Sub(t, m) e = Exp(d)"
        " s = ReduceSum(e, last) y = Div(e, s)"),
    "a sum without its axis": (
        "t = Concat <axis = 0> (x, x) y = Softmax(t)",
        "t = Concat <axis = 0> (x, x) e = Exp(t) s = ReduceSum <keepdims = 0> (e, last) y = Div(e, s)"),
    "a sum of another exponential": (
        "y = Softmax(x)",
        "e = Exp(x) n = Neg(x) f = Exp(n) s = ReduceSum(f, last) y = Div(e, s)"),
    "another axis": ("y = Softmax(x)", "y = Softmax <axis = 0> (x)"),
    "another mask": ("m = Add(x, low) y = Softmax(m)", "y = Softmax(x)"),
    "a mask the wrong way": ("m = Sub(x, low) y = Softmax(m)", "m = Add(x, low) y = Softmax(m)"),
    "a mask that a bound raises": (
        "c = Clip(x, four) m = Add(c, low) y = Softmax(m)", "m = Add(x, low) c = Clip(m, four) y = Softmax(c)"),
    "no mean": ("y = LayerNormalization(x, w)", "y = RMSNormalization(x, w)"),
    "another epsilon": ("y = LayerNormalization(x, w)", "y = LayerNormalization <epsilon = 1e-6> (x, w)"),
    "the smallest": ("y = ReduceMax(x, last)", "y = ReduceMin(x, last)"),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_functions_differ(one: str, other: str) -> None:
    left, right = (in_field(law(each), FEEDS, snaps=True)[0] for each in (one, other))
    assert left.shape != right.shape or (left != right).any()


def test_a_softmax_spelled_out_does_not_overflow() -> None:
    nodes = "e = Exp(x) s = ReduceSum(e, last) y = Div(e, s)"
    feeds = {**FEEDS, "x": FEEDS["x"] * np.float32(2000)}
    np.testing.assert_allclose(in_floats(law(nodes), feeds)[0].sum(-1), 1)
    logs = in_floats(law("s = Softmax(x) y = Log(s)"), feeds)[0]
    assert np.isfinite(logs).all()
    assert logs.min() < -1000


def test_refuses_batch_normalisation_in_training() -> None:
    given = settings({"training_mode": 1})
    model, feeds = single("BatchNormalization", drawn([(2, 4, 3), (4,), (4,), (4,), POSITIVE], 0), **given)
    with pytest.raises(Unsupported, match="training"):
        in_floats(model, feeds)
