"""How far rounding alone moves the outputs of a model: the measure where no float64 evaluation is one.

The rewritten model may then move an output by what the original moves by itself when it rounds differently. One other
run of the original is no measure of that. A quantiser turns a difference in the last place into a whole step, for one
value in 10^5 or so, and what follows amplifies it: one run shows no such step, the next one ten. So the original is run
several times, each time with noise of a few units in the last place on all that its linear operators and quantisers
read (`rewriter.proof.noise`), and on its float inputs. Nothing is drawn at random, so the answer is always the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.files.load import LoadedModel
from rewriter.graph.extract import with_outputs
from rewriter.graph.view import view_model
from rewriter.ort.sessions import open_session
from rewriter.proof.claims import Claim
from rewriter.proof.distance import FACTOR, Array
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.noise import moved, untyped, with_noise
from rewriter.proof.pass_rule import Channels, Wide

DRAWS = 8

LUCK = 2.0
"""A channel counts as moved at least by this many times what the median channel is: it may have been lucky. In the pass
rule it is more (`rewriter.proof.pass_rule.LUCK`): there is one sample there, and here are as many as draws."""

CAP = 2.0
"""What may be allowed, as a share of the channel's scale: values of one channel are hardly further apart. From 1 on, an
output says nothing."""

_STEPS = (1.0, 2.0, 4.0, 8.0)
"""Size of the noise in units in the last place, draw by draw: another formula for the same value is off by as much."""


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """How far each float output of a model moves under rounding.

    Attributes:
        moved: output name to the largest |deviation| of each element over all draws, case by case, in float64.
        draws: how many runs that is over.
        tensors: how many tensors inside the model had noise.
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
) -> Sensitivity:
    """Run a model with noise and say how far its outputs move.

    Args:
        model: the original.
        cases: the inputs.
        plain: what it gives for them, without graph optimisation, case by case.
        provider: execution provider.
        claims: about activations of this very model: what is granted to their programs beyond rounding is noise too.
        ends: tensors of the main graph that have noise beside those that linear operators and quantisers read.
        still: inputs that are exact; other floats have noise too.
        draws: how many runs with noise.

    Raises:
        ValidationError: onnxruntime does not run the model with noise.
    """
    noisy = with_noise(model.proto, claims, ends, _types(model, cases, provider))
    session = open_session(noisy.proto, provider, optimise=False, base_dir=model.base_dir)
    names = [name for name, value in plain[0].items() if is_float(value.dtype)]
    most = {name: tuple(np.zeros(case[name].shape) for case in plain) for name in names}
    for draw in range(draws):
        steps = _STEPS[draw % len(_STEPS)]
        for place, case in enumerate(cases):
            feeds = {
                name: moved(array, steps, draw) if is_float(array.dtype) and name not in still else array
                for name, array in case.feeds.items()
            }
            found = session.run({**feeds, **noisy.feeds(steps, draw)}, names)
            for name in names:
                _widen(most[name][place], plain[place][name], found[name])
    return Sensitivity(most, draws, len(noisy.points))


def rounding(channels: Channels, errors: Wide, eps: float) -> Wide:
    """[channels] the rounding that counts as the original's, given how far it moves; capped."""
    with np.errstate(all="ignore"):
        relative = np.where(errors == 0.0, 0.0, errors / channels.scale)
    typical = LUCK * float(np.median(relative)) if relative.size else 0.0
    capped: Wide = channels.scale * np.clip(relative, max(typical, eps), max(CAP / FACTOR, eps))
    return capped


def _types(model: LoadedModel, cases: Sequence[Case], provider: str) -> dict[str, int]:
    """Element types that inference does not know, from running the smallest case."""
    view = view_model(model.proto)
    names = untyped(view)
    if not names:
        return {}
    session = open_session(with_outputs(model.proto, view, names), provider, optimise=False, base_dir=model.base_dir)
    smallest = min(cases, key=lambda case: sum(array.size for array in case.feeds.values()))
    found = session.run(smallest.feeds, names)
    return {name: onnx.helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in found.items()}


def _widen(most: Array, ours: Array, theirs: Array) -> None:
    """Take in the deviations of another run.

    An element that becomes NaN or infinite says nothing about how far it may move, nor does another shape.
    """
    if ours.shape == theirs.shape:
        with np.errstate(all="ignore"):
            deviation = np.abs(theirs.astype(np.float64) - ours.astype(np.float64))
        np.maximum(most, np.where(np.isfinite(deviation), deviation, 0.0), out=most)
