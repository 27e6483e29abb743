"""The table of decoders that are trained here: their sizes, their data, and how long they are trained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from models.architectures.decoders import GPT2
from models.architectures.shapes import gpt2_sizes
from models.entry import Entry

TOKENIZERS = MappingProxyType({"docstrings": "docstrings-tokenizer.json", "questions": "questions-tokenizer.json"})
"""The tokenizers of the decoders of text, beside their files, by their data."""


@dataclass(frozen=True)
class Trained:
    """One decoder.

    Attributes:
        file: the name of its ONNX file.
        entry: its architecture, of size `tiny`.
        data: what it is trained on.
        steps: how many batches it sees.
        batch: sequences in a batch.
        length: tokens in a sequence.
        rate: the largest learning rate.
    """

    file: str
    entry: Entry
    data: Literal["docstrings", "repeats", "questions"]
    steps: int
    batch: int
    length: int
    rate: float


def _entry(name: str, activation: str, sizes: Mapping[str, Any]) -> Entry:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    common = {"activation_function": activation, **dropout}
    return replace(GPT2, name=name, description="trained here", activation=activation, common=common, sizes=sizes)


_TEXT = {"tiny": {**gpt2_sizes(48, 2, 4, 384, 64), "n_inner": 160}}
_REPEATS = {"tiny": {**gpt2_sizes(64, 2, 4, 64, 64), "n_inner": 128}}
_QUESTIONS = {"tiny": {**gpt2_sizes(128, 4, 4, 177, 32), "n_inner": 256}}

TRAINED: Mapping[str, Trained] = MappingProxyType(
    {
        "docstrings-silu": Trained(
            "docstrings-silu.onnx", _entry("docstrings-silu", "silu", _TEXT), "docstrings", 3000, 32, 64, 4e-3
        ),
        "docstrings-gelu": Trained(
            "docstrings-gelu.onnx", _entry("docstrings-gelu", "gelu", _TEXT), "docstrings", 3000, 32, 64, 4e-3
        ),
        "induction": Trained("induction.onnx", _entry("induction", "silu", _REPEATS), "repeats", 4000, 64, 48, 2e-3),
        "questions": Trained(
            "questions.onnx", _entry("questions", "gelu", _QUESTIONS), "questions", 1500, 64, 24, 1e-3
        ),
    }
)
"""Name to decoder."""
