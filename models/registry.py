"""Look-up in the model table, and the list of committed example files.

Needs neither PyTorch nor transformers.
"""

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
    """The entry with this name.

    Raises:
        UsageError: No entry has this name; the message lists the known ones.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    raise UsageError(f"unknown model {name!r}; known: {', '.join(entry.name for entry in ENTRIES)}")
