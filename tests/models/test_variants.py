"""What other tools make of the committed files: the rewriter finds the same blocks in it; without PyTorch."""

from pathlib import Path

import pytest

from models.registry import COMMITTED, Committed, get
from models.variants import VARIANTS, Hints, Variant, get_variant, make_variant
from rewriter import rewrite
from tests.committed import FOLDER

FREE = ("onnxruntime", "storage", "scopes")
OTHERWISE = ("ort-transformers", "external-all")
"""The transformers optimizer takes some architectures only; onnxruntime does not load shapes from a data file."""

PLAIN = [variant for variant in VARIANTS if variant.group in FREE and not variant.name.startswith(OTHERWISE)]


@pytest.mark.sample(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", PLAIN, ids=lambda variant: variant.name)
@pytest.mark.parametrize("committed", COMMITTED, ids=lambda committed: Path(committed.file).stem)
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
