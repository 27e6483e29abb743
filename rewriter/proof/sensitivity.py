"""Measure how far rounding alone moves the outputs of a model, for models without a usable float64 evaluation.

The rewritten model may then differ from the original by as much as the original itself moves when it rounds
differently. A single second run does not show that: a quantiser turns a difference in the last place into a whole step
for about one value in 10^5, and later layers amplify it, so one run has no such step and the next has ten. The original
is therefore run several times, each time with noise of a few units in the last place on the operands of its linear
operators and quantisers (`rewriter.proof.noise`) and on its float inputs. The noise is deterministic, so results are
reproducible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import with_outputs
from rewriter.graph.view import view_model
from rewriter.ort.sessions import open_session
from rewriter.proof.claims import Claim
from rewriter.proof.distance import FACTOR
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.noise import moved, untyped, with_noise
from rewriter.proof.pass_rule import Channels, Wide

DRAWS = 8
_OWN_DRAWS = 4

LUCK = 2.0
"""A channel counts as moved by at least this many times the median channel, since it may have been lucky."""

CAP = 2.0
"""Maximum allowance, as a share of the channel's scale: values of one channel are hardly further apart than twice their
largest magnitude. An allowance of 1 or more means that the output proves nothing."""

SIZES = (1.0, 2.0, 4.0, 8.0)
"""Size of the noise in units in the last place, draw by draw: what another formula for the same value may differ by."""


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """How far each float output of a model moves under rounding.

    Attributes:
        moved: maps an output to the largest |deviation| of each element over all draws, case by case, in float64.
        draws: number of runs.
        tensors: number of tensors inside the model that received noise.
    """

    moved: Mapping[str, tuple[Array, ...]]
    draws: int
    tensors: int

    def errors(self, name: str, channels: Channels) -> Wide:
        """[channels] largest deviation of an output, in output units."""
        found = self.moved[name]
        return channels.errors(found, [np.zeros(each.shape) for each in found])


def sensitivity(
    model: LoadedModel,
    cases: Sequence[Case],
    plain: Sequence[Mapping[str, Array]],
    provider: str,
    *,
    claims: Sequence[Claim] = (),
    ends: Sequence[str] = (),
    still: Collection[str] = (),
    draws: int = DRAWS,
    sizes: Sequence[float] = SIZES,
) -> Sensitivity:
    """Run a model with noise and measure how far its outputs move.

    Args:
        model: the original.
        cases: the inputs.
        plain: its outputs without noise and without graph optimisation, case by case.
        provider: execution provider.
        claims: claims about activations of this very model; the certified errors of their programs count as noise.
        ends: further tensors of the main graph that receive noise, besides operands of linear operators and quantisers.
        still: inputs without noise; other float inputs receive it.
        draws: number of runs with noise.
        sizes: size of the noise in units in the last place, draw by draw.

    Raises:
        ValidationError: onnxruntime does not run the model with noise.
    """
    noisy = with_noise(model.proto, claims, ends, _types(model, cases, provider))
    session = open_session(noisy.proto, provider, optimise=False, base_dir=model.base_dir)
    names = [name for name, value in plain[0].items() if is_float(value.dtype)]
    most = {name: tuple(np.zeros(case[name].shape) for case in plain) for name in names}
    for draw in range(draws):
        steps = sizes[draw % len(sizes)]
        for place, case in enumerate(cases):
            feeds = {
                name: moved(array, steps, draw) if is_float(array.dtype) and name not in still else array
                for name, array in case.feeds.items()
            }
            found = session.run({**feeds, **noisy.feeds(steps, draw)}, names)
            for name in names:
                _widen(most[name][place], plain[place][name], found[name])
    return Sensitivity(most, draws, len(noisy.points))


def own_rounding(
    model: LoadedModel, cases: Sequence[Case], plain: Sequence[Mapping[str, Array]], provider: str
) -> Sensitivity:
    """How far noise of one unit in the last place, which is the size of rounding, moves a model in a few runs."""
    return sensitivity(model, cases, plain, provider, draws=_OWN_DRAWS, sizes=(1.0,))


def rounding(channels: Channels, errors: Wide, eps: float) -> Wide:
    """[channels] The rounding attributed to the original, given how far its outputs move; capped."""
    with np.errstate(all="ignore"):
        relative = np.where(errors == 0.0, 0.0, errors / channels.scale)
    typical = LUCK * float(np.median(relative)) if relative.size else 0.0
    # The cap bounds the allowance after the pass rule's factor. Without it a model that amplifies rounding to the size
    # of its outputs would excuse any result.
    capped: Wide = channels.scale * np.clip(relative, max(typical, eps), max(CAP / FACTOR, eps))
    return capped


def _types(model: LoadedModel, cases: Sequence[Case], provider: str) -> dict[str, int]:
    """Element types that inference does not know (operators of other domains), from a run of the smallest case."""
    view = view_model(model.proto)
    names = untyped(view)
    if not names:
        return {}
    session = open_session(with_outputs(model.proto, view, names), provider, optimise=False, base_dir=model.base_dir)
    # Types do not depend on the sizes, and all of these tensors become outputs.
    smallest = min(cases, key=lambda case: sum(array.size for array in case.feeds.values()))
    found = session.run(smallest.feeds, names)
    return {name: onnx.helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in found.items()}


def _widen(most: Array, ours: Array, theirs: Array) -> None:
    """Widen `most` by the deviations of another run, in place.

    An element that becomes NaN or infinite does not count, nor does a run with another shape: otherwise the allowance
    would be unlimited there.
    """
    if ours.shape == theirs.shape:
        with np.errstate(all="ignore"):
            deviation = np.abs(theirs.astype(np.float64) - ours.astype(np.float64))
        np.maximum(most, np.where(np.isfinite(deviation), deviation, 0.0), out=most)
