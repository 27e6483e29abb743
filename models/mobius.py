"""Models as Microsoft's builder mobius-onnx writes them, from tiny configurations with random weights (extra `mobius`).

Its default output spells sublayers with operators of com.microsoft, beside local functions of the same names.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rewriter.errors import UsageError

Build = tuple[str, str, int, int, Callable[[Path], None]]
"""The first fields of `models.extra.Extra`."""

_TINY: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_type": "default", "rope_theta": 10_000.0, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_OLDER: Mapping[str, Any] = {"num_key_value_heads": 4, "attn_qkv_bias": True, "attn_o_bias": True}
_IMAGES: Mapping[str, Any] = {"image_size": 32, "patch_size": 8, "num_channels": 3}
_SLIDING = ["sliding_attention", "full_attention"]

_CHANGES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("llama mistral qwen2 exaone4 helium hunyuan_v1_dense llama4_text ministral olmo granite internlm2 minicpm", {}),
    ("minicpm3 openelm zamba chatglm ernie4_5 qwen baichuan command_r yi solar_open glm seed_oss csm gemma", {}),
    ("diffllama", {}),
    ("cohere cohere2", {"tie_word_embeddings": True, "logit_scale": 0.0625}),
    ("olmo2 olmo3", {"attn_qk_norm": True, "attn_qk_norm_full": True}),
    ("qwen3", {"attn_qk_norm": True}),
    ("smollm3", {"no_rope_layers": [1, 0]}),
    ("stablelm", {"partial_rotary_factor": 0.25}),
    ("gemma3_text", {"attn_qk_norm": True, "rope_local_base_freq": 1e4, "layer_types": _SLIDING[::-1]}),
    ("starcoder2", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    ("nemotron", {"hidden_act": "relu2", "partial_rotary_factor": 0.5}),
    ("arcee", {"hidden_act": "relu2"}),
    ("persimmon", {**_OLDER, "hidden_act": "relu2", "mlp_bias": True, "partial_rotary_factor": 0.5}),
    ("opt ctrl", {**_OLDER, "hidden_act": "relu", "tie_word_embeddings": True}),
    ("gpt2 biogpt gpt_bigcode xglm", {**_OLDER, "hidden_act": "gelu_new"}),
    ("codegen", {"num_key_value_heads": 4, "hidden_act": "gelu_new", "mlp_bias": True, "partial_rotary_factor": 0.5}),
    ("gptj", {"num_key_value_heads": 4, "hidden_act": "gelu_new", "mlp_bias": True, "partial_rotary_factor": 0.25}),
    ("gpt_neox", {**_OLDER, "hidden_act": "gelu", "mlp_bias": True, "partial_rotary_factor": 0.25}),
    ("falcon", {"hidden_act": "gelu", "parallel_attn": True, "dual_ln": True}),
    ("mpt", {"hidden_act": "gelu", "num_key_value_heads": 4}),
    ("mixtral granitemoe arctic dbrx", _EXPERTS),
    ("qwen3_moe", {**_EXPERTS, "attn_qk_norm": True}),
    ("qwen2_moe", {**_EXPERTS, "attn_qkv_bias": True, "shared_expert_intermediate_size": 64}),
    ("olmoe", {**_EXPERTS, "attn_qk_norm": True, "attn_qk_norm_full": True}),
    ("gpt_oss", {**_EXPERTS, "layer_types": _SLIDING, "sliding_window": 64}),
    ("bert albert electra roformer deberta xlnet layoutlm", {"hidden_act": "gelu", "type_vocab_size": 2}),
    ("roberta", {"hidden_act": "gelu", "type_vocab_size": 1}),
    ("modernbert", {"hidden_act": "gelu"}),
    ("bart marian m2m_100", {"hidden_act": "gelu", "num_decoder_layers": 2, "max_position_embeddings": 64}),
    ("t5", {"hidden_act": "relu", "num_decoder_layers": 2}),
    ("vit beit deit dinov2 siglip_vision_model swin", {**_IMAGES, "hidden_act": "gelu"}),
    ("clip_vision_model", {**_IMAGES, "hidden_act": "quick_gelu"}),
)
ARCHITECTURES = MappingProxyType({name: changes for names, changes in _CHANGES for name in names.split()})
"""Model type to what its configuration adds to `_TINY`."""

_ACTIVATION = {"gpt_oss": "silu_clipped"}
"""What the configuration does not name."""


def builds() -> Iterator[Build]:
    """One build for each architecture; listing them needs no package."""
    for name, changes in ARCHITECTURES.items():
        config = {**_TINY, **changes}
        layers = config["num_hidden_layers"]
        feedforward = config.get("num_local_experts", 1) + ("shared_expert_intermediate_size" in config)
        activation = _ACTIVATION.get(name, config["hidden_act"])
        pair = "num_decoder_layers" in config
        parts = (("encoder", 1), ("decoder", 2)) if pair else (("model", 1),)
        for part, attention in parts:
            title = f"mobius-{name}-{part}" if pair else f"mobius-{name}"
            yield title, activation, layers * feedforward, layers * attention, partial(_build, name, part)
    yield "mobius-llama-int4", "silu", 2, 2, partial(_build, "llama", "model", bits=4)


def _build(name: str, part: str, path: Path, *, bits: int = 0) -> None:
    """Raises UsageError where the builder is missing."""
    if find_spec("mobius") is None:
        raise UsageError("the builder needs mobius-onnx: pip install .[models,mobius]")
    import onnx_ir
    from mobius import ArchitectureConfig, build_from_module, registry
    from mobius._config_resolver import _default_task_for_model
    from mobius._configs import QuantizationConfig

    packed = {"quantization": QuantizationConfig(bits, 16, "gptq", sym=False)} if bits else {}
    config = ArchitectureConfig(**{**_TINY, **ARCHITECTURES[name]}, **packed)
    model = build_from_module(registry.get(name)(config), config, _default_task_for_model(name))[part]
    rng = np.random.default_rng(0)
    for title, weight in model.graph.initializers.items():
        if weight.const_value is None:
            weight.const_value = onnx_ir.Tensor(_values(rng, title, weight), name=title)
    onnx_ir.save(model, path)


def _values(rng: np.random.Generator, name: str, weight: Any) -> np.ndarray:
    """Random numbers such that layers neither vanish nor explode."""
    shape, dtype = [int(size) for size in weight.shape], weight.dtype.numpy()
    if dtype.kind in "ui":
        return rng.integers(0, 256, shape).astype(dtype)
    values = rng.standard_normal(shape) / (np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 10.0)
    gain = len(shape) == 1 and name.endswith("weight")  # of a normalisation
    return np.asarray(values + gain).astype(dtype)
