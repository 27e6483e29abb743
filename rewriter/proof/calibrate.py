"""Measure how large tensors get on the inputs of the proof.

A fitted head program holds on a bounded domain, which is chosen from the largest pre-activations. The inputs are all
those of the proof, which fails if one of them leaves the domain.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import make_cases
from rewriter.proof.inputs.read import load_cases
from rewriter.proof.inputs.search import other_cases
from rewriter.proof.run import Progress, Wanted, Way, run_model
from rewriter.proof.settings import Settings


def largest_magnitudes(
    model: LoadedModel, tensors: Sequence[str], settings: Settings, progress: Progress
) -> dict[str, float]:
    """The largest finite |entry| of each tensor over all inputs that the model accepts.

    Raises:
        ValidationError: the model runs on none of them.
    """
    side = Side.of(model)
    taps = tuple(name for name in dict.fromkeys(tensors) if name in side.main.producer)
    if not taps:
        return {}
    if settings.inputs is not None:
        cases = load_cases(settings.inputs, model.proto)
    else:
        cases = make_cases(model.proto, seed=settings.seed, dims=settings.dims)
    wanted = Wanted((Way("cpu", optimise=True),), watched=taps, may_refuse=True, what="the original")
    runs = run_model(side, cases, wanted, progress, by_blocks=settings.by_blocks(model.size))
    if not runs.cases and (others := other_cases(model, settings)):
        runs = run_model(side, others, wanted, progress, by_blocks=settings.by_blocks(model.size))
    if not runs.cases:
        raise ValidationError(f"the model runs on none of the {len(cases)} inputs tried ({runs.skipped[0]})")
    return dict(runs.reached)
