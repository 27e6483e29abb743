"""Vision: transformers, and convolutional networks with pointwise MLPs."""

from dataclasses import replace

from models.architectures.shapes import IMAGE_DIMS, PIXELS, as_optimum, layers, vision
from models.entry import Entry, Output

POOLED = Output("pooler_output", ("batch", None))

CLIP_VISION = Entry(
    name="clip-vision",
    description="vision tower of CLIP ViT-B/32",
    activation="quick_gelu",
    gated=False,
    config_class="CLIPVisionConfig",
    model_class="CLIPVisionModel",
    common={"hidden_act": "quick_gelu", "num_channels": 3},
    sizes={
        "tiny": vision(32, 2, 4, 16, 4),
        "small": vision(384, 6, 6, 64, 8),
        "full": vision(768, 12, 12, 224, 32),
    },
    inputs=(PIXELS,),
    outputs=(
        Output("last_hidden_state", ("batch", None, None)),
        Output("pooler_output", ("batch", None)),
    ),
    blocks=layers,
    fixed=IMAGE_DIMS,
)

_VISION: tuple[Entry, ...] = (
    Entry(
        name="vit",
        description="ViT base, patches of 16",
        activation="gelu",
        gated=False,
        config_class="ViTConfig",
        model_class="ViTForImageClassification",
        common={"hidden_act": "gelu", "num_channels": 3},
        sizes={
            "tiny": {**vision(32, 2, 4, 16, 4), "num_labels": 10},
            "small": {**vision(384, 6, 6, 64, 8), "num_labels": 100},
            "full": {**vision(768, 12, 12, 224, 16), "num_labels": 1000},
        },
        inputs=(PIXELS,),
        outputs=(Output("logits", ("batch", None)),),
        blocks=layers,
        fixed=IMAGE_DIMS,
    ),
    CLIP_VISION,
    replace(
        CLIP_VISION,
        name="siglip-vision",
        description="as in the vision tower of SigLIP; its pooling head holds one more MLP",
        activation="gelu_pytorch_tanh",
        config_class="SiglipVisionConfig",
        model_class="SiglipVisionModel",
        common={"hidden_act": "gelu_pytorch_tanh", "num_channels": 3},
        sizes={"tiny": vision(32, 2, 4, 16, 4)},
        blocks=lambda c: int(c["num_hidden_layers"]) + 1,
        attention=lambda c: int(c["num_hidden_layers"]) + 1,
    ),
    replace(
        CLIP_VISION,
        name="dinov2",
        description="as in DINOv2: scaled branches",
        activation="gelu",
        config_class="Dinov2Config",
        model_class="Dinov2Model",
        common={"hidden_act": "gelu", "num_channels": 3, "mlp_ratio": 4},
        sizes={"tiny": vision(32, 2, 4, 16, 4)},
    ),
    replace(
        CLIP_VISION,
        name="dinov2-swiglu",
        description="as in DINOv2 giant: SwiGLU",
        activation="silu",
        gated=True,
        config_class="Dinov2Config",
        model_class="Dinov2Model",
        common={"use_swiglu_ffn": True, "num_channels": 3, "mlp_ratio": 4},
        sizes={"tiny": vision(32, 2, 4, 16, 4)},
    ),
    replace(
        CLIP_VISION,
        name="deit",
        description="as in DeiT: a distillation token",
        activation="gelu",
        config_class="DeiTConfig",
        model_class="DeiTModel",
        common={"hidden_act": "gelu", "num_channels": 3},
        sizes={"tiny": vision(32, 2, 4, 16, 4)},
    ),
    replace(
        CLIP_VISION,
        name="beit",
        description="as in BEiT: relative positions, scaled branches",
        activation="gelu",
        config_class="BeitConfig",
        model_class="BeitModel",
        common={"hidden_act": "gelu", "num_channels": 3, "use_relative_position_bias": True},
        sizes={"tiny": vision(32, 2, 4, 16, 4)},
    ),
    replace(
        CLIP_VISION,
        name="swin",
        description="as in Swin: attention in shifted windows",
        activation="gelu",
        config_class="SwinConfig",
        model_class="SwinModel",
        common={"hidden_act": "gelu", "num_channels": 3},
        sizes={
            "tiny": {
                "image_size": 32,
                "patch_size": 4,
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": 4,
            }
        },
        blocks=lambda c: sum(c["depths"]),
        attention=lambda c: sum(c["depths"]),
    ),
    replace(
        CLIP_VISION,
        name="convnext",
        description="as in ConvNeXt: a depthwise convolution in front of each MLP, channels last",
        activation="gelu",
        config_class="ConvNextConfig",
        model_class="ConvNextModel",
        common={"hidden_act": "gelu", "num_channels": 3, "layer_scale_init_value": 0.5},
        sizes={
            "tiny": {
                "image_size": 32,
                "hidden_sizes": [16, 32],
                "depths": [2, 1],
                "num_stages": 2,
                "out_features": None,
            }
        },
        outputs=(POOLED,),
        blocks=lambda c: sum(c["depths"]),
    ),
    replace(
        CLIP_VISION,
        name="segformer",
        description="as in SegFormer: a depthwise convolution inside each feed-forward, so none is an MLP block",
        activation="gelu",
        config_class="SegformerConfig",
        model_class="SegformerModel",
        common={"hidden_act": "gelu", "num_channels": 3},
        sizes={
            "tiny": {
                "image_size": 32,
                "num_encoder_blocks": 2,
                "depths": [1, 1],
                "sr_ratios": [2, 1],
                "hidden_sizes": [16, 32],
                "patch_sizes": [7, 3],
                "strides": [4, 2],
                "num_attention_heads": [2, 4],
                "mlp_ratios": [2, 2],
            }
        },
        outputs=(Output("last_hidden_state", ("batch", None, None, None)),),
        blocks=lambda _: 0,
        attention=lambda c: sum(c["depths"]),
    ),
)


def _as_optimum(entry: Entry) -> Entry:
    """All axes of the pixels dynamic, although patches and positions fix them; the output's are not named."""
    return replace(
        entry,
        name=f"{entry.name}-optimum",
        description=f"{entry.name} with the axes that optimum declares",
        sizes={"tiny": vision(32, 2, 4, 32, 16)},
        inputs=(as_optimum(PIXELS),),
        outputs=(Output("last_hidden_state", ("batch_size", "last_hidden_state_dim_1", "last_hidden_state_dim_2")),),
        refusals={"dynamo": "positions and patches fix axes that are declared dynamic"},
    )


_VIT = replace(
    CLIP_VISION,
    name="vit",
    activation="gelu",
    config_class="ViTConfig",
    model_class="ViTModel",
    common={"hidden_act": "gelu", "num_channels": 3},
)
VISION = (
    *_VISION,
    _as_optimum(_VIT),
    *(_as_optimum(entry) for entry in _VISION if entry.name in ("clip-vision", "dinov2")),
)
