"""Any two models of one signature, end to end, on one execution provider.

Comes in: two models, cases, and the float64 evaluation of the first, A. Goes out: `OutputVerdict` for each output.
Used by `rewrite validate` and `rewrite diff`.

The rule is that of `rewriter.proof.endtoend` without anything allowed for certified errors:

    e(B) <= 4 max(e(A), eps max|output|),

so that a B whose weights differ cannot excuse itself by them. Where blocks of B are head programs with a certificate,
the caller gives `certified`: how far those programs, made anew from A, may move each output. Where A has no float64
evaluation, A itself stands in, and B may be as far from it as four times what A's own optimisation changes, or a small
share of max|output|. So it does where A is many times that share away from its float64 evaluation: somewhere a rounding
decides (which bucket of relative positions a distance falls into), so that float64 computes another function, and four
times that distance would excuse anything. Given tolerances replace all of that for their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.cases import Case
from rewriter.proof.compare import OutputStats, compare, merge, top_k_agreement
from rewriter.proof.distance import FACTOR, Array, gap, largest, magnitude, setting
from rewriter.proof.endtoend import coarsest_allowance
from rewriter.proof.roles import is_float
from rewriter.proof.sessions import Session, open_session
from rewriter.proof.verdicts import (
    Judged,
    OutputVerdict,
    PairProof,
    Rules,
    Tolerance,
    believable,
    distance,
    parity,
    ratio_of,
)

Results = Sequence[Mapping[str, Array]]

Certified = Callable[[], Results | None]
"""Evaluates in float64 what certified errors amount to; called only where the rule does not hold without."""


@dataclass(frozen=True)
class _Setting:
    where: str
    a: Results
    b: Results


def compare_pair(
    models: tuple[LoadedModel, LoadedModel],
    cases: Sequence[Case],
    truth: Results | None,
    provider: str,
    rules: Rules,
    certified: Certified = lambda: None,
) -> PairProof:
    """Run both models without and with graph optimisation, and judge every output.

    Args:
        models: A and B, of the same signature.
        cases: inputs that A accepts.
        truth: A in float64, case by case; None where there is no such evaluation.
        provider: execution provider.
        rules: tolerances and what else to say.
        certified: see `Certified`.

    Raises:
        ValidationError: a model cannot be loaded, or B refuses a case that A accepts.
    """
    settings: list[_Setting] = []
    for optimise in (False, True):
        # One session at a time: two may not fit into memory.
        a, b = (
            _run(letter, model, provider, cases, optimise=optimise) for letter, model in zip("AB", models, strict=True)
        )
        settings.append(_Setting(setting(provider, optimise=optimise), a.results, b.results))
    coarse = coarsest_allowance(models[0].proto)
    outputs = {name: _verdict(name, settings, truth, coarse, rules, certified) for name in settings[0].a[0]}
    return PairProof(outputs, (a.load_seconds, b.load_seconds), b.cpu_nodes)


def open_model(model: LoadedModel, provider: str, *, optimise: bool) -> Session:
    """A session of a model from where it lies."""
    if model.path is not None:
        return open_session(model.path, provider, optimise=optimise)
    return open_session(model.proto, provider, optimise=optimise, base_dir=model.base_dir)


def open_named(letter: str, model: LoadedModel, provider: str, *, optimise: bool) -> Session:
    """The same, for model A or B; the error says which."""
    try:
        return open_model(model, provider, optimise=optimise)
    except ValidationError as error:
        raise ValidationError(f"model {letter}: {error}") from error


@dataclass(frozen=True)
class _Run:
    """What one model gave in one setting."""

    results: Results
    load_seconds: float
    cpu_nodes: tuple[str, ...]


def _run(letter: str, model: LoadedModel, provider: str, cases: Sequence[Case], *, optimise: bool) -> _Run:
    session = open_named(letter, model, provider, optimise=optimise)
    results = []
    for case in cases:
        try:
            results.append(session.run(case.feeds))
        except ValidationError as error:
            raise ValidationError(f"model {letter} does not run on the input '{case.name}': {error}") from error
    return _Run(results, session.load_seconds, session.cpu_nodes or ())


def _verdict(
    name: str,
    settings: Sequence[_Setting],
    truth: Results | None,
    coarse: float,
    rules: Rules,
    certified: Certified,
) -> OutputVerdict:
    stats = [merge([compare(name, a[name], b[name]) for a, b in zip(each.a, each.b, strict=True)]) for each in settings]
    tolerance = rules.tolerance(name)
    first = settings[0].a[0][name]
    if not is_float(first.dtype):
        judged = [_equal(each, found) for each, found in zip(settings, stats, strict=True)]
    elif tolerance is not None:
        judged = [_within(name, each, tolerance) for each in settings]
    else:
        judged = [_three_way(name, each, settings[0], truth, coarse, certified) for each in settings]
    judged = [_with_parity(one, found) for one, found in zip(judged, stats, strict=True)]
    worst = max(judged, key=lambda one: (one.reason is not None, one.ratio or 0.0, one.error_b))
    return OutputVerdict(
        name=name,
        rule=worst.rule,
        passed=worst.reason is None,
        stats=stats[-1],
        top_k=None if rules.top_k is None else _top_k(name, settings[-1], rules.top_k),
        error_a=worst.error_a,
        error_b=worst.error_b,
        allowed=worst.allowed,
        error_ratio=max((one.ratio for one in judged if one.ratio is not None), default=None),
        where=worst.where,
        reason=worst.reason,
    )


def _equal(each: _Setting, stats: OutputStats) -> Judged:
    reason = None if stats.max_abs == 0.0 else "its values are no floats and differ"
    return Judged(each.where, None, stats.max_abs, 0.0, None, reason, "equal")


def _within(name: str, each: _Setting, tolerance: Tolerance) -> Judged:
    pairs = [(a[name], b[name]) for a, b in zip(each.a, each.b, strict=True) if a[name].shape == b[name].shape]
    excess = max((tolerance.excess(a, b) for a, b in pairs), default=0.0)
    error = max((largest(gap(b, a)) for a, b in pairs), default=0.0)
    reason = None
    if excess > 0.0:
        reason = f"off by up to {error:.3g}: over atol {tolerance.atol:g}, rtol {tolerance.rtol:g} by {excess:.3g}"
    return Judged(each.where, None, error, tolerance.atol, None, reason, "tolerance")


def _three_way(
    name: str, each: _Setting, plain: _Setting, truth: Results | None, coarse: float, certified: Certified
) -> Judged:
    if truth is None:
        return _against_a(name, each, plain, coarse)
    right = [case[name] for case in truth]
    error_a, error_b = (distance([case[name] for case in results], right) for results in (each.a, each.b))
    top = max(magnitude(value) for value in right)
    if not believable(error_a, top, coarse):
        return _against_a(name, each, plain, coarse)
    floor = float(ml_dtypes.finfo(each.a[0][name].dtype).eps) * top
    allowed = FACTOR * max(error_a, floor)
    if not error_b <= allowed:
        moved = certified()
        if moved is not None:
            allowed += distance([case[name] for case in moved], right)
    ratio = ratio_of(error_b, error_a, floor)
    return Judged(each.where, error_a, error_b, allowed, ratio, _reason(error_b, allowed), "float64")


def _against_a(name: str, each: _Setting, plain: _Setting, coarse: float) -> Judged:
    """Without a reference; what certified programs move is far below the share that is allowed here."""
    right = [case[name] for case in each.a]
    error_b, noise = (distance([case[name] for case in results], right) for results in (each.b, plain.a))
    allowed = max(coarse * max(magnitude(value) for value in right), FACTOR * noise)
    return Judged(each.where, None, error_b, allowed, None, _reason(error_b, allowed), "original")


def _reason(error_b: float, allowed: float) -> str | None:
    return None if error_b <= allowed else f"off by {error_b:.3g}, allowed are {allowed:.3g}"


def _with_parity(judged: Judged, stats: OutputStats) -> Judged:
    reason = parity(stats)
    if reason is None:
        return judged
    return Judged(judged.where, judged.error_a, float("inf"), judged.allowed, None, reason, judged.rule)


def _top_k(name: str, each: _Setting, k: int) -> float | None:
    found = [top_k_agreement(a[name], b[name], k) for a, b in zip(each.a, each.b, strict=True)]
    known = [one for one in found if one is not None]
    rows = sum(count for _, count in known)
    return sum(share * count for share, count in known) / rows if rows else None
