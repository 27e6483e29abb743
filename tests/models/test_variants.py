"""The committed example files, and the same blocks in what other tools make of them; without PyTorch."""

import re
from pathlib import Path

import onnx
import pytest

from models.entry import DEFAULT_OPSETS
from models.registry import COMMITTED, Committed, get
from models.variants import VARIANTS, Hints, Variant, get_variant, make_variant
from rewriter import rewrite
from tests.committed import FOLDER

FREE = ("onnxruntime", "storage", "scopes")
OTHERWISE = ("ort-transformers", "external-all")
"""The transformers optimizer takes some architectures only; onnxruntime does not load shapes from a data file."""

MACHINE = re.compile(rb"/(?:home|root|work|tmp|usr|opt|Users)/|site-packages|\.py\b|[A-Z]:\\\\")

PLAIN = [variant for variant in VARIANTS if variant.group in FREE and not variant.name.startswith(OTHERWISE)]


EACH_FILE = pytest.mark.parametrize("committed", COMMITTED, ids=lambda committed: Path(committed.file).stem)


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


@pytest.mark.sample(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", PLAIN, ids=lambda variant: variant.name)
@EACH_FILE
def test_the_same_blocks_are_found(committed: Committed, variant: Variant, tmp_path: Path) -> None:
    entry = get(committed.entry)
    target = make_variant(variant, FOLDER / committed.file, tmp_path / "model.onnx", Hints(entry.name, 4, 32))
    report = rewrite(target, dry_run=True)
    assert len(report.converted) == entry.mlp_blocks("tiny") * variant.copies
    names = [row.name for row in report.blocks]
    assert len(set(names)) == len(names)


@pytest.mark.sample(0)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["ort-extended", "inputs", "constants", "no-names", "if-captured", "loop", "function-shared"]
)
def test_a_variant_is_converted_and_proved(name: str, tmp_path: Path) -> None:
    target = make_variant(get_variant(name), FOLDER / "silu-decoder.onnx", tmp_path / "model.onnx")
    report = rewrite(target, tmp_path / "rewritten.onnx", providers=("cpu",))
    assert report.validation.passed
    assert len(report.converted) == 2 * get_variant(name).copies
