"""Data of the page of heads: the numbers of the functions behind it, and bounds on its size."""

import json
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import attribute, head_pictures, head_tokens, heads, why
from rewriter.interpret import page as contents
from rewriter.interpret.sublayers import Attention, NeuronHeads
from tests.committed import FOLDER
from tests.headmath import neuron_pattern, tapped, wide
from tests.rewriter.interpret.test_attribution import given
from tests.textmodels import word_tokenizer

pytestmark = pytest.mark.slow
MODEL = FOLDER / "silu-decoder.onnx"
LOGIT = 5


@cache
def data(stem: str = "silu-decoder", logit: int | None = LOGIT, **options: Any) -> dict[str, Any]:
    made = head_pictures(FOLDER / f"{stem}.onnx", given(stem, 6), logit=logit, **options)
    return dict(json.loads(json.dumps(made, allow_nan=False)))


def by_name(**options: Any) -> dict[str, dict[str, Any]]:
    return {head["name"]: head for head in data(**options)["heads"]}


@pytest.mark.parametrize("stem", ["silu-decoder", "gelu-encoder"])
def test_patterns_are_the_models(stem: str) -> None:
    index, model = heads(FOLDER / f"{stem}.onnx"), onnx.load(FOLDER / f"{stem}.onnx")
    found = by_name(stem=stem, logit=None)
    own = {each.name: each for each in index.sublayers}
    attention, block = own["blocks.1.attn"], own["blocks.1.mlp_heads"]
    assert isinstance(attention, Attention)
    assert isinstance(block, NeuronHeads)
    values = tapped(model, given(stem, 6), [attention.pattern, block.query.data])
    pattern = values[attention.pattern][0]
    neurons = neuron_pattern(values[block.query.data].astype(np.float64), wide(index, "blocks.1.mlp_heads"))[0]
    for place in range(4):
        (shown,) = found[f"blocks.1.attn.{place}"]["pattern"]
        assert np.abs(np.array(shown) - pattern[place]).max() <= 1e-4
    checked = [head for name, head in found.items() if name.startswith("blocks.1.mlp_heads.")]
    for head in checked:
        assert len(head["pattern"]) == len(block.groups)
        for group, shown in enumerate(head["pattern"]):
            wanted = neurons[:, group * block.count + head["number"]]
            assert np.abs(np.array(shown) - wanted).max() <= 1e-4
    assert len(checked) > 80


def test_attributions_are_those_of_their_function() -> None:
    found, wanted = by_name(), attribute(MODEL, given("silu-decoder", 6), LOGIT)
    assert data()["logit"] == {"entry": str(LOGIT), "position": -1, "value": wanted.logit}
    assert data()["embed"] == pytest.approx(wanted.paths["embed"], rel=1e-3)
    words = word_tokenizer([f"word{number}" for number in range(50)])
    assert data(minus=1, tokenizer=words)["logit"]["entry"] == f"'word{LOGIT}' - 'word1'"
    for name, head in found.items():
        sublayer, _, number = name.rpartition(".")
        effects = wanted.effects[sublayer][:, int(number)]
        assert head["effects"] == pytest.approx(effects, rel=1e-3, abs=1e-12)
        assert head["effect"] == pytest.approx(effects.sum(), rel=1e-3, abs=1e-12)


def test_tokens_are_those_of_their_function() -> None:
    ids = given("silu-decoder", 6)["input_ids"][0]
    assert data()["tokens"] == [{"place": place, "text": str(token)} for place, token in enumerate(ids)]
    rows = {row.side: row for row in head_tokens(MODEL, names="blocks.0.attn.2", top=8).rows}
    for shown in by_name()["blocks.0.attn.2"]["tokens"]:
        row = rows[shown["side"]]
        assert [text for text, _ in shown["top"]] == [str(token) for token, _ in row.top]
        assert [score for _, score in shown["bottom"]] == pytest.approx([score for _, score in row.bottom], rel=1e-3)


def test_scores_are_those_of_their_function(monkeypatch: pytest.MonkeyPatch) -> None:
    found, names = by_name()["blocks.1.attn.2"]["scores"], data()["sources"]
    assert {(query, key) for query, key, *_ in found} == {
        (query, key) for query in range(6) for key in range(query + 1)
    }
    for query, key, total, added, terms in found[::7]:
        wanted = why(MODEL, given("silu-decoder", 6), "blocks.1.attn[2]", query=query, key=key)
        assert (total, added) == pytest.approx((wanted.total, wanted.added), rel=1e-3, abs=1e-9)
        shown = [(names[asked], names[told], value) for asked, told, value in terms]
        assert shown == [(asked, told, pytest.approx(value, rel=1e-3)) for asked, told, value in wanted.top(5)]
    monkeypatch.setattr(contents, "_MAX_SCORES", 10)
    few = [head["scores"] or [] for head in head_pictures(MODEL, given("silu-decoder", 6), logit=LOGIT)["heads"]]
    assert [bool(key) for rows in few for _, key, *_ in rows] == [True] * 10


def test_the_neurons_with_the_largest_attributions_are_shown() -> None:
    few, wanted = data(most=7), attribute(MODEL, given("silu-decoder", 6), LOGIT)
    effects = {
        f"{name}.{number}": size
        for name in ("blocks.0.mlp_heads", "blocks.1.mlp_heads")
        for number, size in enumerate(np.abs(wanted.effects[name]).max(axis=0))
    }
    shown = {head["name"] for head in few["heads"] if head["kind"] == "neuron"}
    assert shown == set(sorted(effects, key=lambda name: -effects[name])[:7])
    assert few["notes"] == ["Shown are 7 of 256 neurons, those with the largest attribution to the logit."]
    without = data(logit=None, most=0)
    assert without["logit"] is None
    assert {head["kind"] for head in without["heads"]} == {"head"}
    assert {head["effect"] for head in without["heads"]} == {None}
    assert without["notes"] == ["Shown are 0 of 256 neurons, those with the largest activation on these tokens."]


def test_long_sequences_are_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_TOKENS", 5)
    monkeypatch.setattr(contents, "_MAX_PATTERN_ENTRIES", 3 * 25)
    long = given("silu-decoder", 19)
    for position, start in ((-1, 14), (9, 5), (0, 0)):
        found = head_pictures(MODEL, long, logit=LOGIT, position=position, most=3)
        assert [token["place"] for token in found["tokens"]] == list(range(start, start + 5))
        assert found["notes"][0] == f"Shown are tokens {start} to {start + 4} of 19."
        assert "Shown are 3 of 8 original heads" in found["notes"][2]
        for head in found["heads"]:
            assert len(head["activation"]) == len(head["effects"]) == 5
            assert np.array(head["pattern"]).shape == (1, 5, 5 if head["kind"] == "head" else 2)
    exact = head_pictures(MODEL, long, most=3)
    assert [token["place"] for token in exact["tokens"]] == [0, 1, 2, 3, 4]
    monkeypatch.setattr(contents, "_MAX_EXACT_ENTRIES", 3 * 25 - 1)
    coarse = head_pictures(MODEL, long, most=3)
    assert coarse["notes"][1] == "Attention weights of original heads below 0.01 are left out."
    for one, other in zip(exact["heads"], coarse["heads"], strict=True):
        weights = np.array(one["pattern"])
        assert other["pattern"] == np.where((weights < 0.01) & (one["kind"] == "head"), 0.0, weights).tolist()


@pytest.mark.parametrize("stem", ["gated-decoder", "gelu-vision", "conformer-encoder", "gelu-encoder"])
def test_other_models(stem: str) -> None:
    found = data(stem, None, most=6)
    neurons = [head for head in found["heads"] if head["kind"] == "neuron"]
    assert len(neurons) == 6
    blocks = heads(FOLDER / f"{stem}.onnx").sublayers
    groups = {each.heads // each.count for each in blocks if isinstance(each, NeuronHeads)}
    assert {len(head["pattern"]) for head in neurons} == groups
    assert (found["tokens"][0]["text"] == "#0") is (stem in ("gelu-vision", "conformer-encoder"))
    assert bool(found["missing"]) is (stem != "gated-decoder")
