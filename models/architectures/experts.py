"""Decoders with routed experts: the weights of all experts are one tensor, and a router picks matrices from it.

They are exported as transformers computes them with `batched_mm`; its loop over experts depends on the data, and no
exporter takes it. DeepSeek V2 is not here: neither exporter takes the complex numbers of its rotary positions.
"""

from collections.abc import Callable
from typing import Any

from models.architectures.shapes import IDS, LOGITS, MASK, layers, text
from models.entry import Config, Entry

_SIZES = {**text(32, 2, 4, 128, 64), "num_key_value_heads": 2, "intermediate_size": 48, "num_experts_per_tok": 2}


def _experts(
    name: str,
    family: str,
    description: str,
    *,
    routed: Callable[[Config], int] = layers,
    dense: Callable[[Config], int] = lambda _: 0,
    **tiny: Any,
) -> Entry:
    """A decoder of two layers with four experts in each routed one, and `dense` MLPs of plain projections."""
    activation = tiny.pop("activation", "silu")
    return Entry(
        name=name,
        description=description,
        activation=activation,
        gated=True,
        config_class=f"{family}Config",
        model_class=f"{family}ForCausalLM",
        common={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        sizes={"tiny": {**_SIZES, **tiny}},
        inputs=(IDS, MASK),
        outputs=(LOGITS,),
        blocks=lambda config: routed(config) + dense(config),
        routed=routed,
    )


EXPERTS: tuple[Entry, ...] = (
    _experts("mixtral", "Mixtral", "as in Mixtral 8x7B", num_local_experts=4),
    _experts(
        "qwen2-moe",
        "Qwen2Moe",
        "as in Qwen2 MoE: a shared expert with its own gate beside the routed ones",
        dense=layers,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=48,
    ),
    _experts("qwen3-moe", "Qwen3Moe", "as in Qwen3 MoE", num_experts=4, moe_intermediate_size=24, head_dim=8),
    _experts("olmoe", "Olmoe", "as in OLMoE", num_experts=4),
    _experts(
        "gpt-oss",
        "GptOss",
        "as in gpt-oss: gate and value interleaved and clipped, biases per expert",
        activation="silu_clipped",
        num_local_experts=4,
        head_dim=8,
        sliding_window=16,
    ),
    _experts(
        "deepseek-v3",
        "DeepseekV3",
        "as in DeepSeek V3: experts in groups, chosen by sigmoids",
        routed=lambda config: layers(config) - 1,
        dense=layers,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    _experts("granite-moe", "GraniteMoe", "as in Granite 3 MoE", num_local_experts=4),
    _experts("phi-moe", "Phimoe", "as in Phi-3.5 MoE", num_local_experts=4),
)
