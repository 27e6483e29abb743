"""Wrong pairs that a hostile reader of the proof by value found: none may be certified.

A pair is marked `open` while it still is, and fails once it no longer is. What passes by chance is judged repeatedly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rewriter.evaluate.arithmetic import draw_prime
from rewriter.files.load import LoadedModel
from rewriter.proof.values.compare import prove

_CHANCES = 8
_TOKENS = "(float[batch,seq,4] x) => (float[batch,seq,4] out)"
_PAIRS = "(float[batch,2] x) => (float[batch,2] out)"
_IDS = "(int64[batch,seq] input_ids) => (float[batch,seq,4] out)"
_MASKED = "(int64[batch,seq] ids, int64[batch,seq] mask) => (float[batch,4] out)"
_INNER = """out, y = Scan<num_scan_inputs = 1, body = g (float[4] a, float[4] b) => (float[4] h, float[4] i) {
    z = Neg(b) h, j = Scan<num_scan_inputs = 1, body = k (float[4] c, float d) => (float[4] e, float[4] f) {
        r = Mul(c, d) e = Add(r, %s) f = Neg(e) }>(z, b) i = Neg(h) }>(u, x)"""
_ONE = "(float[1,1] x) => (float[1,1] out)"
_ROW = "(float[1,128] x) => (float[1,128] out)"
_DECIDED = "c = Greater(s, t) z = Neg(x) out = Where(c, x, z)"
_SIZE = "s = Shape(x) n = Gather(s, one) f = Cast<to=1>(n)"
_ROOTS = "a = Sub({0}, c5) b = Sub({0}, c7) c = Sub({0}, c61) d = Sub({0}, c1) p = Mul(a, b) q = Mul(p, c)"
_BODY = "{{ {}  r = Constant<value_floats=[1.0]>() }}"
_TABLE = np.random.default_rng(0).standard_normal((300, 4)).astype(np.float32)
_OTHER = _TABLE + np.array([[0]] * 299 + [[1]], np.float32)
_LARGE = np.resize(_TABLE, (60_000, 4))
_STEPS = np.linspace(0.1, 1, 128, dtype=np.float32)


def f(*numbers: float) -> Any:
    return np.array(numbers, np.float32)


def n(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def with_last(table: Any, row: int) -> Any:
    other = table.copy()
    other[row] += 1
    return other


_SIZES = {"one": n(1), "c5": f(5), "c7": f(7), "c61": f(61), "c1": f(1)}
_BY_AREA = {"a": n(2, 3), "n": f(224 * 224)}

# name: signature, A, B, constants of both, constants of B
_TAKES = "(int64[batch,seq] input_ids) => (float out)"
_FIRST = "m = Reshape(input_ids, last) s = Slice(m, zero, one)"
_ROW_OF_FIRST = f"{_FIRST} e = Add(s, one) out = Slice(t, s, e)"
_PLACES = {"last": n(-1), "zero": n(0), "one": n(1)}
_DOMAINS = '"com.microsoft": 1, "ai.onnx.ml": 3'
_BITS = np.random.default_rng(0).integers(0, 255, (300, 16), np.uint8)
_LABELS = "out = ai.onnx.ml.LabelEncoder<keys_int64s=[%s], values_floats=[%s]>(input_ids)"
_WORDS = (
    'f = Reshape(input_ids, m) out = TfIdfVectorizer<mode="TFIDF", min_gram_length=1, max_gram_length=1, '
    "max_skip_count=0, ngram_counts=[0], ngram_indexes=[%s], pool_int64s=[%s], weights=[%s]>(f)"
)
_KEYS, _VALUES = ", ".join(map(str, range(300))), "0.25, " * 299
_TAKEN: Mapping[str, tuple[str, Mapping[str, Any], Any, Any]] = {
    "GatherND": ("i = Unsqueeze(input_ids, last) out = GatherND(t, i)", {"last": n(-1)}, _TABLE, _OTHER),
    "GatherElements": (
        "m = Reshape(input_ids, flat) i = Expand(m, four) out = GatherElements<axis=0>(t, i)",
        {"flat": n(-1, 1), "four": n(1, 4)},
        _TABLE,
        _OTHER,
    ),
    "Gather along the last axis": ("out = Gather<axis=1>(t, input_ids)", {}, _TABLE.T.copy(), _OTHER.T.copy()),
    "Slice": (_ROW_OF_FIRST, _PLACES, _TABLE, _OTHER),
    "Slice from a vector": (_ROW_OF_FIRST, _PLACES, _TABLE[:, 1].copy(), _OTHER[:, 1].copy()),
    "Compress": (
        f"{_FIRST} c = Equal(all, s) out = Compress<axis=0>(t, c)",
        {**_PLACES, "all": np.arange(300)},
        _TABLE,
        _OTHER,
    ),
    "GatherBlockQuantized": (
        "out = com.microsoft.GatherBlockQuantized<bits=4, block_size=32, gather_axis=0, quantize_axis=1>"
        "(t, input_ids, scale)",
        {"scale": np.ones((300, 1), np.float32)},
        _BITS,
        with_last(_BITS, 299),
    ),
    "ArrayFeatureExtractor": (
        "m = Reshape(input_ids, last) out = ai.onnx.ml.ArrayFeatureExtractor(t, m)",
        {"last": n(-1)},
        _TABLE[:, :1].T.copy(),
        with_last(_TABLE[:, :1], 299).T.copy(),
    ),
}
"""By operator that takes entries of a table as inputs choose: nodes, constants, the table, and another one."""

CHANCE: Mapping[str, tuple[Any, ...]] = {
    "a Relu is dropped": (_ONE, "out = Relu(x)", "out = Identity(x)"),
    "a threshold of one number": (
        "(float[1] s, float[1,4] x) => (float[1,4] out)", _DECIDED, _DECIDED, {"t": f(5)}, {"t": f(3)}),
    "a condition on another number": (
        "(float[1] s, float[1] r, float[1,4] x) => (float[1,4] out)", _DECIDED, _DECIDED.replace("(s", "(r"),
        {"t": f(5)}),
    "one of 128 thresholds": (
        _ROW, _DECIDED.replace("(s", "(x"), _DECIDED.replace("(s", "(x"), {"t": _STEPS}, {"t": with_last(_STEPS, 5)}),
    "conditions change places": (
        "(float[2] x, float[2] u, float[2] v) => (float[2] out)", "c = Greater(x, t) out = Where(c, u, v)",
        "y = Gather(x, i) c = Greater(y, t) out = Where(c, u, v)", {"t": f(0), "i": n(1, 0)}),
    "one row that the largest entry takes": (
        "(float[batch,300] x) => (float[batch,4] out)",
        *("i = ArgMax<axis=1,keepdims=0>(x) g = Gather(t, i) m = MatMul(x, w) out = Add(g, m)",) * 2,
        {"t": _TABLE, "w": _TABLE}, {"t": _OTHER}),
}  # fmt: skip
ALWAYS: Mapping[str, tuple[Any, ...]] = {
    # undefined where the original is not
    "sqrt of -|x|": (_TOKENS, "a = Abs(x) out = Sqrt(a)", "a = Abs(x) b = Neg(a) out = Sqrt(b)"),
    "sqrt(x) squared for |x|": (_TOKENS, "out = Abs(x)", "a = Sqrt(x) out = Mul(a, a)"),
    "0 / 0": (_TOKENS, "out = Identity(x)", "z = Sub(x, x) i = Reciprocal(z) n = Mul(z, i) out = Add(x, n)"),
    # masks
    "a mask of -250 for -1e4": (
        _PAIRS, "y = Add(x, m) out = Softmax(y)", "y = Add(x, m) out = Softmax(y)", {"m": f(0, -1e4)},
        {"m": f(0, -250)}),
    "a mask of -250 that is scaled to -0.25": (
        _PAIRS, "y = Add(x, m) z = Mul(y, s) out = Softmax(z)", "z = Sub(x, x) y = Add(z, n) out = Softmax(y)",
        {"m": f(0, -250), "s": f(0.001), "n": f(0, -1e4)}),
    "Max with -250": (_TOKENS, "out = Max(x, m)", "out = Identity(x)", {"m": f(-250)}),
    "a condition x > -250": (
        _TOKENS, "c = Greater(x, m) z = Neg(x) out = Where(c, x, z)", "out = Identity(x)", {"m": f(-250)}),
    "exp(x - 250)": (_TOKENS, "y = Add(x, m) out = Exp(y)", "out = Sub(x, x)", {"m": f(-250)}),
    "a float mask": (
        "(float[batch,4] x, float[batch,4] m) => (float[batch,4] out)",
        "c = Cast<to=9>(m) z = Neg(x) out = Where(c, x, z)", "out = Identity(x)"),
    # functions
    "an error that a factor hides": (
        _TOKENS, *(f"a = Div(x, r) e = Erf(a) p = Add(e, {one}) q = Mul(x, p) h = Mul(q, o) out = MatMul(h, w)"
        for one in ("i", "k")), {"r": f(2**0.5), "i": f(1), "k": f(1.00000009), "o": f(0.5), "w": _TABLE[:4]}),
    "a function that stops at 600": (
        _TOKENS, "s = Sigmoid(x) h = Mul(x, s) out = MatMul(h, w)",
        "y = Min(x, k) s = Sigmoid(y) h = Mul(y, s) out = MatMul(h, w)", {"k": f(600), "w": _TABLE[:4]}),
    # integers that are computed with
    **{
        f"{each} of integers": (
            "(float[4,4] x) => (float[4,4] out)", f"c = Cast<to=6>(x) p = {each} q = Div(p, i) out = Cast<to=1>(q)",
            f"b = Cast<to=6>(x) c = Cast<to=1>(b) p = {each} out = Div(p, k)",
            {"k": f(-3), "i": np.array([-3], np.int32), "m": n(1), "h": f(0.5)})
        for each in ("Pow(c, k)", "Pow(c, h)", "ReduceMean(c, m)", "MatMul(c, c)")
    },
    "padding at the start": (
        _MASKED, "m = ReduceSum<keepdims=0>(mask, one) l = Sub(m, one) i = Unsqueeze(l, one) e = Gather(t, ids) "
        "out = GatherND<batch_dims=1>(e, i)",
        "r = CumSum(mask, k) w = Mul(r, mask) l = ArgMax<axis=1,keepdims=0>(w) i = Unsqueeze(l, one) "
        "e = Gather(t, ids) out = GatherND<batch_dims=1>(e, i)", {"t": _TABLE, "one": n(1), "k": np.int64(1)}),
    "a flag": (
        "(float[1,4] x, bool[1] flag) => (float[1,4] out)", "z = Neg(x) out = Where(flag, x, z)", "out = Identity(x)"),
    "one token is answered otherwise": (
        _IDS, "out = Gather(t, input_ids)",
        "c = Equal(input_ids, i) d = Cast<to=6>(c) m = ReduceMax<keepdims=0>(d) q = Cast<to=9>(m) "
        "e = Gather(t, input_ids) z = Neg(e) out = Where(q, z, e)", {"t": _LARGE, "i": n(59_000)}),
    # tables
    "one row of 60,000": (
        _IDS, "out = Gather(t, input_ids)", "out = Gather(t, input_ids)", {"t": _LARGE},
        {"t": with_last(_LARGE, 59_000)}),
    "one row, and one size": (
        _IDS.replace("batch,seq", "1,8"), "out = Gather(t, input_ids)", "out = Gather(t, input_ids)", {"t": _TABLE},
        {"t": _OTHER}),
    "one entry of a table with one axis": (
        _IDS, "b = Gather(v, input_ids) e = Gather(t, input_ids) u = Unsqueeze(b, two) out = Add(e, u)",
        "b = Gather(v, input_ids) e = Gather(t, input_ids) u = Unsqueeze(b, two) out = Add(e, u)",
        {"t": _TABLE, "two": n(2), "v": _TABLE[:, 0].copy()}, {"v": _OTHER[:, 0].copy()}),
    "a row that a one-hot vector takes": (
        _IDS, "h = OneHot(input_ids, d, z) out = MatMul(h, t)", "h = OneHot(input_ids, d, z) out = MatMul(h, t)",
        {"t": _TABLE, "d": np.int64(300), "z": f(0, 1)}, {"t": _OTHER}),
    "one word": (
        _TAKES, *(_WORDS % (_KEYS, _KEYS, _VALUES + last) for last in ("0.5", "1.5")), {"m": n(-1)}),
    "one label": (_TAKES, _LABELS % (_KEYS, _VALUES + "0.5"), _LABELS % (_KEYS, _VALUES + "1.5")),
    **{
        f"one row that {kind} takes": (_TAKES, text, text, {"t": table, **given}, {"t": changed})
        for kind, (text, given, table, changed) in _TAKEN.items()
    },
    # constants
    "a constant that the runtime rounds to 0": (
        _PAIRS, "out = Mul(x, o)", "c = Add(a, o) d = Sub(c, a) out = Mul(x, d)", {"a": f(1e10, 1e10), "o": f(1, 1)}),
    "a small entry of a folded constant": (
        _PAIRS, "w = Mul(a, b) out = Mul(x, w)", "out = Mul(x, w)", {"a": f(3e5, 1e-3), "b": f(3, 1)},
        {"w": f(9e5, 0.1)}),
    # operators
    "two draws are the same": (
        _TOKENS, "a = RandomNormalLike(x) b = RandomNormalLike(x) out = Sub(a, b)", "out = Sub(x, x)"),
    "batch and time of a GRU": (
        "(float[2,3,4] x) => (float[6,3] out)", "y, h = GRU<hidden_size=3>(x, w, r) out = Reshape(y, s)",
        "z = Reshape(x, q) y, h = GRU<hidden_size=3>(z, w, r) out = Reshape(y, s)",
        {"w": np.resize(_TABLE, (1, 9, 4)), "r": np.resize(_TABLE, (1, 9, 3)), "s": n(6, 3), "q": n(3, 2, 4)}),
    "the largest in any order": (
        "(float[batch,9] x) => (float[batch,5] out)", "out, i = TopK(x, k)", "out, i = TopK<sorted=0>(x, k)",
        {"k": n(5)}),
    "a state of another body": ("(float[3,4] x, float[4] u) => (float[4] out)", _INNER % "a", _INNER % "c"),
    # inputs and outputs
    "two axes change places": (
        ("(float[2,n] x) => (float[2,n] out)", "(float[n,2] x) => (float[n,2] out)"), "out = Relu(x)", "out = Relu(x)"),
    "the default of an input is a constant": (  # a caller who feeds it gets another result
        (_PAIRS.replace(")", ", float[1] g)", 1), _PAIRS), *("y = Mul(x, g) out = Add(y, o)",) * 2,
        {"g": f(0.5), "o": f(1)}),
    "the output is of another type": (
        (_PAIRS, _PAIRS.replace("=> (float", "=> (double")), "out = Relu(x)", "a = Relu(x) out = Cast<to=11>(a)"),
    "the batch is fixed": ((_PAIRS, _PAIRS.replace("[batch,2] x", "[1,2] x")), "out = Relu(x)", "out = Relu(x)"),
    "the input is of another type": ((_PAIRS, _PAIRS.replace("(float", "(double")), "out = Relu(x)", "out = Relu(x)"),
    # every size
    "an image of 224 by 224": (
        "(float[1,3,height,width] x) => (float[1,3,1,1] out)", "out = GlobalAveragePool(x)",
        "s = ReduceSum(x, a) out = Div(s, n)", _BY_AREA),
    "80 features": (
        "(float[batch,features] x) => (float[batch,1] out)", "out = ReduceMean(x, a)",
        "s = ReduceSum(x, a) out = Div(s, n)", {"a": n(1), "n": f(80)}),
    "the size of another input": (
        "(float[n,4] x, float[m,4] y) => (float[n,4] out, float[m,4] o)",
        "w = Add(x, x) s = Shape(x) o = Relu(y) out = Reshape(w, s)",
        "w = Add(x, x) s = Shape(y) o = Relu(y) out = Reshape(w, s)"),
    "a shape from a table": (
        _TOKENS, "out = Softmax(x)",
        "s = Shape(x) b = Gather(s, zero) q = Gather(s, one) p = Gather(t, q) d = Concat<axis=0>(b, p, rest) "
        "y = Reshape(x, d) w = Softmax(y) out = Reshape(w, s)",
        {"t": np.where(np.arange(70) == 6, 3, np.arange(70)), "one": n(1), "zero": n(0), "rest": n(-1)}),
    "rows are dealt out six times": (  # of two by five this is nothing, and of one by any number
        _TOKENS, "r0 = Neg(x) out = Relu(r0)",
        "r0 = Neg(x) s = Shape(x) "
        + "".join(f"t{k} = Transpose<perm=[1,0,2]>(r{k}) r{k + 1} = Reshape(t{k}, s) " for k in range(6))
        + "out = Relu(r6)"),
    "the first 128 tokens": (
        "(float[batch,seq,4] x) => (float[batch,k,4] o, float[batch,l,4] out)",
        "o = Slice(x, z, e, one) out = Relu(x)", "o = Slice(x, z, e, one) out = Relu(o)",
        {"z": n(0), "e": n(128), "one": n(1)}),
    "a softmax over two axes": (
        _TOKENS, "out = Identity(x)",
        "u = Sub(x, x) v = Softmax(u) g = Reciprocal(v) " + _ROOTS.format("g") + " r = Mul(q, d) out = Add(x, r)",
        {"c5": f(20), "c7": f(28), "c61": f(244), "c1": f(4)}, {}, 11),
    "a body has a constant of this name": (
        _TOKENS, "out = Identity(x)",
        f"i = If(yes)<then_branch = g1 () => (float[1] r) {_BODY.format('t = Constant<value_floats=[1.0]>()')}, "
        f"else_branch = g2 () => (float[1] r) {_BODY.format('')}> ".replace("{{", "{").replace("}}", "}")
        + f"{_SIZE} {_ROOTS.format('f')} t = Mul(q, d) out = Add(x, t)", {**_SIZES, "yes": np.bool_(True)}),
}  # fmt: skip


THERE = {
    *(
        "an image of 224 by 224",
        "80 features",
        "a shape from a table",
        "rows are dealt out six times",
        "the first 128 tokens",
        "a softmax over two axes",
    ),
    *("a body has a constant of this name", "the size of another input"),
}
"""Pairs that are the same at the sizes tried, as their certificate says."""


def loaded(signature: str, body: str, constants: Mapping[str, Any], opset: int) -> LoadedModel:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: [{_DOMAINS}, "": {opset}]> g {signature} {{ {body} }}'
    )
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items())
    return LoadedModel(proto, None, Path(), (), 0)


def certified(
    signature: Any, a: str, b: str, constants: Mapping[str, Any] | None = None,
    of_b: Mapping[str, Any] | None = None, opset: int = 18, *, there: bool = False,
) -> bool:  # fmt: skip
    """Whether a pair is certified, at some sizes or at every one; with `there`, at every one."""
    ours, theirs = (signature, signature) if isinstance(signature, str) else signature
    shared = dict(constants or {})
    models = loaded(ours, a, shared, opset), loaded(theirs, b, shared | dict(of_b or {}), opset)
    found = prove(*models)
    return found.certified and not (there and found.sizes)


@pytest.mark.sample(4, turns=False)
@pytest.mark.parametrize("name", ALWAYS)
def test_it_is_not_certified(name: str) -> None:
    assert not certified(*ALWAYS[name], there=name in THERE)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANCE)
def test_it_is_not_certified_by_chance(name: str) -> None:
    assert not any(certified(*CHANCE[name]) for _ in range(_CHANCES))


def test_a_product_that_every_prime_divides() -> None:
    """1 in the reals, 0 modulo each prime: a file that has all of them as constants; here, the few that are drawn."""
    primes = np.array(sorted({draw_prime() for _ in range(16)}))
    monkey = iter(primes.tolist() * 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewriter.evaluate.arithmetic.draw_prime", lambda: next(monkey))
        scale = 2.0 ** -np.where(np.arange(primes.size) % 2, 30, 31)
        split = {"hi": f(*(primes >> 16) * 65536.0 * scale), "lo": f(*(primes & 0xFFFF) * scale)}
        wrong = (
            "z = Sub(y, y) o = Exp(z) a = Mul(hi, o) b = Mul(lo, o) c = Add(a, b) p = ReduceProd<keepdims=0>(c) "
            "r = Relu(x) out = Add(r, p)"
        )
        assert not certified("(float[batch,4] x, float[1] y) => (float[batch,4] out)", "out = Relu(x)", wrong, split)
