"""Shared parts of table entries: inputs, outputs and sizes of configurations."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.entry import Input, Output

IDS = Input("input_ids", "tokens", ("batch", "sequence"))
MASK = Input("attention_mask", "mask", ("batch", "sequence"))
DECODER_IDS = Input("decoder_input_ids", "tokens", ("batch", "decoder_sequence"))
PIXELS = Input("pixel_values", "normal", ("batch", "channels", "image", "image"))
LOGITS = Output("logits", ("batch", "sequence", None))
DECODER_LOGITS = Output("logits", ("batch", "decoder_sequence", None))
HIDDEN = Output("last_hidden_state", ("batch", "sequence", None))
IMAGE_DIMS = {"channels": lambda c: c["num_channels"], "image": lambda c: c["image_size"]}


_OPTIMUM = {
    "batch": "batch_size",
    "past": "past_sequence_length",
    "total": "past_sequence_length + sequence_length",
    "samples": "sequence_length",
    "channels": "num_channels",
}


def as_optimum(spec: Input, *, encoder: bool = False) -> Input:
    """The same input with its axes named and declared dynamic as optimum does it; `encoder`: beside a decoder."""
    names = {**_OPTIMUM, "sequence": "encoder_sequence_length" if encoder else "sequence_length"}
    names["decoder_sequence"] = "decoder_sequence_length"
    found = {axis: names[dim] for axis, dim in enumerate(spec.dims) if dim in names}
    images = (axis for axis, dim in enumerate(spec.dims) if dim == "image")
    return replace(spec, declared={**found, **dict(zip(images, ("height", "width"), strict=False))})


def transformer(width: int, layers: int, heads: int, d_ff: int) -> dict[str, int]:
    """Width, layers, heads and d_ff under their most common names."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": d_ff,
    }


def gpt2_sizes(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, Any]:
    """GPT-2 and its relatives."""
    return {
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": positions,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
    }


def opt_sizes(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    """OPT."""
    return {
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * width,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }


def text(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    """A text model with d_ff four times its width."""
    shape = transformer(width, layers, heads, 4 * width)
    return {**shape, "vocab_size": vocabulary, "max_position_embeddings": positions}


def distilbert_sizes(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    """DistilBERT."""
    return {
        "dim": width,
        "n_layers": layers,
        "n_heads": heads,
        "hidden_dim": 4 * width,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }


def vision(width: int, layers: int, heads: int, image: int, patch: int) -> dict[str, int]:
    """A vision transformer with d_ff four times its width."""
    return {**transformer(width, layers, heads, 4 * width), "image_size": image, "patch_size": patch}


def whisper_sizes(width: int, layers: int, heads: int, vocabulary: int, mel: int, source: int) -> dict[str, Any]:
    """Whisper."""
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


def t5_sizes(width: int, layers: int, heads: int, vocabulary: int) -> dict[str, int]:
    """T5."""
    return {
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "vocab_size": vocabulary,
    }


def layers(config: Mapping[str, Any]) -> int:
    """One MLP block per layer."""
    return int(config["num_hidden_layers"])
