"""The committed example files, without PyTorch."""

import re

import onnx
import pytest

from models.entry import DEFAULT_OPSETS
from models.registry import COMMITTED, Committed, get
from tests.committed import FOLDER

MACHINE = re.compile(rb"/(?:home|root|work|tmp|usr|opt|Users)/|site-packages|\.py\b|[A-Z]:\\\\")

EACH_FILE = pytest.mark.parametrize("committed", COMMITTED, ids=lambda committed: committed.file)


def test_only_the_listed_files_are_there_and_small() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.glob("*.onnx*")}
    assert set(files) == {committed.file for committed in COMMITTED}
    assert sum(files.values()) < 2_000_000


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
