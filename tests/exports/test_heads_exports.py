"""The weights of heads against the state dict of PyTorch, read by the architectures' own conventions."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from models.entry import Exporter
from models.registry import get
from rewriter import attribute, heads, why
from rewriter.arrays import Array
from rewriter.interpret.index import HeadIndex
from rewriter.interpret.sublayers import NeuronHeads
from tests.conftest import Export

State = Mapping[str, Array]

GROUPED = ("qwen3", "olmo2", "gemma2")
"""Two heads share keys; queries and keys of the first two are normalised, and outputs of the last two."""
SEPARATE = {
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "bert": ("self.query", "self.key", "self.value", "output.dense"),
    "vit": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "t5": ("q", "k", "v", "o"),
    "whisper": ("q_proj", "k_proj", "v_proj", "out_proj"),
    **dict.fromkeys(GROUPED, ("q_proj", "k_proj", "v_proj", "o_proj")),
    "gptj": ("q_proj", "k_proj", "v_proj", "out_proj"),
}
NEURONS = {
    "gpt2": ("c_fc", "c_fc", "c_proj"),
    "opt": ("fc1", "fc1", "fc2"),
    "llama": ("gate_proj", "up_proj", "down_proj"),
    "pythia": ("dense_h_to_4h", "dense_h_to_4h", "dense_4h_to_h"),
    "bert": ("intermediate.dense", "intermediate.dense", "output.dense"),
    "vit": ("fc1", "fc1", "fc2"),
    "t5": ("wi", "wi", "wo"),
    "whisper": ("fc1", "fc1", "fc2"),
    **dict.fromkeys(GROUPED, ("gate_proj", "up_proj", "down_proj")),
    "gptj": ("fc_in", "fc_in", "fc_out"),
}
SUBLAYERS = {"t5": 2 * (2 + 3), "whisper": 2 * (2 + 3)}
"""Two layers each: an encoder's has two sublayers, a decoder's three. Other models have two layers of two."""

CASES = [pytest.param(name, exporter) for name in NEURONS for exporter in get(name).exporters]


def state_of(name: str) -> State:
    from models.build import build

    module = build(get(name), "tiny", "fp32", 0)
    return {key: value.numpy() for key, value in module.state_dict().items()}


def linear(state: State, name: str) -> tuple[Array, Array]:
    """(weight [out, in], bias [out]) of a torch Linear."""
    # The scopes of the TorchScript exporter lack a module that calls another one directly.
    (key,) = [key for key in state if f".{key}".endswith(f".{name}.weight")]
    weight = state[key]
    return weight, state.get(key.replace(".weight", ".bias"), np.zeros(len(weight), np.float32))


def by_head(weight: Array, heads: int) -> Array:
    """[heads * d_head, in] to [heads, in, d_head], as TransformerLens rearranges it."""
    return weight.reshape(heads, -1, weight.shape[1]).transpose(0, 2, 1)


def attention(name: str, state: State, module: str, count: int) -> dict[str, Array]:
    if name == "gpt2":  # Conv1D: [in, out], queries, keys and values side by side
        packed, bias = state[f"{module}.c_attn.weight"], state[f"{module}.c_attn.bias"]
        sides = list(zip(np.split(packed.T, 3), np.split(bias, 3), strict=True))
        out, out_bias = state[f"{module}.c_proj.weight"].T, state[f"{module}.c_proj.bias"]
    elif name == "pythia":  # every head has its query, key and value together
        packed, bias = linear(state, f"{module}.query_key_value")
        packed, bias = packed.reshape(count, 3, -1, packed.shape[1]), bias.reshape(count, 3, -1)
        sides = [(packed[:, i].reshape(-1, packed.shape[-1]), bias[:, i].reshape(-1)) for i in range(3)]
        out, out_bias = linear(state, f"{module}.dense")
    else:
        names = SEPARATE[name]
        sides = [linear(state, f"{module}.{each}") for each in names[:3]]
        out, out_bias = linear(state, f"{module}.{names[3]}")
    found: dict[str, Array] = {}
    width = out.shape[1] // count
    for side, (weight, side_bias) in zip("QKV", sides, strict=True):
        own = len(weight) // width
        found[f"W_{side}"] = np.repeat(by_head(weight, own), count // own, axis=0)
        found[f"b_{side}"] = np.repeat(side_bias.reshape(own, width), count // own, axis=0)
    found["W_O"] = out.T.reshape(count, width, -1)
    found["b_O"] = out_bias
    for side in "qk":
        for key in (key for key in state if key.endswith(f"{module}.{side}_norm.weight")):
            scale = state[key].reshape(-1, width)  # of each head that there is, or of all heads
            found[f"{side}_norm.w"] = np.repeat(scale, count // len(scale), axis=0)
    return found


def neurons(name: str, state: State, module: str) -> dict[str, Array]:
    """W1 of gates and of values and W2, [neurons, d_model], with their biases."""
    gate, value, out = (f"{module}.{each}" for each in NEURONS[name])
    if name == "gpt2":
        w_in, w_out = state[f"{gate}.weight"].T, state[f"{out}.weight"]
        return {"Q": w_in, "V": w_in, "O": w_out, "b_Q": state[f"{gate}.bias"], "b_O": state[f"{out}.bias"]}
    (w_gate, b_gate), (w_value, _), (w_out, b_out) = (linear(state, each) for each in (gate, value, out))
    return {"Q": w_gate, "V": w_value, "O": w_out.T, "b_Q": b_gate, "b_O": b_out}


def check_neurons(index: HeadIndex, own: NeuronHeads, wanted: Mapping[str, Array]) -> None:
    """Every head of a neuron reads and writes along that neuron's weights, up to the program's factors."""
    count = own.count
    for place, group in enumerate(own.groups):
        part = slice(place * count, (place + 1) * count)
        np.testing.assert_array_equal(index[f"{own.name}.W_Q"][part, :, 0], wanted["Q"])
        np.testing.assert_array_equal(index[f"{own.name}.b_Q"][part, 0], wanted["b_Q"])
        np.testing.assert_array_equal(index[f"{own.name}.W_V"][part, :, 0], wanted["V"] * np.float32(group.head.c))
        expected = (wanted["O"].astype(np.float64) * group.factor).astype(np.float32)
        np.testing.assert_allclose(index[f"{own.name}.W_O"][part, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(index[f"{own.name}.b_O"], wanted["b_O"])


@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_weights_are_those_of_the_state_dict(name: str, exporter: Exporter, export: Export) -> None:
    index, state = heads(export(name, exporter, "fp32")), state_of(name)
    assert len(index.sublayers) == SUBLAYERS.get(name, 4), index.missed
    for own in index.sublayers:
        if isinstance(own, NeuronHeads):
            check_neurons(index, own, neurons(name, state, own.module))
            continue
        for part, array in attention(name, state, own.module, own.heads).items():
            np.testing.assert_array_equal(index[f"{own.name}.{part}"], array, err_msg=f"{own.name}.{part}")


@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_facts_beside_the_weights(name: str, exporter: Exporter, export: Export) -> None:
    index = heads(export(name, exporter, "fp32"))
    attentions = [facts for facts in index.to_json()["sublayers"].values() if facts["kind"] == "attention"]
    assert {facts["rotary"] for facts in attentions} == {name in ("llama", "pythia", "gptj", *GROUPED)}
    assert {facts["groups"] for facts in attentions} == {2 if name in ("llama", *GROUPED) else 1}
    assert {round(facts["scale"], 6) for facts in attentions} == {1.0 if name == "t5" else round(8**-0.5, 6)}
    assert sum(facts["cross"] for facts in attentions) == (2 if name in ("t5", "whisper") else 0)


def inputs_of(model: onnx.ModelProto) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    made: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [dim.dim_value or (2, 6)[axis > 0] for axis, dim in enumerate(value.type.tensor_type.shape.dim)]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            made[value.name] = rng.normal(size=shape).astype(np.float32)
        else:
            made[value.name] = np.ones(shape, np.int64) if "mask" in value.name else rng.integers(3, 100, shape)
    return made


@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_attributions_add_up(name: str, exporter: Exporter, export: Export) -> None:
    path = export(name, exporter, "fp32")
    found = attribute(path, inputs_of(onnx.load(path)), 3)
    size = max(1.0, *(float(np.abs(part).max()) for part in found.paths.values()))
    assert abs(found.residuals["direct"]) <= 1e-5 * size
    assert abs(found.residuals["paths"]) <= 1e-5 * size
    if name in ("t5", "whisper"):
        assert any(part.endswith("cross_attn.other_sequence") for part in found.paths)


@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_scores_and_pre_activations_are_sums(name: str, exporter: Exporter, export: Export) -> None:
    path = export(name, exporter, "fp32")
    for named in heads(path).sublayers[-2 if name not in ("t5", "whisper") else -3 :]:
        found = why(path, inputs_of(onnx.load(path)), f"{named.name}[1]", query=3)
        assert abs(found.residual) <= 1e-12 * max(1.0, np.abs(found.table).max())
        assert len(found.sources) > 5


def test_what_onnxruntimes_optimiser_makes(export: Export, tmp_path: Path) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    path, made = export("bert", "torchscript", "fp32"), tmp_path / "optimised.onnx"
    fused = optimize_model(str(path), model_type="bert", num_heads=4, hidden_size=32, opt_level=0)
    fused.save_model_to_file(str(made))
    assert {"Attention", "EmbedLayerNormalization"} <= {node.op_type for node in fused.model.graph.node}
    index, original, feeds = heads(made), heads(path), inputs_of(onnx.load(path))
    for name in (name for name in original if ".ln" not in name):
        np.testing.assert_array_equal(index[name], original[name], err_msg=name)
    found, wanted = attribute(made, feeds, 3), attribute(path, feeds, 3)
    assert max(map(abs, found.residuals.values())) <= 1e-12
    for name, effects in wanted.effects.items():
        np.testing.assert_allclose(found.effects[name], effects, atol=1e-6, err_msg=name)
