"""Inputs that a user gives: arrays, npz files, text; what fits, and one line for what does not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

from rewriter.errors import UsageError
from rewriter.inputs.cases import load_cases

tokenizers = pytest.importorskip("tokenizers")

MODEL = parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]>
    g (int64[batch, 4] ids, float[batch] x, float[2] w) => (int64 y) <float[2] w = {1, 2}>
    { y = Identity(ids) }"""
)
IDS, X = np.zeros((2, 4), np.int64), np.zeros(2, np.float32)


def saved(folder: Path, arrays: dict[str, Any]) -> Path:
    path = folder / "inputs.npz"
    np.savez(path, **arrays)
    return path


def test_one_case(tmp_path: Path) -> None:
    (case,) = load_cases(saved(tmp_path, {"ids": IDS, "x": X}), MODEL)
    assert case.name == "the given inputs"
    assert {name: array.dtype.name for name, array in case.feeds.items()} == {"ids": "int64", "x": "float32"}


def test_several_cases(tmp_path: Path) -> None:
    arrays = {"a/ids": IDS, "a/x": X, "b/ids": IDS + 1, "b/x": X, "b/w": X}
    cases = load_cases(saved(tmp_path, arrays), MODEL)
    assert [(case.name, set(case.feeds)) for case in cases] == [("a", {"ids", "x"}), ("b", {"ids", "x", "w"})]


def test_safe_casts(tmp_path: Path) -> None:
    (case,) = load_cases(saved(tmp_path, {"ids": IDS.astype(np.int32), "x": X.astype(np.float16)}), MODEL)
    assert case.feeds["ids"].dtype == np.int64
    assert case.feeds["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"ids": IDS}, "inputs.npz: input 'x' missing"),
        ({"a/ids": IDS, "a/x": X, "b/x": X}, "inputs.npz: input 'ids' of case 'b' missing"),
        ({"ids": IDS, "x": X, "z": X}, "inputs.npz: the model has no input 'z'; its inputs are 'ids', 'x'"),
        ({"ids": IDS.astype(float), "x": X}, "input 'ids' is of type float64, the model takes int64"),
        ({"ids": IDS > 0, "x": X}, "input 'ids' is of type bool, the model takes int64"),
        ({"ids": IDS, "x": X.astype(float)}, "input 'x' is of type float64, the model takes float32"),
        ({"ids": IDS[0], "x": X}, r"input 'ids' has shape \[4\], the model takes \[batch, 4\]"),
        ({"ids": IDS[:, :3], "x": X}, r"input 'ids' has shape \[2, 3\], the model takes \[batch, 4\]"),
        ({}, "inputs.npz: there are no arrays"),
        ({"ids": np.array([object()]), "x": X}, "inputs.npz: not a readable npz file"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    path = saved(tmp_path, arrays)
    with pytest.raises(UsageError, match=reason):
        load_cases(path, MODEL)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.npz: no such file"):
        load_cases(tmp_path / "none.npz", MODEL)
    text = tmp_path / "text.npz"
    text.write_text("no archive")
    with pytest.raises(UsageError, match=r"text\.npz: not a readable npz file of numbers; write one with numpy\."):
        load_cases(text, MODEL)
    single = tmp_path / "single.npy"
    np.save(single, X)
    with pytest.raises(UsageError, match=r"single\.npy: a single array; name the inputs with numpy\.savez"):
        load_cases(single, MODEL)
