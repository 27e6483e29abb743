"""Seven architectures in every form, from PyTorch to the proof (needs PyTorch)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rewriter import ExitStatus, rewrite
from tests.conftest import Export

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

ARCHITECTURES = ("gpt2-silu", "opt", "clip-text", "wav2vec2-conformer", "bert", "vit", "t5")
EXACT = ("gpt2-silu", "opt", "clip-text", "wav2vec2-conformer", "t5")


@pytest.mark.parametrize("form", ["masked", "maskless", "staged"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_form(name: str, form: str, export: Export, tmp_path: Path) -> None:
    check(export(name, "torchscript"), tmp_path / "out.onnx", form, 1.5 if name in EXACT else 4.0)


@pytest.mark.parametrize("name", ["gpt2-silu", "opt"])
def test_float16(name: str, export: Export, tmp_path: Path) -> None:
    check(export(name, "torchscript", "fp16"), tmp_path / "out.onnx", "masked", 1.5)


def check(model: Path, out: Path, form: str, allowed: float) -> None:
    report: Any = rewrite(model, out, form=form)
    assert report.exit_status is ExitStatus.CONVERTED, report.validation and report.validation.failures
    assert report.notes == ()
    assert report.converted
    ratio = report.validation.providers["cpu"].error_ratio
    assert ratio is not None
    assert ratio <= allowed
