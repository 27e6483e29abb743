"""Interventions against a numpy evaluation of the network with the same values planted, and against attributions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from rewriter import ModelError, UsageError, ablate, attribute, freeze, heads, patch, rewrite, validate
from rewriter.interpret.index import HeadIndex
from rewriter.interpret.run import hooks_of
from rewriter.interpret.sublayers import NeuronHeads
from tests.committed import ACTIVATIONS, FOLDER, VOCABULARY, in_float64
from tests.conftest import slow
from tests.headmath import Tensors, neuron_pattern, projected, wide
from tests.oracle import evaluate, tensors
from tests.rewriter.interpret.test_attribution import LOGIT, given

Array = NDArray[Any]

STEMS = ["silu-decoder", "relu-decoder", "gated-decoder", "gelu-vision", "gelu-encoder"]
HEADS, WIDTH = 4, 8
"""Of the attention of all committed models."""
SINGLE = ("gelu-vision", "gelu-encoder")
SOME = pytest.mark.parametrize(
    "stem", [pytest.param(stem, marks=() if stem in ("relu-decoder", "gelu-vision") else slow) for stem in STEMS]
)


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


def ran(model: onnx.ModelProto, feeds: Tensors) -> Array:
    """The first output, by onnxruntime."""
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, dict(feeds))[0])


def places(stem: str, layer: int) -> tuple[str, str]:
    """The tensors of z and of neurons, by the nodes around them: the products after the Softmax, the activations."""
    model = onnx.load(FOLDER / f"{stem}.onnx")
    softmaxes = [node.output[0] for node in model.graph.node if node.op_type == "Softmax"]
    reached, z = {softmaxes[layer]}, ""
    for node in model.graph.node:
        if not reached.isdisjoint(node.input):
            if node.op_type == "MatMul":
                z = node.output[0]
                break
            reached.update(node.output)
    return z, ACTIVATIONS[f"{stem}.onnx"][layer][0]


Change = Callable[[Array], Array]


def by_hand(stem: str, feeds: Tensors, layer: int, change: Change, *, neurons: bool) -> Array:
    """The first output in numpy, with z [batch, heads, tokens, d_head] or neurons [batch, tokens, neurons] changed."""
    model = doubled(stem)
    tensor = places(stem, layer)[int(neurons)]
    made = tensors(model, feeds)[tensor]
    output = model.graph.output[0].name
    return evaluate(model, feeds, {tensor: lambda _: change(made)})[output]


def with_entries(array: Array, place: Any, values: Array | float) -> Array:
    changed = array.copy()
    changed[place] = values
    return changed


def close(found: Array, wanted: Array, bound: float = 1e-10) -> None:
    """Relative to the largest entry; float32 is rounded once per operator."""
    bound = max(bound, 1e-5) if found.dtype == np.float32 else bound
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= bound * max(1.0, np.abs(wanted).max())


@SOME
def test_heads_that_write_nothing(stem: str) -> None:
    model, feeds = doubled(stem), fed(stem)
    plain = evaluate(model, feeds)[model.graph.output[0].name]
    for names, neurons, place in (
        ("blocks.0.attn.2", False, np.s_[:, 2]),
        (["blocks.0.attn.0", "blocks.0.attn.[23]"], False, np.s_[:, [0, 2, 3]]),
        ("blocks.0.mlp_heads.17", True, np.s_[..., 17]),
        ("blocks.0.mlp_heads.1?", True, np.s_[..., 10:20]),
    ):
        wanted = by_hand(stem, feeds, 0, lambda array, at=place: with_entries(array, at, 0.0), neurons=neurons)  # type: ignore[misc]
        assert np.abs(wanted - plain).max() > 1e-6
        close(ran(ablate(model, names), feeds), wanted)


@SOME
def test_means(stem: str) -> None:
    model, feeds, others = doubled(stem), fed(stem), fed(stem, seed=1)
    z, neurons = places(stem, 1)
    recorded = tensors(model, others)
    mean = recorded[z][:, 1].mean(axis=(0, 1))
    wanted = by_hand(stem, feeds, 1, lambda array: with_entries(array, np.s_[:, 1], mean), neurons=False)
    close(ran(ablate(model, "blocks.1.attn.1", "mean", inputs=others), feeds), wanted)
    means = recorded[neurons].reshape(-1, recorded[neurons].shape[-1]).mean(axis=0)
    wanted = by_hand(stem, feeds, 1, lambda _: np.broadcast_to(means, recorded[neurons].shape), neurons=True)
    close(ran(ablate(model, "blocks.1.mlp_heads.*", "mean", inputs=others), feeds), wanted)


@SOME
def test_values_of_another_run(stem: str) -> None:
    model, feeds, others = doubled(stem), fed(stem), fed(stem, seed=1)
    recorded = tensors(model, others)
    for names, neurons, place in (
        ("blocks.1.attn.3", False, np.s_[:, 3]),
        ("blocks.1.mlp_heads.5", True, np.s_[..., 5]),
    ):
        source = recorded[places(stem, 1)[int(neurons)]]

        def wanted(order: list[int], neurons: bool = neurons, place: Any = place, source: Array = source) -> Array:
            mixed = source.reshape(3, -1)[order].reshape(source.shape)[place]
            return by_hand(stem, feeds, 1, lambda array: with_entries(array, place, mixed), neurons=neurons)

        close(ran(patch(model, names, others), feeds), wanted([0, 1, 2]))
        # Three sequences without one in its place: there are two such orders, and the seed chooses.
        orders = {}
        for seed in range(5):
            found = ran(ablate(model, names, "resample", inputs=others, seed=seed), feeds)
            misses = {order: np.abs(found - wanted(list(order))).max() for order in ((1, 2, 0), (2, 0, 1))}
            orders[seed] = min(misses, key=lambda order: misses[order])
            assert (
                misses[orders[seed]]
                <= (1e-5 if stem in SINGLE else 1e-10) * max(1.0, np.abs(found).max())
                < max(misses.values())
            )
        assert len(set(orders.values())) == 2


@SOME
def test_frozen_patterns(stem: str) -> None:
    """Heads with the pattern of other inputs: patterns in numpy from there, values from here."""
    model, feeds, others = doubled(stem), fed(stem), fed(stem, seed=1)
    index = heads(model)
    here, there = tensors(model, feeds), tensors(model, others)
    softmax = next(
        node.output[0]
        for place, node in enumerate([node for node in model.graph.node if node.op_type == "Softmax"])
        if place == 1
    )
    changed = with_entries(here[softmax], np.s_[:, 2], there[softmax][:, 2])
    wanted = evaluate(model, feeds, {softmax: lambda _: changed})[model.graph.output[0].name]
    assert np.abs(wanted - here[model.graph.output[0].name]).max() > 1e-6
    close(ran(freeze(model, "blocks.1.attn.2", others), feeds), wanted)

    own = wide(index, "blocks.1.mlp_heads")
    (data,) = [each.sublayer.data for each in index.sublayers if each.name == "blocks.1.mlp_heads"]  # type: ignore[union-attr]
    shaped = (len(feeds[model.graph.input[0].name]), -1, own["W_V"].shape[1])
    pattern = neuron_pattern(there[data].reshape(shaped), own)
    value = projected(here[data].reshape(shaped), own["W_V"], own["b_V"])
    z = (pattern[..., :1] * value + (pattern[..., 1:, None] * own["bias_V"]).sum(axis=-2))[..., 0]
    _, neurons = places(stem, 1)
    count = here[neurons].shape[-1]
    # W_O of the heads of a neuron is the same row times a factor, which is that of its activation.
    rows = own["W_O"][:, 0].reshape(-1, count, own["W_O"].shape[-1])
    base = rows_of_w2(model, index)
    factors = np.einsum("gnd,nd->gn", rows, base) / (base * base).sum(axis=-1)
    activation = (z.reshape(*z.shape[:2], -1, count) * factors).sum(axis=-2)
    changed = with_entries(
        here[neurons], np.s_[..., 3:40], activation[..., 3:40].reshape(here[neurons][..., 3:40].shape)
    )
    wanted = evaluate(model, feeds, {neurons: lambda _: changed})[model.graph.output[0].name]
    names = [f"blocks.1.mlp_heads.{number}" for number in range(3, 40)]
    # Programs of gates are small differences of large values: 2^24 times the rounding of float64.
    close(ran(freeze(model, names, others), feeds), wanted, 1e-10 if stem != "gated-decoder" else 1e-8)


def rows_of_w2(model: onnx.ModelProto, index: HeadIndex) -> Array:
    """W2 of the second MLP, read from the file."""
    (own,) = [each.sublayer for each in index.sublayers if each.name == "blocks.1.mlp_heads"]
    assert isinstance(own, NeuronHeads)
    (held,) = [each for each in model.graph.initializer if each.name == own.output.weight]
    array = onnx.numpy_helper.to_array(held)
    return array.T if own.output.transposed else array


@pytest.mark.parametrize(
    "stem",
    [
        "relu-decoder",
        *(pytest.param(f"{each}", marks=slow) for each in ("silu-decoder", "gelu-encoder", "gelu-vision")),
    ],
)
def test_effects_are_what_the_linear_network_loses(stem: str) -> None:
    """With everything frozen, what a head writes is the difference that its ablation makes."""
    model, feeds = doubled(stem), fed(stem)
    found = attribute(model, feeds, LOGIT)
    frozen = freeze(model, "*", feeds, norms=True)
    at = (0, LOGIT) if stem == "gelu-vision" else (0, -1, LOGIT)
    bound = 1e-10 if stem in ("silu-decoder", "relu-decoder") else 1e-5
    logit = ran(frozen, feeds)[at]
    assert abs(logit - found.logit) <= bound * max(1.0, abs(logit))
    for sublayer in ("blocks.0.attn", "blocks.0.mlp_heads", "blocks.1.attn", "blocks.1.mlp_heads"):
        effects = found.effects[sublayer]
        effects = effects.reshape(len(effects), -1, HEADS if sublayer.endswith("attn") else 128).sum(axis=(0, 1))
        number = int(np.abs(effects).argmax())
        lost = logit - ran(ablate(frozen, f"{sublayer}.{number}"), feeds)[at]
        assert abs(effects[number]) > 1e-3
        assert abs(lost - effects[number]) <= bound
    # The frozen network is linear: what all heads of a sublayer write adds up.
    everything = logit - ran(ablate(frozen, "blocks.0.attn.*"), feeds)[at]
    assert abs(everything - found.effects["blocks.0.attn"].sum()) <= bound


def test_denominators_are_held() -> None:
    """Other inputs than those recorded: a frozen network is affine in what its embeddings are."""
    stem = "silu-decoder"
    model, feeds = doubled(stem), fed(stem)
    frozen = freeze(model, "*", feeds, norms=True)
    table = next(tensor for tensor in frozen.graph.initializer if "wte" in tensor.name)
    held, results = onnx.numpy_helper.to_array(table), []
    for factor in (1.0, 2.0, 3.0):
        table.CopyFrom(onnx.numpy_helper.from_array(held * factor, table.name))
        results.append(ran(frozen, feeds))
    assert np.abs(results[1] - results[0]).max() > 1e-3
    close(results[2] - results[1], results[1] - results[0])


@pytest.mark.parametrize("form", ["local", pytest.param("masked", marks=slow)])
@pytest.mark.parametrize("stem", ["silu-decoder", pytest.param("gelu-encoder", marks=slow)])
def test_rewritten_files(stem: str, form: str, tmp_path: Path) -> None:
    """Interventions on heads of a rewritten file do what those on the original do, in float32.

    Neurons of other forms than `local` have no tensors of their own.
    """
    source, out = FOLDER / f"{stem}.onnx", tmp_path / "out.onnx"
    rewrite(source, out, form=form, validate=False)
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
    if form == "masked":
        with pytest.raises(UsageError, match="has no tensor of its pre-activations"):
            freeze(out, "blocks.0.mlp_heads.0", feeds)
        with pytest.raises(UsageError, match="has no tensor of what its neurons write"):
            ablate(out, "blocks.0.mlp_heads.0")


@slow
def test_validate_sees_an_ablation_and_accepts_what_changes_nothing() -> None:
    path, feeds = FOLDER / "silu-decoder.onnx", given("silu-decoder")
    assert validate(path, ablate(path, "blocks.1.mlp_heads.3"), inputs=feeds).exit_status != 0
    assert validate(path, patch(path, "*", feeds), inputs=feeds).exit_status == 0
    assert validate(path, freeze(path, "*", feeds), inputs=feeds).exit_status == 0


def test_later_interventions_add_to_earlier_ones(tmp_path: Path) -> None:
    """One after the other is both at once, also by way of a file; what is recorded is the original's."""
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path, _: ablate(path, "blocks.9.attn.0"), "no head matches 'blocks.9.attn.0'; there are, for example"),
        (lambda path, _: ablate(path, ["*", "blocks.0.attn.4"]), "no head matches 'blocks.0.attn.4'"),
        (lambda path, _: ablate(path, []), "no head is named"),
        (lambda path, _: ablate(path, "*", "median"), "unknown ablation 'median'"),
        (lambda path, _: ablate(path, "*", "mean"), "ablation by mean takes inputs"),
        (lambda path, x: ablate(path, "*", inputs=x), "ablation by zero takes no inputs"),
        (lambda path, x: freeze(path, "*", x, norms=True, output="hidden"), "has no output 'hidden'"),
    ],
)
def test_refusals(call: Callable[[Path, Tensors], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        call(FOLDER / "silu-decoder.onnx", given("silu-decoder"))


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


def test_other_sublayers_of_a_changed_file_are_still_found() -> None:
    """`heads` of a changed file still finds the sublayers that are not changed."""
    model = ablate(FOLDER / "silu-decoder.onnx", "blocks.1.attn.0")
    assert "blocks.0.attn.hook_pattern" in hooks_of(heads(model))


def test_marks_that_do_not_fit() -> None:
    model = ablate(FOLDER / "silu-decoder.onnx", "blocks.1.attn.0")
    for node in model.graph.node:
        for entry in node.metadata_props:
            if entry.key == "attnonly.intervention":
                entry.value = "elsewhere"
    with pytest.raises(ModelError, match="marked as interventions at 'elsewhere'"):
        ablate(model, "blocks.0.attn.0")


def test_weights_in_other_files_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stem, path = "relu-decoder", tmp_path / "model.onnx"
    feeds = given(stem)
    wanted = ran(ablate(FOLDER / f"{stem}.onnx", "blocks.0.attn.1"), feeds)
    onnx.save(onnx.load(FOLDER / f"{stem}.onnx"), path, save_as_external_data=True, size_threshold=0)
    made = ablate(path, "blocks.0.attn.1")
    assert not any(tensor.external_data for tensor in made.graph.initializer)
    close(ran(made, feeds), wanted)
    monkeypatch.setattr("rewriter.interpret.interventions.MAX_FILE", 1000)
    with pytest.raises(UsageError, match="a model in memory can have less than 2"):
        ablate(path, "blocks.0.attn.1")


def test_the_result_is_of_the_kind_that_was_given() -> None:
    data = (FOLDER / "relu-decoder.onnx").read_bytes()
    changed = ablate(data, "blocks.0.attn.1")
    assert isinstance(changed, bytes)
    assert changed == ablate(onnx.load_model_from_string(data), "blocks.0.attn.1").SerializeToString()
