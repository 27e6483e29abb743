"""Models in plain PyTorch (`models.plain`), which transformers lacks or does not export in plain operators."""

from __future__ import annotations

from models.architectures.shapes import IDS, LOGITS
from models.entry import Entry, Input, Output

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
    Entry(
        name="gpt2-cache",
        description="GPT-2 with a cache: keys and values of earlier tokens are inputs and outputs",
        activation="gelu_new",
        gated=False,
        config_class="plain.Config",
        model_class="plain.CachedDecoder",
        common={"activation": "gelu_new"},
        sizes={"tiny": {"width": 32, "layers": 2, "heads": 4, "head": 8, "vocab_size": 128}},
        inputs=(
            IDS,
            Input("attention_mask", "mask", ("batch", "total")),
            *(
                Input(f"past_key_values.{layer}.{kind}", "normal", ("batch", "heads", "past", "head"))
                for layer in range(2)
                for kind in ("key", "value")
            ),
        ),
        outputs=(
            LOGITS,
            *(
                Output(f"present.{layer}.{kind}", ("batch", None, "total", None))
                for layer in range(2)
                for kind in ("key", "value")
            ),
        ),
        blocks=lambda c: int(c["layers"]),
        attention=lambda c: int(c["layers"]),
        fixed={"heads": lambda c: c["heads"], "head": lambda c: c["head"]},
    ),
)
