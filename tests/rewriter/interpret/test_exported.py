"""Attention of files as exporters write them: all of it is found, and what is read computes what onnxruntime computes.

z and scores are computed here by numpy, from the weights that `heads` read and from tensors of the original file.
"""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from passes.options import Options
from passes.plan import make_plan
from rewriter import UsageError, attribute, heads, run_with_cache
from rewriter.arrays import Array
from tests.committed import FOLDER
from tests.headmath import tapped
from tests.textmodels import SILU, mlp, values

CASES = Path(__file__).parents[2] / "inputs_that_failed"
TOKENS = 5


def _ids(*batch: int) -> Array:
    return np.random.default_rng(0).integers(3, 60, (*batch, TOKENS))


def _zeros(names: str, layers: int, *shape: int) -> dict[str, Array]:
    return {name.format(layer): np.zeros(shape, np.float32) for layer in range(layers) for name in names.split()}


CHAINS = {
    "scaled": "f = Cast<to = 1>(q) w = Mul(f, scale)",
    "with a zero point": "f = Cast<to = 1>(q) g = Cast<to = 1>(zero) d = Sub(f, g) w = Mul(d, scale)",
    "divided and turned": "t = Transpose<perm = [1, 0]>(q) f = Cast<to = 1>(t) d = Div(f, two) w = Transpose(d)",
    "dequantised": "d = DequantizeLinear(q, two, zero) r = Reshape(d, flat) i = Identity(r) w = Reshape(i, shape)",
}


def dequantised(chain: str, numbers: Array, scale: Array) -> Array:
    nodes, shifted = CHAINS[chain], numbers.astype(np.float32)
    shifted -= np.float32(3 if "zero" in nodes else 0)
    return shifted * scale if "scale" in nodes else shifted / 2 if "Div" in nodes else shifted * 2


@pytest.mark.sample(0)
@pytest.mark.parametrize("chain", CHAINS)
def test_weights_that_nodes_compute(chain: str) -> None:
    computed, plain = (onnx.load(FOLDER / "silu-decoder.onnx") for _ in range(2))
    weights = {node.input[1] for node in plain.graph.node if node.op_type == "Gemm"}
    rng = np.random.default_rng(0)
    for kept, stored in zip(plain.graph.initializer, list(computed.graph.initializer), strict=True):
        if stored.name not in weights:
            continue
        rows, columns = stored.dims
        numbers = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
        scale = rng.uniform(0.001, 0.002, columns).astype(np.float32)
        arrays = {"q": numbers, "scale": scale, "zero": np.int8(3), "two": np.float32(2)}
        arrays |= {"flat": np.array([-1]), "shape": np.array([rows, columns])}
        made = onnx.parser.parse_graph(f"g () => (float[{rows}, {columns}] w) {{ {CHAINS[chain]} }}").node
        for node in made:
            used = [f"{stored.name}/{name}" for name in node.input]
            node.input[:] = used
            node.output[0] = stored.name if node.output[0] == "w" else f"{stored.name}/{node.output[0]}"
        for node in reversed(made):
            computed.graph.node.insert(0, node)
        computed.graph.initializer.extend(
            onnx.numpy_helper.from_array(np.asarray(array), f"{stored.name}/{name}") for name, array in arrays.items()
        )
        computed.graph.initializer.remove(stored)
        kept.CopyFrom(onnx.numpy_helper.from_array(dequantised(chain, numbers, scale), stored.name))
    index, wanted = heads(computed), heads(plain)
    assert index.missed == wanted.missed == ()
    assert index.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(index[name], wanted[name], err_msg=name)


FUSED = {"": "W1", "<transB = 1>": "W1t", "<alpha = 0.5>": ""}
"""Attributes to the weight; empty where it is not a plain matrix."""


@pytest.mark.parametrize("stated", FUSED)
def test_neurons_behind_a_fused_product(stated: str) -> None:
    name = FUSED[stated] or "W1"
    model = mlp(SILU, first=f"f = com.microsoft.FusedMatMul{stated}(x, {name}) y = Add(f, b1)")
    index, plan = heads(model), make_plan(model, Options(form="masked"))
    if not FUSED[stated]:
        scaled = "block mlp: Mul 'f/mul_2' stands between a linear operator and the activation"
        assert [miss.reason for miss in index.missed] == [scaled]
        assert [left.miss.reason.partition("and ")[2] for left in plan.left] == [
            "com.microsoft::FusedMatMul 'f' scales its operands; use form compact or local"
        ]
        return
    weight = values(name).astype(np.float32)
    np.testing.assert_array_equal(index["blocks.0.mlp_heads.W_Q"][..., 0], weight if "t" in name else weight.T)
    assert [each.form for each in plan.conversions] == ["masked"]


def test_weights_in_the_type_of_what_they_meet() -> None:
    """A CastLike reads the type of the data alone, and the data stays what it is."""
    first, second = (f"w{name} = CastLike({name}, {{0}}) {{1}}" for name in ("W1", "W2"))
    model = mlp(SILU, first=first.format("x", "y = MatMul(x, wW1)"), second=second.format("h", "out = MatMul(h, wW2)"))
    index = heads(model)
    assert index.missed == ()
    np.testing.assert_array_equal(index["blocks.0.mlp_heads.W_Q"][..., 0], values("W1").astype(np.float32).T)


ONES = np.ones((1, TOKENS), np.int64)
PLACES = np.arange(TOKENS)[None]
FILES: dict[str, tuple[int, dict[str, Array]]] = {
    "heads_lost_gpt2_dynamo": (3, {"input_ids": _ids(2), "attention_mask": np.ones((2, TOKENS), np.int64)}),
    "heads_lost_dinov2": (2, {"pixel_values": np.random.default_rng(1).normal(size=(2, 3, 32, 32)).astype(np.float32)}),
    "5-heads-lost-bert-mask2d": (2, {"input_ids": _ids(1), "attention_mask": ONES, "token_type_ids": 0 * ONES}),
    "5-heads-lost-gemma2-onnx-standard": (
        2,
        {"input_ids": _ids(1), "attention_mask": ONES, "position_ids": PLACES}
        | _zeros("past_key_values.{}.key past_key_values.{}.value", 2, 1, 2, 0, 16),
    ),
    "13-static-cache": (
        2,
        {"input_ids": _ids(1), "position_ids": PLACES, "write_indices": np.array([0])}
        | {"nonpad_kv_seqlen": np.array([TOKENS])}
        | _zeros("key_cache.{} value_cache.{}", 2, 1, 64, 32),
    ),
}
"""A file to its layers of attention, and inputs."""


@pytest.mark.parametrize("name", FILES)
def test_all_attention_is_found_and_read(name: str) -> None:
    layers, feeds = FILES[name]
    model = onnx.load(CASES / f"{name}.onnx")
    del model.functions[:]  # onnxruntime has kernels for them
    index = heads(model)
    assert [each.name for each in index.attention] == [f"blocks.{layer}.attn" for layer in range(layers)]
    assert index.missed_attention == ()
    recorded, batch = run_with_cache(index, feeds).cache, len(next(iter(feeds.values())))
    for own in index.attention:
        data = [each.operator.data for each in (own.query, own.key, own.value)]
        read = tapped(model, feeds, list(dict.fromkeys([*data, own.output.data])))
        q, k, v = (
            np.einsum("btm,hmd->bhtd", _rows(read[each], batch), index[f"{own.name}.W_{side}"])
            + index[f"{own.name}.b_{side}"][:, None]
            for side, each in zip("QKV", data, strict=True)
        )
        pattern = recorded[f"{own.name}.hook_pattern"][..., : k.shape[2]]  # the rest of a cache is empty
        z = np.swapaxes(pattern @ v, 1, 2)
        assert np.abs(z.reshape(*z.shape[:2], -1) - _rows(read[own.output.data], batch)).max() <= 1e-5
        if not own.query.rotary:
            added = recorded[f"{own.name}.hook_attn_scores"] - own.scale * q @ np.swapaxes(k, 2, 3)
            mask = added[:, :1].round()  # the same for all heads
            assert np.abs((added - mask)[pattern > 0]).max() <= 1e-5


def _rows(array: Array, batch: int) -> Array:
    return array.reshape(batch, -1, array.shape[-1])


@pytest.mark.slow
def test_an_empty_cache_of_fixed_size_is_attributed() -> None:
    """Its tokens come first; tokens that it holds already are an unknown past."""
    feeds = FILES["13-static-cache"][1]
    found = attribute(CASES / "13-static-cache.onnx", feeds, 5)
    assert max(map(abs, found.residuals.values())) <= 1e-12
    later = {"position_ids": PLACES + 3, "write_indices": np.array([3]), "nonpad_kv_seqlen": np.array([3 + TOKENS])}
    with pytest.raises(UsageError, match="attends to tokens of a cache"):
        attribute(CASES / "13-static-cache.onnx", {**feeds, **later}, 5)


@pytest.mark.parametrize("causal", [1, 0])
def test_a_static_cache_that_holds_tokens(causal: int) -> None:
    model, rng = onnx.load(CASES / "13-static-cache.onnx"), np.random.default_rng(2)
    del model.functions[:]
    for node in (node for node in model.graph.node if node.op_type == "Attention"):
        next(each for each in node.attribute if each.name == "is_causal").i = causal
    feeds = {"input_ids": _ids(2), "position_ids": PLACES + np.array([[3], [7]]), "write_indices": np.array([3, 7])}
    feeds |= {"nonpad_kv_seqlen": np.array([3, 7]) + TOKENS}
    feeds |= {
        name: rng.normal(size=(2, 64, 32)).astype(np.float32) for name in FILES["13-static-cache"][1] if "." in name
    }
    made = run_with_cache(model, feeds).outputs["logits"]
    np.testing.assert_allclose(made, tapped(model, feeds, ["logits"])["logits"], atol=1e-5)
