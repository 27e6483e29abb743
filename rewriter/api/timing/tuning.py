"""`--tune`: which way of writing the heads is fastest here, measured on one block of each kind.

Each way runs in a process of its own, and they take turns (docs/decisions/0025). The default stays unless another way
is faster by more than the measurement can be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx

from passes.options import WAYS, Options
from passes.plan import Plan
from passes.tuning import INPUT, ORIGINAL, Sample, samples
from rewriter.errors import UsageError
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.proof.validate import Progress
from rewriter.timing.requests import Start
from rewriter.timing.rounds import Field

TOKENS = (16, 128, 512)
"""Lengths of the sequences on which ways are compared; each counts the same."""

ROUNDS = 5
MARGIN = 0.97
"""A way is taken instead of the default if its time is below this share of the default's."""

Times = Mapping[str, list[float]]


def check_tunable(options: Options) -> None:
    """Raise UsageError if other options leave no choice."""
    if options.tune and options.form != "local":
        raise UsageError(f"--tune chooses among the ways of form local; form {options.form} has only one")
    fixed = [
        each
        for each, given in (
            ("--spelling", options.forms.spelling != "fused"),
            ("--precision", options.precision != "model"),
            ("--expose", bool(options.forms.expose)),
        )
        if given
    ]
    if options.tune and fixed:
        raise UsageError(f"--tune chooses what {fixed[0]} fixes; give only one of them")


def tuned(
    source: LoadedModel, plan: Plan, options: Options, provider: str, progress: Progress
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The fastest way for each kind of block that has several, and a note per kind.

    Args:
        source: the model that was loaded.
        plan: its plan with the default ways.
        options: the options of that plan.
        provider: the execution provider to measure on.
        progress: called with (current activity, steps done, total steps).

    Raises:
        ProviderError: the execution provider is not available.
        ValidationError: a block does not run in onnxruntime.
    """
    ways: dict[str, str] = {}
    notes: list[str] = []
    found = samples(plan, options, partial(_inline, source))
    for done, sample in enumerate(found):
        progress(f"timing {sample.kind}", done, len(found))
        times = timed(sample, provider)
        ways[sample.kind] = fastest(times)
        notes.append(_note(sample, times, ways[sample.kind], provider))
    if not found:
        notes.append("--tune: no kind of block has more than one way of writing its heads")
    return ways, tuple(notes)


def _inline(source: LoadedModel, tensor: onnx.TensorProto) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(read_tensor(source, tensor), tensor.name)


def fastest(times: Times) -> str:
    """The way with the smallest geometric mean over the lengths; the first one unless that is faster by the margin."""
    usual, *others = (name for name in times if name != ORIGINAL)
    best = min(others, key=lambda name: _over(times, name, usual))
    return best if _over(times, best, usual) < MARGIN else usual


def _over(times: Times, way: str, other: str) -> float:
    """Time over time: geometric mean over the lengths."""
    return float(np.exp(np.mean(np.log(np.divide(times[way], times[other])))))


def timed(sample: Sample, provider: str) -> dict[str, list[float]]:
    """Median seconds of the block and of each way, one per length of `TOKENS`.

    Raises:
        ProviderError: the execution provider is not available.
        ValidationError: a model does not run in onnxruntime.
    """
    starts = {name: Start(model.SerializeToString(), provider, 0) for name, model in sample.models.items()}
    found: dict[str, list[float]] = {name: [] for name in starts}
    with Field(starts) as field:
        for tokens in TOKENS:
            data = np.random.default_rng(0).normal(size=(1, tokens, sample.width)).astype(sample.dtype)
            for name, seconds in field.measure({INPUT: data}, ROUNDS).items():
                found[name].append(float(np.median(seconds)))
    return found


def _note(sample: Sample, times: Times, chosen: str, provider: str) -> str:
    listed = ", ".join(f"{name} {_over(times, name, ORIGINAL):.2f}" for name in times if name != ORIGINAL)
    count = f"{sample.blocks} block{'s' if sample.blocks > 1 else ''}"
    kept = "" if chosen != next(iter(WAYS)) else ", the default"
    return f"--tune on {provider}, {count} of {sample.kind}, times the original block: {listed}; took {chosen}{kept}"
