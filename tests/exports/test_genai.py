"""Folders of onnxruntime-genai's own builder: rewritten without options, proved, and the same tokens come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rewriter import FolderReport, rewrite

genai: Any = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is missing: pip install .[genai]")


def tokens(folder: Path) -> list[int]:
    """Greedy tokens after a prompt, long enough to leave a sliding window of 16."""
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=40, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens([5, 17, 99, 3, 42, 8, 77, 21, 60])
    while not generator.is_done():
        generator.generate_next_token()
    return [int(each) for each in generator.get_sequence(0)]


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma2"])
def test_a_folder_of_the_builder(name: str, precision: Any, tmp_path: Path) -> None:
    from models.genai import build_genai, genai_entry

    old, new = tmp_path / "old", tmp_path / "new"
    build_genai(name, old, precision)
    folder = rewrite(old, new)
    assert isinstance(folder, FolderReport)
    report = folder.models["model.onnx"]
    proof = report.validation
    assert proof is not None
    assert proof.passed, proof.failures
    assert proof.certified
    assert len(report.converted) == genai_entry(name).mlp_blocks("tiny")
    assert {"past 0" in each for each in proof.cases} == {True, False}
    assert not proof.skipped
    assert any("present.0.value unwritten" in each for each in proof.notes) == (name == "gemma2")
    (stability,) = [each for each in proof.notes if "one unit in the last place" in each] or [""]
    assert bool(stability) == (precision == "int4")
    if precision == "fp32" or stability.endswith("the same tokens are to be expected"):
        assert len(tokens(old)) > 20
        assert tokens(new) == tokens(old)
