"""Inputs made for models that PyTorch exports, and their float64 evaluation, which is that of the model."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter.files.load import load_model
from rewriter.inputs.cases import Maker
from rewriter.ort import open_session
from rewriter.proof.run import open_reference
from tests.conftest import Export


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "vit", "whisper"])
def test_float32_differs_from_float64_by_rounding_only(name: str, exporter: str, export: Export) -> None:
    model = onnx.load(export(name, exporter))
    session, reference = open_session(model), open_reference(load_model(model))
    for case in Maker(model, seed=3).usual():
        truth = reference(case.feeds)
        for output, value in session.run(case.feeds).items():
            assert truth[output].dtype == np.float64
            assert np.abs(value - truth[output]).max() < 2e-6 * np.abs(truth[output]).max(), case.name


@pytest.mark.parametrize("weights_outside", [True, False])
def test_a_merged_decoder_takes_both_branches(weights_outside: bool, export: Export, tmp_path: Path) -> None:
    from models.tools.common import Hints
    from models.tools.scopes import if_bodies

    merged = tmp_path / "merged.onnx"
    if_bodies(weights_outside=weights_outside)(export("gpt2-cache", "torchscript"), merged, Hints())
    session, cases = open_session(merged, optimise=False), Maker(onnx.load(merged)).usual()
    names = [case.name for case in cases if session.run(case.feeds)]
    assert sum("cache branch on" in name for name in names) > 2
    assert sum("cache branch off" in name for name in names) > 1
