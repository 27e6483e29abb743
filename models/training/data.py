"""What the small decoders are trained on: docstrings of Python's standard library, or repeated random tokens.

Both are made from a generator, so the same seed gives the same batches; the docstrings are those of the Python that
runs. Needs PyTorch, and `tokenizers` for the text.
"""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")


def docstrings() -> Iterator[str]:
    """Every docstring of the standard library, file by file."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not set(path.relative_to(root).parts) & {*_SKIPPED}:
            yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # a few files are broken on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def trained_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer with `vocabulary` tokens; every text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def text_batches(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows [batch, length] of a text, drawn at random, without end."""
    offsets = torch.arange(length)
    while True:
        starts = torch.randint(0, len(tokens) - length, (batch, 1), generator=generator)
        yield tokens[starts + offsets]


def repeated_batches(
    vocabulary: int, batch: int, length: int, periods: tuple[int, int], generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens that repeat with a random period, and where the next token is known, [batch, length], without end.

    Each sequence has its own period between the two `periods`, so no fixed distance predicts the next token.
    """
    places = torch.arange(length)
    least, most = periods
    while True:
        drawn = torch.randint(0, vocabulary, (batch, most), generator=generator)
        period = torch.randint(least, most + 1, (batch, 1), generator=generator)
        yield drawn.gather(1, places % period), places >= period
