"""Interventions against a numpy evaluation of the network with the same values planted."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from rewriter import ModelError, UsageError, ablate, freeze, heads, patch, rewrite, run_with_cache, validate
from rewriter.arrays import Array
from tests import headmath
from tests.changes import nodes_of
from tests.committed import ACTIVATIONS, FOLDER, VOCABULARY, in_float64
from tests.headmath import Tensors
from tests.oracle import evaluate, tensors
from tests.rewriter.interpret.test_attribution import given

WIDTH = 8
"""Of the attention of all committed models."""
SINGLE = ("gelu-vision", "gelu-encoder")
SOME = pytest.mark.parametrize("stem", ["silu-decoder", "relu-decoder", "gated-decoder", *SINGLE])


@cache
def doubled(stem: str) -> onnx.ModelProto:
    """A committed model with all of its floats in float64, so that what is recorded is not rounded.

    Two stay in float32: onnxruntime has neither a convolution nor Erf in float64.
    """
    model = onnx.load(FOLDER / f"{stem}.onnx")
    return model if stem in SINGLE else in_float64(model)


def fed(stem: str, seed: int = 0) -> dict[str, Array]:
    values = {
        name: array.astype(np.float64) if array.dtype == np.float32 and stem not in SINGLE else array
        for name, array in given(stem).items()
    }
    if seed and "input_ids" in values:
        values["input_ids"] = np.random.default_rng(seed).integers(0, VOCABULARY, values["input_ids"].shape)
    elif seed:
        (name,) = values
        values[name] = np.random.default_rng(seed).normal(size=values[name].shape).astype(values[name].dtype)
    return values


@cache
def recorded(stem: str, seed: int = 0) -> Tensors:
    return tensors(doubled(stem), fed(stem, seed))


def ran(model: onnx.ModelProto, feeds: Tensors) -> Array:
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, dict(feeds))[0])


def places(stem: str, layer: int) -> tuple[str, str]:
    """The tensors of z and of neurons, by the nodes around them: the products after the Softmax, the activations."""
    model = onnx.load(FOLDER / f"{stem}.onnx")
    reached = {*nodes_of(model, "Softmax")[layer].output}
    for node in model.graph.node:
        if not reached.isdisjoint(node.input):
            reached.update(node.output)
            if node.op_type == "MatMul":
                break
    return node.output[0], ACTIVATIONS[f"{stem}.onnx"][layer][0]


Change = Callable[[Array], Array]


def by_hand(stem: str, feeds: Tensors, layer: int, change: Change, *, neurons: bool) -> Array:
    """The first output in numpy, with z [batch, heads, tokens, d_head] or neurons [batch, tokens, neurons] changed."""
    model = doubled(stem)
    tensor = places(stem, layer)[int(neurons)]
    made = tensors(model, feeds)[tensor]
    return evaluate(model, feeds, {tensor: lambda _: change(made)})[model.graph.output[0].name]


def with_entries(array: Array, place: Any, values: Array | float) -> Array:
    changed = array.copy()
    changed[place] = values
    return changed


def close(found: Array, wanted: Array, bound: float = 1e-10) -> None:
    """Float32 is rounded once per operator."""
    headmath.close(found, wanted, max(bound, 1e-5) if found.dtype == np.float32 else bound)


Intervention = Callable[[onnx.ModelProto, str | list[str], Tensors], Any]


def zero(model: onnx.ModelProto, names: str | list[str], _: Tensors) -> Any:
    return ablate(model, names)


def mean(model: onnx.ModelProto, names: str | list[str], others: Tensors) -> Any:
    return ablate(model, names, "mean", inputs=others)


def mean_of_tokens(array: Array) -> Array:
    """Of all sequences, which come first."""
    return np.asarray(array.reshape(-1, array.shape[-1]).mean(axis=0))


INTERVENTIONS: dict[str, tuple[Intervention, str | list[str], int, Any, Change]] = {
    "no head": (zero, "blocks.0.attn.2", 0, np.s_[:, 2], np.zeros_like),
    "no heads": (zero, ["blocks.0.attn.0", "blocks.0.attn.[23]"], 0, np.s_[:, [0, 2, 3]], np.zeros_like),
    "no neuron": (zero, "blocks.0.mlp_heads.17", 0, np.s_[..., 17], np.zeros_like),
    "no neurons": (zero, "blocks.0.mlp_heads.1?", 0, np.s_[..., 10:20], np.zeros_like),
    "a mean": (mean, "blocks.1.attn.1", 1, np.s_[:, 1], mean_of_tokens),
    "means": (mean, "blocks.1.mlp_heads.*", 1, np.s_[..., :], mean_of_tokens),
    "a head of another run": (patch, "blocks.1.attn.3", 1, np.s_[:, 3], np.copy),
    "a neuron of another run": (patch, "blocks.1.mlp_heads.5", 1, np.s_[..., 5], np.copy),
}
"""What is done to which heads, in which layer and entries, and what takes their place, of those of other inputs."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", INTERVENTIONS)
@SOME
def test_values_in_the_place_of_others(stem: str, what: str) -> None:
    intervene, names, layer, place, instead = INTERVENTIONS[what]
    model, feeds, others = doubled(stem), fed(stem), fed(stem, seed=1)
    neurons = place[0] is Ellipsis
    values = instead(recorded(stem, 1)[places(stem, layer)[neurons]][place])
    wanted = by_hand(stem, feeds, layer, lambda array: with_entries(array, place, values), neurons=neurons)
    assert np.abs(wanted - recorded(stem)[model.graph.output[0].name]).max() > 1e-6
    close(ran(intervene(model, names, others), feeds), wanted)


@pytest.mark.sample(1)
@SOME
def test_frozen_patterns(stem: str) -> None:
    model, feeds, others = doubled(stem), fed(stem), fed(stem, seed=1)
    here, there = recorded(stem), recorded(stem, 1)
    softmax = nodes_of(model, "Softmax")[1].output[0]
    changed = with_entries(here[softmax], np.s_[:, 2], there[softmax][:, 2])
    wanted = evaluate(model, feeds, {softmax: lambda _: changed})[model.graph.output[0].name]
    assert np.abs(wanted - here[model.graph.output[0].name]).max() > 1e-6
    close(ran(freeze(model, "blocks.1.attn.2", others), feeds), wanted)


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("stem", "form"), [("silu-decoder", "local"), ("gelu-encoder", "whole"), ("silu-decoder", "masked")]
)
def test_rewritten_files(stem: str, form: str, tmp_path: Path) -> None:
    """Interventions on heads of a rewritten file do what those on the original do, in float32.

    Neurons of other forms than `local` have no tensors.
    """
    source, out = FOLDER / f"{stem}.onnx", tmp_path / "out.onnx"
    rewrite(source, out, form=form, max_tokens=24, validate=False)
    feeds, others = given(stem), fed(stem, seed=1)
    plain = ran(onnx.load(source), feeds)
    names = ["blocks.0.attn.1", *(["blocks.0.mlp_heads.1*"] if form == "local" else [])]
    made: tuple[Callable[[Path], onnx.ModelProto], ...] = (
        lambda path: ablate(path, names),
        lambda path: ablate(path, names, "mean", inputs=others),
        lambda path: patch(path, names, others),
    )
    for make in made:
        wanted = ran(make(source), feeds)
        assert np.abs(wanted - plain).max() > 1e-4
        close(ran(make(out), feeds), wanted, 2e-5)
    if form != "local":
        with pytest.raises(UsageError, match="has no tensor of what its neurons write"):
            ablate(out, "blocks.0.mlp_heads.0")


@pytest.mark.slow
def test_validate_sees_an_ablation_and_accepts_what_changes_nothing() -> None:
    path, feeds = FOLDER / "silu-decoder.onnx", given("silu-decoder")
    assert validate(path, ablate(path, "blocks.1.mlp_heads.3"), inputs=feeds).exit_status != 0
    assert validate(path, patch(path, "*", feeds), inputs=feeds).exit_status == 0
    assert validate(path, freeze(path, "*.attn.*", feeds), inputs=feeds).exit_status == 0


@pytest.mark.slow
def test_later_interventions_add_to_earlier_ones(tmp_path: Path) -> None:
    stem = "relu-decoder"
    model, feeds = doubled(stem), fed(stem)
    both = ran(ablate(model, ["blocks.0.attn.1", "blocks.0.attn.3", "blocks.1.mlp_heads.9"]), feeds)
    first = ablate(model, "blocks.0.attn.1")
    onnx.save(ablate(first, ["blocks.0.attn.3", "blocks.1.mlp_heads.9"]), tmp_path / "both.onnx")
    close(ran(onnx.load(tmp_path / "both.onnx"), feeds), both)
    again = patch(ablate(first, "*.mlp_heads.*"), "*", feeds)
    close(ran(again, feeds), ran(model, feeds))
    assert model.SerializeToString() == doubled(stem).SerializeToString()


def test_one_recorded_sequence_serves_all_and_other_sizes_fail() -> None:
    stem = "relu-decoder"
    model, feeds, others = doubled(stem), fed(stem), fed(stem, seed=1)
    one = {name: array[:1] for name, array in others.items()}
    z = tensors(model, one)[places(stem, 0)[0]]
    wanted = by_hand(stem, feeds, 0, lambda array: with_entries(array, np.s_[:, 1], z[:, 1]), neurons=False)
    close(ran(patch(model, "blocks.0.attn.1", one), feeds), wanted)
    # Nothing after the last MLP would notice that one sequence has become three.
    for other in (stem, "gated-decoder"):
        feeds = fed(other)
        patched = patch(doubled(other), "blocks.1.mlp_heads.1", fed(other, seed=1))
        for count in (1, 2):
            with pytest.raises(Exception, match="ONNXRuntimeError"):
                ran(patched, {name: array[:count] for name, array in feeds.items()})


def test_several_cases_are_for_means_only(tmp_path: Path) -> None:
    stem = "relu-decoder"
    values, others = given(stem), fed(stem, seed=1)
    cases = {"a": values, "b": {name: array[:1] for name, array in others.items()}}
    arrays: dict[str, Any] = {f"{case}/{name}": array for case, each in cases.items() for name, array in each.items()}
    np.savez(tmp_path / "x.npz", **arrays)
    model = doubled(stem)
    z = [tensors(model, each)[places(stem, 0)[0]][:, 1] for each in cases.values()]
    mean = np.concatenate([each.reshape(-1, WIDTH) for each in z]).mean(axis=0)
    wanted = by_hand(stem, values, 0, lambda array: with_entries(array, np.s_[:, 1], mean), neurons=False)
    close(ran(ablate(model, "blocks.0.attn.1", "mean", inputs=tmp_path / "x.npz"), values), wanted)
    with pytest.raises(UsageError, match="takes one case, and there are 2"):
        patch(model, "*", tmp_path / "x.npz")


def test_marks_that_do_not_fit() -> None:
    model = ablate(FOLDER / "silu-decoder.onnx", "blocks.1.attn.0")
    every = (entry for node in model.graph.node for entry in node.metadata_props)
    for entry in (each for each in every if each.key == "attnonly.intervention"):
        entry.value = "elsewhere"
    with pytest.raises(ModelError, match="marked as interventions at 'elsewhere'"):
        ablate(model, "blocks.0.attn.0")


def test_weights_in_other_files_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, path, feeds = FOLDER / "relu-decoder.onnx", tmp_path / "model.onnx", given("relu-decoder")
    wanted = ran(ablate(file, "blocks.0.attn.1"), feeds)
    onnx.save(onnx.load(file), path, save_as_external_data=True, size_threshold=0)
    made = ablate(path, "blocks.0.attn.1")
    assert not any(tensor.external_data for tensor in made.graph.initializer)
    close(ran(made, feeds), wanted)
    monkeypatch.setattr("rewriter.files.load.MAX_FILE", path.stat().st_size)  # what the weights add is too much
    with pytest.raises(UsageError, match="a model in memory can have less than 2"):
        ablate(path, "blocks.0.attn.1")


def test_an_index_is_changed_as_its_file_is() -> None:
    path, there, names = FOLDER / "relu-decoder.onnx", fed("relu-decoder", 1), ("blocks.0.attn.1", "*.mlp_heads.3")
    models = [index := heads(path), *(patch(ablate(model, names[0]), names[1], there) for model in (path, index))]
    without, wanted, found = (run_with_cache(each, fed("relu-decoder")).outputs["logits"] for each in models)
    assert (found == wanted).all()
    assert np.abs(found - without).max() > 1e-6
