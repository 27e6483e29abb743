"""Operators that hold attention, written out: what onnxruntime's kernels compute, and the proof in its field.

GroupQueryAttention, packed weights and sums before norms are tried in `tests/rewriter/interpret/test_deployed.py`.
"""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import pytest

from rewriter.arrays import Array
from rewriter.files.load import load_model
from rewriter.graph.attention import with_plain
from rewriter.proof.run import open_model, open_reference
from tests.cases import run
from tests.rewriter.evaluate.single import in_field

SHAPES = {
    **dict.fromkeys(("q", "k", "v"), (2, 5, 12)),
    **dict.fromkeys(("kl", "vl"), (2, 7, 12)),
    **dict.fromkeys(("k6", "v6"), (2, 5, 6)),
    "q4": (2, 4, 5, 3),
    "k4": (2, 2, 7, 3),
    "v4": (2, 2, 7, 3),
    "pk": (2, 4, 2, 3),
    "pv": (2, 4, 2, 3),
    "bias5": (1, 4, 5, 5),
    "bias7": (2, 4, 5, 7),
    "w": (12, 36),
    "w8": (12, 4 + 4 + 8),
    "b": (36,),
    "past": (2, 2, 4, 2, 3),
    "words": (9, 12),
    "g": (12,),
}
PACKED = "com.microsoft.Attention<num_heads = 4"
OURS = "com.microsoft.MultiHeadAttention<num_heads = 4"
ONNX = "Attention<q_num_heads = 4, kv_num_heads = 4"
CALLS = (
    f"y = {OURS}>(q, kl, vl)",
    f"y = {OURS}>(q, k, v, , pad)",
    f"y = {OURS}, unidirectional = 1, scale = 0.7>(q, k, v, , pad, bias5)",
    f"y, nk, nv = {OURS}, unidirectional = 1>(q, k, v, , , bias7, pk, pv)",
    "y = Attention<q_num_heads = 4, kv_num_heads = 2>(q, k6, v6)",
    "y = Attention<is_causal = 1>(q4, k4, v4)",
    f"y = {ONNX}, is_causal = 1>(q, kl, vl, keep)",
    f"y = {ONNX}>(q, kl, vl, none)",
    f"y = {ONNX}, softcap = 1.5>(q, kl, vl, bias7)",
    f"y, nk, nv = {ONNX}, is_causal = 1, scale = 0.4>(q, k, v, , pk, pv)",
    f"y = {PACKED}>(q, w, b, pad)",
    f"y = {PACKED}, scale = 0.7, qkv_hidden_sizes = [4, 4, 8]>(q, w8, , ends, , bias5)",
    f"y, now = {PACKED}, unidirectional = 1>(q, w, b, , past)",
    f"y = {PACKED}, mask_filter_value = -50.0>(q, w, b, square)",
    f"y = {PACKED}>(q, w, b, within)",
    f"y = {OURS}>(q, kl, vl, b)",
    "y, n = com.microsoft.EmbedLayerNormalization(ids, kinds, words, words, words, g, g, pad)",
    "y, n, s = com.microsoft.EmbedLayerNormalization<epsilon = 0.01>(ids, , words, words, , g, g, pad, kinds)",
)


@pytest.mark.parametrize("call", CALLS)
def test_the_definition_computes_the_same(call: str) -> None:
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    feeds["pad"] = np.array([[1] * 5, [1, 1, 1, 0, 0]], np.int32)
    feeds["ends"], feeds["within"] = np.array([5, 3], np.int32), np.array([5, 3, 0, 1], np.int32)
    feeds["square"] = rng.integers(0, 2, (2, 5, 5)).astype(np.int32)
    feeds["ids"], feeds["kinds"] = rng.integers(0, 9, (2, 2, 5)).astype(np.int32)
    feeds["keep"] = np.tril(np.ones((5, 7), np.bool_), 1)
    feeds["none"] = feeds["keep"] & (np.arange(5) != 2)[:, None]  # a query that sees nothing
    used = [name for name in feeds if re.search(rf"\b{name}\b", call.partition("(")[2])]
    kinds = {"i": "int32", "b": "bool", "f": "float"}
    given = ", ".join(f"{kinds[feeds[each].dtype.kind]}{list(feeds[each].shape)} {each}" for each in used)
    results = [each.strip() for each in call.partition("=")[0].split(",")]
    made = ", ".join(f"{'int32' if each == 'n' else 'float'} {each}" for each in results)
    head = f'<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]> agraph ({given}) => ({made})'
    model = onnx.parser.parse_model(f"{head} {{ {call} }}")
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    plain = with_plain(model)
    assert not any(node.op_type.endswith(("Attention", "EmbedLayerNormalization")) for node in plain.graph.node)
    own = {name: feeds[name] for name in used}
    made_by = run(plain, **own)
    for name, values in run(model, **own).items():
        np.testing.assert_allclose(made_by[name], values, atol=1e-6)
    for one, other in zip(*(in_field(each, own, snaps=True) for each in (model, plain)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("packed", [False, True])
def test_norms_that_only_gpus_have_a_kernel_for(packed: bool) -> None:
    rng = np.random.default_rng(0)
    heads = {"q": 4, "k": 2, "v": 2}
    rows = {name: rng.normal(size=(1, 5, count, 16)).astype(np.float32) for name, count in heads.items()}
    scales = {name: rng.normal(size=16).astype(np.float32) for name in ("qn", "kn")}
    normed = {name: rows[name] / np.sqrt(np.square(rows[name]).mean(-1, keepdims=True) + 0.1) for name in "qk"}
    normed = {"q": normed["q"] * scales["qn"], "k": normed["k"] * scales["kn"], "v": rows["v"]}

    def made(sides: dict[str, Array], norms: str, more: str = "") -> tuple[onnx.ModelProto, dict[str, Array]]:
        feeds = {name: each.reshape(1, 5, -1) for name, each in sides.items()}
        if packed:
            feeds = {"q": np.concatenate(list(feeds.values()), axis=-1)}
        operands = f"{', '.join([*feeds, *[''] * (3 - len(feeds))])}, , , lengths, total{norms}"
        given = ", ".join(f"float[1, 5, {each.shape[-1]}] {name}" for name, each in feeds.items())
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> agraph ({given}, int32[1] lengths, '
            f"int32 total) => (float[1, 5, 64] z) {{ z = com.microsoft.GroupQueryAttention<num_heads = 4, "
            f"kv_num_heads = 2{more}>({operands}) }}"
        )
        return model, {**feeds, "lengths": np.array([4], np.int32), "total": np.array(5, np.int32)}

    plain, feeds = made(normed, "")
    (wanted,) = run(plain, **feeds).values()
    model, feeds = made(rows, ", , , , , , , , qn, kn", ", qk_norm_epsilon = 0.1")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(each, name) for name, each in scales.items())
    session = open_model(load_model(model), "cpu", optimise=False)
    assert session.defined == ("GroupQueryAttention with q_norm_weight",)
    np.testing.assert_allclose(session.run(feeds)["z"], wanted, atol=1e-6)
    np.testing.assert_allclose(open_reference(load_model(model))(feeds)["z"], wanted, atol=1e-6)
