"""How to validate: the options of every proof, as data.

Comes in: what the command line or a caller of the Python interface says. Goes out: `Settings`, and after `checked`
settings that can be followed here: providers that start, a joblib that is installed, limits that the system knows.
Light on purpose: the command line reads it before it knows that there will be a proof.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewriter.errors import UsageError

PROOFS = ("auto", "whole", "blocks")
"""How much of a model is loaded at a time: all of it, or one block and one segment."""

LARGE = 5 * 10**8
"""Bytes of model and weights above which `auto` means `blocks`."""


@dataclass(frozen=True)
class Settings:
    """How to validate. The fields are the options of the same names.

    Attributes:
        providers: execution providers, as `cpu` or `cuda:device_id=1`; none means all that work here.
        seed: of the generated inputs.
        dims: sizes for symbolic dimensions.
        inputs: an npz file to use instead of generated inputs.
        proof: `whole` loads whole models; `blocks` proves block by block and runs the models in consecutive
            segments; `auto` takes `blocks` above `LARGE` bytes.
        jobs: how many blocks are proved at once; -1 means one per processor.
        joblib_backend: what runs them, as joblib names it: `loky`, `dask:scheduler_host=tcp://HOST:PORT`.
        isolate: carry the proof out in a process of its own.
        memory_limit_mb: what that process may allocate, in megabytes (10^6 bytes).
        time_limit: how long it may take, in seconds.
    """

    providers: tuple[str, ...] = ("cpu",)
    seed: int = 0
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: Path | None = None
    proof: str = "auto"
    jobs: int = 1
    joblib_backend: str | None = None
    isolate: bool = False
    memory_limit_mb: int | None = None
    time_limit: float | None = None

    def by_blocks(self, size: int) -> bool:
        """Whether a model of `size` bytes, weights included, is proved without ever being loaded as a whole."""
        return self.proof == "blocks" or (self.proof == "auto" and size > LARGE)


def checked(settings: Settings) -> Settings:
    """The settings with the providers filled in.

    Raises:
        ProviderError: a provider is unknown or does not start.
        UsageError: options that contradict each other or cannot be followed on this system.
    """
    from rewriter.ort.providers import chosen_providers
    from rewriter.proof.run.jobs import check_jobs

    if settings.proof not in PROOFS:
        raise UsageError(f"unknown proof '{settings.proof}'; known are: {', '.join(PROOFS)}")
    _check_limits(settings)
    check_jobs(settings.jobs, settings.joblib_backend)
    return replace(settings, providers=chosen_providers(settings.providers))


def _check_limits(settings: Settings) -> None:
    limits = {"memory limit": settings.memory_limit_mb, "time limit": settings.time_limit}
    for name, value in limits.items():
        if value is not None and not value > 0:
            raise UsageError(f"a {name} of {value} leaves nothing; give a positive number")
        if value is not None and not settings.isolate:
            raise UsageError(f"a {name} binds an isolated proof only: add --isolate (isolate=True)")
    if settings.isolate and os.name != "posix":
        raise UsageError("--isolate needs the resource limits of a POSIX system; run without it, or in a container")
