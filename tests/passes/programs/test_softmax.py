"""Weights and rounding of heads in float64, against ball arithmetic, in every spelling of the package."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from passes.programs import groups as masked
from passes.programs.activations import ACTIVATIONS, LINEAR
from passes.programs.arithmetic import ARITHMETIC
from passes.programs.fitted import bounded_programs, fitted_programs, gate_programs, lines
from passes.programs.head import BiasToken, Head
from passes.programs.program import Program
from passes.programs.sharing import Key, groups_of
from passes.programs.softmax import Array, Keys
from tests.passes.programs.balls import arb, errors, exact_values, points, precision, program_at
from tests.passes.programs.test_programs import PARAMETERS

COUNT = 2000 if os.environ.get("ATTNONLY_SLOW") else 40
TYPES = (1, 10, 11) if os.environ.get("ATTNONLY_SLOW") else (1, 11)
Evaluate = Callable[[Program, Array, Array], Array]


def weighted(logits: list[Array], values: list[Array], weights: list[float] | None = None) -> Array:
    """Softmax attention with the largest logit subtracted; `weights` are factors of the exponentials."""
    top = np.max(logits, axis=0)
    factors = weights or [1.0] * len(logits)
    shares = [np.exp(logit - top) * factor for logit, factor in zip(logits, factors, strict=True)]
    return np.asarray(sum(share * value for share, value in zip(shares, values, strict=True)) / sum(shares))


def direct(head: Head, y: Array, z: Array) -> Array:
    """A head with its offsets in the logits."""
    logits = [(head.alpha * y + head.beta) * y + head.gamma, *(t.slope * y + t.offset for t in head.bias_tokens)]
    return weighted(logits, [head.c * z + head.d, *(np.full_like(y, t.value) for t in head.bias_tokens)])


def by_heads(program: Program, y: Array, z: Array) -> Array:
    return sum(direct(head, y, z) for head in program.heads) + program.linear * z + program.constant


def as_local(program: Program, y: Array, z: Array) -> Array:
    """The nodes of form local: shared keys averaged first, offsets as factors, a self logit without offset."""
    groups, linear = groups_of(program)
    result = linear * z + program.constant
    for group in groups:
        if group.keys is not None:
            logits, weights = [key.slope * y + key.offset for key in group.keys], [key.weight for key in group.keys]
            parts = [np.full_like(y, key.part / key.weight) for key in group.keys]
            result = result + z * weighted(logits, parts, weights)
            continue
        (head,) = group.heads
        plain = (head.unscaled() if head.c not in (0.0, 1.0) else head).shifted(0.0, -head.gamma)
        keys = [Key(plain.beta, 0.0, 1.0, 0.0), *(Key.of(t.slope, t.offset, t.value) for t in plain.bias_tokens)]
        logits, weights = [key.slope * y + key.offset for key in keys], [key.weight for key in keys]
        values = [plain.c * z + plain.d, *(np.full_like(y, key.part / key.weight) for key in keys[1:])]
        result = result + (head.c if head.c not in (0.0, 1.0) else 1.0) * weighted(logits, values, weights)
    return result


def as_masked(program: Program, y: Array, z: Array) -> Array:
    """The groups of the forms with a mask: linear terms spread over the keys."""
    return np.asarray(sum(group.factor * direct(group.head, y, z) for group in masked.groups_of(program)))


def as_staged(program: Program, y: Array, z: Array) -> Array:
    """The heads of f(y) - y and the skip connection, where form staged uses them."""
    minus = Program(program.name, program.heads, program.linear - 1.0, program.constant)
    return as_masked(minus, y, z) + z if masked.spreads(minus) else as_masked(program, y, z)


SPELLINGS: Mapping[str, Evaluate] = {
    "evaluate": lambda program, y, z: program.evaluate(y, z),
    "by heads": by_heads,
    "local": as_local,
    "masked": as_masked,
    "staged": as_staged,
}

FITTED = [
    pytest.param(program, False, id=program.name)
    for _, program in (*fitted_programs(), *bounded_programs(), *gate_programs())
]
MORE = {"gelu_clipped": (1.3, 0.7, -2.0, 3.0), "softplus": (1.0, 2.0), "exp": (0.7, 1.3), "linear": (1.5,)}


def of_table() -> list[object]:
    """Every row of the table in three arithmetics, and its gate."""
    found: list[object] = []
    for entry in (*ACTIVATIONS, LINEAR):
        for elem_type in TYPES:
            for gated in (False, True):
                parameters = {**PARAMETERS, **MORE}.get(entry.name)
                if parameters is None or (entry.program is None and not gated):
                    continue
                program = entry.program_for(parameters, ARITHMETIC[elem_type], gated=gated)
                if program is not None:
                    found.append(pytest.param(program, gated, id=f"{entry.name}-{elem_type}{'-gate' * gated}"))
    return found


@pytest.mark.parametrize(("program", "gated"), [*FITTED, *of_table()])
def test_float64_rounding(program: Program, gated: bool) -> None:
    """The bound holds for every spelling at each point, within three orders of magnitude of the largest rounding seen.

    Gates have values of all sizes, so for them the two are compared per unit of the value.
    """
    rng = np.random.default_rng(1)
    terms = sum(1 + len(head.bias_tokens) for head in program.heads)
    y = points(program, rng, COUNT if terms < 1000 else max(40, COUNT // 10))
    z = rng.normal(0.0, 3.0, y.size) * 10.0 ** rng.integers(-2, 3, y.size) if gated else y
    bound, usual = program.float64_rounding(y, z), np.abs(y) <= 20.0
    unit = np.abs(z) if gated else np.ones_like(y)
    with precision():
        exact = exact_values(program, y, z, 2.0**-40 * bound)
        finite = np.array([abs(value) < 1e304 for value in exact])
        seen = 0.0
        for name, spelling in SPELLINGS.items():
            with np.errstate(all="ignore"):
                error = errors(spelling(program, y, z), exact)
            ours = finite if name == "evaluate" else finite & (np.abs(y) < 1e140)
            assert np.all(error[ours] <= bound[ours]), (name, y[ours][np.argmax(error[ours] - bound[ours])])
            seen = max(seen, float(np.max((error / unit)[ours & usual])))
    assert np.all(np.isfinite(bound))
    if seen > 1e-17:
        assert np.max((bound / unit)[usual]) <= 1e3 * seen


def test_float64_rounding_has_the_shape_of_the_arguments() -> None:
    program = Program("p", (Head(1.0, (BiasToken(-1.0, 0.5, 2.0),)),), linear=0.5)
    y, z = np.zeros((3, 1)), np.ones(4)
    assert program.float64_rounding(y, z).shape == program.evaluate(y, z).shape == (3, 4)
    np.testing.assert_array_equal(program.float64_rounding(y, y), program.float64_rounding(y))
    assert program.float64_rounding(np.asarray(2.0)).shape == ()


GELU = [pytest.param(program, id=program.name) for name, program in fitted_programs() if name == "gelu"]


@pytest.mark.parametrize("program", GELU)
def test_rounding_of_gelu(program: Program) -> None:
    """A few units in the last place of 20; m5 has values of 100 that cancel."""
    y = np.linspace(-20.0, 20.0, 4001)
    assert np.max(program.float64_rounding(y)) < (2.5e-13 if program.name == "gelu_erf_m5" else 1e-13)


@pytest.mark.parametrize("elem_type", [1, 10, 11])
@pytest.mark.parametrize("name", ["silu", "relu", "gelu", "mish", "relu6", "elu"])
def test_rounding_of_gates(name: str, elem_type: int) -> None:
    """Some units of float64 over e, or over the step of the line that float64 models take but for clips.

    Proportional to the value, and constant far from where weights change.
    """
    arithmetic = ARITHMETIC[elem_type]
    entry = next(entry for entry in ACTIVATIONS if entry.name == name)
    program = entry.program_for(PARAMETERS[name], arithmetic, gated=True)
    assert program is not None
    g = np.linspace(-20.0, 20.0, 4001)
    bound = program.float64_rounding(g, np.ones_like(g))
    paired = elem_type == 11 and name != "relu6"
    unit, most = (2.0**-53 / lines("double pairs")[0].step, 300.0) if paired else (2.0**-53 / arithmetic.small, 200.0)
    if paired and name == "gelu":  # 24 bias tokens with values of up to 24, which cancel
        most = 2000.0
    assert unit <= np.max(bound) <= most * unit
    np.testing.assert_allclose(program.float64_rounding(g, np.full_like(g, -1e6)), 1e6 * bound, rtol=1e-12, atol=1e-200)
    assert np.max(bound) / 3.0 <= program.rounding * max(
        1.0, float(np.max(np.abs(program.evaluate(g, np.ones_like(g)))))
    )


@pytest.mark.parametrize(("program", "gated"), [*FITTED, *of_table()])
def test_nothing_finite_gives_nan(program: Program, gated: bool) -> None:
    """The largest numbers of float32 and float64, zeros of both signs, denormals; beyond domains at least no NaN."""
    sizes = np.array([0.0, 5e-324, 1e-310, 2.2e-308, 1e-45, 3.4028234663852886e38, 1e150, 1e300, 1.797e308])
    y = np.concatenate([sizes, -sizes])
    z = np.full_like(y, 2.0) if gated else y
    with np.errstate(over="ignore"):
        values, bound = program.evaluate(y, z), program.float64_rounding(y, z)
    assert not np.any(np.isnan(values))
    assert np.all(np.isfinite(values[np.abs(y) <= min(program.domain, 1e300)]))
    assert np.all(np.isfinite(bound) & (bound > 0.0))


def test_values_beyond_the_range_are_weighed_first() -> None:
    """A value of 2^24 times 1e305 would be infinite; 0 times it, or its difference from another one, would be NaN."""
    silu = next(entry for entry in ACTIVATIONS if entry.name == "silu")
    program = silu.program_for((1.0, 1.0), ARITHMETIC[1], gated=True)
    assert program is not None
    g, u = np.array([-500.0, 0.0, 1.0, 500.0]), np.full(4, 1e305)
    expected = g * u / (1.0 + np.exp(-g))
    np.testing.assert_allclose(program.evaluate(g, u), expected, rtol=1e-6, atol=1e297)
    assert np.all(program.float64_rounding(g, u) <= 1e-6 * u)
    clip = Program("clip", (Head(0.0, (BiasToken(2.0**80, 0.0, 6.0),)),))
    assert clip.evaluate(np.array([1.7e308]))[0] == 6.0


def test_a_quadratic_logit_does_not_overflow() -> None:
    for alpha, far in ((1.0, 1e300), (-1.0, 3.0)):
        program = Program("q", (Head(0.5, (BiasToken(0.1, 0.2, 3.0),), alpha=alpha),))
        y = np.array([1e300, -1e300])
        np.testing.assert_array_equal(np.abs(program.evaluate(y)), [far, far])
        assert np.all(np.isfinite(program.float64_rounding(y)))


def test_rounding_with_a_quadratic_logit() -> None:
    program = Program(
        "q", (Head(0.7, (BiasToken(-1.0, 0.5, 2.0), BiasToken(0.25, -1.0, -3.0)), alpha=-0.3, gamma=0.2),)
    )
    y = np.random.default_rng(0).uniform(-20.0, 20.0, 300)
    bound = program.float64_rounding(y)
    with precision():
        error = errors(by_heads(program, y, y), [program_at(program, arb(float(a)), arb(float(a))) for a in y])
    assert np.all(error <= bound)
    assert np.max(bound) <= 1e3 * np.max(error)


def test_changed_logits_within_the_model_move_the_output_within_the_bound() -> None:
    """Every logit is off by as much as the model allows, with random signs: the worst possible evaluation."""
    rng = np.random.default_rng(3)
    head = Head(3.0, (BiasToken(-7.0, 9.0, 2.0), BiasToken(-1.0, 5.0, -40.0), BiasToken(2.0, -3.0, 11.0)), c=1.5)
    y = rng.uniform(-20.0, 20.0, 4000)
    logits = head.keys.logits(y)
    values = np.stack([1.5 * y, *(np.full_like(y, token.value) for token in head.bias_tokens)])
    moved = logits + 2.0**-53 * rng.choice([-3.5, 3.5], logits.shape) * (
        np.abs(head.keys.slopes)[:, None] * np.abs(y) + 9.0
    )
    change = weighted(list(moved), list(values)) - weighted(list(logits), list(values))
    assert np.all(np.abs(change) <= head.keys.rounding(y, values, shifted=True, steps=1))
    assert np.max(np.abs(change)) >= 0.05 * np.max(
        head.keys.rounding(y, values, shifted=True, steps=1)[np.abs(y) < 5.0]
    )


def test_enclosed_weights() -> None:
    """The least and the largest weight over cells, against many points in each."""
    keys = Keys(np.array([3.0, -7.0, -1.0, 2.0**40]), np.array([0.0, 9.0, 5.0, -(2.0**41)]))
    edges = np.linspace(-4.0, 4.0, 161)
    least, most = keys.enclosed(edges[:-1], edges[1:])
    inside = edges[:-1, None] + np.diff(edges)[:, None] * np.linspace(0.0, 1.0, 50)
    weights = keys.weights(inside)
    assert np.all(least[:, :, None] <= weights)
    assert np.all(weights <= most[:, :, None])
    narrow = np.linspace(-4.0, 4.0, 33)
    least, most = keys.enclosed(narrow, narrow)
    np.testing.assert_allclose(least, most, rtol=1e-11)
    np.testing.assert_allclose(most, keys.weights(narrow), rtol=1e-11)


def test_weights_of_a_quadratic_logit_are_between_0_and_1() -> None:
    least, most = Keys(np.array([1.0, 0.0]), np.zeros(2), alpha=0.5).enclosed(np.zeros(3), np.ones(3))
    assert (np.max(least), np.min(most)) == (0.0, 1.0)


def test_rounding_of_an_offset_that_is_shifted() -> None:
    """2^80 less an offset of 5 loses the 5 where a head is computed alone; over shared keys nothing is shifted."""

    def of(*, alone: bool) -> float:
        head = Head(0.0, (BiasToken(2.0**80, -(2.0**80)),), gamma=5.0)
        other = Head(2.0**80, (BiasToken(0.0, 5.0),), gamma=-(2.0**80), c=-1.0)
        return float(Program("p", (head,) if alone else (head, other)).float64_rounding(np.array([1.0]))[0])

    assert of(alone=True) > 1e-3 > 1e-12 > of(alone=False)


def test_points_cover_kinks() -> None:
    """The tests above would prove little away from kinks."""
    program = Program("clip", (Head(0.0, (BiasToken(2.0**80, -3.0 * 2.0**80, 3.0),)),))
    y = points(program, np.random.default_rng(0), 200)
    assert np.any((y != 3.0) & (np.abs(y - 3.0) < 1e-14)) or np.any(y == 3.0)
    assert math.isclose(float(np.min(np.abs(y - 3.0))), 0.0, abs_tol=1e-15)
