"""Who reads whom in exports with parallel sublayers and with an encoder, and scores against torch's own weights."""

import numpy as np
import pytest

from models.registry import get
from rewriter import compositions, heads
from rewriter.arrays import Array
from rewriter.interpret.rank import pairs
from tests.conftest import Export

PARALLEL = [pytest.param("pythia", exporter) for exporter in get("pythia").exporters]
CROSS = [pytest.param("t5", exporter) for exporter in get("t5").exporters]

Readers = dict[tuple[str, str], set[str]]


def read(path: str) -> Readers:
    """(sublayer, kind) to the sublayers that it reads."""
    found: Readers = {}
    for side, writers in pairs(heads(path)):
        for kind in side.kinds:
            found[side.sublayer.name, kind] = {writer.sublayer.name for writer in writers}
    return found


@pytest.mark.parametrize(("name", "exporter"), PARALLEL)
def test_parallel_sublayers_do_not_read_each_other(name: str, exporter: str, export: Export) -> None:
    first = {"blocks.0.attn", "blocks.0.mlp_heads"}
    found = read(str(export(name, exporter)))
    assert set(found) == {
        (sublayer, kind)
        for sublayer, kinds in (("blocks.1.attn", "QKV"), ("blocks.1.mlp_heads", "QV"))
        for kind in kinds
    }
    assert set(map(frozenset, found.values())) == {frozenset(first)}


@pytest.mark.parametrize(("name", "exporter"), CROSS)
def test_a_decoder_reads_its_encoder_in_cross_attention(name: str, exporter: str, export: Export) -> None:
    found = read(str(export(name, exporter)))
    encoder = {f"encoder.{layer}.{part}" for layer in (0, 1) for part in ("attn", "mlp_heads")}
    own = ["decoder.0.attn", "decoder.0.cross_attn", "decoder.0.mlp_heads"]
    own += ["decoder.1.attn", "decoder.1.cross_attn", "decoder.1.mlp_heads"]
    for place, sublayer in enumerate(own):
        for kind in "QV" if sublayer.endswith("mlp_heads") else "QKV":
            other = sublayer.endswith("cross_attn") and kind != "Q"
            assert found.get((sublayer, kind), set()) == (encoder if other else set(own[:place]))
    assert found["decoder.1.cross_attn", "K"] == encoder
    assert found["encoder.1.mlp_heads", "V"] == {"encoder.0.attn", "encoder.0.mlp_heads", "encoder.1.attn"}


def test_scores_are_those_of_torchs_weights(export: Export) -> None:
    from models.build import build

    module = build(get("gpt2"), "tiny", "fp32", 0)
    state = {
        key[key.index("h.") :]: value.numpy().astype(np.float64)
        for key, value in module.state_dict().items()
        if "h." in key
    }
    path = export("gpt2", "torchscript")
    width, count = state["h.0.attn.c_attn.weight"].shape[0], heads(path).sublayers[0].heads
    step = width // count
    found = compositions(path, top=10**4)

    def part(layer: int, side: int, head: int) -> Array:
        start = side * width + head * step
        return np.asarray(state[f"h.{layer}.attn.c_attn.weight"][:, start : start + step])

    def ov(layer: int, head: int) -> Array:
        rows = state[f"h.{layer}.attn.c_proj.weight"][head * step : (head + 1) * step]
        return np.asarray(part(layer, 2, head) @ rows)

    def score(one: Array, other: Array) -> float:
        return float(np.linalg.norm(one @ other) / np.linalg.norm(one) / np.linalg.norm(other))

    for head in range(count):
        qk = part(1, 0, head) @ part(1, 1, head).T
        for kind, matrix in (("Q", qk), ("K", qk.T), ("V", ov(1, head))):
            scores = {each.writer: each.score for each in found.of(f"blocks.1.attn.{head}", kind)}
            for writer in range(count):
                assert abs(scores[f"blocks.0.attn.{writer}"] - score(ov(0, writer), matrix)) <= 1e-5
            neuron = state["h.0.mlp.c_proj.weight"][3][None]
            assert abs(scores["blocks.0.mlp_heads.3"] - score(neuron, matrix)) <= 1e-5
