"""Where heads are active, and dead heads, against tensors of the model in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from rewriter import UsageError, head_activity, heads
from rewriter.interpret.sublayers import NeuronHeads
from tests.committed import ACTIVATIONS, FOLDER, feeds
from tests.conftest import slow
from tests.headmath import tapped
from tests.textmodels import SILU, text_model

Array = NDArray[Any]


def test_the_largest_activations_of_neurons() -> None:
    """The activation's output is a tensor of the file."""
    for stem, atol in (("silu-decoder", 1e-5), ("gated-decoder", 1e-5)):
        model = onnx.load(FOLDER / f"{stem}.onnx")
        given = feeds(model)
        output = ACTIVATIONS[f"{stem}.onnx"][1][0]
        values = tapped(model, given, [output])[output].reshape(3, 19, -1).astype(np.float64)
        kept = given["attention_mask"].astype(bool)
        found = head_activity(FOLDER / f"{stem}.onnx", given, names="blocks.1.mlp_heads.*", top=3)
        assert found.tokens == kept.sum() == 52
        for neuron, row in enumerate(found.rows):
            own = np.where(kept, values[..., neuron], -np.inf)
            assert row.head == f"blocks.1.mlp_heads.{neuron}"
            assert [place.value for place in row.top] == pytest.approx(np.sort(own.reshape(-1))[:-4:-1], abs=atol)
            for place in row.top:
                assert abs(own[place.sequence, place.position] - place.value) <= atol
                assert place.token == given["input_ids"][place.sequence, place.position]
            assert row.mean == pytest.approx(own[kept].mean(), abs=atol)
            assert row.deviation == pytest.approx(own[kept].std(), abs=1e-4)


def test_original_heads_by_what_they_write() -> None:
    path = FOLDER / "silu-decoder.onnx"
    given, index = feeds(onnx.load(path), tokens=6), heads(path)
    own = next(each.sublayer for each in index.sublayers if each.name == "blocks.1.attn")
    assert not isinstance(own, NeuronHeads)
    values = tapped(onnx.load(path), given, [own.z])
    norms = np.linalg.norm(np.einsum("bhtk,hkd->bhtd", values[own.z], index["blocks.1.attn.W_O"]), axis=-1)
    kept = given["attention_mask"].astype(bool)
    for head, row in enumerate(head_activity(path, given, names="blocks.1.attn.*", top=4).rows):
        largest = np.sort(norms[:, head][kept])[:-5:-1]
        assert [place.value for place in row.top] == pytest.approx(largest, abs=1e-5)
        assert not row.dead


@slow
def test_cases_of_a_file(tmp_path: Path) -> None:
    path, file = FOLDER / "silu-decoder.onnx", tmp_path / "x.npz"
    both = {name: feeds(onnx.load(path), seed, tokens=size) for name, seed, size in (("a", 1, 5), ("b", 2, 9))}
    arrays: dict[str, Any] = {f"{case}/{name}": array for case, own in both.items() for name, array in own.items()}
    np.savez(file, **arrays)
    found = head_activity(path, file, names="blocks.0.mlp_heads.3", top=100)
    (row,) = found.rows
    assert len(row.top) == found.tokens == sum(int(given["attention_mask"].sum()) for given in both.values())
    for place in row.top:
        assert place.token == both[place.case]["input_ids"][place.sequence, place.position]
    alone = head_activity(path, both["b"], names="blocks.0.mlp_heads.3", top=100).rows[0].top
    mine = [(place.sequence, place.position, place.value) for place in row.top if place.case == "b"]
    assert [each[:2] for each in mine] == [(place.sequence, place.position) for place in alone]
    assert found.to_json()["heads"][0]["top"][0]["case"] in both


def test_heads_that_are_dead_on_the_inputs() -> None:
    rng = np.random.default_rng(0)
    first, second, bias = rng.normal(size=(4, 8)), rng.normal(size=(8, 4)), rng.normal(size=8)
    bias[3] = -1000.0
    body = f"first = MatMul(x, W1) y = Add(first, b1) {SILU} second = MatMul(h, W2) out = Add(x, second)"
    model = text_model(body, constants={"W1": first, "W2": second, "b1": bias})
    given = {"x": np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)}
    found = head_activity(model, given)
    assert [int(row.head.rpartition(".")[2]) for row in found.dead] == [3]
    assert found.rows[0].top[0].token is None


def test_refusals() -> None:
    path = FOLDER / "silu-decoder.onnx"
    given = feeds(onnx.load(path), tokens=4)
    for options, message in (({"top": 0}, "take 1"), ({"names": "y"}, "no head")):
        with pytest.raises(UsageError, match=message):
            head_activity(path, given, **options)
