"""What a run records: against the heads in numpy, and against the sums that it must satisfy."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import ValidationError, rewrite, run_with_cache
from rewriter.interpret.run import Cached
from rewriter.interpret.sublayers import NeuronHeads
from tests.committed import EACH_FILE, FOLDER, feeds
from tests.headmath import close, neuron_pattern, projected, tapped, wide

pytestmark = pytest.mark.sample(1)


def cached(path: Path, **options: str) -> Cached:
    return run_with_cache(path, feeds(onnx.load(path)), **options)


@EACH_FILE
def test_original_heads(path: Path) -> None:
    run = cached(path)
    model = onnx.load(path)
    for own in run.index.sublayers:
        if isinstance(own, NeuronHeads):
            continue
        data = tapped(model, feeds(model), [own.query.operator.data])[own.query.operator.data]
        tensors, cache = wide(run.index, own.name), {part: run.cache[f"{own.name}.hook_{part}"] for part in "qkvz"}
        data = data.reshape(*cache["q"].shape[:2], -1).astype(np.float64)
        for part in "qkv":
            side = part.upper()
            wanted = projected(data, tensors[f"W_{side}"], tensors[f"b_{side}"])
            close(cache[part], wanted)
        pattern = run.cache[f"{own.name}.hook_pattern"]
        assert pattern.shape == (len(data), 4, data.shape[1], data.shape[1])
        close(cache["z"], np.einsum("bhts,bshk->bthk", pattern, cache["v"]))
        scores = run.cache[f"{own.name}.hook_attn_scores"].astype(np.float64)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        close(pattern, weights / weights.sum(axis=-1, keepdims=True))


@EACH_FILE
@pytest.mark.parametrize("program", ["fewest", "fast"])
def test_heads_of_neurons(path: Path, program: str) -> None:
    run = cached(path, program=program)
    model = onnx.load(path)
    for own in run.index.sublayers:
        if not isinstance(own, NeuronHeads):
            continue
        values = tapped(model, feeds(model), [own.query.data, own.result])
        pattern, z = (run.cache[f"{own.name}.hook_{part}"] for part in ("pattern", "z"))
        shape = pattern.shape[:2]
        data = values[own.query.data].reshape(*shape, -1).astype(np.float64)
        tensors = wide(run.index, own.name)
        pre = projected(data, tensors["W_Q"][: own.count, :, :1], tensors["b_Q"][: own.count, :1])[..., 0]
        close(run.cache[f"{own.name}.hook_pre"], pre)
        # Steep keys turn the rounding of a pre-activation near 0 into a different weight.
        certain = np.tile(np.abs(pre) > 1e-4, len(own.groups))
        wanted = neuron_pattern(data, tensors)
        assert pattern.shape == wanted.shape
        steep = max(abs(group.head.beta) for group in own.groups)
        assert np.abs(pattern - wanted)[certain].max() <= 1e-5 * max(1.0, min(steep, 100.0))
        out = np.einsum("bthk,hkd->btd", z.astype(np.float64), tensors["W_O"]) + tensors["b_O"]
        close(out, values[own.result].reshape(out.shape))


@pytest.mark.parametrize("stem", ["silu-decoder", "relu-decoder", "gated-decoder", "gelu-vision"])
def test_the_residual_stream_adds_up(stem: str) -> None:
    cache = cached(FOLDER / f"{stem}.onnx").cache
    for layer in ("blocks.0", "blocks.1"):
        pre, mid, post = (cache[f"{layer}.hook_resid_{place}"] for place in ("pre", "mid", "post"))
        assert pre.ndim == 3
        close(mid, pre + cache[f"{layer}.hook_attn_out"])
        close(post, mid + cache[f"{layer}.hook_mlp_out"])
        assert np.abs(post - pre).max() > 0.01
    np.testing.assert_array_equal(cache["blocks.1.hook_resid_pre"], cache["blocks.0.hook_resid_post"])


@pytest.mark.sample(0)
@pytest.mark.parametrize("form", ["local", "masked", "whole"])
def test_a_rewritten_file_records_the_same(form: str, tmp_path: Path) -> None:
    source, out = FOLDER / "gated-decoder.onnx", tmp_path / "out.onnx"
    rewrite(source, out, form=form, max_tokens=24, validate=False)
    before, after = cached(source), cached(out)
    assert list(before.cache) == list(after.cache)
    for name in before.cache:
        assert before.cache[name].shape == after.cache[name].shape, name
        bound = 2e-4 if "pattern" in name else 2e-5
        masked = [found.cache[name] <= -(2.0**59) for found in (before, after)]  # form whole masks with other numbers
        np.testing.assert_array_equal(masked[0], masked[1])
        finite = np.isfinite(before.cache[name]) & ~masked[0]
        scale = max(1.0, np.abs(before.cache[name][finite]).max())
        assert np.abs(before.cache[name] - after.cache[name])[finite].max() <= bound * scale, name


@pytest.mark.slow
def test_several_cases_of_several_lengths(tmp_path: Path) -> None:
    path = FOLDER / "silu-decoder.onnx"
    model = onnx.load(path)
    cases = {"short": feeds(model, tokens=5, batch=2), "long": feeds(model, seed=1, tokens=11, batch=1)}
    arrays: dict[str, Any] = {f"{case}/{name}": array for case in cases for name, array in cases[case].items()}
    np.savez(tmp_path / "x.npz", **arrays)
    run = run_with_cache(path, tmp_path / "x.npz", names="blocks.0.*.hook_pattern")
    assert {name: array.shape for name, array in run.cache.items()} == {
        "short/blocks.0.attn.hook_pattern": (2, 4, 5, 5),
        "short/blocks.0.mlp_heads.hook_pattern": (2, 5, 128, 2),
        "long/blocks.0.attn.hook_pattern": (1, 4, 11, 11),
        "long/blocks.0.mlp_heads.hook_pattern": (1, 11, 128, 2),
    }
    alone = run_with_cache(path, cases["long"], names="*.hook_pattern")
    name = "blocks.0.attn.hook_pattern"
    np.testing.assert_array_equal(run.cache[f"long/{name}"], alone.cache[name])
    outputs = [value.name for value in model.graph.output]
    assert {*run.outputs} == {f"{case}/{name}" for case in cases for name in outputs}
    for case, given in cases.items():
        wanted = tapped(model, given, outputs)
        for name in outputs:
            close(run.outputs[f"{case}/{name}"], wanted[name])


def test_an_input_that_onnxruntime_refuses() -> None:
    path = FOLDER / "silu-decoder.onnx"
    given = feeds(onnx.load(path))
    with pytest.raises(ValidationError):  # token 1,000 does not exist
        run_with_cache(path, {**given, "input_ids": given["input_ids"] + 1000}, names="*.hook_q")


@pytest.mark.slow
def test_models_in_memory_and_lists_of_cases() -> None:
    path = FOLDER / "silu-decoder.onnx"
    given = feeds(onnx.load(path))
    from_file = run_with_cache(path, given, names="*.hook_q")
    from_bytes = run_with_cache(path.read_bytes(), [given, given], names="*.hook_q")
    for name, array in from_file.cache.items():
        for case in ("0", "1"):
            np.testing.assert_array_equal(from_bytes.cache[f"{case}/{name}"], array)
