"""Look-up in the model table, and the list of committed example files.

Comes in: a name. Goes out: its `Entry`; needs neither PyTorch nor transformers. Used by the command line of
this folder and by the tests of the rewriter, which compare what was found with what the configuration says
exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.architectures import ARCHITECTURES
from models.entry import Entry, Exporter
from rewriter.errors import UsageError

ENTRIES: tuple[Entry, ...] = ARCHITECTURES


@dataclass(frozen=True)
class Committed:
    """One example file kept in this folder: size tiny, fp32, seed 0, default opset of its exporter."""

    file: str
    entry: str
    exporter: Exporter


COMMITTED: tuple[Committed, ...] = (
    Committed("silu-decoder.onnx", "gpt2-silu", "torchscript"),
    Committed("relu-decoder.onnx", "opt", "dynamo"),
    Committed("gelu-encoder.onnx", "bert", "dynamo"),
    Committed("conformer-encoder.onnx", "wav2vec2-conformer", "torchscript"),
    Committed("gelu-vision.onnx", "vit", "torchscript"),
    Committed("gated-decoder.onnx", "llama", "dynamo"),
)


def get(name: str) -> Entry:
    """The entry of that name.

    Raises:
        UsageError: No entry has that name; the message lists those that exist.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    raise UsageError(f"unknown model {name!r}; known: {', '.join(entry.name for entry in ENTRIES)}")
