"""Encoder-decoder models, exported as one file."""

from collections.abc import Mapping
from typing import Any

from models.architectures.shapes import DECODER_IDS, DECODER_LOGITS, IDS, MASK, t5_sizes, whisper_sizes
from models.entry import Entry, Input


def _both(c: Mapping[str, Any]) -> int:
    return int(c["encoder_layers"] + c["decoder_layers"])


def _translator(name: str, family: str, activation: str, description: str, model: str) -> Entry:
    sizes = whisper_sizes(32, 2, 4, 128, 16, 20)
    dropped = ("num_mel_bins", "max_source_positions")
    return Entry(
        name=name,
        description=description,
        activation=activation,
        gated=False,
        config_class=f"{family}Config",
        model_class=f"{family}{model}",
        common={"activation_function": activation},
        sizes={
            "tiny": {
                **{key: value for key, value in sizes.items() if key not in dropped},
                "max_position_embeddings": 64,
                "forced_eos_token_id": 127,
                "pad_token_id": 1,
            }
        },
        inputs=(IDS, MASK, DECODER_IDS),
        outputs=(DECODER_LOGITS,),
        blocks=_both,
        full_masks={"decoder_attention_mask": "decoder_input_ids"},
    )


ENCODER_DECODERS: tuple[Entry, ...] = (
    Entry(
        name="whisper",
        description="Whisper tiny, encoder and decoder in one file",
        activation="gelu",
        gated=False,
        config_class="WhisperConfig",
        model_class="WhisperForConditionalGeneration",
        common={"activation_function": "gelu", "max_target_positions": 448},
        sizes={
            "tiny": {**whisper_sizes(32, 2, 4, 128, 16, 20), "max_target_positions": 64},
            "small": whisper_sizes(384, 4, 6, 8192, 80, 200),
            "full": whisper_sizes(384, 4, 6, 51865, 80, 1500),
        },
        inputs=(Input("input_features", "normal", ("batch", "mel", "frames")), DECODER_IDS),
        outputs=(DECODER_LOGITS,),
        blocks=_both,
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
            "tiny": t5_sizes(32, 2, 4, 128),
            "small": t5_sizes(384, 4, 6, 8192),
            "full": t5_sizes(512, 6, 8, 32128),
        },
        inputs=(IDS, MASK, DECODER_IDS),
        outputs=(DECODER_LOGITS,),
        blocks=lambda c: int(c["num_layers"] + c["num_decoder_layers"]),
        embedding_std=3.0,
        unscaled_queries=(".q",),
    ),
    Entry(
        name="flan-t5",
        description="as in FLAN-T5: gated tanh-GELU",
        activation="gelu_new",
        gated=True,
        config_class="T5Config",
        model_class="T5ForConditionalGeneration",
        common={"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "tie_word_embeddings": False},
        sizes={"tiny": t5_sizes(32, 2, 4, 128)},
        inputs=(IDS, MASK, DECODER_IDS),
        outputs=(DECODER_LOGITS,),
        blocks=lambda c: int(c["num_layers"] + c["num_decoder_layers"]),
        unscaled_queries=(".q",),
    ),
    _translator("bart", "Bart", "gelu", "as in BART", "ForConditionalGeneration"),
    _translator("pegasus", "Pegasus", "relu", "as in PEGASUS: fixed positions", "ForConditionalGeneration"),
    _translator("marian", "Marian", "swish", "as in the OPUS translation models", "MTModel"),
    _translator("m2m100", "M2M100", "relu", "as in M2M-100 and NLLB", "ForConditionalGeneration"),
)
