"""Models in plain PyTorch (`models.plain`), which transformers lacks or does not export in plain operators."""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from models.architectures.shapes import IDS, LOGITS, as_optimum, gpt2_sizes, t5_sizes, text, whisper_sizes
from models.entry import Config, Entry, Input, Output


def _decoder(
    name: str, description: str, activation: str, family: str, model: str, settings: Config, *, past: bool, **more: Any
) -> Entry:
    """A decoder with a cache, its inputs and outputs named as optimum names them, and their axes."""
    layers, encoder = 2, family not in ("GPT2", "Llama")
    sizes = {"width": 32, "layers": layers, "heads": 4, "num_heads": 4, "head": 8, "vocab_size": 128}
    sizes["caches"] = settings.get("num_key_value_heads", 4)
    new = "decoder_sequence" if encoder else "sequence"
    inputs = [Input("input_ids", "tokens", ("batch", new))]
    if encoder and family != "Whisper":
        inputs.insert(0, Input("encoder_attention_mask", "mask", ("batch", "sequence")))
    if encoder and not past:
        inputs.append(Input("encoder_hidden_states", "normal", ("batch", "sequence", "width")))
    if not encoder:
        inputs.append(Input("attention_mask", "mask", ("batch", "total" if past else "sequence")))
    kinds = {".decoder": "past", ".encoder": "sequence"} if encoder else {"": "past"}
    caches = [
        (f"{layer}{kind}.{part}", length)
        for layer in range(layers)
        for kind, length in kinds.items()
        for part in ("key", "value")
    ]
    if past:
        axes = ("batch", "caches")
        inputs += [Input(f"past_key_values.{each}", "normal", (*axes, length, "head")) for each, length in caches]
    grown = (new if not past else "past_decoder_sequence") if encoder else ("total" if past else "sequence")
    outputs = [Output("logits", ("batch", new, None))]
    outputs += [
        Output(f"present.{each}", ("batch", None, grown if length == "past" else length, None))
        for each, length in caches
        if not (past and length == "sequence")
    ]
    return Entry(
        name=name,
        description=description,
        activation=activation,
        gated=family == "Llama",
        config_class="plain.Config",
        model_class="plain.Decoder",
        common={"family": family, "model": model, "encoder": encoder, "decoder": settings},
        sizes={"tiny": sizes},
        inputs=tuple(as_optimum(each, encoder=encoder) for each in inputs),
        outputs=tuple(outputs),
        blocks=lambda _: layers,
        attention=lambda _: 2 * layers if encoder else layers,
        fixed={key: itemgetter(key) for key in ("width", "caches", "head")},
        **more,
    )


def _pair(name: str, activation: str, *rest: Any, **more: Any) -> Iterator[Entry]:
    yield _decoder(f"{name}-first", "the same without a past", activation, *rest, past=False, **more)
    what = f"the decoder of {rest[0]} with a cache: keys and values of earlier tokens are inputs and outputs"
    yield _decoder(f"{name}-cache", what, activation, *rest, past=True, **more)


_STATIC = ("batch", "caches", "capacity", "head")
_TRANSLATOR = {**whisper_sizes(32, 2, 4, 128, 16, 20), "max_position_embeddings": 64, "max_target_positions": 64}
_DECODERS: tuple[Entry, ...] = (
    *_pair("gpt2", "gelu_new", "GPT2", "GPT2LMHeadModel", gpt2_sizes(32, 2, 4, 128, 64)),
    *_pair("llama", "silu", "Llama", "LlamaForCausalLM", {**text(32, 2, 4, 128, 64), "num_key_value_heads": 2}),
    *_pair(
        "t5",
        "relu",
        "T5",
        "T5ForConditionalGeneration",
        {**t5_sizes(32, 2, 4, 128), "feed_forward_proj": "relu", "decoder_start_token_id": 0},
        embedding_std=3.0,
        unscaled_queries=(".q",),
    ),
    *_pair("marian", "swish", "Marian", "MarianMTModel", {**_TRANSLATOR, "activation_function": "swish"}),
    *_pair(
        "whisper", "gelu", "Whisper", "WhisperForConditionalGeneration", {**_TRANSLATOR, "activation_function": "gelu"}
    ),
)

PLAIN: tuple[Entry, ...] = (
    Entry(
        name="timestep-embedder",
        description="what a diffusion model knows of its time step: sinusoids, Linear, SiLU, Linear",
        activation="silu",
        gated=False,
        config_class="plain.Config",
        model_class="plain.TimestepEmbedder",
        common={},
        sizes={"tiny": {"channels": 32, "width": 128}, "full": {"channels": 320, "width": 1280}},
        inputs=(Input("timestep", "normal", ("batch",)),),
        outputs=(Output("embedding", ("batch", None)),),
        blocks=lambda _: 1,
    ),
    Entry(
        name="moe-dense",
        description="mixture of experts in plain operators: every expert is computed, the router weighs them",
        activation="silu",
        gated=True,
        config_class="plain.Config",
        model_class="plain.DenseMixture",
        common={"activation": "silu", "gated": True},
        sizes={"tiny": {"width": 32, "d_ff": 64, "experts": 4, "layers": 2, "top": 2}},
        inputs=(Input("hidden_states", "normal", ("batch", "sequence", "width")),),
        outputs=(Output("last_hidden_state", ("batch", "sequence", None)),),
        blocks=lambda c: int(c["layers"] * c["experts"]),
        fixed={"width": lambda c: c["width"]},
    ),
    Entry(
        name="moe-dense-gelu",
        description="the same with experts of two layers, as in Switch",
        activation="gelu",
        gated=False,
        config_class="plain.Config",
        model_class="plain.DenseMixture",
        common={"activation": "gelu", "gated": False},
        sizes={"tiny": {"width": 32, "d_ff": 64, "experts": 4, "layers": 2, "top": 1}},
        inputs=(Input("hidden_states", "normal", ("batch", "sequence", "width")),),
        outputs=(Output("last_hidden_state", ("batch", "sequence", None)),),
        blocks=lambda c: int(c["layers"] * c["experts"]),
        fixed={"width": lambda c: c["width"]},
    ),
    *_DECODERS,
    Entry(
        name="llama-static",
        description="the decoder of Llama with a cache of fixed size, written at given positions",
        activation="silu",
        gated=True,
        config_class="plain.Config",
        model_class="plain.StaticDecoder",
        common={"decoder": {**text(32, 2, 4, 128, 64), "num_key_value_heads": 2}},
        sizes={
            "tiny": {"layers": 2, "caches": 2, "capacity": 24, "head": 8, "vocab_size": 128, "width": 32, "heads": 4}
        },
        inputs=(
            IDS,
            Input("cache_position", "positions", ("sequence",)),
            *(Input(f"{part}_cache.{layer}", "normal", _STATIC) for layer in range(2) for part in ("key", "value")),
        ),
        outputs=(
            LOGITS,
            *(
                Output(f"updated_{part}_cache.{layer}", ("batch", None, None, None))
                for layer in range(2)
                for part in ("key", "value")
            ),
        ),
        blocks=lambda c: int(c["layers"]),
        attention=lambda c: int(c["layers"]),
        fixed={key: itemgetter(key) for key in _STATIC[1:]},
    ),
)
