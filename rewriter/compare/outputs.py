"""Compare any two models with the same signature end to end, on one execution provider.

Every output is judged by `rewriter.proof.judging`, without and with graph optimisation. Nothing in B can earn it an
allowance: if blocks of B are head programs with a certificate, the caller provides A with programs planned from A.
Tolerances that the user gives replace the rule for their outputs. An output of which nothing could be compared does not
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rewriter.arrays import Array
from rewriter.compare.verdicts import OutputVerdict, PairProof, Rules, Tolerance
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.claims import Claim
from rewriter.proof.distance import gap, largest
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.judging import Judged, Values, disparity, judge
from rewriter.proof.pass_rule import coarsest_allowance
from rewriter.proof.run.whole import Way
from rewriter.proof.sensitivity import Sensitivity, own_rounding, sensitivity
from rewriter.proof.statistics import compare, merge, top_k_share, uncompared

Results = Sequence[Mapping[str, Array]]


@dataclass(frozen=True)
class Programs:
    """The head programs of B, as this tool plans them for A.

    Attributes:
        named: A in the form whose tensors the claims name; None if that is A itself.
        claims: claims about its activations.
        planned: returns float64 evaluations of A with these programs; called only if B fails without them.
    """

    named: LoadedModel | None = None
    claims: Sequence[Claim] = ()
    planned: Callable[[], Sequence[Results]] = lambda: ()


NO_PROGRAMS = Programs()


@dataclass(frozen=True)
class _Setting:
    where: str
    a: Results
    b: Results


@dataclass(frozen=True)
class _Measures:
    """The measures of outputs. They depend on A alone, and expensive ones are computed only if an output needs them.

    Attributes:
        model: A.
        cases: the inputs.
        provider: execution provider.
        plain: outputs of A without graph optimisation.
        truth: outputs of A in float64; None if there is no such evaluation.
        programs: the head programs of B, planned for A.
    """

    model: LoadedModel
    cases: Sequence[Case]
    provider: str
    plain: Results
    truth: Results | None
    programs: Programs

    @cached_property
    def coarse(self) -> float:
        return coarsest_allowance(self.model.proto)

    @cached_property
    def own_rounding(self) -> Sensitivity:
        return own_rounding(self.model, self.cases, self.plain, self.provider)

    @cached_property
    def sensitivity(self) -> Sensitivity:
        model = self.programs.named or self.model
        return sensitivity(model, self.cases, self.plain, self.provider, claims=self.programs.claims)


def compare_pair(
    models: tuple[LoadedModel, LoadedModel],
    cases: Sequence[Case],
    truth: Results | None,
    provider: str,
    rules: Rules,
    programs: Programs = NO_PROGRAMS,
) -> PairProof:
    """Run both models without and with graph optimisation, and judge every output.

    Args:
        models: A and B, of the same signature.
        cases: inputs that A accepts.
        truth: outputs of A in float64, case by case; None if there is no such evaluation.
        provider: execution provider.
        rules: tolerances, and what else to report.
        programs: the head programs of B that have a certified error.

    Raises:
        ValidationError: a model cannot be loaded, or B refuses a case that A accepts.
    """
    settings: list[_Setting] = []
    for optimise in (False, True):
        # One session at a time: two may not fit into memory.
        a, b = (
            _run(letter, model, provider, cases, optimise=optimise) for letter, model in zip("AB", models, strict=True)
        )
        settings.append(_Setting(str(Way(provider, optimise)), a.results, b.results))
    measures = _Measures(models[0], cases, provider, settings[0].a, truth, programs)
    outputs = {name: _verdict(name, settings, measures, rules) for name in settings[0].a[0]}
    return PairProof(outputs, (a.load_seconds, b.load_seconds), b.cpu_nodes)


def open_model(model: LoadedModel, provider: str, *, optimise: bool) -> Session:
    """Open a session on a model, from its file if it has one."""
    if model.path is not None and not model.mapped:
        return open_session(model.path, provider, optimise=optimise)
    return open_session(model.proto, provider, optimise=optimise, base_dir=model.base_dir)


def open_named(letter: str, model: LoadedModel, provider: str, *, optimise: bool) -> Session:
    """Open a session on model A or B; the error says which."""
    try:
        return open_model(model, provider, optimise=optimise)
    except ValidationError as error:
        raise ValidationError(f"model {letter}: {error}") from error


@dataclass(frozen=True)
class _Run:
    """The results of one model in one setting."""

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


def _verdict(name: str, settings: Sequence[_Setting], measures: _Measures, rules: Rules) -> OutputVerdict:
    every = [merge([compare(name, a[name], b[name]) for a, b in zip(each.a, each.b, strict=True)]) for each in settings]
    judged = [_judged(name, each, measures, rules.tolerance(name)) for each in settings]
    place = max(range(len(judged)), key=lambda index: _badness(judged[index]))
    worst, nothing = judged[place], [reason for reason in map(uncompared, every) if reason is not None]
    if worst.reason is None and nothing:
        worst, judged = Judged("nothing", (), None, 0.0, 0.0, None, nothing[0]), []
    old, new = (_by_case(side, name) for side in (settings[-1].a, settings[-1].b))
    return OutputVerdict(
        name=name,
        rule=worst.rule,
        passed=worst.reason is None,
        stats=every[-1],
        top_k=None if rules.top_k is None else top_k_share(old, new, rules.top_k),
        error_a=worst.error_a,
        error_b=worst.error_b,
        allowed=worst.allowed,
        error_ratio=max((one.ratio for one in judged if one.ratio is not None), default=None),
        where=settings[place].where,
        reason=worst.reason,
        channel=worst.channel,
        share=worst.share,
    )


def _by_case(results: Results, name: str) -> list[Array]:
    return [case[name] for case in results]


def _badness(judged: Judged) -> tuple[bool, float]:
    """Sort key of a verdict: failures rank above the rest, then by the used share of the allowance."""
    return judged.reason is not None, judged.error_b / judged.allowed if judged.allowed else judged.error_b


def _judged(name: str, each: _Setting, measures: _Measures, tolerance: Tolerance | None) -> Judged:
    old, new, plain = (_by_case(results, name) for results in (each.a, each.b, measures.plain))
    if tolerance is not None and is_float(old[0].dtype):
        return within(old, new, tolerance)
    values = Values(plain, old, new, None if measures.truth is None else _by_case(measures.truth, name))

    return judge(
        values,
        measures.coarse,
        lambda channels: measures.sensitivity.errors(name, channels),
        lambda: [_by_case(planned, name) for planned in measures.programs.planned()],
        lambda channels: measures.own_rounding.errors(name, channels),
    )


def within(old: Sequence[Array], new: Sequence[Array], tolerance: Tolerance) -> Judged:
    """The verdict on an output that is judged by a tolerance alone."""
    apart = disparity(old, new)
    if apart is not None:
        return Judged("tolerance", (), None, float("inf"), tolerance.atol, None, apart)
    pairs = list(zip(old, new, strict=True))
    excess = max(tolerance.excess(a, b) for a, b in pairs)
    error = max(largest(gap(b, a)) for a, b in pairs)
    given = f"atol {tolerance.atol:g}, rtol {tolerance.rtol:g}"
    reason = f"error {error:.3g} exceeds {given} by {excess:.3g}" if excess > 0.0 else None
    return Judged("tolerance", (), None, error, tolerance.atol, None, reason)
