"""Run work items in several processes, through joblib.

With one job and no backend everything runs in this process, one item after the other, and joblib is not needed. joblib
itself provides the backends `loky`, `threading` and `multiprocessing`, and `dask` if dask.distributed is installed;
`ray` comes with Ray.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rewriter.errors import RewriteError, UsageError, ValidationError
from rewriter.text import one_line

Item = TypeVar("Item")
Result = TypeVar("Result")

_BROUGHT_BY = {"dask": ("distributed", "pip install 'dask[distributed]'"), "ray": ("ray", "pip install ray")}
"""Maps a backend to the module that it needs, and how to install it."""

_REGISTERED_BY = {"ray": ("ray.util.joblib", "register_ray")}
"""Maps a backend to the function that registers it with joblib."""

_ALWAYS: Mapping[str, Mapping[str, Any]] = {"ray": {"ray_remote_args": {"max_restarts": 3, "max_task_retries": 3}}}
"""Maps a backend to options that it always gets: Ray starts a lost worker, and its items, again only if it is told."""


@dataclass(frozen=True)
class Backend:
    """A joblib backend.

    Attributes:
        name: joblib's name for it; None is joblib's default.
        options: its options, such as `scheduler_host` for dask.
    """

    name: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def parse_backend(text: str | None) -> Backend:
    """Parse `NAME` or `NAME:KEY=VALUE,...`. Raises UsageError if the text is neither."""
    if text is None:
        return Backend()
    name, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")] if colon else []
    if not name or any(not (key and sign and value) for key, sign, value in pairs):
        raise UsageError(f"joblib backend '{one_line(text, 80)}' is not NAME or NAME:KEY=VALUE,...")
    return Backend(name, {key: value for key, _, value in pairs})


def check_jobs(jobs: int, backend: str | None) -> None:
    """Raise UsageError if `run_jobs` could not use these options."""
    if jobs < 1 and jobs != -1:
        raise UsageError(f"the number of jobs cannot be {jobs}; give a positive number, or -1 for one per processor")
    wanted = parse_backend(backend)
    if jobs == 1 and wanted.name is None:
        return
    _require("joblib", "pip install 'attnonly[parallel]'")
    if wanted.name in _BROUGHT_BY:
        _require(*_BROUGHT_BY[wanted.name])


def run_jobs(work: Callable[[Item], Result], items: Iterable[Item], jobs: int, backend: str | None) -> list[Result]:
    """`[work(item) for item in items]`, in several processes if `jobs` or `backend` asks for them.

    Args:
        work: a function at the top level of a module.
        items: its arguments; consumed as workers become free, so a generator keeps few items in memory.
        jobs: number of parallel jobs; -1 is one per processor of the machine or cluster. With a backend, 1 means the
            same, because joblib never sends a single job to a backend.
        backend: as for `parse_backend`.

    Returns:
        The results, in the order of the items.

    Raises:
        UsageError: joblib or the backend is missing or cannot be reached.
        ValidationError: a worker was lost.
    """
    wanted = parse_backend(backend)
    if jobs == 1 and wanted.name is None:
        return [work(item) for item in items]
    check_jobs(jobs, backend)
    import joblib

    if wanted.name in _REGISTERED_BY:
        module, function = _REGISTERED_BY[wanted.name]
        getattr(importlib.import_module(module), function)()
    arguments: dict[str, Any] = {**_ALWAYS.get(wanted.name or "", {}), **wanted.options}
    try:
        context = joblib.parallel_config(backend=wanted.name or "loky", **arguments)
    except (ValueError, TypeError, OSError) as error:
        reason = one_line(error, 160)
        raise UsageError(f"joblib backend '{one_line(backend, 80)}' cannot be used: {reason}") from error
    # joblib runs a single job in this process, whatever the backend.
    together = joblib.Parallel(n_jobs=-1 if jobs == 1 else jobs)
    try:
        with context:
            results: list[Result] = together(joblib.delayed(work)(item) for item in items)
    except (RewriteError, MemoryError):
        raise
    except Exception as error:  # each backend has its own exceptions for a lost worker
        reason = f"{type(error).__name__}: {one_line(error, 160)}"
        raise ValidationError(
            f"a worker failed ({reason}); run with --option jobs=1 to see which block it was"
        ) from error
    return results


def _require(module: str, advice: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"running blocks in parallel needs {module}, which is not installed: {advice}")
