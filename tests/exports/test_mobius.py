"""Files and folders as mobius-onnx writes them: rewritten without options, certified, run."""

from pathlib import Path

import onnx
import pytest

from models.mobius import builds
from rewriter import FolderReport, rewrite

pytest.importorskip("mobius", reason="mobius-onnx is missing: pip install .[mobius]")

NAMES = ("llama", "llama-int4", "falcon", "gpt_oss", "bert", "t5-encoder", "clip_vision_model")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_converted_and_the_functions_stay(name: str, tmp_path: Path) -> None:
    _, _, blocks, _, create = next(each for each in builds() if each[0] == f"mobius-{name}")
    source = tmp_path / "old" / "model.onnx"
    source.parent.mkdir()
    create(source)
    source.with_name("genai_config.json").write_text("{}", encoding="utf-8")
    folder = rewrite(source.parent, tmp_path / "new")
    assert isinstance(folder, FolderReport)
    report = folder.models["model.onnx"]
    assert report.validation.certified
    assert sum(not row.part_of for row in report.converted) == blocks
    old, new = onnx.load(source), onnx.load(tmp_path / "new" / "model.onnx")
    assert [each for each in new.functions if each.domain == "com.microsoft"] == list(old.functions)
    packed = [[node.op_type for node in each.graph.node].count("MatMulNBits") for each in (old, new)]
    assert packed[0] == packed[1]
    assert bool(packed[0]) is (name == "llama-int4")
    assert (tmp_path / "new" / "genai_config.json").exists()
