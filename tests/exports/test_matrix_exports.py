"""GPT-NeoX in every form, from both exporters: the sixth architecture of `tests.passes.test_networks`.

Attention and MLP stand in parallel on one stream, a quarter of the queries is rotated, GELU is written with erf.
"""

from __future__ import annotations

import onnx
import pytest

from models.entry import Exporter
from tests.committed import in_float64
from tests.conftest import Export
from tests.passes.test_networks import (
    ALL_FORMS,
    BOUND,
    check_float64_against_the_original,
    float32_ratio,
    largest_difference,
)
from tests.whole import without_padding

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

EXPORTERS: tuple[Exporter, ...] = ("torchscript", "dynamo")
EACH = pytest.mark.parametrize(("exporter", "form"), [(exporter, form) for exporter in EXPORTERS for form in ALL_FORMS])


def pythia(export: Export, exporter: Exporter) -> onnx.ModelProto:
    return without_padding(onnx.load(export("pythia", exporter)))


@EACH
def test_float64_is_the_network_of_the_theorems(exporter: Exporter, form: str, export: Export) -> None:
    assert largest_difference(in_float64(pythia(export, exporter)), "pythia", form) <= BOUND


@EACH
def test_float64_computes_the_original(exporter: Exporter, form: str, export: Export) -> None:
    check_float64_against_the_original(in_float64(pythia(export, exporter)), form)


@EACH
def test_float32_is_the_network_of_the_theorems(exporter: Exporter, form: str, export: Export) -> None:
    """Evaluated in float64."""
    assert largest_difference(pythia(export, exporter), "pythia", form) <= BOUND


@EACH
def test_float32_is_as_close_as_the_original(exporter: Exporter, form: str, export: Export) -> None:
    assert float32_ratio(pythia(export, exporter), form) <= 1.5
