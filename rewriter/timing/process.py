"""One model in a process of its own: the parent side.

Models share no process, because onnxruntime's worker threads spin for a while after a run: in one process every run
competes with the other sessions' workers (docs/decisions/0023).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rewriter.child import ERRORS, Child, how_it_ended, pipes, send
from rewriter.child import started as started_child
from rewriter.errors import ValidationError
from rewriter.timing.requests import EndProfile, Start, Turn


@dataclass(eq=False)
class Process:
    """A model, loaded in its own process.

    Attributes:
        name: how errors call the model.
        child: the process.
        loaded: what the child said when it had loaded the model.
        peak_bytes: the most memory that the model has taken so far, in bytes; None if unknown.
    """

    name: str
    child: Child
    loaded: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None

    def turn(self, turn: Turn) -> list[float]:
        """Run the model for a while: the seconds of each run.

        Raises:
            ValidationError: the model does not run, or ended its process.
        """
        answer = self.ask(turn)
        self.peak_bytes = answer["peak_bytes"]
        return [float(each) for each in answer["seconds"]]

    def ask(self, request: Start | Turn | EndProfile) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        send(self.child, request)
        line = pipes(self.child)[1].readline()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            ended = how_it_ended(self.child)
            raise ValidationError(f"{self.name}: its process was ended {ended}") from None
        if "error" in answer:
            message = answer["message"] or "out of memory"
            raise ERRORS.get(answer["error"], ValidationError)(f"{self.name}: {message}")
        return answer


@contextmanager
def started(name: str, start: Start) -> Iterator[Process]:
    """A process that has loaded a model; it ends with the block.

    Raises:
        ValidationError: onnxruntime cannot load the model.
        ProviderError: the execution provider is not available.
    """
    with started_child("rewriter.timing.worker") as child:
        process = Process(name, child)
        process.loaded = process.ask(start)
        yield process
