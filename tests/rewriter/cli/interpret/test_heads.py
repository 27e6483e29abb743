"""`rewrite heads`: the list, the files, and what happens to bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter.cli import run
from tests.committed import FOLDER
from tests.textmodels import mlp


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["heads", str(FOLDER / "gated-decoder.onnx")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == (
        "blocks.0.attn 4 heads, 2 per key and value, rotary model.model.layers.0.self_attn"
    )
    assert "192 heads of 96 neurons, silu(gate) * value as silu_gate" in lines[1]
    assert lines[-1] == "392 heads in 4 sublayers, 40 tensors"


def test_what_is_not_understood_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["heads", str(FOLDER / "gelu-encoder.onnx")]) == 0
    assert "not understood: block model.pooler.dense: its output is an output of the graph" in capsys.readouterr().out


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "heads.npz"
    arguments = ["heads", str(FOLDER / "silu-decoder.onnx"), "-o", str(out)]
    assert run(arguments) == 0
    with np.load(out) as archive:
        assert set(archive.files) >= {
            *(f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("attn.W_O", "mlp_heads.W_O", "ln1.w", "ln1.b")),
            "__metadata__",
        }
    assert run(arguments) == 2
    assert "exists; remove it, or choose another output" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["heads", str(FOLDER / "relu-decoder.onnx"), "--json", "--fold-ln"]) == 0
    found = json.loads(capsys.readouterr().out)
    facts = found["sublayers"]["blocks.0.mlp_heads"]
    assert (facts["kind"], facts["heads"], facts["activation"]) == ("neurons", 128, "relu")
    assert facts["heads_per_neuron"][0]["head"]["beta"] > 1e9


@pytest.mark.parametrize("suffix", [".bin", ""])
def test_other_suffixes(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["heads", str(FOLDER / "silu-decoder.onnx"), "-o", str(tmp_path / f"heads{suffix}")]) == 2
    assert "must end in .safetensors or .npz" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    model = mlp("y = Relu(h)")
    del model.graph.node[:]
    model.graph.node.append(
        onnx.helper.make_node("Identity", [model.graph.input[0].name], [model.graph.output[0].name])
    )
    onnx.save(model, path)
    assert run(["heads", str(path)]) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "0 heads in 0 sublayers, 0 tensors"


def test_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes((FOLDER / "silu-decoder.onnx").read_bytes()[:5000])
    assert run(["heads", str(path), "-o", str(tmp_path / "heads.npz")]) == 4
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not (tmp_path / "heads.npz").exists()


def test_weights_that_disappear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data file is replaced between indexing and reading: one line, and no half-written file."""
    model = onnx.load(FOLDER / "silu-decoder.onnx")
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    from rewriter import ModelError, heads

    index = heads(path)
    (tmp_path / "weights").write_bytes(b"short")
    with pytest.raises(ModelError):
        index.write(tmp_path / "heads.safetensors")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx", "weights"]
