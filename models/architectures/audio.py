"""Speech encoders."""

from dataclasses import replace
from typing import Any

from models.architectures.shapes import HIDDEN, as_optimum, layers, transformer
from models.entry import Entry, Input, Output

_WAVE_DIMS = {"samples": lambda _: 800}


def _wave(name: str, family: str, description: str, **tiny: Any) -> Entry:
    """An encoder of the waveform: convolutions with their own GELUs, then a transformer."""
    return Entry(
        name=name,
        description=description,
        activation="gelu",
        gated=False,
        config_class=f"{family}Config",
        model_class=f"{family}Model",
        common={"hidden_act": "gelu", "apply_spec_augment": False, "layerdrop": 0.0},
        sizes={
            "tiny": {
                **transformer(32, 2, 4, 128),
                "conv_dim": (16, 16, 16),
                "conv_stride": (5, 2, 2),
                "conv_kernel": (10, 3, 3),
                "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 2,
                **tiny,
            }
        },
        inputs=(Input("input_values", "normal", ("batch", "samples")),),
        outputs=(Output("last_hidden_state", ("batch", None, None)),),
        blocks=layers,
        fixed=_WAVE_DIMS,
    )


def _as_optimum(entry: Entry) -> Entry:
    """The samples dynamic."""
    return replace(
        entry,
        name=f"{entry.name}-optimum",
        description=f"{entry.description}, with the axes that optimum declares",
        inputs=tuple(as_optimum(spec) for spec in entry.inputs),
        outputs=(Output("last_hidden_state", ("batch_size", "frames", None)),),
    )


_CONFORMER = replace(
    _wave(
        "conformer",
        "Wav2Vec2Conformer",
        "Wav2Vec2-Conformer from the waveform",
        hidden_act="silu",
        position_embeddings_type="relative",
        max_source_positions=200,
        conv_depthwise_kernel_size=5,
    ),
    activation="silu",
    blocks=lambda c: 2 * layers(c),
)

AUDIO: tuple[Entry, ...] = (
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
                **transformer(32, 2, 4, 128),
                "max_source_positions": 64,
                "conv_depthwise_kernel_size": 5,
            },
            "small": {**transformer(256, 8, 4, 1024), "max_source_positions": 1000},
            "full": {**transformer(1024, 24, 16, 4096), "max_source_positions": 5000},
        },
        inputs=(Input("hidden_states", "normal", ("batch", "sequence", "width")),),
        outputs=(HIDDEN,),
        blocks=lambda c: 2 * int(c["num_hidden_layers"]),
        fixed={"width": lambda c: c["hidden_size"]},
    ),
    _as_optimum(_CONFORMER),
    _as_optimum(_wave("wav2vec2", "Wav2Vec2", "Wav2Vec2")),
    _wave("wav2vec2", "Wav2Vec2", "as in Wav2Vec2 base"),
    _wave("hubert", "Hubert", "as in HuBERT base"),
    _wave("data2vec-audio", "Data2VecAudio", "as in data2vec audio", conv_pos_kernel_size=3, num_conv_pos_embeddings=2),
)
