"""Attributions as identities, and against a frozen network that is run forwards in numpy."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import attribute, rewrite
from rewriter.arrays import Array
from rewriter.interpret.attribute import Attribution, FrozenRun, NeuronStep, held
from rewriter.interpret.index import AffineMap
from rewriter.interpret.stream import FrozenNorm
from rewriter.interpret.sublayers import NeuronHeads
from tests.committed import FOLDER, feeds
from tests.decoder import Decoder
from tests.headmath import tapped

pytestmark = pytest.mark.sample(2)

EXACT = ["silu-decoder", "trained/docstrings-gelu"]
FITTED = ["gated-decoder", "gelu-vision", "gelu-encoder"]
"""The last two read one token, and have normalisations after the sublayers."""
LOGIT, OTHER = 5, 7


def given(stem: str, tokens: int = 7) -> dict[str, Array]:
    made = feeds(onnx.load(FOLDER / f"{stem}.onnx"), tokens=tokens)
    return {name: np.ones_like(array) if "mask" in name else array for name, array in made.items()}


@cache
def attributed(stem: str, **options: Any) -> Attribution:
    return attribute(FOLDER / f"{stem}.onnx", given(stem), LOGIT, **options)


@pytest.mark.parametrize("stem", EXACT + FITTED)
@pytest.mark.parametrize("options", [{}, {"minus": OTHER, "position": 2}], ids=str)
def test_both_sums_equal_the_logit(stem: str, options: dict[str, Any]) -> None:
    found = attributed(stem, **options)
    model = onnx.load(FOLDER / f"{stem}.onnx")
    output = model.graph.output[0].name
    values = tapped(model, given(stem), [output])[output]
    if values.ndim == 2:  # of the class token
        values = values[:, None].repeat(3, axis=1)
    logits = values[0, options.get("position", -1)]
    wanted = logits[LOGIT] - (logits[OTHER] if "minus" in options else 0.0)
    assert abs(found.logit - wanted) <= 1e-5
    sizes = max(1.0, *(np.abs(part).max() for part in found.paths.values()))
    for name, parts in (("direct", found.direct), ("paths", found.paths)):
        assert abs(found.residuals[name]) <= 1e-10 * sizes
        assert abs(found.logit - sum(float(np.sum(part)) for part in parts.values())) == abs(found.residuals[name])


def test_a_factor_of_embeddings_belongs_to_the_tokens() -> None:
    model, inputs = onnx.load(FOLDER / "relu-decoder.onnx"), given("relu-decoder")
    place = next(at for at, each in enumerate(model.graph.node) if each.output[0] == "embedding")
    model.graph.node[place].output[0] = "rows"
    model.graph.node.insert(place + 1, onnx.helper.make_node("Mul", ["rows", "three"], ["embedding"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(3.0, np.float32), "three"))
    run = FrozenRun(model, inputs)
    run.linear(LOGIT, None, -1)
    wanted = run.index["embed.W_E"][inputs["input_ids"][0]]
    np.testing.assert_allclose(run.beginning["embed"], wanted, atol=1e-6)


@cache
def decoder(stem: str) -> Decoder:
    return Decoder(stem, given(stem)["input_ids"][0])


def lost(stem: str, start: Array | None = None, **options: Any) -> float:
    """What the logit of the held network is lower by."""
    return float(decoder(stem).logits[-1, LOGIT] - decoder(stem).run(start, **options)[-1, LOGIT])


@pytest.mark.sample(0)
@pytest.mark.parametrize("stem", EXACT)
def test_paths_are_those_of_the_frozen_network(stem: str) -> None:
    found, start = attributed(stem), decoder(stem).streams["blocks.0.attn"]
    assert abs(decoder(stem).logits[-1, LOGIT] - found.logit) <= 1e-6
    for token, effect in enumerate(found.paths["embed"]):
        changed = start.copy()
        changed[token] = 0.0
        assert abs(lost(stem, changed) - effect) <= 1e-6


@pytest.mark.parametrize("stem", EXACT)
@pytest.mark.parametrize(
    ("name", "token", "head"),
    [("blocks.0.attn", 1, 2), ("blocks.0.mlp_heads", 3, 17), ("blocks.1.attn", 6, 0), ("blocks.1.mlp_heads", 6, 90)],
)
def test_effects_are_what_the_frozen_network_loses(stem: str, name: str, token: int, head: int) -> None:
    def gone(made: Array) -> Array:
        made[token, head] = 0.0
        return made

    found, effect = attributed(stem), lost(stem, changes={name: gone})
    assert abs(effect - found.effects[name][token, head]) <= 1e-6
    if name == "blocks.1.mlp_heads":  # nothing is between it and the logit but the last normalisation
        assert abs(effect - found.direct[name][head]) <= 1e-6


def test_constants_are_what_the_frozen_network_loses() -> None:
    stem = "silu-decoder"
    for part in ("attn.ln.b", "mlp_heads.ln.b", "attn.b_O", "attn.b_V", "mlp_heads.b_in", "mlp_heads.b_O"):
        for name in (f"blocks.0.{part}", f"blocks.1.{part}"):
            wanted = float(np.sum(attributed(stem).paths[name]))
            assert abs(lost(stem, off=[name]) - wanted) <= 1e-6, name


def test_of_one_token_and_after_normalisations() -> None:
    for stem in ("gelu-vision", "gelu-encoder"):
        found = attributed(stem)
        assert found.paths["embed"].shape == (17 if stem == "gelu-vision" else 7,)
        last = found.effects["blocks.1.mlp_heads"].sum(axis=1)
        token = 0 if stem == "gelu-vision" else -1
        assert np.abs(np.delete(last, token)).max() <= 1e-5 < np.abs(last[token])
        direct = {name: part for name, part in found.direct.items() if name.endswith("after.ln.b")}
        assert len(direct) == (0 if stem == "gelu-vision" else 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stem", ["silu-decoder", "gelu-encoder", "gated-decoder"])
@pytest.mark.parametrize("options", [{}, {"form": "compact"}, {"form": "masked"}, {"form": "whole"}], ids=str)
def test_the_head_program_does_not_matter(stem: str, options: dict[str, Any], tmp_path: Path) -> None:
    """What is attributed is the function: the same parts for the original and for every program in its place."""
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
    own = found.index.sublayers[1]
    assert isinstance(own, NeuronHeads)
    rng = np.random.default_rng(0)
    g, u, width = rng.normal(size=(3, own.count)), rng.normal(size=(3, own.count)), own.output.out_features
    activations, norm = own.function(g) * u, FrozenNorm(np.ones(3), np.ones(width), np.zeros(width), centred=False)
    output = AffineMap(own.output, found.index.value_of)
    step = NeuronStep(norm, activations[..., None], output.bias(), output.weight, own, found.index.value_of, g, u)
    for (rate, _), read in zip(step.reads, (g, u), strict=True):
        np.testing.assert_allclose(rate * read, activations / 2, rtol=1e-12, atol=1e-15)
