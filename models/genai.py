"""Folders as onnxruntime-genai's own model builder makes them, from entries of the table (extra `genai`)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
}
"""Entries that the builder knows, and what their configurations need beside the sizes. Builder 0.18 does not read the
rotary parameters of Gemma 3 as transformers 5 writes them."""


def genai_entry(name: str) -> Entry:
    """The entry of the table, in sizes that the builder and the kernels take."""
    entry = get(name)
    return replace(entry, sizes={"tiny": {**entry.sizes["tiny"], **_WIDE, **FAMILIES[name]}})


def build_genai(name: str, output: Path, precision: Precision = "fp32", seed: int = 0) -> None:
    """Make a checkpoint with realistically scaled random weights, and let the builder make a folder of it.

    Raises:
        UsageError: a package is missing, or the builder refuses the checkpoint.
    """
    require_packages()
    if find_spec("onnxruntime_genai") is None or find_spec("tokenizers") is None:
        raise UsageError("the builder needs onnxruntime-genai: pip install .[models,genai]")
    from models.build import build

    model = build(genai_entry(name), "tiny", seed=seed).model
    model.config.use_cache = True
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        _save_tokenizer(Path(scratch), model.config.vocab_size)
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", scratch, "-o", str(output)]
        # For the CPU it makes float16 models of declared shapes that are wrong, and onnxruntime refuses to decode.
        command += ["-c", scratch, "-p", precision, "-e", "cuda" if precision == "fp16" else "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    if done.returncode:
        raise UsageError(f"onnxruntime-genai cannot build {name}: {one_line(done.stderr[-200:], 200)}")


def _save_tokenizer(folder: Path, words: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=own, unk_token="w0", eos_token=f"w{words - 1}").save_pretrained(folder)
