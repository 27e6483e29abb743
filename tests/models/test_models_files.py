"""The committed example files, without PyTorch."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import pytest

from models.entry import DEFAULT_OPSETS
from models.registry import COMMITTED, Committed, get
from tests.committed import FOLDER, feeds

LENGTHS = {"batch": 3, "sequence": 11}
MACHINE = re.compile(rb"/(?:home|root|work|tmp|usr|opt|Users)/|site-packages|\.py\b|[A-Z]:\\\\")


EACH_FILE = pytest.mark.parametrize("committed", COMMITTED, ids=lambda committed: committed.file)


def test_only_the_listed_files_are_there_and_small() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.glob("*.onnx*")}
    assert set(files) == {committed.file for committed in COMMITTED}
    assert sum(files.values()) < 2_000_000


def test_readme_describes_every_file() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for committed in COMMITTED:
        entry = get(committed.entry)
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{committed.file}`"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:5] == [
            f"`{committed.entry}`",
            committed.exporter,
            str(DEFAULT_OPSETS[committed.exporter]),
            str(entry.mlp_blocks("tiny")),
        ]


@EACH_FILE
def test_file_is_valid_and_names_no_path_of_a_machine(committed: Committed) -> None:
    path = FOLDER / committed.file
    assert MACHINE.findall(path.read_bytes()) == []
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == DEFAULT_OPSETS[committed.exporter]
    entry = get(committed.entry)
    assert [value.name for value in model.graph.input] == [spec.name for spec in entry.inputs]
    assert [value.name for value in model.graph.output] == [output.name for output in entry.outputs]


@EACH_FILE
def test_file_runs_with_other_lengths(committed: Committed) -> None:
    entry = get(committed.entry)
    session = onnxruntime.InferenceSession(FOLDER / committed.file, providers=["CPUExecutionProvider"])
    fed = feeds(onnx.load(FOLDER / committed.file), tokens=LENGTHS["sequence"])
    for output, result in zip(entry.outputs, session.run(None, fed), strict=True):
        expected = [LENGTHS.get(name or "", length) for name, length in zip(output.dims, result.shape, strict=True)]
        assert list(result.shape) == expected
        assert np.isfinite(result).all()
        assert result.std() > 0.1
