"""What `rewrite doctor` found, as data and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rewriter.estimate.formula import Estimate

SCHEMA_VERSION = 1
"""Incremented if a field changes its meaning or is removed; new fields may be added without that."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        what: what is wrong.
        advice: a command or step that mends it.
    """

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}"


@dataclass(frozen=True)
class ProviderState:
    """One execution provider of this tool.

    Attributes:
        name: as users write it.
        built: whether the installed onnxruntime was built with it.
        works: whether a session started on it and ran, with no node on the CPU.
        float64: whether the same holds for a model in float64; None if it was not tried.
        reason: why it does not work.
        wanted: whether a provider that was built but does not work is a problem; the others are used only when named.
    """

    name: str
    built: bool
    works: bool = False
    float64: bool | None = None
    reason: str = ""
    wanted: bool = True


@dataclass(frozen=True)
class Machine:
    """Memory and disk, in bytes; None where the system does not tell.

    Attributes:
        memory: physical memory, or the container's limit if that is smaller.
        available: what can be had of it without swapping.
        disk: free space in `folder`.
        folder: the folder of the model, or the current one.
        writable: whether files can be made there.
    """

    memory: int | None
    available: int | None
    disk: int | None
    folder: str
    writable: bool


@dataclass(frozen=True)
class ModelNeeds:
    """What a model would need.

    Attributes:
        path: the model.
        bytes: its size with external data.
        by_blocks: whether it would be proved one block or segment at a time.
        memory: about how much memory that takes, in bytes; None if there is nothing to convert.
        disk: what a result beside it would take on disk; weights in external files are shared, not copied.
        estimate: time and memory of converting it in form `local` with the proof, as of a dry run.
    """

    path: str
    bytes: int
    by_blocks: bool
    memory: int | None
    disk: int
    estimate: Estimate | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        packages: name to version; an empty version for a required package that is missing.
        onnxruntimes: the installed packages that provide onnxruntime, with versions.
        providers: all execution providers that this tool knows.
        others: providers of this onnxruntime that this tool does not use.
        libraries: CUDA libraries that onnxruntime's provider wants, and whether they are found; empty without it.
        machine: memory and disk.
        model: what the model needs; None if none was given.
        problems: what is wrong; nothing is if it is empty.
    """

    packages: Mapping[str, str]
    onnxruntimes: Mapping[str, str]
    providers: tuple[ProviderState, ...]
    others: tuple[str, ...]
    libraries: Mapping[str, bool]
    machine: Machine
    model: ModelNeeds | None
    problems: tuple[Problem, ...]

    @property
    def exit_status(self) -> int:
        """0 if nothing is wrong, 1 otherwise."""
        return int(bool(self.problems))

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {"version": SCHEMA_VERSION, "exit_status": self.exit_status, **asdict(self)}
