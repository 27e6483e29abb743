"""Folders as onnxruntime-genai's own model builder makes them, from entries of the table (extra `genai`)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from models.entry import Entry
from models.export import require_packages
from models.registry import get
from rewriter.errors import UsageError
from rewriter.text import one_line

Precision = Literal["fp32", "fp16", "int4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int4")

_WIDE = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": 127
}  # fmt: skip
"""The builder's 4-bit weights come in groups of 32 numbers, and onnxruntime's kernels want heads of 16."""
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "phi3": {"original_max_position_embeddings": 128},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Architectures that the builder knows, and what their configurations need beside the sizes."""


def genai_entry(name: str) -> Entry:
    """The entry of the table, in sizes that the builder and the kernels take."""
    entry = get("gemma2" if name == "gemma3" else name)
    if name == "gemma3":
        entry = replace(entry, name=name, config_class="Gemma3TextConfig", model_class="Gemma3ForCausalLM")
    return replace(entry, sizes={"tiny": {**entry.sizes["tiny"], **_WIDE, **_FAMILIES[name]}})


def build_genai(name: str, output: Path, precision: Precision = "fp32", seed: int = 0) -> None:
    """Make a checkpoint with realistically scaled random weights, and let the builder make a folder of it.

    Raises:
        UsageError: a package is missing.
    """
    require_packages("onnxruntime_genai", "tokenizers")
    from models.build import build

    model = build(genai_entry(name), "tiny", seed=seed).model
    model.config.use_cache = True
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        _save_tokenizer(Path(scratch), model.config.vocab_size)
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", precision]
        command += ["-e", "cuda" if precision == "fp16" else "cpu"]  # on the CPU, its float16 does not decode
        done = subprocess.run(
            [*command, "-i", scratch, "-o", str(output), "-c", scratch], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise UsageError(f"onnxruntime-genai cannot build {name}: {one_line(done.stderr[-200:], 200)}")


def _save_tokenizer(folder: Path, words: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=own, unk_token="w0", eos_token=f"w{words - 1}").save_pretrained(folder)


if __name__ == "__main__":
    place = Path("/work/exports-genai"); place.mkdir(exist_ok=True)
    for name in sys.argv[1:] or _FAMILIES:
        for precision in PRECISIONS:
            if not (place / f"{name}-{precision}{'c'*(precision=='fp16')}").exists():
                try:
                    build_genai(name, place / f"{name}-{precision}{'c'*(precision=='fp16')}", precision)
                except Exception as error:
                    import traceback; traceback.print_exc()
                    print("FAILED", name, precision, repr(error)[:300])
