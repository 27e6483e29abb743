"""Trains a decoder of the table, and exports it with the checks of every other export.

Needs PyTorch and transformers, and `tokenizers` for text. The same seed gives the same weights on the same machine with
the same versions.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.build import Positional, untrained
from models.entry import Exporter
from models.export import Exported, export_module
from models.training.data import docstrings, repeated_batches, text_batches, trained_tokenizer
from models.training.questions import questions_batches, questions_tokenizer
from models.training.table import TOKENIZERS, Trained

EXPORTER: Exporter = "dynamo"
_KEPT = "pkg.torch.onnx.name_scopes"

Batches = Iterator[tuple[Tensor, Tensor]]
"""Tokens [batch, length], and which of them are predictable from those before."""

_WARM_UP = 200
_DECAY = 0.01
_LARGEST_GRADIENT = 1.0


def train_and_export(
    trained: Trained, folder: Path, *, seed: int = 0, steps: int | None = None, told: Callable[[str], None]
) -> Exported:
    """Train a decoder, export it to `folder`, and write the tokenizer beside it if it reads text.

    Raises:
        UsageError: the folder does not exist.
        ValidationError: the exported file does not compute what PyTorch does; no file is left.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = untrained(trained.entry, "tiny")
    batches, tokenizer = _batches(trained, generator, seed)
    train(model, batches, trained, steps or trained.steps, told)
    module = Positional(model, trained.entry)
    module.eval()
    module.requires_grad_(requires_grad=False)
    path = folder / trained.file
    done = export_module(module, trained.entry, path, exporter=EXPORTER)
    slim(path)
    if tokenizer is not None:
        tokenizer.save(str(folder / TOKENIZERS[trained.data]))
    return replace(done, size_bytes=path.stat().st_size)


def slim(path: Path) -> None:
    """Remove the exporter's notes from a file, except the scopes by which layers are named: a fifth of a small file."""
    model = onnx.load(path)
    messages = (*model.graph.node, *model.graph.initializer, *model.graph.value_info, *model.graph.input)
    for message in (*messages, *model.graph.output, model.graph, model):
        kept = [prop for prop in message.metadata_props if prop.key == _KEPT]
        del message.metadata_props[:]
        message.metadata_props.extend(kept)
    onnx.save(model, path)


def train(model: Any, batches: Batches, trained: Trained, steps: int, told: Callable[[str], None]) -> float:
    """Train in place with AdamW; returns the loss, in nats per token, over the last tenth of the steps."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=trained.rate, weight_decay=_DECAY, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, steps))
    model.train()
    last: list[float] = []
    for step in range(1, steps + 1):
        tokens, known = next(batches)
        logits = model(input_ids=tokens)["logits"][:, :-1]
        losses = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        counted = known[:, 1:].flatten()
        loss = losses[counted].mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
        optimiser.step()
        schedule.step()
        last = [*last, loss.item()][-max(steps // 10, 1) :]
        if step % max(steps // 10, 1) == 0:
            told(f"step {step}: loss {sum(last) / len(last):.3f}")
    return sum(last) / len(last)


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * step / steps))


def _batches(trained: Trained, generator: torch.Generator, seed: int) -> tuple[Batches, Any]:
    vocabulary = trained.entry.config("tiny")[trained.entry.vocabulary]
    if trained.data == "repeats":
        periods = (4, trained.length // 2)
        return repeated_batches(vocabulary, trained.batch, trained.length, periods, generator), None
    if trained.data == "questions":
        tokenizer = questions_tokenizer()
        drawn = questions_batches(tokenizer, trained.batch, trained.length, np.random.default_rng(seed))
        return ((torch.from_numpy(ids), torch.from_numpy(known)) for ids, known in drawn), tokenizer
    texts = list(docstrings())
    tokenizer = trained_tokenizer(texts, vocabulary)
    tokens = torch.tensor(tokenizer.encode("\n\n".join(texts)).ids)
    everywhere = torch.ones(trained.batch, trained.length, dtype=torch.bool)
    windows = text_batches(tokens, trained.batch, trained.length, generator)
    return ((window, everywhere) for window in windows), tokenizer
