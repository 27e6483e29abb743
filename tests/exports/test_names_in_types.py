"""Blocks of real exports have the same names in float32, float16 and int8, whichever exporter wrote them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from models.tools.common import Hints
from models.tools.precision import dynamic_int8, runtime_float16, static_qdq
from passes.options import Options
from passes.plan import make_plan
from tests.conftest import Export

CONVERSIONS = {
    "float16": runtime_float16(),
    "dynamic": dynamic_int8(per_channel=False),
    "static": static_qdq("QDQ"),
}
NAMES = {
    "gpt2": ["model.transformer.h.0.mlp", "model.transformer.h.1.mlp"],
    "llama": ["model.model.layers.0.mlp", "model.model.layers.1.mlp"],
    "bert": ["model.encoder.layer.0", "model.encoder.layer.1"],
    "vit": ["model.vit.layers.0.mlp", "model.vit.layers.1.mlp"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "exporter"),
    # The quantisers here refuse ViT from the dynamo exporter: its indices are weights of another type.
    [(name, kind) for name in NAMES for kind in ("torchscript", "dynamo") if (name, kind) != ("vit", "dynamo")],
)
def test_names(name: str, exporter: str, export: Export, tmp_path: Path) -> None:
    source = export(name, exporter)
    assert named(source) == NAMES[name]
    for kind, convert in CONVERSIONS.items():
        target = tmp_path / f"{kind}.onnx"
        convert(source, target, Hints())
        assert named(target) == NAMES[name], kind


def named(path: Path) -> list[str]:
    return [each.block.name for each in make_plan(onnx.load(path), Options()).conversions]
