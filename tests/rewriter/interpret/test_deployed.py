"""Heads of files that people deploy: packed and grouped attention inside an operator, and matrices of 4 and 8 bits.

What is read from a file is evaluated here by numpy, and compared with what onnxruntime's own kernels compute.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from rewriter import attribute, attribution_graph, heads, run_with_cache
from rewriter.arrays import Array
from rewriter.errors import ModelError, UsageError
from rewriter.interpret.attribute import why
from rewriter.interpret.sublayers import Attention
from tests.committed import FOLDER
from tests.rewriter.interpret.test_attribution import given

CAPPED = """cap = Constant<value_float = 30.0>()
    l1 = Div(l0, cap)
    l2 = Tanh(l1)
    logits = Mul(l2, cap)"""
HEADS, SHARED, WIDTH, MODEL, TOKENS, LONGEST = 4, 2, 16, 32, 5, 40
NORM = "SimplifiedLayerNormalization"


@dataclass(frozen=True, eq=False)
class Deployed:
    """A layer as onnxruntime-genai's builder writes it, and inputs."""

    more: str = ""
    past: int = 3
    places: int = 0
    bits: int = 0
    zeros: bool = False
    packed: bool = True
    turned: int = WIDTH
    sink: bool = False
    normed: bool = False
    operator: str = "GroupQueryAttention"

    @cached_property
    def constants(self) -> dict[str, Array]:
        rng = np.random.default_rng(1)
        angles = np.arange(LONGEST)[:, None] / 50.0 ** (np.arange(self.turned // 2) / (self.turned // 2))
        sizes = {"qkv": (HEADS + 2 * SHARED) * WIDTH, "q": HEADS * WIDTH, "k": SHARED * WIDTH, "v": SHARED * WIDTH}
        made = {f"w_{name}": rng.normal(size=(MODEL, size)) / 4 for name, size in sizes.items()}
        made |= {"w_o": rng.normal(size=(HEADS * WIDTH, MODEL)) / 8, "w_u": rng.normal(size=(MODEL, 7))}
        made |= {
            "scale": rng.normal(size=MODEL) + 1,
            "bias": rng.normal(size=sizes["qkv"]),
            "sink": rng.normal(size=HEADS),
        }
        made |= {f"{name}_scale": rng.normal(size=MODEL if name == "o" else WIDTH) + 1 for name in "qko"}
        return {
            key: array.astype(np.float32)
            for key, array in {**made, "cos": np.cos(angles), "sin": np.sin(angles)}.items()
        }

    def product(self, made: str, data: str, name: str) -> str:
        if not self.bits or name == "w_u":
            return f"{made} = MatMul({data}, {name})"
        rows, columns = self.constants[name].T.shape
        zeros = f", {name}_zeros" if self.zeros else ""
        zeros += f", , {name}_bias" if not self.packed else ""
        sizes = f"K = {columns}, N = {rows}, bits = {self.bits}, block_size = 16"
        return f"{made} = com.microsoft.MatMulNBits<{sizes}>({data}, {name}_numbers, {name}_scales{zeros})"

    def normalised(self, made: str, data: str) -> str:
        """A product; its result, by head unless it is the output, is normalised, except values."""
        if not self.normed or made == "v":
            return self.product(made, data, f"w_{made}")
        return f"""{self.product(f"{made}0", data, f"w_{made}")}
            {made}h = Constant<value_ints = [0, 0, -1, {MODEL if made == "o" else WIDTH}]>()
            {made}1 = Reshape({made}0, {made}h)
            {made}2 = {NORM}<axis = -1, epsilon = 0.000001>({made}1, {made}_scale)
            {made}j = Constant<value_ints = [0, 0, -1]>()
            {made} = Reshape({made}2, {made}j)"""

    def quantised(self, name: str) -> dict[str, Array]:
        """The packed numbers, scales and zero points of a matrix [in, out]."""
        rng = np.random.default_rng(len(name))
        rows, columns = self.constants[name].T.shape
        numbers = rng.integers(0, 2**self.bits, (rows, columns // 16, 16))
        zeros = rng.integers(0, 2**self.bits, (rows, columns // 16))
        scales = (rng.uniform(0.5, 1, (rows, columns // 16)) * 2.0 ** (-self.bits - 1)).astype(np.float32)
        both = {"numbers": numbers, "zeros": zeros}
        if self.bits == 4:
            both = {key: each[..., ::2] + 16 * each[..., 1::2] for key, each in both.items()}
        made = {f"{name}_{key}": each.astype(np.uint8) for key, each in both.items()}
        biases = np.asarray(rng.normal(size=rows), np.float32)
        return {**made, f"{name}_scales": scales.reshape(-1), f"{name}_bias": biases}

    @cached_property
    def model(self) -> onnx.ModelProto:
        width = f"num_heads = {HEADS}, kv_num_heads = {SHARED}{self.more}"
        qkv = [self.product("qkv0", "n", "w_qkv"), "qkv = Add(qkv0, bias)"]
        split = [self.normalised(each, "n") for each in "qkv"]
        tables = ", cos, sin" if "do_rotary" in self.more else ", , "
        sides, made = ("qkv, , ", qkv) if self.packed else ("q, k, v", split)
        sink = ", , , sink" if self.sink else ""
        call = f"{self.operator}<{width}>({sides}, pk, pv, lengths, total{tables}{sink})"
        cache = f"float[b, {SHARED}, p, {WIDTH}]"
        text = f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
            agraph (float[b, t, {MODEL}] x, {cache} pk, {cache} pv, int32[b] lengths, int32 total)
            => (float[b, t, 7] logits, {cache} nk, {cache} nv) {{
                n = {NORM}<axis = -1, epsilon = 0.000001>(x, scale)
                {chr(10).join(made)}
                z, nk, nv = com.microsoft.{call}
                {self.normalised("o", "z")}
                m, , , r = com.microsoft.Skip{NORM}<epsilon = 0.000001>(x, o, scale)
                {self.product("logits" if not self.normed else "l0", "m", "w_u")}
                {CAPPED if self.normed else ""}
            }}"""
        model = onnx.parser.parse_model(text)
        used = {name for node in model.graph.node for name in node.input}
        constants = dict(self.constants)
        for name in [name for name in constants if self.bits and name.startswith("w_")]:
            constants |= self.quantised(name) if name != "w_u" else {}
        held = [onnx.numpy_helper.from_array(each, name) for name, each in constants.items() if name in used]
        model.graph.initializer.extend(held)
        return model

    @cached_property
    def feeds(self) -> dict[str, Array]:
        rng, places = np.random.default_rng(2), self.places or self.past
        cache = {name: rng.normal(size=(1, SHARED, places, WIDTH)).astype(np.float32) for name in ("pk", "pv")}
        total = self.past + TOKENS
        x = rng.normal(size=(1, TOKENS, MODEL)).astype(np.float32)
        return {"x": x, **cache, "lengths": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}

    @cached_property
    def facts(self) -> dict[str, float]:
        return {part.split("=")[0].strip(): float(part.split("=")[1]) for part in self.more.split(",") if part}

    def resident(self, tokens: int) -> int:
        """How many tokens a cache holds, by the operator's documentation."""
        if "sliding_window_cache" not in self.facts:
            return tokens
        step = self.places - int(self.facts["local_window_size"]) + 1
        return tokens - step * -(-max(tokens - self.places, 0) // step)

    def run(self, *names: str) -> list[Array]:
        model = onnx.ModelProto.FromString(self.model.SerializeToString())
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name in "nz")
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return [np.asarray(each) for each in session.run(list(names), self.feeds)]


ROTARY = ", do_rotary = 1"
FILES = {
    "packed": Deployed(ROTARY),
    "no cache": Deployed(ROTARY, past=0),
    "a cache with free places": Deployed(ROTARY, places=20),
    "apart": Deployed(packed=False),
    "interleaved": Deployed(ROTARY + ", rotary_interleaved = 1"),
    "scaled": Deployed(ROTARY + ", scale = 0.4"),
    "window": Deployed(ROTARY + ", local_window_size = 3"),
    "sliding cache": Deployed(ROTARY + ", local_window_size = 3, sliding_window_cache = 1", past=7, places=4),
    "sliding cache that was full": Deployed(
        ROTARY + ", local_window_size = 3, sliding_window_cache = 1", past=8, places=5
    ),
    "capped": Deployed(ROTARY + ", softcap = 1.5"),
    "smooth": Deployed(ROTARY + ", smooth_softmax = 1"),
    "sink": Deployed(ROTARY, sink=True),
    "normalised": Deployed(ROTARY, packed=False, normed=True),
    "4 bits": Deployed(ROTARY, bits=4),
    "4 bits, zero points": Deployed(bits=4, zeros=True, packed=False),
    "8 bits, zero points": Deployed(ROTARY, bits=8, zeros=True),
}


def rotated(rows: Array, positions: Array, *, interleaved: bool) -> Array:
    """[tokens, d_head], pairs of channels as complex numbers."""
    angles = positions[:, None] / 50.0 ** (np.arange(WIDTH // 2) / (WIDTH // 2))
    first, second = (rows[:, 0::2], rows[:, 1::2]) if interleaved else np.split(rows, 2, axis=1)
    turned = (first + 1j * second) * np.exp(1j * angles)
    parts = [turned.real, turned.imag]
    return np.stack(parts, axis=-1).reshape(rows.shape) if interleaved else np.concatenate(parts, axis=1)


def normalised(rows: Array, scale: Array) -> Array:
    return np.asarray(rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + 1e-6) * scale)


def evaluated(case: Deployed, n: Array) -> Array:
    """[tokens, heads, d_head]: what the heads of a file compute, by what was read from it."""
    index = heads(case.model, wide=True)
    assert ["its output is an output of the graph" in miss.reason for miss in index.missed] == [True] * case.normed
    own = index.sublayers[0]
    assert isinstance(own, Attention)
    assert own.groups == HEADS // SHARED
    facts = case.facts
    positions, made = case.past + np.arange(TOKENS), []
    kept = case.resident(case.past)
    key_positions = np.append(case.past - kept + np.arange(kept), positions)
    for head in range(HEADS):
        q, k, v = (n @ index[f"blocks.0.attn.W_{s}"][head] + index[f"blocks.0.attn.b_{s}"][head] for s in "QKV")
        if case.normed:
            q, k = (normalised(each, case.constants[f"{s}_scale"]) for each, s in ((q, "q"), (k, "k")))
        if own.query.rotary:
            q, k = (rotated(each, positions, interleaved="rotary_interleaved" in facts) for each in (q, k))
        held = [case.feeds[name][0, head // 2, :kept] for name in ("pk", "pv")]
        k, v = np.concatenate([held[0], k]), np.concatenate([held[1], v])
        scores = own.scale * q @ k.T
        cap = facts.get("softcap", 0.0)
        scores = cap * np.tanh(scores / cap) if cap else scores
        ahead = key_positions - positions[:, None]
        seen = (ahead <= 0) & (ahead > -facts.get("local_window_size", 1e9))
        weights = np.where(seen, np.exp(scores), 0.0)
        beside = 1.0 if "smooth_softmax" in facts else np.exp(case.constants["sink"][head]) if case.sink else 0.0
        made.append(weights / (weights.sum(axis=1, keepdims=True) + beside) @ v)
    return np.stack(made, axis=1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FILES)
def test_heads_compute_what_the_operator_computes(name: str) -> None:
    case = FILES[name]
    n, z = case.run("n", "z")
    made = evaluated(case, n[0].astype(np.float64)).reshape(TOKENS, -1)
    assert np.abs(made - z[0]).max() <= 3e-6 * np.abs(z).max()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name in FILES if "bits" in name])
def test_packed_matrices_are_those_of_onnxruntime(name: str) -> None:
    case = FILES[name]
    (node,) = [node for node in case.model.graph.node if node.output[0] == "o"]
    del node.input[5:]
    eye, output = (onnx.helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, None) for each in "zo")
    held = [each for each in case.model.graph.initializer if each.name in node.input]
    graph = onnx.helper.make_graph([node], "product", [eye], [output], held)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in (("", 21), ("com.microsoft", 1))]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"z": np.eye(HEADS * WIDTH, dtype=np.float32)})
    read = heads(case.model)["blocks.0.attn.W_O"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read.reshape(wanted.shape), wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FILES)
def test_patterns_times_values(name: str) -> None:
    case = FILES[name]
    found = run_with_cache(case.model, case.feeds)
    logits, z = case.run("logits", "z")
    np.testing.assert_allclose(found.outputs["logits"], logits, atol=1e-5)
    cache = {key: found.cache[f"blocks.0.attn.hook_{key}"] for key in ("pattern", "v", "z")}
    np.testing.assert_allclose(cache["z"].reshape(z.shape), z, atol=1e-5)
    for side in "qk" if case.normed else "":
        plain, normed = (found.cache[f"blocks.0.attn.hook_{side}{each}"] for each in ("", "_normed"))
        np.testing.assert_allclose(normed, normalised(plain, case.constants[f"{side}_scale"]), atol=1e-5)
    if case.past == 0:
        np.testing.assert_allclose(np.einsum("bhts,bshk->bthk", cache["pattern"], cache["v"]), cache["z"], atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["no cache", "4 bits", "normalised"])
def test_a_logit_is_the_sum_of_its_parts(name: str) -> None:
    case = replace(FILES[name], past=0)
    found = attribute(case.model, case.feeds, 3)
    assert found.capped == case.normed
    made = 30 * np.tanh(found.logit / 30) if found.capped else found.logit
    assert made == pytest.approx(float(case.run("logits")[0][0, -1, 3]), abs=1e-4)
    assert max(map(abs, found.residuals.values())) <= 1e-12
    assert found.direct["blocks.0.attn"].shape == (HEADS,)
    score = why(case.model, case.feeds, "blocks.0.attn[1]", query=3, key=1)
    assert abs(score.residual) <= 1e-12
    assert "embed" in score.sources


@pytest.mark.slow
def test_dynamically_quantised(tmp_path: Path) -> None:
    quantize_dynamic(FOLDER / "silu-decoder.onnx", tmp_path / "q.onnx", per_channel=True, weight_type=QuantType.QUInt8)
    index, original = heads(tmp_path / "q.onnx"), heads(FOLDER / "silu-decoder.onnx")
    assert [miss.reason.partition(" that ")[0] for miss in index.missed] == ["attribution leaves out"]
    assert index.keys() == original.keys()
    held = {each.name: onnx.numpy_helper.to_array(each) for each in index.source.proto.graph.initializer}
    scales = [name.removesuffix("_scale") for name in held if name.endswith("_scale")]
    for own, of in {"blocks.1.attn.W_O": "h.1.attn.c_proj", "embed.W_E": "wte", "pos_embed.W_pos": "wpe"}.items():
        (name,) = (name for name in scales if of in name)
        numbers, scale, zero = (held[f"{name}_{part}"] for part in ("quantized", "scale", "zero_point"))
        wanted = (numbers.astype(np.float32) - zero) * scale
        np.testing.assert_array_equal(index[own].reshape(wanted.shape), wanted)
    feeds = given("silu-decoder")
    (logits,) = onnxruntime.InferenceSession(tmp_path / "q.onnx").run(None, feeds)
    np.testing.assert_array_equal(run_with_cache(index, feeds).outputs["logits"], logits)
    assert max(map(abs, attribute(tmp_path / "q.onnx", feeds, 3).residuals.values())) <= 1e-12
    changed = onnx.load(tmp_path / "q.onnx")
    next(node for node in changed.graph.node if node.output[0].endswith("quant_scales_mul:0")).op_type = "Add"
    assert len(heads(changed).sublayers) < len(index.sublayers), "that is not a scale"


def test_a_graph_without_the_scores_of_places_that_no_token_has() -> None:
    case = replace(FILES["a cache with free places"], past=0)
    found = attribution_graph(case.model, case.feeds, 3)
    assert "head" in {node.kind for node in found.nodes}
    assert found.why == {}


def test_tokens_of_a_cache_have_no_parts() -> None:
    case = FILES["packed"]
    with pytest.raises(UsageError, match="attends to tokens of a cache"):
        attribute(case.model, case.feeds, 3)


REFUSED = {
    "its queries see later keys": Deployed(", causal = 0"),
    "what it computes is not known": Deployed(operator="PagedAttention"),
    "it has a state and no softmax": Deployed(operator="LinearAttention"),
    "its operand number 11 is not understood": Deployed(operator="MultiHeadAttention", sink=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_an_operator_does_otherwise_is_said(reason: str) -> None:
    index = heads(REFUSED[reason].model)
    assert index.sublayers == ()
    assert [miss.reason.partition("': ")[2] for miss in index.missed_attention] == [reason]


def test_weights_that_are_packed_otherwise() -> None:
    model = Deployed(bits=4).model
    for node in (node for node in model.graph.node if node.op_type == "MatMulNBits"):
        next(each for each in node.attribute if each.name == "bits").i = 2
    index = heads(model)
    with pytest.raises(ModelError, match="its weight is not of 4 bits or 8 bits"):
        index["blocks.0.attn.W_Q"]
