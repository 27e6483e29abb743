"""LeViT: a BatchNormalization behind every linear layer, and layers that leave out tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.entry import Exporter
from rewriter import ExitStatus, rewrite
from rewriter.ort.sessions import open_session


def levit() -> Any:
    """A small one, whose normalisations are not the identity and whose pre-activations reach the kinks."""
    import torch
    from transformers import LevitConfig, LevitModel

    torch.manual_seed(0)
    sizes = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "key_dim": [4, 4, 4]}
    module = LevitModel(LevitConfig(image_size=128, depths=[1, 1, 1], **sizes)).eval()
    for each in module.modules():
        if isinstance(each, torch.nn.BatchNorm1d):
            each.running_mean.normal_(0.0, 0.3)
            each.running_var.uniform_(0.1, 0.5)
            each.weight.data.uniform_(0.5, 2.0)
            each.bias.data.normal_()
    return module


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_every_mlp_is_converted(exporter: Exporter, tmp_path: Path) -> None:
    import torch

    module, path, out = levit(), tmp_path / "levit.onnx", tmp_path / "out.onnx"
    images = torch.randn(2, 3, 128, 128)
    torch.onnx.export(module, (images,), path, dynamo=exporter == "dynamo", input_names=["pixel_values"])
    report = rewrite(path, out)
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    # One behind each attention, also behind the two that halve the image.
    assert [row.activation for row in report.converted] == ["hard_swish"] * 5
    assert all("Conv 3x3" in (row.reason or "") for row in report.left)
    with torch.no_grad():
        wanted = module(images).last_hidden_state.numpy()
    found = open_session(out).run({"pixel_values": images.numpy()})
    (got,) = (each for each in found.values() if each.shape == wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-5 * np.abs(wanted).max())
