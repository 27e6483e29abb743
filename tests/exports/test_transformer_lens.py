"""Neuron heads, and whole files, in TransformerLens: logits, hooks and ablations against PyTorch and onnxruntime."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models.registry import get
from rewriter import UsageError, ablate, run_with_cache
from rewriter.arrays import Array
from rewriter.ort import open_session
from tests.committed import FOLDER
from tests.conftest import Export
from tests.headmath import neuron_pattern, neurons_write, wide

pytest.importorskip("transformer_lens")
from rewriter.adapters.transformer_lens import MlpHeads, boot_onnx, with_mlp_heads

pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]


EXPORTERS = {"gpt2-silu": "torchscript", "gpt2": "torchscript", "llama": "torchscript"}
EXACT = {"gpt2-silu": 1e-12, "gpt2": 1e-5, "llama": 1e-5}
"""Allowed in float64: the certified errors of the programs, about 1e-7 for GELU and gates, through two layers."""
TOKENS = np.random.default_rng(0).integers(3, 60, (2, 9))


@cache
def module(name: str, seed: int = 0) -> Any:
    from models.build import build

    return build(get(name), "tiny", "fp32", seed).model


def bridge(name: str, *, wide: bool = False, seed: int = 0) -> Any:
    """A bridge around a copy, since it changes the module that it wraps."""
    import copy

    import torch
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    own = copy.deepcopy(module(name, seed))
    dtype = torch.float64 if wide else torch.float32
    own.to(dtype)
    made = build_bridge_from_module(own, type(own).__name__, hf_config=own.config, dtype=dtype)
    made.eval()
    return made


def logits(model: Any) -> Array:
    import torch

    with torch.no_grad():
        found: Array = model(torch.tensor(TOKENS)).numpy()
    return found


def feeds() -> dict[str, Array]:
    return {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}


def file(name: str, export: Export) -> Path:
    return export(name, EXPORTERS[name])


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", EXPORTERS)
def test_logits(name: str, wide: bool, export: Export) -> None:
    own = bridge(name, wide=wide)
    wanted = logits(own)
    assert with_mlp_heads(own, file(name, export)) is own
    found = logits(own)
    assert np.abs(wanted).max() > 1.0
    assert np.abs(found - wanted).max() <= (EXACT[name] if wide else 1e-4)


@pytest.mark.parametrize("name", EXPORTERS)
def test_hooks_fire_and_show_what_the_file_computes(name: str, export: Export) -> None:
    import torch

    path = file(name, export)
    own = with_mlp_heads(bridge(name), path)
    own.cfg.use_attn_result = True
    _, cache = own.run_with_cache(torch.tensor(TOKENS))
    wanted = run_with_cache(path, feeds(), program="fast")
    heads, width = wanted.index["blocks.1.mlp_heads.W_Q"].shape[0], wanted.index["blocks.1.mlp_heads.W_Q"].shape[2]
    others = wanted.index["blocks.1.mlp_heads.bias_K"].shape[1]
    shapes = {"q": (width,), "k": (width,), "v": (1,), "z": (1,), "result": (own.cfg.d_model,)}
    shapes |= dict.fromkeys(("attn_scores", "pattern"), (1 + others,))
    for hook, shape in shapes.items():
        assert cache[f"blocks.1.mlp.hook_{hook}"].shape == (2, 9, heads, *shape), hook
    for hook in ("z", "pattern"):
        expected = wanted.cache[f"blocks.1.mlp_heads.hook_{hook}"]
        np.testing.assert_allclose(cache[f"blocks.1.mlp.hook_{hook}"].numpy(), expected, atol=2e-5 * expected.max())
    written = cache["blocks.1.mlp.hook_result"].sum(dim=2) + own.blocks[1].mlp.b_O
    np.testing.assert_allclose(written.detach(), cache["blocks.1.hook_mlp_out"], atol=1e-4)
    np.testing.assert_allclose(cache["blocks.1.hook_mlp_out"], wanted.cache["blocks.1.hook_mlp_out"], atol=1e-4)


@pytest.mark.parametrize("name", EXPORTERS)
def test_ablation_by_a_hook_is_that_of_the_file(name: str, export: Export) -> None:
    import torch

    path = file(name, export)
    own = with_mlp_heads(bridge(name), path)
    neurons = own.blocks[0].mlp.W_Q.shape[0] // len(heads_per_neuron(path))
    chosen = [3, 17, 40]

    def without(z: Any, hook: Any) -> Any:
        z = z.clone()
        for start in range(0, z.shape[2], neurons):
            z[:, :, [start + number for number in chosen]] = 0.0
        return z

    with torch.no_grad():
        found = own.run_with_hooks(torch.tensor(TOKENS), fwd_hooks=[("blocks.0.mlp.hook_z", without)]).numpy()
    changed = ablate(path, [f"blocks.0.mlp_heads.{number}" for number in chosen])
    expected = open_session(changed, optimise=False).run(feeds())["logits"]
    assert np.abs(logits(own) - expected).max() > 1e-2
    np.testing.assert_allclose(found, expected, atol=1e-4)


def heads_per_neuron(path: Path) -> list[Any]:
    from rewriter import heads

    found: list[Any] = heads(path, program="fast").to_json()["sublayers"]["blocks.0.mlp_heads"]["heads_per_neuron"]
    return found


def test_gradients_are_those_of_the_mlp(export: Export) -> None:
    import torch

    for name in ("gpt2-silu", "gpt2"):
        own = bridge(name, wide=True)
        data = torch.randn(1, 5, own.cfg.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        gradients = []
        mlp = own.blocks[0].mlp
        for part in (mlp, with_mlp_heads(own, file(name, export)).blocks[0].mlp):
            leaf = data.clone().requires_grad_()
            part(leaf).square().sum().backward()
            gradients.append(leaf.grad)
        assert torch.isfinite(gradients[1]).all()
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_heads_with_fewer_bias_tokens() -> None:
    """Keys of -inf have weight 0, as in plain numpy, and gradients are finite."""
    import torch

    rng = np.random.default_rng(0)
    shapes = {"W_Q": (3, 4, 2), "W_K": (3, 4, 2), "W_V": (3, 4, 1), "W_O": (3, 1, 4), "b_V": (3, 1), "b_O": (4,)}
    shapes |= {"b_K": (3, 2), "bias_K": (3, 2, 2), "bias_V": (3, 2, 1)}
    weights = {f"own.{name}": rng.normal(size=shape) for name, shape in shapes.items()}
    weights["own.W_Q"][..., 1] = 0.0
    weights["own.b_Q"] = np.stack([rng.normal(size=3), np.ones(3)], axis=-1)
    weights["own.bias_K"][1, 1] = (0.0, -np.inf)
    index: Any = weights
    module = MlpHeads(index, "own", "mlp", None)
    data = torch.tensor(rng.normal(size=(2, 5, 4))).requires_grad_()
    found = module(data)
    x = data.detach().numpy()
    own = wide(weights, "own")
    wanted = neurons_write(x, own)
    assert [(neuron_pattern(x, own)[:, :, head, 2] == 0.0).all() for head in range(3)] == [False, True, False]
    np.testing.assert_allclose(found.detach().numpy(), wanted, atol=1e-12)
    found.square().sum().backward()
    assert all(torch.isfinite(each.grad).all() for each in (data, *module.parameters()))


def test_another_model_is_refused_and_nothing_changes(export: Export) -> None:
    own = bridge("gpt2-silu", seed=1)
    wanted, before = logits(own), own.blocks[0].mlp
    with pytest.raises(UsageError, match="is not what the file's heads compute"):
        with_mlp_heads(own, file("gpt2-silu", export))
    with pytest.raises(UsageError, match="is not what the file's heads compute"):
        with_mlp_heads(own, file("llama", export))
    assert own.blocks[0].mlp is before
    np.testing.assert_array_equal(logits(own), wanted)


def test_what_is_no_bridge(export: Export) -> None:
    with pytest.raises(UsageError, match="a TransformerBridge of TransformerLens 4 is needed, not a GPT2LMHeadModel"):
        with_mlp_heads(module("gpt2-silu"), file("gpt2-silu", export))


STREAM = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out")
HOOKS = (*STREAM, "attn.hook_q", "attn.hook_v", "attn.hook_z", "attn.hook_pattern", "mlp.hook_pre")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_bridge_to_a_file_shows_what_the_model_computes(name: str, export: Export) -> None:
    import torch

    path, own = file(name, export), bridge(name)
    remote = boot_onnx(path)
    found, cache = remote.run_with_cache(torch.tensor(TOKENS))
    _, wanted = own.run_with_cache(torch.tensor(TOKENS))
    np.testing.assert_array_equal(found, open_session(path, optimise=False).run(feeds())["logits"])
    np.testing.assert_allclose(found, logits(own), atol=1e-4)
    for key in ("n_layers", "n_heads", "d_head", "d_model", "d_vocab", "d_vocab_out"):
        assert getattr(remote.cfg, key) == getattr(own.cfg, key), key
    for place, other in ((f"blocks.{n}.{hook}", f"blocks.{1 - n}.{hook}") for n in (0, 1) for hook in HOOKS):
        here, there = cache[place], wanted[place].detach()
        here = here[:, :, :: here.shape[2] // there.shape[2]]  # query heads may share values
        torch.testing.assert_close(here, there, atol=1e-4, rtol=0.0)
        for wrong in (wanted[other], there.roll(1, 1 if "pattern" in place else 2)):
            assert (here - wrong).abs().max() > 0.1, place


CHANGES: tuple[tuple[str, Any, Any, float, float], ...] = (
    ("attn.hook_z", None, np.s_[:, :, 1], 0.0, 0.0),
    ("attn.hook_z", {"op": "suppress", "pos": [2, 4]}, np.s_[:, [2, 4]], 0.0, 0.0),
    ("attn.hook_pattern", {"op": "scale", "factor": 0.5, "pos": 3}, np.s_[:, :, 3], 0.5, 0.0),
    ("attn.hook_k", {"op": "set", "value": 0.7, "pos": 5}, np.s_[:, 5], 0.0, 0.7),
    ("mlp.hook_pre", {"op": "set", "value": -0.3, "pos": 8}, np.s_[:, 8], 0.0, -0.3),
    ("hook_attn_out", {"op": "add", "value": [0.5, 0.0] * 16}, np.s_[:, :, ::2], 1.0, 0.5),
    ("hook_resid_mid", {"op": "add", "value": [2.0, 0.0] * 16}, np.s_[:, :, ::2], 1.0, 2.0),
)


def edited(tensor: Any, hook: Any = None, *, where: Any, factor: float, added: float) -> Any:
    changed = tensor.clone()
    changed[where] = changed[where] * factor + added
    return changed


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_interventions_are_those_of_hooks(name: str, export: Export) -> None:
    import torch

    own, remote, tokens = bridge(name), boot_onnx(file(name, export)), torch.tensor(TOKENS)
    for hook, spec, where, factor, added in CHANGES:
        change = partial(edited, where=where, factor=factor, added=added)
        places = [f"blocks.{layer}.{hook}" for layer in (1, 0)]
        wanted = own.run_with_hooks(tokens, fwd_hooks=[(place, change) for place in places]).detach()
        found = remote.forward(tokens, intervene=dict.fromkeys(places, spec or change))
        assert np.abs(wanted - logits(own)).max() > 0.1, spec
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)
        _, cache = remote.run_with_cache(tokens, intervene={places[0]: spec or change})
        _, before = remote.run_with_cache(tokens)
        torch.testing.assert_close(cache[places[0]], change(before[places[0]]))


def test_an_encoder_without_a_vocabulary() -> None:
    """BERT normalises the stream itself, and no sublayer alone reads its middle."""
    remote = boot_onnx(FOLDER / "gelu-encoder.onnx")
    assert (remote.cfg.d_vocab, remote.cfg.d_vocab_out, remote.forward(TOKENS).shape[-1]) == (128, 32, 32)
    assert "blocks.0.hook_resid_post" in remote.hook_dict
    assert "blocks.0.hook_resid_mid" not in remote.hook_dict


def test_a_file_with_bfloat16() -> None:
    import torch

    model = onnx.load(FOLDER / "silu-decoder.onnx")
    wanted, (output,) = boot_onnx(model).forward(TOKENS), model.graph.output
    model.graph.node.append(onnx.helper.make_node("Cast", [output.name], ["rounded"], to=onnx.TensorProto.BFLOAT16))
    output.name, output.type.tensor_type.elem_type = "rounded", onnx.TensorProto.BFLOAT16
    remote = boot_onnx(model)
    torch.testing.assert_close(remote.forward(TOKENS), wanted.bfloat16(), atol=0.0, rtol=0.0)
    half, change = wanted.bfloat16(), {"blocks.1.hook_resid_post": lambda x: x.bfloat16()}
    torch.testing.assert_close(remote.forward(TOKENS, intervene=change), half, atol=0.1, rtol=0.0)


def test_what_a_bridge_to_a_file_refuses(export: Export) -> None:
    remote, seen = boot_onnx(file("llama", export)), dict[str, Any]()
    look = [("blocks.1.attn.hook_q", lambda q, hook: seen.update({hook.name: q.shape}))]
    remote.run_with_hooks(TOKENS, fwd_hooks=look)
    assert seen == {"blocks.1.attn.hook_q": (2, 9, 4, 8)}
    for hook, change, reason in (
        ("attn.hook_result", {"op": "suppress"}, "the file has no hook"),
        ("attn.hook_z", {"op": "double"}, "Unsupported intervention op"),
        ("attn.hook_z", {"op": "suppress", "pos": 9}, "out of bounds"),
        ("attn.hook_z", lambda z: z[:, 1:], "gives"),
        ("attn.hook_k", partial(edited, where=np.s_[:, :, 1], factor=0.0, added=0.0), "no tensor of the file gives it"),
        ("mlp.hook_pattern", {"op": "suppress"}, "no tensor of the file gives it"),
    ):
        with pytest.raises(UsageError, match=reason):
            remote.forward(TOKENS, intervene={f"blocks.0.{hook}": change})
