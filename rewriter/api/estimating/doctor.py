"""`doctor`, with the estimate of a dry run for what a model needs."""

from __future__ import annotations

import os
from pathlib import Path

from passes.options import Options
from passes.plan import make_plan
from rewriter.api.estimating.counting import estimate_of
from rewriter.api.run import silent
from rewriter.estimate.formula import Estimate
from rewriter.files.load import LoadedModel, load_model
from rewriter.health import diagnosing
from rewriter.health.findings import Diagnosis
from rewriter.health.machine import needs_of
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Progress


def doctor(
    model: str | os.PathLike[str] | None = None, *, allow_links: bool = False, progress: Progress = silent
) -> Diagnosis:
    """Look at packages, execution providers, CUDA libraries, memory and disk.

    Every execution provider is started in a process of its own, so that a crash is a finding.

    Args:
        model: a model whose needs are compared with memory and disk: what `rewrite` estimates for form `local`. The
            graph is read, its external data is not.
        allow_links: let external data be links inside one Hugging Face cache directory.
        progress: called with (current activity, steps done, total steps).

    Raises:
        ModelError: the model is unreadable, malformed or unsafe.
    """
    if model is None:
        return diagnosing.doctor(progress=progress)
    path = Path(model)
    source = load_model(path, mapped=True, allow_links=allow_links)
    return diagnosing.doctor(path, needs_of(source, path, _estimated(source)), progress=progress)


def _estimated(source: LoadedModel) -> Estimate | None:
    """What converting the model in form `local` takes; None if there is nothing to convert."""
    plan = make_plan(source.proto, Options())
    return estimate_of(source, plan, Settings()) if plan.conversions else None
