"""Folders as onnxruntime-genai's own model builder makes them, from entries of the table (extra `genai`)."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from models.entry import Entry
from models.export import require_packages
from models.registry import get
from rewriter.errors import UsageError
from rewriter.text import one_line

Precision = Literal["fp32", "fp16", "int4"]

_WIDE = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": 127
}  # fmt: skip
"""The builder's 4-bit weights come in groups of 32 numbers, and onnxruntime's kernels want heads of 16."""

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "phi3": {"original_max_position_embeddings": 128},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Entries that the builder knows, and what their configurations need beside the sizes."""

_GEMMA3 = {"rope_type": "default", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
"""Where builder 0.18 looks for the rotary parameters of Gemma 3: transformers 5 has one set for each type of layer."""


def genai_entry(name: str) -> Entry:
    """The entry of the table, in sizes that the builder and the kernels take."""
    entry = get("gemma2" if name == "gemma3" else name)
    if name == "gemma3":
        entry = replace(entry, config_class="Gemma3TextConfig", model_class="Gemma3ForCausalLM")
    return replace(entry, sizes={"tiny": {**entry.sizes["tiny"], **_WIDE, **FAMILIES[name]}})


def build_genai(
    name: str,
    output: Path,
    precision: Precision = "fp32",
    *,
    provider: str = "cpu",
    adapted: Sequence[str] = (),
    seed: int = 0,
) -> None:
    """Make a checkpoint with realistically scaled random weights, and let the builder make a folder of it.

    Args:
        name: a key of `FAMILIES`.
        output: the folder.
        precision: that of the weights.
        provider: whose kernels the builder chooses operators for.
        adapted: the projections that get LoRA weights, as `gate_proj`.
        seed: of all random numbers.

    Raises:
        UsageError: a package is missing, or the builder refuses the checkpoint.
    """
    require_packages()
    if find_spec("onnxruntime_genai") is None or find_spec("tokenizers") is None:
        raise UsageError("the builder needs onnxruntime-genai: pip install .[models,genai]")
    from models.build import build

    model = build(genai_entry(name), "tiny", seed=seed).model
    model.config.use_cache = True
    if name == "gemma3":
        model.config.rope_parameters |= _GEMMA3
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        save_tokenizer(Path(scratch), model.config.vocab_size)
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", scratch, "-o", str(output)]
        command += ["-c", scratch, "-p", precision, "-e", provider]
        if adapted:
            _save_adapter(model, adapted, Path(scratch, "adapter"), seed)
            command += ["--extra_options", f"adapter_path={scratch}/adapter"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    if done.returncode:
        raise UsageError(f"onnxruntime-genai cannot build {name}: {one_line(done.stderr[-200:], 200)}")


def _save_adapter(model: Any, adapted: Sequence[str], folder: Path, seed: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, lora_alpha=8, target_modules=list(adapted), init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        get_peft_model(model, settings).save_pretrained(folder)


def save_tokenizer(folder: Path, words: int) -> None:
    """Put a tokenizer of the words `w0`, `w1`, ... beside a checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=own, unk_token="w0", eos_token=f"w{words - 1}").save_pretrained(folder)
