"""Attributions as identities, and against a frozen network that is run forwards in numpy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from rewriter import UsageError, attribute, heads, rewrite
from rewriter.interpret.attribute import Attribution, NeuronStep, held, total
from rewriter.interpret.run import hooks_of, values_in_float64
from rewriter.interpret.stream import unchanged
from rewriter.interpret.sublayers import NeuronHeads
from rewriter.proof.inputs.cases import Case
from tests.committed import FOLDER, feeds
from tests.headmath import tapped

Array = NDArray[Any]

EXACT = ["silu-decoder", "relu-decoder"]
FITTED = ["gated-decoder", "gelu-vision", "gelu-encoder"]
"""The last two read one token, and have normalisations after the sublayers."""
LOGIT, OTHER = 5, 7
EPSILON = float(np.float32(1e-5))


def given(stem: str, tokens: int = 7) -> dict[str, Array]:
    made = feeds(onnx.load(FOLDER / f"{stem}.onnx"), tokens=tokens)
    return {name: np.ones_like(array) if "mask" in name else array for name, array in made.items()}


@cache
def attributed(stem: str, **options: Any) -> Attribution:
    return attribute(FOLDER / f"{stem}.onnx", given(stem), LOGIT, **options)


@pytest.mark.parametrize("stem", EXACT + FITTED)
@pytest.mark.parametrize("options", [{}, {"minus": OTHER, "position": 2, "sequence": 1}], ids=str)
def test_both_sums_equal_the_logit(stem: str, options: dict[str, Any]) -> None:
    found = attributed(stem, **options)
    model = onnx.load(FOLDER / f"{stem}.onnx")
    output = model.graph.output[0].name
    values = tapped(model, given(stem), [output])[output]
    if values.ndim == 2:  # of the class token
        values = values[:, None].repeat(3, axis=1)
    logits = values[options.get("sequence", 0), options.get("position", -1)]
    wanted = logits[LOGIT] - (logits[OTHER] if "minus" in options else 0.0)
    assert abs(found.logit - wanted) <= 1e-5
    sizes = max(1.0, *(np.abs(part).max() for part in found.paths.values()))
    for name, parts in (("direct", found.direct), ("paths", found.paths)):
        assert abs(found.residuals[name]) <= 1e-10 * sizes
        assert abs(found.logit - total(parts)) == abs(found.residuals[name])


def mlp_of(stem: str, layer: int) -> tuple[Array, Array, Array]:
    """(weight [D, neurons], bias, second weight [neurons, D]) of an MLP, by their names in the file."""
    model = onnx.load(FOLDER / f"{stem}.onnx")
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer}
    if stem == "relu-decoder":  # of torch's Linear: transposed
        place = f"model.model.decoder.layers.{layer}.fc"
        return arrays[f"{place}1.weight"].T, arrays[f"{place}1.bias"], arrays[f"{place}2.weight"].T
    place = f"model.transformer.h.{layer}.mlp.c_"
    return arrays[f"{place}fc.weight"], arrays[f"{place}fc.bias"], arrays[f"{place}proj.weight"]


class Frozen:
    """The network with patterns, gates and denominators held, run forwards; written from the definitions."""

    def __init__(self, stem: str, sequence: int = 0) -> None:
        self.stem, self.mlps = stem, [mlp_of(stem, layer) for layer in (0, 1)]
        self.index = heads(FOLDER / f"{stem}.onnx", wide=True)
        hooks = hooks_of(self.index)
        names = [name for name in hooks if name.endswith(("pattern", "resid_pre", "resid_mid", "resid_post"))]
        case = Case("", given(stem))
        values = values_in_float64(self.index, case, sorted({t for name in names for t in hooks[name].tensors}))
        self.cache = {name: hooks[name].make(values)[sequence] for name in names}
        self.gone: tuple[str, int, int] | None = None
        mids = [self.cache[f"blocks.{i}.hook_resid_mid"] for i in (0, 1)]
        held = [self.norm(mid, mid, f"blocks.{i}.ln2") for i, mid in enumerate(mids)]
        reads = [data @ weight + bias for data, (weight, bias, _) in zip(held, self.mlps, strict=True)]
        self.gates = [1 / (1 + np.exp(-y)) if stem == "silu-decoder" else y > 0 for y in reads]

    def norm(self, data: Array, at: Array, place: str, epsilon: float = EPSILON) -> Array:
        """LayerNorm of `data` with the denominators of the stream `at`."""
        spread = np.sqrt(at.var(axis=-1, keepdims=True) + epsilon)
        centred = data - data.mean(axis=-1, keepdims=True)
        return np.asarray(centred / spread * self.index[f"{place}.w"] + self.index[f"{place}.b"])

    def activations(self, layer: int, data: Array, bias: Array) -> Array:
        """[T, neurons] for normalised data, the gates being those of the run."""
        return np.asarray(self.gates[layer] * (data @ self.mlps[layer][0] + bias))

    def written(self, name: str, data: Array) -> Array:
        layer = int(name.split(".")[1])
        if name.endswith("mlp_heads"):
            z, out = self.activations(layer, data, self.mlps[layer][1]), self.mlps[layer][2]
            if self.gone is not None and self.gone[0] == name:
                z[self.gone[1], self.gone[2]] = 0.0
            return np.asarray(z @ out + self.index[f"{name}.b_O"])
        own = {part: self.index[f"{name}.{part}"] for part in ("W_V", "b_V", "W_O", "b_O")}
        value, pattern = np.einsum("td,hdk->thk", data, own["W_V"]) + own["b_V"], self.cache[f"{name}.hook_pattern"]
        z = np.einsum("hts,shk->thk", pattern, value)
        if self.gone is not None and self.gone[0] == name:
            z[self.gone[1], self.gone[2]] = 0.0
        return np.asarray(np.einsum("thk,hkd->td", z, own["W_O"]) + own["b_O"])

    def stream(self, start: Array) -> Array:
        data = start
        for layer in ("blocks.0", "blocks.1"):
            pre, mid = (self.cache[f"{layer}.hook_resid_{place}"] for place in ("pre", "mid"))
            data = data + self.written(f"{layer}.attn", self.norm(data, pre, f"{layer}.ln1"))
            data = data + self.written(f"{layer}.mlp_heads", self.norm(data, mid, f"{layer}.ln2"))
        return data


def unembedding(stem: str) -> tuple[Array, Array, Array]:
    """(w and b of the last normalisation, W_U), by their names in the file."""
    model = onnx.load(FOLDER / f"{stem}.onnx")
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer}
    last = next(node for node in reversed(model.graph.node) if node.op_type == "LayerNormalization")
    product = next(node for node in reversed(model.graph.node) if node.op_type == "MatMul")
    return arrays[last.input[1]], arrays[last.input[2]], arrays[product.input[1]]


def logit_of(stem: str, frozen: Frozen, stream: Array, position: int = -1) -> float:
    scale, bias, unembed = unembedding(stem)
    at = frozen.cache["blocks.1.hook_resid_post"]
    spread = np.sqrt(at.var(axis=-1, keepdims=True) + EPSILON)
    normed = (stream - stream.mean(axis=-1, keepdims=True)) / spread * scale + bias
    return float(normed[position] @ unembed[:, LOGIT])


@pytest.mark.parametrize("stem", EXACT)
def test_paths_are_those_of_the_frozen_network(stem: str) -> None:
    found, frozen = attributed(stem), Frozen(stem)
    start = frozen.cache["blocks.0.hook_resid_pre"]
    logit = logit_of(stem, frozen, frozen.stream(start))
    assert abs(logit - found.logit) <= 1e-6
    for token in range(len(start)):
        changed = start.copy()
        changed[token] = 0.0
        difference = logit - logit_of(stem, frozen, frozen.stream(changed))
        assert abs(difference - found.paths["embed"][token]) <= 1e-6


@pytest.mark.parametrize("stem", EXACT)
@pytest.mark.parametrize(
    ("name", "token", "head"),
    [("blocks.0.attn", 1, 2), ("blocks.0.mlp_heads", 3, 17), ("blocks.1.attn", 6, 0), ("blocks.1.mlp_heads", 6, 90)],
)
def test_effects_are_what_the_frozen_network_loses(stem: str, name: str, token: int, head: int) -> None:
    found, frozen = attributed(stem), Frozen(stem)
    start = frozen.cache["blocks.0.hook_resid_pre"]
    logit = logit_of(stem, frozen, frozen.stream(start))
    frozen.gone = (name, token, head)
    lost = logit - logit_of(stem, frozen, frozen.stream(start))
    assert abs(lost - found.effects[name][token, head]) <= 1e-6
    if name.startswith("blocks.1") and token == 6:  # nothing is between it and the logit but the last normalisation
        direct = found.direct[name][head]
        assert name.endswith("attn") or abs(lost - direct) <= 1e-6


def test_the_bias_of_a_normalisation_and_b_o() -> None:
    """Constants by the same test: without them the frozen network's logit is lower by what they contribute."""
    stem = "silu-decoder"
    found, frozen = attributed(stem), Frozen(stem)
    start = frozen.cache["blocks.0.hook_resid_pre"]
    logit = logit_of(stem, frozen, frozen.stream(start))
    for tensor, part in (
        ("blocks.0.ln1.b", "blocks.0.attn.ln.b"),
        ("blocks.1.ln2.b", "blocks.1.mlp_heads.ln.b"),
        ("blocks.0.attn.b_O", "blocks.0.attn.b_O"),
        ("blocks.0.attn.b_V", "blocks.0.attn.b_V"),
        ("b_in", "blocks.1.mlp_heads.b_in"),
    ):
        other = Frozen(stem)
        plain = dict(other.index)
        if tensor == "b_in":
            other.mlps[1] = (other.mlps[1][0], np.zeros_like(other.mlps[1][1]), other.mlps[1][2])
        else:
            plain[tensor] = np.zeros_like(plain[tensor])
        other.index = plain  # type: ignore[assignment]
        lost = logit - logit_of(stem, other, other.stream(start))
        assert abs(lost - total({part: found.paths[part]})) <= 1e-6, part


def test_a_rewritten_file_is_attributed_alike(tmp_path: Path) -> None:
    source, out = FOLDER / "silu-decoder.onnx", tmp_path / "out.onnx"
    rewrite(source, out, form="masked", validate=False)
    before, after = (attribute(path, given("silu-decoder"), LOGIT) for path in (source, out))
    assert abs(after.residuals["paths"]) <= 1e-10
    for name, part in before.paths.items():
        np.testing.assert_allclose(after.paths[name], part, atol=1e-9, err_msg=name)


def test_of_one_token_and_after_normalisations() -> None:
    """In the last layer only the token that is read counts; normalisations after sublayers have parts of their own."""
    for stem in ("gelu-vision", "gelu-encoder"):
        found = attributed(stem)
        assert found.paths["embed"].shape == (17 if stem == "gelu-vision" else 7,)
        last = found.effects["blocks.1.mlp_heads"].sum(axis=1)
        token = 0 if stem == "gelu-vision" else -1
        assert np.abs(np.delete(last, token)).max() <= 1e-5 < np.abs(last[token])
        direct = {name: part for name, part in found.direct.items() if name.endswith("after.ln.b")}
        assert len(direct) == (0 if stem == "gelu-vision" else 3)


@pytest.mark.parametrize(
    ("stem", "options", "message"),
    [
        ("silu-decoder", {"logit": 1000}, "there is no logit 1000"),
        ("silu-decoder", {"minus": -1000}, "there is no logit -1000"),
        ("silu-decoder", {"position": 99}, "there is no token 99"),
        ("silu-decoder", {"sequence": 3}, "there is no sequence 3"),
        ("silu-decoder", {"output": "hidden"}, "the model has no output 'hidden'"),
        ("conformer-encoder", {}, "is not on the stream that it reads"),
        ("gelu-encoder", {"output": "pooler_output"}, "is not a normalisation of the residual stream"),
    ],
)
def test_refusals(stem: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attribute(FOLDER / f"{stem}.onnx", given(stem), **{"logit": LOGIT, **options})


def test_several_cases_are_refused(tmp_path: Path) -> None:
    values = given("silu-decoder")
    arrays: dict[str, Any] = {f"{case}/{name}": array for case in "ab" for name, array in values.items()}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UsageError, match="takes one case, and there are 2"):
        attribute(FOLDER / "silu-decoder.onnx", tmp_path / "x.npz", LOGIT)


@pytest.mark.parametrize("stem", ["silu-decoder", "gelu-encoder", "gated-decoder"])
@pytest.mark.parametrize("options", [{}, {"spelling": "softmax"}, {"form": "compact"}, {"form": "masked"}], ids=str)
def test_the_head_program_does_not_matter(stem: str, options: dict[str, Any], tmp_path: Path) -> None:
    """What is attributed is the function: the same parts for the original and for every program that stands for it."""
    made = rewrite(FOLDER / f"{stem}.onnx", tmp_path / "out.onnx", validate=False, max_tokens=16, **options)
    assert made.converted
    before, after = attributed(stem), attribute(tmp_path / "out.onnx", given(stem), LOGIT)
    assert not any(name.endswith("bias_tokens") for name in before.paths)
    for ours, theirs in ((before.paths, after.paths), (before.direct, after.direct), (before.effects, after.effects)):
        assert ours.keys() == theirs.keys()
        for name, part in ours.items():
            np.testing.assert_allclose(theirs[name], part, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("function", "slope"),
    [(lambda y: y / (1 + np.exp(-y)), 0.5), (lambda y: np.log1p(np.exp(y)), 0.5), (np.tanh, 1.0), (np.exp, 1.0)],
)
def test_gates_times_what_they_are_held_at_is_the_function(function: Any, slope: float) -> None:
    y = np.concatenate([np.linspace(-30, 30, 4001), [0.0, 1e-300, -1e-12, 1e-9, 1e-7]])
    zero, gate = held(function, y)
    assert zero == function(np.zeros(1))[0]
    np.testing.assert_allclose(zero + gate * y, function(y), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gate[y == 0.0], slope, rtol=1e-8)
    assert np.abs(gate[np.abs(y) < 1]).max() <= 2.0


def test_a_product_is_shared_by_what_gate_and_value_read() -> None:
    """The derivative along the scale of g alone, the gate held, is half of what the neuron writes."""
    found = attributed("gated-decoder")
    own = found.index.sublayers[1].sublayer
    assert isinstance(own, NeuronHeads)
    rng = np.random.default_rng(0)
    g, u, width = rng.normal(size=(3, own.neurons)), rng.normal(size=(3, own.neurons)), own.output.out_features
    step = NeuronStep.of(own, unchanged(rng.normal(size=(3, width))), found.index, g, u)
    np.testing.assert_allclose(step.activations, own.function(g) * u, rtol=1e-12)
    for (rate, _, _), read in zip(step.reads, (g, u), strict=True):
        np.testing.assert_allclose(rate * read, step.activations / 2, rtol=1e-12, atol=1e-15)
