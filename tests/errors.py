"""How far a rewritten model is from the original: measured by onnxruntime and the oracle, not by the tool.

e(model) is the largest distance of a model's output, in its own precision, from the oracle's float64 evaluation of the
original. `error_ratio` is e(rewritten) over e(original). `apart` leaves rounding out: it compares the oracle's
evaluations of both models with that of the original in which the numbers of the head programs, in plain numpy, stand in
place of the activations. `correct` and `accurate` hold both to bounds, of which each states what was measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from passes.plan import Plan, apply
from rewriter.ort import open_session
from tests.attention import Array, ProgramNumbers, neurons
from tests.oracle import evaluate, tensors

Feeds = Mapping[str, Array]

BATCH, TOKENS = 3, 19
"""Three sequences, every position different: mixing tokens, sequences, neurons or heads is noticed."""

HALF_UNIT = {2: 2.0**-11, 4: 2.0**-24, 8: 2.0**-53}
"""Half a unit in the last place of 1, by the bytes of a float type."""


RATIO = 2.0
"""Bound on e(rewritten) over e(original); at most 1.45 was measured where a test states no other figure."""

EMITTED = 2e-15
"""Bound on what exact arithmetic makes of the nodes against the program's numbers, over the largest output: the
rounding of two float64 evaluations. At most 1.04e-15 was measured."""

ROUGHER: Mapping[str, float] = {"leaky_relu": 2.4e-8, "leaky_relu_gate": 2.4e-8}
"""The same for programs whose numbers are less exact; 2.3e-8 was measured.

Where heads share keys, their multiples are added up before they are rounded, so that the nodes are better than the
numbers (float32 coefficients).
"""

EVALUATED = 3e-14
"""Bound on the rounding of a program's numbers in float64 over max(1, |f|); 1.4e-14 was measured, for exp."""


@dataclass(frozen=True)
class Apart:
    """Distances in float64, the worst of all outputs and feeds, over the largest entry of the output if it is above 1.

    Attributes:
        exact: the rewritten model from the original.
        emitted: the rewritten model from the original with the head programs' numbers.
        carried: the original with the head programs' numbers from the original.
        program: the numbers of a head program from the activation f in whose place they stand, over max(1, |f|); those
            of a gate f = h(g) u over max(1, |f|, |u|).
    """

    exact: float
    emitted: float
    carried: float
    program: float


@dataclass(frozen=True)
class InPlace:
    """A program's numbers in place of an activation; `gate` is or makes its pre-activation, `value` what is gated."""

    program: ProgramNumbers
    output: str = "h"
    gate: str | Callable[[Feeds], Array] = "y"
    value: str | None = None

    def __call__(self, values: Feeds) -> Array:
        y = values[self.gate] if isinstance(self.gate, str) else self.gate(values)
        return neurons(self.program, y, y if self.value is None else values[self.value])

    def scale(self, values: Feeds) -> Array:
        """What certified errors are relative to."""
        f = np.abs(values[self.output])
        return np.maximum(1.0, f) if self.value is None else np.maximum(1.0, np.maximum(f, np.abs(values[self.value])))


def feeds_of(
    model: onnx.ModelProto, seed: int | np.random.Generator = 0, batch: int = BATCH, tokens: int = TOKENS
) -> dict[str, Array]:
    """Normal numbers for the inputs of a text model; those above 0 are true."""
    rng = np.random.default_rng(seed)
    made = {}
    for value in model.graph.input:
        stated = value.type.tensor_type
        shape = [dim.dim_value or {"batch": batch}.get(dim.dim_param, tokens) for dim in stated.shape.dim]
        dtype, numbers = onnx.helper.tensor_dtype_to_np_dtype(stated.elem_type), rng.normal(size=shape)
        made[value.name] = np.asarray(numbers > 0.0 if dtype == np.bool_ else numbers).astype(dtype)
    return made


BOTH = (False, True)
"""Without and with onnxruntime's optimisation. Loading a model takes longer than running it: many tests do with one."""


def error_ratio(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    cases: Sequence[Feeds] | None = None,
    optimised: Sequence[bool] = BOTH,
) -> float:
    """The worst of all outputs, without and with onnxruntime's optimisation.

    Half a unit in the last place of the largest entry is what e(original) counts as at least.
    """
    cases = cases or [feeds_of(original, seed) for seed in range(4)]
    truth = [evaluate(original, feeds) for feeds in cases]
    ratios = []
    for optimise in optimised:
        sessions = [open_session(model, optimise=optimise) for model in (original, rewritten)]
        old, new = ([session.run(feeds) for feeds in cases] for session in sessions)
        for name in truth[0]:
            floor = HALF_UNIT[old[0][name].itemsize] * _largest(truth, name)
            ratios.append(distance(new, truth, name) / max(distance(old, truth, name), floor))
    return max(ratios)


def apart(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    programs: Sequence[InPlace],
    cases: Sequence[Feeds] | None = None,
) -> Apart:
    """`programs` are those of all converted blocks."""
    cases = cases or [feeds_of(original)]
    planted = {entry.output: entry for entry in programs}
    truth = [tensors(original, feeds) for feeds in cases]
    meant = [tensors(original, feeds, planted) for feeds in cases]
    made = [evaluate(rewritten, feeds) for feeds in cases]
    pairs = ((made, truth), (made, meant), (meant, truth))
    exact, emitted, carried = (
        max(distance(*pair, name) / max(1.0, _largest(truth, name)) for name in made[0]) for pair in pairs
    )
    off = (np.abs(entry(case) - case[entry.output]) / entry.scale(case) for case in truth for entry in programs)
    return Apart(exact, emitted, carried, max((float(entry.max()) for entry in off), default=0.0))


def distance(left: Sequence[Feeds], right: Sequence[Feeds], name: str) -> float:
    """The largest difference; NaN, which no bound allows, where one is not finite."""
    pairs = [(a[name].astype(np.float64), b[name]) for a, b in zip(left, right, strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    return float(np.max([np.abs(a - b).max() for a, b in pairs]))


def correct(
    model: onnx.ModelProto,
    plan: Plan,
    *,
    emitted: float | None = None,
    cases: Sequence[Feeds] | None = None,
    **place: Any,
) -> onnx.ModelProto:
    """The plan for the one block of a model carried out, and the result compared with the model by the oracle.

    The nodes compute the program's numbers, the numbers the activation within the certified error, and so the model
    what the original does, within what the original makes of that error. `place` says where the activation is.
    """
    (conversion,) = plan.conversions
    program, result = conversion.program.as_heads, apply(plan)
    found = apart(model, result, [InPlace(program, **place)], cases)
    bound = ROUGHER.get(program.name, EMITTED) if emitted is None else emitted
    assert found.emitted <= bound
    assert found.program <= conversion.max_error + EVALUATED
    assert found.exact <= found.carried + bound
    return result


def accurate(
    model: onnx.ModelProto,
    plan: Plan,
    *,
    ratio: float = RATIO,
    optimised: Sequence[bool] = BOTH,
    cases: Sequence[Feeds] | None = None,
    **given: Any,
) -> onnx.ModelProto:
    """The same, and the result is as accurate as the model is, both in the model's own precision."""
    result = correct(model, plan, cases=cases, **given)
    assert error_ratio(model, result, cases, optimised) <= ratio
    return result


def _largest(cases: Sequence[Feeds], name: str) -> float:
    return max(float(np.abs(case[name]).max()) for case in cases)
