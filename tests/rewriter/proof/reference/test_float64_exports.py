"""Inputs and float64 evaluation on models exported from transformers, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.ort.sessions import open_session
from rewriter.proof.inputs.cases import make_cases
from rewriter.proof.reference.float64 import open_reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

IDS = torch.randint(0, 90, (2, 7))
TEXT = {"input_ids": IDS, "attention_mask": torch.ones(2, 7, dtype=torch.long)}
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "attn_implementation": "eager",
}  # fmt: skip
VOCABULARY = {"vocab_size": 100, "max_position_embeddings": 48}


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=48, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config)


def _whisper() -> Any:
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=100, max_source_positions=50,
        max_target_positions=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, attn_implementation="eager",
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _of(model: str, config: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**SMALL, **more))


MODELS: Mapping[str, tuple[Callable[[], Any], dict[str, Any], str, int | None]] = {
    "gpt2": (_gpt2, TEXT, "logits", 48),
    "bert": (_of("BertModel", "BertConfig", **VOCABULARY), TEXT, "last_hidden_state", 48),
    "llama": (_of("LlamaForCausalLM", "LlamaConfig", **VOCABULARY), TEXT, "logits", None),
    "vit": (
        _of("ViTModel", "ViTConfig", image_size=32, patch_size=8),
        {"pixel_values": torch.randn(2, 3, 32, 32)},
        "last_hidden_state",
        None,
    ),
    "whisper": (
        _whisper,
        {"input_features": torch.randn(2, 80, 100), "decoder_input_ids": IDS},
        "logits",
        48,
    ),
}


class _OneOutput(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, model: Any, names: list[str], output: str) -> None:
        super().__init__()
        self.model, self.names, self.output = model, names, output

    def forward(self, *values: Any) -> Any:
        options = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        return self.model(**dict(zip(self.names, values, strict=True)), **options)[self.output]


def export(name: str, path: Path, *, dynamo: bool) -> onnx.ModelProto:
    make, inputs, output, _ = MODELS[name]
    torch.manual_seed(0)
    module = _OneOutput(make().eval(), list(inputs), output)
    options: dict[str, Any] = {"opset_version": 17}
    if dynamo:
        free = torch.export.Dim.DYNAMIC
        axes = [{0: free, 1: free} if value.dtype == torch.long else {0: free} for value in inputs.values()]
        options = {"dynamic_shapes": (tuple(axes),), "external_data": False, "verbose": False}
    else:
        options["dynamic_axes"] = {
            key: {0: "batch_size", 1: "sequence_length"} if value.dtype == torch.long else {0: "batch_size"}
            for key, value in inputs.items()
        }
    torch.onnx.export(
        module, tuple(inputs.values()), str(path), dynamo=dynamo, input_names=list(inputs),
        output_names=["result"], **options,
    )  # fmt: skip
    return onnx.load(path)


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("name", MODELS)
def test_float32_differs_by_rounding_only(name: str, dynamo: bool, tmp_path: Path) -> None:
    if name == "whisper" and not dynamo:
        pytest.skip("the TorchScript exporter has no aten::diff")
    model = export(name, tmp_path / "model.onnx", dynamo=dynamo)
    cases = make_cases(model, seed=3)
    longest = max((array.shape[1] for case in cases for key, array in case.feeds.items() if "ids" in key), default=0)
    assert longest in {0, MODELS[name][3] or 64}
    session, reference = open_session(model), open_reference(model)
    for case in cases:
        truth = reference.run(case.feeds)["result"]
        assert truth.dtype == np.float64
        scale = np.abs(truth).max()
        assert np.abs(session.run(case.feeds)["result"] - truth).max() < 2e-6 * scale, case.name
