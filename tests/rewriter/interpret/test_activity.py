"""Where heads are active, dead heads and duplicates, against tensors of the model in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from rewriter import UsageError, head_activity, heads, idle_heads
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


def test_original_heads_by_what_they_write_and_by_their_pattern() -> None:
    path = FOLDER / "silu-decoder.onnx"
    given, index = feeds(onnx.load(path), tokens=6), heads(path)
    own = next(each.sublayer for each in index.sublayers if each.name == "blocks.1.attn")
    assert not isinstance(own, NeuronHeads)
    values = tapped(onnx.load(path), given, [own.z, own.pattern])
    norms = np.linalg.norm(np.einsum("bhtk,hkd->bhtd", values[own.z], index["blocks.1.attn.W_O"]), axis=-1)
    kept = given["attention_mask"].astype(bool)
    for by, wanted in (("z", norms), ("self", np.diagonal(values[own.pattern], axis1=2, axis2=3))):
        found = head_activity(path, given, names="blocks.1.attn.*", by=by, top=4)
        for head, row in enumerate(found.rows):
            largest = np.sort(wanted[:, head][kept])[:-5:-1]
            assert [place.value for place in row.top] == pytest.approx(largest, abs=1e-5)
            assert row.dead == ""


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


def broken() -> onnx.ModelProto:
    """Neuron 0 writes nothing, neuron 1 has a constant pattern, 2 and 5 are duplicates with a factor, 3 never fires."""
    rng = np.random.default_rng(0)
    first, second, bias = rng.normal(size=(4, 8)), rng.normal(size=(8, 4)), rng.normal(size=8)
    second[0], first[:, 1] = 0.0, 0.0
    first[:, 5], second[5] = -2.0 * first[:, 2], 3.0 * second[2]
    bias[3] = -1000.0
    body = f"first = MatMul(x, W1) y = Add(first, b1) {SILU} second = MatMul(h, W2) out = Add(x, second)"
    return text_model(body, constants={"W1": first, "W2": second, "b1": bias})


def test_heads_that_are_idle_by_their_weights() -> None:
    found = idle_heads(broken())
    (name,) = [each.name for each in heads(broken()).sublayers]
    assert [(each.head, each.reason.partition(":")[0]) for each in found.idle] == [
        (f"{name}.0", "writes nothing"),
        (f"{name}.1", "its values are constant"),
    ]
    ((first, second, reads, writes),) = [
        (each.first, each.second, each.reads, each.writes) for each in found.duplicates
    ]
    assert (first, second) == (f"{name}.2", f"{name}.5")
    assert (reads, writes) == pytest.approx((-1.0, 1.0), abs=1e-6)
    assert idle_heads(broken(), names=f"{name}.4").to_json() == {"similarity": 0.999, "idle": [], "duplicates": []}
    assert len(idle_heads(broken(), names=f"{name}.5").duplicates) == 1
    with pytest.raises(UsageError, match="not between 0 and 1"):
        idle_heads(broken(), similarity=0.0)


def test_duplicates_of_gates_read_the_same_twice() -> None:
    """Neurons 2 and 5 share gate and value, 1 and 6 only the gate."""
    rng = np.random.default_rng(0)
    gate, value = rng.normal(size=(2, 4, 8))
    gate[:, 5], value[:, 5] = 2.0 * gate[:, 2], -1.0 * value[:, 2]
    gate[:, 6] = gate[:, 1]
    body = "y = MatMul(x, W1) u = MatMul(x, V1) s = Sigmoid(y) a = Mul(y, s) h = Mul(a, u)"
    model = text_model(f"{body} second = MatMul(h, W2) out = Add(x, second)", constants={"W1": gate, "V1": value})
    (pair,) = idle_heads(model).duplicates
    assert [each.rpartition(".")[2] for each in (pair.first, pair.second)] == ["2", "5"]
    assert abs(pair.reads) == pytest.approx(1.0, abs=1e-6)


def test_heads_that_are_dead_on_the_inputs() -> None:
    given = {"x": np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)}
    found = head_activity(broken(), given)
    assert {int(row.head.rpartition(".")[2]): row.dead for row in found.dead} == {
        1: "its pattern is the same at all tokens",
        3: "writes nothing on these inputs",
    }
    assert found.rows[0].top[0].token is None


def test_duplicates_of_original_heads(tmp_path: Path) -> None:
    """Head 3 of the last sublayer gets the weights of head 1, with factors that change no direction."""
    model = onnx.load(FOLDER / "silu-decoder.onnx")
    index = heads(model)
    own = next(each.sublayer for each in index.sublayers if each.name == "blocks.1.attn")
    assert not isinstance(own, NeuronHeads)
    weights = {each.name: each for each in model.graph.initializer}
    for heads_of, factor in ((own.query, 2.0), (own.key, -1.0), (own.value, 0.5)):
        tensor = weights[heads_of.operator.weight]
        array = onnx.numpy_helper.to_array(tensor).copy()
        array[:, heads_of.columns[3]] = factor * array[:, heads_of.columns[1]]
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    tensor = weights[own.output.weight]
    array = onnx.numpy_helper.to_array(tensor).copy()
    array[own.channels[3]] = array[own.channels[1]]
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    found = idle_heads(model)
    assert [(each.first, each.second) for each in found.duplicates] == [("blocks.1.attn.1", "blocks.1.attn.3")]
    assert (found.duplicates[0].reads, found.duplicates[0].writes) == pytest.approx((-1.0, 1.0), abs=1e-6)
    assert idle_heads(FOLDER / "silu-decoder.onnx").duplicates == ()


def test_refusals() -> None:
    path = FOLDER / "silu-decoder.onnx"
    given = feeds(onnx.load(path), tokens=4)
    for options, message in (({"by": "x"}, "unknown measure 'x'"), ({"top": 0}, "take 1"), ({"names": "y"}, "no head")):
        with pytest.raises(UsageError, match=message):
            head_activity(path, given, **options)
