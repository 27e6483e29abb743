"""The index of heads: weights that do in numpy what the model does, on the committed models."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from passes.options import Options
from passes.plan import apply, make_plan
from rewriter import UsageError, heads, rewrite
from rewriter.interpret.index import HeadIndex
from rewriter.interpret.sublayers import Attention, NeuronHeads
from tests.committed import EACH_FILE, FOLDER, feeds
from tests.headmath import close, neurons_write, pattern_of, scores_of, tapped, wide, written
from tests.oracle_operators import softmax
from tests.textmodels import FIRST, SILU, text_model

pytestmark = pytest.mark.sample(1)

NAMES = {
    "silu-decoder": 50,
    "relu-decoder": 50,
    "gelu-encoder": 49,  # three embeddings and a normalisation of their sum, no unembedding
    "gelu-vision": 48,  # no embedding of tokens
    "gated-decoder": 44,  # normalisation without bias, no positions
    "conformer-encoder": 68,  # two MLPs in a layer
}
ROTARY = {"gated-decoder"}
CAUSAL = {"silu-decoder", "relu-decoder", "gated-decoder"}


def attentions(index: HeadIndex) -> list[tuple[str, Attention]]:
    return [(each.name, each) for each in index.sublayers if isinstance(each, Attention)]


def neurons(index: HeadIndex) -> list[tuple[str, NeuronHeads]]:
    return [(each.name, each) for each in index.sublayers if isinstance(each, NeuronHeads)]


@EACH_FILE
def test_every_sublayer_has_its_tensors(path: Path) -> None:
    index = heads(path)
    assert (len(index), len(attentions(index))) == (NAMES[path.stem], 2)
    assert len(neurons(index)) == (4 if path.stem == "conformer-encoder" else 2)
    for name in index:
        array = index[name]
        assert array.shape == index.tensors[name].shape
        assert array.dtype == index.tensors[name].dtype == np.float32
    width = 32
    for name, own in attentions(index):
        shapes = index[f"{name}.W_Q"].shape, index[f"{name}.W_O"].shape
        assert (own.heads, *shapes) == (4, (4, width, 8), (4, 8, width))
    for name, block in neurons(index):
        assert index[f"{name}.W_O"].shape == (block.heads, 1, width)
        assert index[f"{name}.bias_K"].shape == (block.heads, block.program.bias_tokens, block.dimension)


@EACH_FILE
@pytest.mark.parametrize("program", ["fewest", "fast"])
def test_neuron_heads_write_what_the_block_writes(path: Path, program: str) -> None:
    index, model = heads(path, program=program), onnx.load(path)
    for name, own in neurons(index):
        values = tapped(model, feeds(model), [own.query.data, own.result])
        data = values[own.query.data].astype(np.float64)
        found = neurons_write(data.reshape(-1, data.shape[-2], data.shape[-1]), wide(index, name))
        close(found.reshape(values[own.result].shape), values[own.result], 3e-6)


@EACH_FILE
def test_original_heads_attend_and_write_as_the_model_does(path: Path) -> None:
    index, model = heads(path), onnx.load(path)
    given = feeds(model)
    for name, own in attentions(index):
        values = tapped(model, given, [own.query.operator.data, own.pattern, own.output.output])
        pattern = values[own.pattern].astype(np.float64)
        data = values[own.query.operator.data].astype(np.float64).reshape(pattern.shape[0], -1, 32)
        tensors = wide(index, name)
        if path.stem != "conformer-encoder":  # its positions are relative to each other
            mask = np.ones((data.shape[1],) * 2, bool)
            if path.stem in CAUSAL:
                mask = np.tril(mask)
            if "attention_mask" in given:
                mask = mask & given["attention_mask"].astype(bool)[:, None, None]
            kept = np.broadcast_to(mask.any(axis=-1), pattern.shape[:-1])
            found = pattern_of(data, tensors, own.scale, mask, rotary=path.stem in ROTARY)
            assert np.abs(found - pattern)[kept].max() <= 2e-6
        assert own.query.rotary == (path.stem in ROTARY)
        out = written(data, pattern, tensors) - tensors["b_O"]
        left = values[own.output.output].reshape(out.shape) - out
        # The bias is inside the operator or in an Add after it.
        assert min(np.abs(left).max(), np.abs(left - tensors["b_O"]).max()) <= 3e-6


@EACH_FILE
def test_folding_the_normalisation_changes_nothing(path: Path) -> None:
    """(x_hat w + b) W + c is x_hat W' + c', for any x_hat."""
    plain, folded = heads(path), heads(path, fold_ln=True)
    norms = [name for name in plain if ".ln" in name and name not in folded]
    behind = path.stem == "gelu-encoder"  # part of the residual stream, and not folded
    assert bool(norms) != behind
    last = {name for name in plain if name.startswith("ln_final.") and "unembed.W_U" in plain}
    assert set(plain) - set(folded) == {*norms, *last}
    if last:
        x_hat = np.random.default_rng(1).normal(size=(5, 32))
        read = x_hat * plain["ln_final.w"] + plain.get("ln_final.b", 0.0)
        expected = read @ plain["unembed.W_U"] + plain["unembed.b_U"]
        close(x_hat @ folded["unembed.W_U"] + folded["unembed.b_U"], expected, 1e-5)
    rng = np.random.default_rng(0)
    changed = 0
    for named in plain.sublayers:
        if not norms:
            assert all(np.array_equal(plain[name], folded[name]) for name in plain)
            break
        places = sorted({name.split(".")[2] for name in norms if name.startswith(f"{named.layer}.")})
        own = [each for each in plain.sublayers if each.layer == named.layer]
        place = f"{named.layer}.{places[own.index(named)]}"
        scale = plain[f"{place}.w"].astype(np.float64)
        bias = plain[f"{place}.b"].astype(np.float64) if f"{place}.b" in plain else np.zeros(32)
        x_hat = rng.normal(size=(1, 5, 32))
        before, after = wide(plain, named.name), wide(folded, named.name)
        for side in "QKV":
            expected = np.einsum("btd,hdk->bthk", x_hat * scale + bias, before[f"W_{side}"]) + before[f"b_{side}"]
            found = np.einsum("btd,hdk->bthk", x_hat, after[f"W_{side}"]) + after[f"b_{side}"]
            close(found, expected, 1e-5)
            changed += not np.array_equal(before[f"W_{side}"], after[f"W_{side}"])
    assert changed or not norms


PLAIN_AND_INLINE: tuple[dict[str, Any], ...] = ({}, {"inline": True})


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("stem", "form", "options"),
    [
        *product(["silu-decoder"], ("local", "masked", "maskless", "staged"), PLAIN_AND_INLINE[:1]),
        *product(("gated-decoder", "relu-decoder"), ["local"], PLAIN_AND_INLINE),
        *product(("gated-decoder", "gelu-encoder"), ["masked"], PLAIN_AND_INLINE),
    ],
    ids=str,
)
def test_a_rewritten_file_has_the_heads_of_its_original(
    stem: str, form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source, out = FOLDER / f"{stem}.onnx", tmp_path / "out.onnx"
    rewrite(source, out, form=form, validate=False, **options)
    original, rewritten = heads(source), heads(out)
    assert list(original) == list(rewritten), rewritten.missed
    for name in original:
        np.testing.assert_array_equal(original[name], rewritten[name], err_msg=name)


@pytest.mark.sample(0)
@pytest.mark.parametrize("stem", ["silu-decoder", "gelu-encoder", "gelu-vision", "gated-decoder"])
def test_a_network_of_form_whole_has_the_heads_of_its_original_and_their_positions(stem: str, tmp_path: Path) -> None:
    """With P in W_QK between positions, and no other mask, they attend as the original does."""
    source, out, t = FOLDER / f"{stem}.onnx", tmp_path / "out.onnx", 24
    rewrite(source, out, form="whole", max_tokens=t, validate=False)
    original, found = heads(source), heads(out)
    tables = [f"{each.name}.P" for each in found.sublayers]
    assert sorted(found) == sorted([*original, *tables]), found.missed
    for name in original:
        np.testing.assert_array_equal(original[name], found[name], err_msg=name)
    folded = heads(source, fold_ln=True), heads(out, fold_ln=True)
    assert all(np.array_equal(folded[0][name], folded[1][name]) for name in folded[0])
    told = found.to_json()
    r = told["bias_tokens"]
    assert told["max_tokens"] == t

    model = onnx.load(source)
    given = {name: np.ones_like(each) if name == "attention_mask" else each for name, each in feeds(model).items()}
    for name, own in attentions(original):
        values = tapped(model, given, [own.query.operator.data, own.pattern])
        pattern = values[own.pattern].astype(np.float64)
        data = values[own.query.operator.data].astype(np.float64).reshape(len(pattern), -1, 32)
        tensors, end = wide(found, name), r + data.shape[1]
        assert tensors["P"].shape == (1, r + t, r + t)
        scores = scores_of(data, tensors, own.scale, rotary=stem in ROTARY) + tensors["P"][:, r:end, r:end]
        assert np.abs(softmax(scores) - pattern).max() <= 2e-6
        assert tensors["P"][:, r:, :r].max() <= -(2.0**60)  # tokens weigh no bias token
    for name, block in neurons(found):
        own_rows = np.arange(r, r + t)
        for group, p in zip(block.groups, found[f"{name}.P"], strict=True):
            m = group.bias_tokens
            assert (p[r:, :m] == 0.0).all()
            assert (p[own_rows, own_rows] == 0.0).all()
            assert np.count_nonzero(p[r:] <= -(2.0**24)) == t * (r + t) - t * (m + 1)


@pytest.mark.parametrize("form", [None, "compact", "masked", "local"])
def test_heads_that_this_tool_put_into_a_body_are_no_attention_that_is_missed(form: str | None) -> None:
    body = (
        f"out = If (yes) <then_branch = a () => (float[batch, tokens, 4] p) {{ {FIRST} {SILU} p = MatMul(h, W2) }}, "
        "else_branch = b () => (float[batch, tokens, 4] q) { s = Softmax(x) q = MatMul(s, x) }>"
    )
    model = text_model(body, constants={"yes": onnx.numpy_helper.from_array(np.array(True), "yes")})
    model = apply(make_plan(model, Options(form=form))) if form else model
    assert [miss.node for miss in heads(model).missed_attention] == ["If/else_branch/Softmax 's'"]


def test_files_open_elsewhere(tmp_path: Path) -> None:
    index = heads(FOLDER / "gated-decoder.onnx")
    index.write(tmp_path / "heads.safetensors")
    data = (tmp_path / "heads.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert json.loads(header.pop("__metadata__")["attnonly"]) == json.loads(json.dumps(index.to_json()))
    assert set(header) == set(index)
    ends = 0
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert start == ends
        ends = end
        array = np.frombuffer(data[8 + size + start : 8 + size + end], "<f4").reshape(entry["shape"])
        np.testing.assert_array_equal(array, index[name])
    assert len(data) == 8 + size + ends
    first = data
    index.write(tmp_path / "heads.safetensors")
    assert (tmp_path / "heads.safetensors").read_bytes() == first


def test_refusals(tmp_path: Path) -> None:
    index = heads(FOLDER / "silu-decoder.onnx")
    with pytest.raises(UsageError, match=r"must end in \.safetensors"):
        index.write(tmp_path / "heads.bin")
    with pytest.raises(KeyError):
        index["blocks.0.attn.W_X"]
    assert not list(tmp_path.iterdir())


def test_indexing_reads_no_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from rewriter.interpret import index as module

    read: list[int] = []

    def counted(_: object, tensor: onnx.TensorProto) -> NDArray[np.generic]:
        read.append(len(tensor.raw_data))
        return onnx.numpy_helper.to_array(tensor)

    monkeypatch.setattr(module, "read_tensor", counted)
    found = heads(FOLDER / "silu-decoder.onnx")
    assert max(read, default=0) < 32 * 32 * 4
    before = len(read)
    found["blocks.0.attn.W_Q"]
    assert len(read) > before
