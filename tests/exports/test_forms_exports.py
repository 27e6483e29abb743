"""Exported architectures in every form: proved, and against the theorems' networks in numpy (needs PyTorch)."""

from itertools import product
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import ExitStatus, rewrite
from tests.committed import in_float64
from tests.conftest import Export
from tests.passes.test_networks import (
    ALL_FORMS,
    BOUND,
    DIFFERENCES,
    check_float64_against_the_original,
    float32_ratio,
    largest_difference,
)
from tests.whole import without_padding

EXPORTERS = ("torchscript", "dynamo")
EACH_EXPORTER = pytest.mark.parametrize("exporter", EXPORTERS)
EXACT = ("gpt2-silu", "opt", "clip-text", "wav2vec2-conformer", "t5")
WHOLE = ("gpt2", "opt", "llama", "pythia", "bert", "vit")
FURTHER = ("phi3", "llama-cache", "llama-static", "t5", "t5-first", "gemma2", "bloom", "swin", "deberta-v2")
"""Fused projections, rotations, caches, biases, caps, and relative positions that depend on data."""
ROUTED = ("mixtral", "qwen2-moe", "deepseek-v3", "phi-moe", "gpt-oss")
"""Experts, chosen by softmax, groups of sigmoids or a sparse mixer; gpt-oss has sinks too."""


def check(model: Path, allowed: float, **options: Any) -> None:
    """The proof passes, and errors are at most `allowed` times those of the original."""
    report: Any = rewrite(model, providers=["cpu"], **options)  # CUDA refuses gates in these forms
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert report.converted
    ratio = report.validation.providers["cpu"].error_ratio
    assert ratio is not None or model.name.startswith("t5"), "whose buckets of positions are others in float64"
    assert (ratio or 0.0) <= allowed
    clamped = [note for note in report.notes if "hold for |pre-activation| up to 5.76461e+17" in note]
    assert options["form"] == "whole" or [*report.notes] == clamped
    assert options["form"] == "staged" or not clamped


@pytest.mark.parametrize("form", ["masked", "maskless", "staged"])
@pytest.mark.parametrize("name", [*EXACT, "bert", "vit"])
def test_every_form(name: str, form: str, export: Export) -> None:
    check(export(name, "torchscript"), 1.5 if name in EXACT else 4.0, form=form)


@pytest.mark.parametrize("name", ["gpt2-silu", "opt"])
def test_float16(name: str, export: Export) -> None:
    check(export(name, "torchscript", "fp16"), 1.5, form="masked")


@EACH_EXPORTER
@pytest.mark.parametrize("name", WHOLE)
def test_the_network_is_that_of_the_theorems(name: str, exporter: str, export: Export) -> None:
    model = onnx.load(export(name, exporter))
    model = model if name == "vit" else without_padding(model)
    assert largest_difference(model, name, "whole") <= (DIFFERENCES if name == "llama" else BOUND)


@pytest.mark.parametrize(("name", "exporter"), [*product((*WHOLE, *FURTHER, *ROUTED), EXPORTERS), ("glm", "dynamo")])
def test_the_proof_passes(name: str, exporter: str, export: Export) -> None:
    check(export(name, exporter), 1.5 if name in WHOLE else 2.0, form="whole", max_tokens=64)


# -- GPT-NeoX, the sixth architecture of tests.passes.test_networks ----------------------------------------------------
# Attention and MLP are parallel on one stream, a quarter of the queries is rotated, GELU is written with erf.


@pytest.mark.parametrize("form", ALL_FORMS)
@EACH_EXPORTER
def test_gpt_neox_is_the_network_of_the_theorems(exporter: str, form: str, export: Export) -> None:
    single = without_padding(onnx.load(export("pythia", exporter)))
    double = in_float64(single)
    assert largest_difference(double, "pythia", form) <= BOUND
    assert largest_difference(single, "pythia", form) <= BOUND
    check_float64_against_the_original(double, form)
    assert float32_ratio(single, form) <= 1.5
