"""Bias tokens through Conformers and DeBERTas, whose convolutions and relative positions see the tokens alone.

PyTorch is the oracle: the module from which a file was exported, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models.entry import Entry, Exporter
from models.registry import get
from passes.options import FormOptions, Options
from passes.plan import apply, make_plan
from rewriter import ExitStatus, rewrite
from tests.conftest import slow
from tests.oracle import evaluate

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

NETWORK = Options(form="masked", forms=FormOptions(bias_token="network"))
WHOLE = Options(form="whole", forms=FormOptions(max_tokens=32))
SIZES = ((1, 1), (1, 2), (2, 7), (3, 20))
"""Batch and tokens. With masks, the last quarter of the last sequence is padding."""
ERROR = 5e-7
"""In float64, over the largest output; the largest measured is 1.7e-7.

GELU's program is within 8.1e-8. Some constants are float32 in the files, so that the originals are as far off.
"""


def changed(name: str, base: str, **settings: Any) -> Entry:
    entry = get(base)
    return replace(entry, name=name, common={**entry.common, **settings})


VARIANTS = {
    "conformer-relative": get("wav2vec2-conformer"),
    "conformer-rotary": changed("conformer-rotary", "wav2vec2-conformer", position_embeddings_type="rotary"),
    "deberta-v2": get("deberta-v2"),
    "deberta-convolution": changed("deberta-convolution", "deberta-v2", conv_kernel_size=3, conv_act="gelu"),
    "deberta-own-keys": changed(
        "deberta-own-keys", "deberta-v2", share_att_key=False, position_buckets=-1, max_relative_positions=64
    ),
    "deberta-c2p": changed("deberta-c2p", "deberta-v2", pos_att_type=["c2p"]),
    "deberta-v1": replace(
        changed("deberta-v1", "deberta-v2", max_relative_positions=-1),
        config_class="DebertaConfig",
        model_class="DebertaModel",
    ),
}
"""DeBERTa-v2 shares the projections of positions with those of content, in buckets; its largest has a convolution."""
BLOCKS = {"conformer-relative": 4, "conformer-rotary": 4}
OPERATORS = {
    "conformer-relative": ("MatMul", "Conv"),
    "conformer-rotary": ("Conv",),
    "deberta-convolution": ("MatMul", "Conv"),
}
"""What sees the tokens alone; otherwise products of queries and positions."""
QUICK = ("conformer-relative", "conformer-rotary", "deberta-v2")
SETTINGS = ("deberta-own-keys", "deberta-c2p")
EACH = pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])

Exported = Callable[[str, Exporter], tuple[Path, Any]]


@pytest.fixture(autouse=True)
def no_cached_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotary Conformer keeps its angles from call to call; an exporter would write them down as constants."""
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as module

    kept = module.Wav2Vec2ConformerRotaryPositionalEmbedding.forward

    def forward(self: Any, hidden_states: Any) -> Any:
        self.cached_sequence_length = None
        return kept(self, hidden_states)

    monkeypatch.setattr(module.Wav2Vec2ConformerRotaryPositionalEmbedding, "forward", forward)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A variant's file and module in float64, made once."""
    from models.build import build
    from models.export import export_module

    folder, made = tmp_path_factory.mktemp("relative"), dict[tuple[str, str], tuple[Path, Any]]()

    def give(name: str, exporter: Exporter) -> tuple[Path, Any]:
        if (name, exporter) not in made:
            path = folder / f"{name}-{exporter}.onnx"
            module = build(VARIANTS[name], "tiny")
            export_module(module, VARIANTS[name], path, exporter=exporter)
            made[name, exporter] = path, module.double()
        return made[name, exporter]

    return give


@EACH
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow if name in SETTINGS else ()) for name in VARIANTS])
def test_the_network_is_that_of_torch(name: str, exporter: Exporter, exported: Exported) -> None:
    import torch

    from models.build import example_inputs

    path, module = exported(name, exporter)
    plan = make_plan(onnx.load(path), NETWORK)
    assert len(plan.conversions) == BLOCKS.get(name, 2), plan.left
    assert plan.route is not None
    found = [aside.node.partition(" ")[0] for aside in plan.route.asides]
    assert set(found) == set(OPERATORS.get(name, ("MatMul",)))
    result, entry = apply(plan), VARIANTS[name]
    for batch, tokens in SIZES:
        inputs = example_inputs(entry, "tiny", {"batch": batch, "sequence": tokens})
        wanted = module(*(each.double() if each.is_floating_point() else each for each in inputs))
        assert wanted.dtype == torch.float64
        feeds = {spec.name: each.numpy() for spec, each in zip(entry.inputs, inputs, strict=True)}
        got = evaluate(result, feeds)["last_hidden_state"]
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted.numpy(), rtol=0.0, atol=ERROR * float(wanted.abs().max()))


@EACH
@pytest.mark.parametrize("name", QUICK)
def test_the_proof_passes(name: str, exporter: Exporter, exported: Exported, tmp_path: Path) -> None:
    path, _ = exported(name, exporter)
    report: Any = rewrite(path, tmp_path / "out.onnx", form="masked", bias_token="network")
    assert report.exit_status is ExitStatus.CONVERTED, report.validation and report.validation.failures
    assert len(report.converted) == BLOCKS.get(name, 2)
    assert report.validation.providers["cpu"].error_ratio <= 2.0


@EACH
@pytest.mark.parametrize("name", QUICK)
def test_form_whole_names_what_it_cannot_hold(name: str, exporter: Exporter, exported: Exported) -> None:
    path, _ = exported(name, exporter)
    plan = make_plan(onnx.load(path), WHOLE)
    assert not plan.conversions
    first = OPERATORS.get(name, ("MatMul",))[0]
    assert any(f"the network cannot be attention only: {first}" in left.miss.reason for left in plan.left)
