"""`bench`: what is measured on which inputs, what is refused, and the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import UsageError, bench, rewrite
from rewriter.api.benching import inputs_of
from rewriter.files.load import load_model
from rewriter.ort.timing import Feeds, Process, measure
from rewriter.proof.settings import Settings, as_given
from tests.committed import FOLDER
from tests.textmodels import SILU, mlp

DECODER, VISION = FOLDER / "silu-decoder.onnx", FOLDER / "gelu-vision.onnx"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Turns of one run; the models in the order of their turns."""
    log: list[str] = []
    turn = Process.turn

    def logged(self: Process, feeds: Feeds | None, seconds: float) -> float:
        log.append(self.name)
        return turn(self, feeds, seconds)

    monkeypatch.setattr(Process, "turn", logged)
    monkeypatch.setattr(measure, "__kwdefaults__", {"seconds": 0.0})
    return log


def test_a_measurement(quick: list[str]) -> None:
    model = mlp(SILU)
    heads = rewrite(model, validate=False).rewritten
    found = bench(model, heads, model, tokens=(5, 7), repeat=3, providers=["cpu"])
    names = ["<memory>", "<memory> (1)", "<memory> (2)", "control"]
    assert [(row.model, row.inputs) for row in found.times] == [
        (name, f"batch 1, sequence {tokens}") for tokens in (5, 7) for name in names
    ]
    assert {name: quick.count(name) for name in names} == dict.fromkeys(names, 2 * 4), (
        "to warm up, and one turn a round"
    )
    for row in found.times:
        assert len(row.rounds) == 3
        assert row.milliseconds == np.median(row.rounds) > 0.0
        assert row.load_seconds > 0.0
        assert (row.over_original is None) == (row.model == "<memory>")
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["options"]["tokens"] == [5, 7]
    assert data["environment"]["onnxruntime"]


def test_inputs_of_a_file(quick: list[str], tmp_path: Path) -> None:
    del quick
    path = tmp_path / "inputs.npz"
    arrays: dict[str, Any] = {"short/x": np.ones((1, 3, 4), np.float32), "long/x": np.ones((2, 9, 4), np.float32)}
    np.savez(path, **arrays)
    found = bench(mlp(SILU), mlp(SILU), inputs=path, repeat=3, providers=["cpu"])
    assert list(dict.fromkeys(row.inputs for row in found.times)) == ["short", "long"]
    with pytest.raises(UsageError, match="sizes come with the inputs of a file"):
        bench(mlp(SILU), mlp(SILU), inputs=path, tokens=3)


def test_a_file_gives_what_cannot_be_made(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (string[n] words) => (string[n] y) { y = Identity(words) }'
    )
    np.savez(tmp_path / "words.npz", words=np.asarray(["a", "b"]))
    (words,) = inputs_of(model, Settings(inputs=as_given(tmp_path / "words.npz")))
    assert list(words.feeds["words"]) == ["a", "b"]
    with pytest.raises(UsageError, match="no values can be made for input 'words'"):
        bench(model, model)


def shapes(path: Path, **given: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs made for a model."""
    (case,) = inputs_of(load_model(path).proto, Settings(), **given)
    return {name: array.shape for name, array in case.feeds.items()}


def test_sizes() -> None:
    assert shapes(DECODER, tokens=(7,))["input_ids"] == (1, 7)
    assert shapes(DECODER)["input_ids"] == (1, 64), "as many as the table of positions has"
    assert shapes(VISION) == {"pixel_values": (1, 3, 16, 16)}


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        (VISION, {"tokens": 5}, "^tokens 5: no input of the model has an open dimension for it; leave tokens out$"),
        (DECODER, {"tokens": 65}, "^tokens 65: the model's inputs and tables allow 64$"),
        (DECODER, {"tokens": (3, 0)}, "^tokens is 0; it must be"),
        (DECODER, {"repeat": 1}, "^repeat is 1; it must be"),
        (DECODER, {"dims": {"nothing": 3}}, "no input has a dimension 'nothing'"),
    ],
)
def test_sizes_that_the_model_does_not_take(path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench(path, path, **given)
