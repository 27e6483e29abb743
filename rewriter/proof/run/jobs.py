"""Work done by several processes, through joblib.

Comes in: a function, self-contained work items, the number of jobs and a backend. Goes out: the results, in the order
of the items whatever order they were done in. Without a second job and without a backend everything runs here, one
item after the other, and joblib is not needed. joblib itself brings the backends `loky`, `threading` and
`multiprocessing`, and `dask` where dask.distributed is installed; `ray` comes with Ray.
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
"""Backend to the module that must be there, and how to get it."""

_REGISTERED_BY = {"ray": ("ray.util.joblib", "register_ray")}
"""Backend to the function that makes joblib know it."""


@dataclass(frozen=True)
class Backend:
    """Where joblib runs things.

    Attributes:
        name: as joblib calls it; None is joblib's default.
        options: what the backend is told, such as `scheduler_host` for dask.
    """

    name: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def parse_backend(text: str | None) -> Backend:
    """`NAME` or `NAME:key=value,...`. Raises UsageError where the text is neither."""
    if text is None:
        return Backend()
    name, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")] if colon else []
    if not name or any(not (key and sign and value) for key, sign, value in pairs):
        raise UsageError(f"joblib backend '{one_line(text, 80)}' is not NAME or NAME:KEY=VALUE,...")
    return Backend(name, {key: value for key, _, value in pairs})


def check_jobs(jobs: int, backend: str | None) -> None:
    """Raise UsageError where `run_jobs` could not follow these options."""
    if jobs < 1 and jobs != -1:
        raise UsageError(f"{jobs} jobs cannot do anything; give a positive number, or -1 for one per processor")
    wanted = parse_backend(backend)
    if jobs == 1 and wanted.name is None:
        return
    _require("joblib", "pip install 'attnonly[parallel]'")
    if wanted.name in _BROUGHT_BY:
        _require(*_BROUGHT_BY[wanted.name])


def run_jobs(work: Callable[[Item], Result], items: Iterable[Item], jobs: int, backend: str | None) -> list[Result]:
    """`[work(item) for item in items]`, by several processes where that is asked for.

    Args:
        work: a function at the top level of a module.
        items: what it is applied to; consumed as workers become free, so a generator keeps few items in memory.
        jobs: how many at once, -1 for one per processor of the machine or cluster; so is 1 where a backend is named,
            since joblib sends a single job nowhere.
        backend: as for `parse_backend`.

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
    arguments: dict[str, Any] = dict(wanted.options)
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
    except Exception as error:  # each backend has exceptions of its own for a worker that was lost
        reason = f"{type(error).__name__}: {one_line(error, 160)}"
        raise ValidationError(f"a worker failed ({reason}); run with --jobs 1 to see which block it was") from error
    return results


def _require(module: str, advice: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"running blocks in parallel needs {module}, which is not installed: {advice}")
