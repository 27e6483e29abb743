"""Why neurons and scores are what they are, against the same decoders written down in numpy from their initializers."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from rewriter import UsageError, rewrite, why
from rewriter.interpret.why import Why, rotation
from tests.committed import FOLDER
from tests.headmath import rotated, softmax, tapped
from tests.rewriter.interpret.test_attribution import EPSILON, given

Array = NDArray[Any]
DECODERS = ["silu-decoder", "trained/docstrings-gelu"]
HEADS = 4


class Decoder:
    """GPT-2 on the first sequence of `given`: what its sources write, and what reads them, by its own arithmetic.

    Attributes:
        written: source to what it writes, [T, D].
        before: the sources that had written when a sublayer read the stream.
    """

    def __init__(self, stem: str) -> None:
        model = onnx.load(FOLDER / f"{stem}.onnx")
        arrays = {each.name: onnx.numpy_helper.to_array(each).astype(np.float64) for each in model.graph.initializer}
        self.own = {name.removeprefix("model.transformer."): array for name, array in arrays.items()}
        ids = given(stem)["input_ids"][0]
        table = self.own["wte.weight"] if "wte.weight" in self.own else self.own["model.lm_head.weight"]
        self.written = {"embed": table[ids], "pos_embed": self.own["wpe.weight"][: len(ids)]}
        self.before: dict[str, tuple[str, ...]] = {}
        for layer in (0, 1):
            name, place = f"blocks.{layer}.attn", f"h.{layer}.attn"
            self.before[name] = tuple(self.written)
            query, key, value = (np.stack([self.read(name, t, part) for t in range(len(ids))]) for part in range(3))
            self.width = query.shape[1] // HEADS
            for head, z in enumerate(self.attend(query, key, value)):
                rows = self.own[f"{place}.c_proj.weight"][head * self.width : (head + 1) * self.width]
                self.written[f"{name}[{head}]"] = z @ rows
            self.written[f"{name}.b_O"] = np.tile(self.own[f"{place}.c_proj.bias"], (len(ids), 1))
            name, place = f"blocks.{layer}.mlp_heads", f"h.{layer}.mlp"
            self.before[name] = tuple(self.written)
            y = np.stack([self.read(name, t) for t in range(len(ids))])
            gate = np.vectorize(lambda each: (1 + math.erf(each / math.sqrt(2))) / 2)
            made = y * gate(y) if stem.endswith("gelu") else y / (1 + np.exp(-y))
            for neuron, row in enumerate(self.own[f"{place}.c_proj.weight"]):
                self.written[f"{name}[{neuron}]"] = np.outer(made[:, neuron], row)
            self.written[f"{name}.b_O"] = np.tile(self.own[f"{place}.c_proj.bias"], (len(ids), 1))

    def read(self, name: str, token: int, part: int = 0, *, without: str = "") -> Array:
        """Pre-activations, or a third of queries, keys and values, at a token; the denominator is held."""
        layer, neurons = name.split(".")[1], name.endswith("mlp_heads")
        whole = sum(self.written[each][token] for each in self.before[name])
        gone = [
            self.written[each][token]
            for each in self.before[name]
            if each.partition("[")[0] == without or each == without
        ]
        data = whole - sum(gone, np.zeros(len(whole)))
        norm = f"h.{layer}.ln_{2 if neurons else 1}"
        data = (data - data.mean()) / np.sqrt(whole.var() + EPSILON) * self.own[f"{norm}.weight"]
        data = data + self.own[f"{norm}.bias"] * (without != "ln.b")
        place = f"h.{layer}.mlp.c_fc" if neurons else f"h.{layer}.attn.c_attn"
        out = data @ self.own[f"{place}.weight"] + self.own[f"{place}.bias"] * (without not in ("b_in", "b_Q", "b_K"))
        return np.asarray(out if neurons else np.split(out, 3)[part])

    def attend(self, query: Array, key: Array, value: Array) -> list[Array]:
        """z [T, d_head] of each head."""
        sides = zip(*(np.split(each, HEADS, axis=1) for each in (query, key, value)), strict=True)
        causal = np.tri(len(query), dtype=bool)
        return [softmax(np.where(causal, q @ k.T / np.sqrt(self.width), -np.inf)) @ v for q, k, v in sides]

    def gives(self, name: str, token: int, source: str, part: int = 0) -> Array:
        """What the stream's readers lose without a source."""
        return self.read(name, token, part) - self.read(name, token, part, without=source)

    def score(self, name: str, head: int, query: int, key: int, sources: tuple[str, str]) -> float:
        """What a pair of sources gives to a score."""
        own = slice(head * self.width, (head + 1) * self.width)
        left, right = self.gives(name, query, sources[0])[own], self.gives(name, key, sources[1], 1)[own]
        return float(left @ right / np.sqrt(self.width))


decoder = cache(Decoder)


def whole(found: Why, bound: float = 1e-12) -> None:
    """The table adds up to what the model has."""
    assert abs(found.residual) <= bound * np.abs(found.table).max()
    assert abs(found.table.sum() + found.added - found.total) <= bound * max(1.0, np.abs(found.table).max())


@pytest.mark.parametrize("stem", DECODERS)
@pytest.mark.parametrize(("name", "neuron", "token"), [("blocks.0.mlp_heads", 68, 2), ("blocks.1.mlp_heads", 17, -1)])
def test_a_neuron_reads_what_was_written(stem: str, name: str, neuron: int, token: int) -> None:
    made, found = decoder(stem), why(FOLDER / f"{stem}.onnx", given(stem), f"{name}[{neuron}]", query=token)
    whole(found)
    assert found.total == pytest.approx(made.read(name, token)[neuron], abs=1e-7)
    assert (found.query, found.key, found.keys, found.added) == (token % 7, None, ("",), 0.0)
    rows = dict(zip(found.sources, found.table[:, 0], strict=True))
    assert {*rows} <= {*made.before[name], "ln.b", "b_in"}
    for source in (*made.before[name], "ln.b", "b_in"):
        wanted = made.gives(name, token, source)[neuron]
        assert rows.get(source, 0.0) == pytest.approx(wanted, abs=1e-7), source
        # Another token, the other sign, another neuron or no such row would be seen.
        other = made.gives(name, token - 1, source)[neuron]
        assert abs(wanted) < 1e-3 or source in ("ln.b", "b_in") or source.endswith("b_O") or abs(wanted - other) > 1e-6


@pytest.mark.parametrize("stem", DECODERS)
@pytest.mark.parametrize(("layer", "head", "tokens"), [(0, 1, (6, 2)), (1, 3, (5, 5)), (1, 0, (6, 1))])
def test_a_score_is_a_sum_over_pairs(stem: str, layer: int, head: int, tokens: tuple[int, int]) -> None:
    name, made = f"blocks.{layer}.attn", decoder(stem)
    found = why(FOLDER / f"{stem}.onnx", given(stem), f"{name}.{head}", query=tokens[0], key=tokens[1])
    whole(found)
    own = slice(head * made.width, (head + 1) * made.width)
    query, key = (made.read(name, token, part)[own] for part, token in enumerate(tokens))
    assert found.total == pytest.approx(query @ key / np.sqrt(made.width), rel=1e-7)  # 1 / sqrt(12) is a float32
    sources = dict.fromkeys(each.partition("[")[0] if "mlp" in each else each for each in made.before[name])
    assert {*found.sources} == {*sources, "ln.b", "b_Q"}
    assert {*found.keys} == {*sources, "ln.b", "b_K"}
    wanted = np.array(
        [[made.score(name, head, *tokens, (row, column)) for column in found.keys] for row in found.sources]
    )
    np.testing.assert_allclose(found.table, wanted, atol=1e-7)
    if layer:
        mistakes = {
            "a wrong sign": -wanted,
            "query and key swapped": wanted.T,
            "the token before": [
                [made.score(name, head, tokens[0] - 1, tokens[1], (r, c)) for c in found.keys] for r in found.sources
            ],
            "no bias": np.where(np.array(found.sources)[:, None] == "b_Q", 0.0, wanted),
        }
        for mistake, table in mistakes.items():
            assert np.abs(found.table - table).max() > 1e-3, mistake


def test_the_key_is_the_one_attended_to_most() -> None:
    path, inputs = FOLDER / "silu-decoder.onnx", given("silu-decoder")
    totals = [why(path, inputs, "blocks.1.attn[2]", query=4, key=key).total for key in range(5)]
    found = why(path, inputs, "blocks.1.attn[2]", query=-3)
    assert (found.query, found.key, found.total) == (4, int(np.argmax(totals)), max(totals))
    masked = why(path, inputs, "blocks.1.attn[2]", query=4, key=6)
    assert masked.added < -1e30
    assert abs(masked.residual) <= 1e-12


@pytest.mark.parametrize("stem", ["gated-decoder", "gelu-encoder", "relu-decoder", "gelu-vision"])
def test_what_the_file_computes(stem: str) -> None:
    """Rotations, shared keys, normalisations after sublayers: scores of onnxruntime in float32, and whole tables."""
    model, inputs = onnx.load(FOLDER / f"{stem}.onnx"), given(stem)
    softmax_node = [node for node in model.graph.node if node.op_type == "Softmax"][1]
    scores = tapped(model, inputs, [softmax_node.input[0]])[softmax_node.input[0]]
    for head, query, key in ((0, 3, 1), (3, 6, 6), (2, 5, 0)):
        found = why(model, inputs, f"blocks.1.attn[{head}]", query=query, key=key, sequence=1)
        whole(found)
        assert found.total == pytest.approx(scores[1, head, query, key], abs=1e-5)


def test_what_a_rewritten_file_computes(tmp_path: Path) -> None:
    """Its neurons are what its heads make, up to their certified error; the sum is exact all the same."""
    rewrite(FOLDER / "gelu-encoder.onnx", tmp_path / "out.onnx", form="local", validate=False)
    paths = FOLDER / "gelu-encoder.onnx", tmp_path / "out.onnx"
    before, after = (why(path, given("gelu-encoder"), "blocks.1.mlp_heads[3]", query=2) for path in paths)
    whole(after)
    assert before.sources == after.sources
    np.testing.assert_allclose(after.table, before.table, atol=1e-6)


@pytest.mark.parametrize("turning", [8, 6])
@pytest.mark.parametrize("neighbours", [False, True])
def test_rotations(turning: int, neighbours: bool) -> None:
    """Halves against each other or neighbours, of all channels or some; of one head, too."""
    order = np.arange(turning).reshape(2, -1).T.reshape(-1) if neighbours else np.arange(turning)
    for heads in (1, 3):
        before = np.random.default_rng(0).normal(size=(1, 5, heads, 8))
        after = before.copy()
        after[..., np.argsort(order)] = 0.0
        inner = before[..., :turning][..., np.argsort(order)]
        after[..., :turning] = rotated(inner)[..., order]
        for token in (0, 1, 4):
            found = rotation(before[0, token], after[0, token], "it")
            other = np.random.default_rng(1).normal(size=(1, 5, 1, 8))
            wanted = other.copy()
            wanted[..., :turning] = rotated(other[..., :turning][..., np.argsort(order)])[..., order]
            np.testing.assert_allclose(other[0, token] @ found, wanted[0, token], atol=1e-9)
    with pytest.raises(UsageError, match="it turns queries or keys in a way that is not understood"):
        rotation(before[0, 1], before[0, 1] ** 2, "it")


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        ("blocks.7.attn[0]", {}, "no head matches 'blocks.7.attn.0'"),
        ("blocks.0.attn[9]", {}, "no head matches"),
        ("blocks.0.attn.*", {}, "no head matches"),
        ("blocks.0.mlp_heads[1]", {"key": 1}, "it has no key"),
        ("blocks.0.mlp_heads[1]", {"query": 7}, "there is no token 7"),
        ("blocks.0.attn[1]", {"key": -8}, "there is no token -8"),
        ("blocks.0.attn[1]", {"sequence": 5}, "there is no sequence 5"),
    ],
)
def test_refusals(head: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("*", r"\*")):
        why(FOLDER / "silu-decoder.onnx", given("silu-decoder"), head, **options)
