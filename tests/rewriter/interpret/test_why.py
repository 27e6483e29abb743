"""Why neurons and scores are what they are, against the same decoders written down in numpy from their initializers."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter import UsageError, rewrite, why
from rewriter.arrays import Array
from rewriter.interpret.attribute import Why, rotation
from tests.committed import FOLDER
from tests.decoder import HEADS
from tests.headmath import rotated, tapped
from tests.rewriter.interpret.test_attribution import EXACT, decoder, given


def gives(stem: str, name: str, token: int, source: str) -> Array:
    """What pre-activations, or queries, keys and values, lose at a token without a source, denominators held."""
    made = decoder(stem)
    stream = made.streams[name]
    gone = sum((made.written[each] for each in made.before[name] if each.partition("[")[0] == source), np.zeros(1))
    gone = made.written.get(source, gone)
    off = {"b_Q": f"{name}.b_V", "b_K": f"{name}.b_V"}.get(source, f"{name}.{source}")
    return np.asarray(made.read(name, stream)[token] - made.read(name, stream - gone, off=[off])[token])


def wanted_table(stem: str, name: str, head: int, tokens: tuple[int, int], found: Why) -> Array:
    """[sources, keys]: what pairs of sources give to a score."""
    sides = zip(tokens, (found.sources, found.keys), range(2), strict=True)
    left, right = (
        np.stack([np.split(gives(stem, name, token, each), 3)[part].reshape(HEADS, -1)[head] for each in sources])
        for token, sources, part in sides
    )
    return np.asarray(left @ right.T / np.sqrt(left.shape[1]))


def whole(found: Why, bound: float = 1e-12) -> None:
    """The table adds up to what the model has."""
    assert abs(found.residual) <= bound * np.abs(found.table).max()
    assert abs(found.table.sum() + found.added - found.total) <= bound * max(1.0, np.abs(found.table).max())


@pytest.mark.sample(2)
@pytest.mark.parametrize("stem", EXACT)
@pytest.mark.parametrize(("name", "neuron", "token"), [("blocks.0.mlp_heads", 68, 2), ("blocks.1.mlp_heads", 17, -1)])
def test_a_neuron_reads_what_was_written(stem: str, name: str, neuron: int, token: int) -> None:
    made, found = decoder(stem), why(FOLDER / f"{stem}.onnx", given(stem), f"{name}[{neuron}]", query=token)
    whole(found)
    assert found.total == pytest.approx(made.read(name, made.streams[name])[token, neuron], abs=1e-7)
    assert (found.query, found.key, found.keys, found.added) == (token % 7, None, ("",), 0.0)
    sources = (*made.before[name], "ln.b", "b_in")
    rows = dict(zip(found.sources, found.table[:, 0], strict=True))
    assert {*rows} <= {*sources}
    wanted, other = ([gives(stem, name, at, each)[neuron] for each in sources] for at in (token, token - 1))
    np.testing.assert_allclose([rows.get(each, 0.0) for each in sources], wanted, atol=1e-7)
    assert np.abs(np.subtract(wanted, other)).max() > 1e-2, "the token before would be seen"


@pytest.mark.sample(2)
@pytest.mark.parametrize("stem", EXACT)
@pytest.mark.parametrize(("layer", "head", "tokens"), [(0, 1, (6, 2)), (1, 3, (5, 5)), (1, 0, (6, 1))])
def test_a_score_is_a_sum_over_pairs(stem: str, layer: int, head: int, tokens: tuple[int, int]) -> None:
    name, made = f"blocks.{layer}.attn", decoder(stem)
    found = why(FOLDER / f"{stem}.onnx", given(stem), f"{name}.{head}", query=tokens[0], key=tokens[1])
    whole(found)
    query, key, _ = np.split(made.read(name, made.streams[name]).reshape(7, 3 * HEADS, -1), 3, axis=1)
    score = query[tokens[0], head] @ key[tokens[1], head] / np.sqrt(key.shape[-1])
    assert found.total == pytest.approx(score, rel=1e-7)  # 1 / sqrt(12) is a float32
    sources = {each.partition("[")[0] if "mlp" in each else each for each in made.before[name]}
    assert ({*found.sources}, {*found.keys}) == ({*sources, "ln.b", "b_Q"}, {*sources, "ln.b", "b_K"})
    wanted = wanted_table(stem, name, head, tokens, found)
    np.testing.assert_allclose(found.table, wanted, atol=1e-7)
    if layer:
        no_bias = np.where(np.array(found.sources)[:, None] == "b_Q", 0.0, wanted)
        before = wanted_table(stem, name, head, (tokens[0] - 1, tokens[1]), found)
        for mistake in (-wanted, wanted.T, no_bias, before):
            assert np.abs(found.table - mistake).max() > 1e-3


@pytest.mark.slow
def test_the_key_is_the_one_attended_to_most() -> None:
    path, inputs = FOLDER / "silu-decoder.onnx", given("silu-decoder")
    totals = [why(path, inputs, "blocks.1.attn[2]", query=4, key=key).total for key in range(5)]
    found = why(path, inputs, "blocks.1.attn[2]", query=-3)
    assert (found.query, found.key, found.total) == (4, int(np.argmax(totals)), max(totals))
    masked = why(path, inputs, "blocks.1.attn[2]", query=4, key=6)
    assert masked.added < -1e30
    assert abs(masked.residual) <= 1e-12


@pytest.mark.sample(1)
@pytest.mark.parametrize("stem", ["gated-decoder", "gelu-encoder", "relu-decoder", "gelu-vision"])
def test_what_the_file_computes(stem: str) -> None:
    """Rotations, shared keys, normalisations after sublayers: scores of onnxruntime in float32, and whole tables."""
    model, inputs = onnx.load(FOLDER / f"{stem}.onnx"), given(stem)
    softmax_node = [node for node in model.graph.node if node.op_type == "Softmax"][1]
    scores = tapped(model, inputs, [softmax_node.input[0]])[softmax_node.input[0]]
    for head, query, key in ((0, 3, 1), (3, 6, 6), (2, 5, 0)):
        found = why(model, inputs, f"blocks.1.attn[{head}]", query=query, key=key)
        whole(found)
        assert found.total == pytest.approx(scores[0, head, query, key], abs=1e-5)


@pytest.mark.slow
def test_what_a_rewritten_file_computes(tmp_path: Path) -> None:
    """Its neurons are what its heads make, up to their certified error; the sum is exact all the same."""
    rewrite(FOLDER / "gelu-encoder.onnx", tmp_path / "out.onnx", form="local", validate=False)
    paths = FOLDER / "gelu-encoder.onnx", tmp_path / "out.onnx"
    before, after = (why(path, given("gelu-encoder"), "blocks.1.mlp_heads[3]", query=2) for path in paths)
    whole(after)
    assert before.sources == after.sources
    np.testing.assert_allclose(after.table, before.table, atol=1e-6)


@pytest.mark.parametrize("turning", [8, 6])
@pytest.mark.parametrize("neighbours", [False, True])
def test_rotations(turning: int, neighbours: bool) -> None:
    """Halves against each other or neighbours, of all channels or some; of one head, too."""
    order = np.arange(turning).reshape(2, -1).T.reshape(-1) if neighbours else np.arange(turning)
    for heads in (1, 3):
        before = np.random.default_rng(0).normal(size=(1, 5, heads, 8))
        after = before.copy()
        after[..., np.argsort(order)] = 0.0
        inner = before[..., :turning][..., np.argsort(order)]
        after[..., :turning] = rotated(inner)[..., order]
        for token in (0, 1, 4):
            found = rotation(before[0, token], after[0, token], "it")
            other = np.random.default_rng(1).normal(size=(1, 5, 1, 8))
            wanted = other.copy()
            wanted[..., :turning] = rotated(other[..., :turning][..., np.argsort(order)])[..., order]
            np.testing.assert_allclose(other[0, token] @ found, wanted[0, token], atol=1e-9)
    with pytest.raises(UsageError, match="it turns queries or keys in a way that is not understood"):
        rotation(before[0, 1], before[0, 1] ** 2, "it")
