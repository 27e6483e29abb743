"""How fast models run: one process per model, taking turns. Here, the options of a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.options import option

TOKENS = 128


@dataclass(frozen=True)
class BenchOptions:
    """What to run, and how often."""

    tokens: tuple[int, ...] = option(
        (), f"Number of tokens of a sequence (repeatable). Default: {TOKENS}, or what the model fixes.", least=1
    )
    batch: int = option(1, "Number of sequences.", least=1, rare=True)
    past: int = option(0, "Number of tokens in the key-value cache, if the model takes one.", least=0, rare=True)
    repeat: int = option(10, "Number of rounds; each model has one turn per round.", least=3, rare=True)
    threads: int = option(0, "Threads per operator; 0: one per core, as onnxruntime does.", least=0, rare=True)
