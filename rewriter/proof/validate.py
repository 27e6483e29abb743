"""The proof that a rewritten model computes what the original does.

Comes in: both models, the claims about the replaced blocks, and how to try them. Goes out: `Validation`, with
numbers also when it passes. Order: each block by itself (`rewriter.proof.blocks`), then end to end, on every
execution provider asked for, with onnxruntime's default optimisation and with none.

End to end the test is three-way. With e(model) the largest distance from a float64 evaluation of the original,

    e(rewritten) <= 4 max(e(original), eps max|output|) + c,

where c is what the certified program errors amount to at that output: the distance of a float64 evaluation of
the *rewritten* model from that of the original. It scales with the model, and tells rounding from bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import with_outputs
from rewriter.graph.view import GraphView, view_model
from rewriter.proof.blocks import FACTOR, BlockProof, Claim, Side, prove_block, tap_inputs
from rewriter.proof.compare import OutputStats, compare, merge
from rewriter.proof.float64 import NoReference, Reference, open_reference
from rewriter.proof.inputs import Case, load_cases, make_cases
from rewriter.proof.points import is_floating
from rewriter.proof.sessions import Session, open_session

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are."""

_WITHOUT_TRUTH = 256.0
"""Without a float64 evaluation: allowed difference of the two models in units of eps max|output|, unless the
original's own optimised and unoptimised runs differ by more."""

_TAPPED_CASES = 2


@dataclass(frozen=True)
class Settings:
    """How to validate.

    Attributes:
        providers: execution providers, `cpu` or `cuda`.
        seed: of the generated inputs.
        dims: sizes for symbolic dimensions.
        inputs: an npz file to use instead of generated inputs.
    """

    providers: tuple[str, ...] = ("cpu",)
    seed: int = 0
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: Path | None = None


@dataclass(frozen=True)
class ProviderProof:
    """What was measured on one execution provider.

    Attributes:
        outputs: output name to statistics of rewritten against original, both optimised, over all cases.
        error_ratio: largest error against float64, rewritten over original, worst over outputs and optimisation
            levels; None where there is no float64 evaluation.
        load_seconds: how long onnxruntime took to load original and rewritten.
        cpu_nodes: new nodes that fell back to the CPU.
    """

    outputs: Mapping[str, OutputStats]
    error_ratio: float | None
    load_seconds: tuple[float, float]
    cpu_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Validation:
    """The result of the proof.

    Attributes:
        passed: whether everything held.
        providers: by execution provider.
        blocks: by block, in graph order.
        cases: the inputs that were run.
        skipped: inputs that the original model itself refused, with the reason.
        reference: what computed the float64 evaluation, or why there is none.
        failures: what did not hold.
    """

    passed: bool
    providers: Mapping[str, ProviderProof]
    blocks: tuple[BlockProof, ...]
    cases: tuple[str, ...]
    skipped: tuple[str, ...]
    reference: str
    failures: tuple[str, ...]


def validate(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress = lambda _what, _done, _total: None,
) -> Validation:
    """Prove `rewritten` against `original`.

    Raises:
        ValidationError: the original does not run on any of the inputs, or the rewritten one cannot be loaded.
        ProviderError: a provider is not available.
        UsageError: the inputs do not fit the model.
    """
    return _Proof(original, rewritten, claims, settings, progress).run()


@dataclass
class _Error:
    """Largest distances from the truth, over cases."""

    old: float = 0.0
    new: float = 0.0
    carried: float = 0.0
    scale: float = 0.0


class _Proof:
    def __init__(
        self,
        original: LoadedModel,
        rewritten: LoadedModel,
        claims: Sequence[Claim],
        settings: Settings,
        progress: Progress,
    ) -> None:
        self._original = Side(original, view_model(original.proto))
        self._rewritten = Side(rewritten, view_model(rewritten.proto))
        self._claims = claims
        self._settings = settings
        self._progress = progress
        self._failures: list[str] = []
        self._skipped: list[str] = []

    def run(self) -> Validation:
        cases = self._cases()
        runnable, taps = self._tapped(cases)
        blocks = self._blocks(taps)
        reference, truth, rebuilt = self._truth(runnable)
        providers = {
            name: self._end_to_end(name, runnable, truth, rebuilt) for name in self._settings.providers
        }
        return Validation(
            passed=not self._failures,
            providers=providers,
            blocks=blocks,
            cases=tuple(case.name for case in runnable),
            skipped=tuple(self._skipped),
            reference=reference,
            failures=tuple(self._failures),
        )

    def _cases(self) -> tuple[Case, ...]:
        proto = self._original.model.proto
        if self._settings.inputs is not None:
            return load_cases(self._settings.inputs, proto)
        return make_cases(proto, seed=self._settings.seed, dims=self._settings.dims)

    def _open(self, side: Side, provider: str, *, optimise: bool) -> Session:
        model = side.model
        if model.path is not None:
            return open_session(model.path, provider, optimise=optimise)
        return open_session(model.proto, provider, optimise=optimise, base_dir=model.base_dir)

    # -- what the original does with the inputs ------------------------------------------------------------

    def _tapped(self, cases: Sequence[Case]) -> tuple[list[Case], dict[str, list[dict[str, NDArray[Any]]]]]:
        """The cases that the original accepts, and the values that its blocks read in the last of them."""
        self._progress("running the original", 0, len(cases))
        names = tap_inputs(self._original, self._claims)
        wanted = list(dict.fromkeys(name for group in names.values() for name in group))
        given = set(self._original.view.inputs)
        tapped = with_outputs(
            self._original.model.proto, self._original.view, [name for name in wanted if name not in given]
        )
        session = open_session(
            tapped, self._settings.providers[0], optimise=False, base_dir=self._original.model.base_dir
        )
        runnable: list[Case] = []
        taps: dict[str, list[dict[str, NDArray[Any]]]] = {name: [] for name in names}
        for number, case in enumerate(cases):
            self._progress(f"running the original: {case.name}", number, len(cases))
            try:
                values = {**case.feeds, **session.run(case.feeds)}
            except ValidationError as error:
                self._skipped.append(f"{case.name}: {error}")
                continue
            runnable.append(case)
            if len(runnable) <= _TAPPED_CASES:
                for block, group in names.items():
                    taps[block].append({name: values[name] for name in group})
        if not runnable:
            raise ValidationError(
                f"the original model runs on none of the {len(cases)} inputs tried; give some with --inputs or "
                f"sizes with --dim ({self._skipped[0]})"
            )
        return runnable, taps

    def _blocks(self, taps: Mapping[str, Sequence[Mapping[str, NDArray[Any]]]]) -> tuple[BlockProof, ...]:
        proofs = []
        for number, claim in enumerate(self._claims):
            self._progress(f"proving {claim.name}", number, len(self._claims))
            proof = prove_block(
                self._original, self._rewritten, claim, taps[claim.name], self._settings.providers
            )
            self._failures.extend(proof.failures)
            proofs.append(proof)
        return tuple(proofs)

    # -- end to end ----------------------------------------------------------------------------------------

    def _truth(
        self, cases: Sequence[Case]
    ) -> tuple[str, list[dict[str, NDArray[Any]]] | None, list[dict[str, NDArray[Any]]] | None]:
        """The float64 evaluations of both models on all cases."""
        self._progress("evaluating in float64", 0, 2 * len(cases))
        try:
            how, truth = self._evaluate(self._original, cases, 0)
            _, rebuilt = self._evaluate(self._rewritten, cases, len(cases))
        except NoReference as reason:
            return f"no float64 reference: {reason}", None, None
        return how, truth, rebuilt

    def _evaluate(
        self, side: Side, cases: Sequence[Case], done: int
    ) -> tuple[str, list[dict[str, NDArray[Any]]]]:
        reference: Reference = open_reference(side.model.proto, side.model.base_dir)
        results = []
        for number, case in enumerate(cases):
            self._progress(f"evaluating in float64: {case.name}", done + number, 2 * len(cases))
            results.append(reference.run(case.feeds))
        return reference.how, results

    def _end_to_end(
        self,
        provider: str,
        cases: Sequence[Case],
        truth: list[dict[str, NDArray[Any]]] | None,
        rebuilt: list[dict[str, NDArray[Any]]] | None,
    ) -> ProviderProof:
        stats: dict[str, OutputStats] = {}
        ratio: float | None = None
        loads = (0.0, 0.0)
        fallen: tuple[str, ...] = ()
        plain: list[dict[str, NDArray[Any]]] | None = None
        for optimise in (False, True):
            where = f"{provider}, {'default optimisation' if optimise else 'no optimisation'}"
            self._progress(f"end to end on {where}", int(optimise), 2)
            old, new = (
                self._open(side, provider, optimise=optimise) for side in (self._original, self._rewritten)
            )
            before = [old.run(case.feeds) for case in cases]
            after = [new.run(case.feeds) for case in cases]
            stats = {
                name: merge([compare(name, b[name], a[name]) for b, a in zip(before, after, strict=True)])
                for name in old.outputs
            }
            self._check_parity(stats, where)
            measured = self._three_way(before, after, truth, rebuilt, plain, where)
            ratio = measured if ratio is None or measured is None else max(ratio, measured)
            plain = before
            loads = (old.load_seconds, new.load_seconds)
            fallen = tuple(name for name in new.cpu_nodes or () if "/heads/" in name)
        return ProviderProof(stats, ratio, loads, fallen)

    def _check_parity(self, stats: Mapping[str, OutputStats], where: str) -> None:
        for name, row in stats.items():
            if not row.same_shape or not row.same_dtype:
                self._failures.append(f"output {name}: shape or element type differs on {where}")
            elif not row.nan_parity or not row.inf_parity:
                self._failures.append(
                    f"output {name}: NaN or infinite at other places than the original on {where}"
                )

    def _three_way(
        self,
        before: list[dict[str, NDArray[Any]]],
        after: list[dict[str, NDArray[Any]]],
        truth: list[dict[str, NDArray[Any]]] | None,
        rebuilt: list[dict[str, NDArray[Any]]] | None,
        plain: list[dict[str, NDArray[Any]]] | None,
        where: str,
    ) -> float | None:
        """Apply the pass rule to every output; the worst ratio of errors, None without a float64 evaluation."""
        worst: float | None = None
        for name in before[0]:
            dtype = before[0][name].dtype
            if not is_floating(dtype):
                if any(not np.array_equal(b[name], a[name]) for b, a in zip(before, after, strict=True)):
                    self._failures.append(f"output {name}: integer values differ on {where}")
                continue
            epsilon = float(np.finfo(np.float32).eps) if dtype.itemsize == 4 else _epsilon(dtype)
            error = _Error()
            for number, (b, a) in enumerate(zip(before, after, strict=True)):
                if b[name].shape != a[name].shape:
                    continue
                right = b[name].astype(np.float64) if truth is None else truth[number][name]
                error.scale = max(error.scale, _distance(right, np.zeros(())))
                error.new = max(error.new, _distance(a[name], right))
                if truth is not None and rebuilt is not None:
                    error.old = max(error.old, _distance(b[name], right))
                    error.carried = max(error.carried, _distance(rebuilt[number][name], right))
                elif plain is not None:
                    error.carried = max(error.carried, FACTOR * _distance(b[name], plain[number][name]))
            floor = epsilon * error.scale
            allowed = FACTOR * max(error.old, floor) + error.carried
            if truth is None:
                allowed = _WITHOUT_TRUTH * floor + error.carried + self._certified()
            if not error.new <= allowed:
                self._failures.append(
                    f"output {name}: off by {error.new:.3g} on {where}, allowed are {allowed:.3g}"
                )
            if truth is not None and error.scale > 0.0:
                ratio = error.new / max(error.old, 0.5 * floor, float(np.finfo(np.float64).tiny))
                worst = ratio if worst is None else max(worst, ratio)
        return worst

    def _certified(self) -> float:
        """Without truth: the certified errors added up, as if each reached the output once with weight 10."""
        return 10.0 * sum(claim.max_error + claim.rounding for claim in self._claims)


def view_of(model: LoadedModel) -> GraphView:
    """The index of a loaded model's main graph."""
    return view_model(model.proto)


def _epsilon(dtype: np.dtype[Any]) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)


def _distance(values: NDArray[Any], truth: NDArray[Any]) -> float:
    """Largest |values - truth| where the truth is finite; NaN there counts as infinite."""
    truth = truth.astype(np.float64)
    with np.errstate(all="ignore"):
        gap = np.abs(values.astype(np.float64) - truth)
    gap = np.where(np.isfinite(truth), np.where(np.isnan(gap), np.inf, gap), 0.0)
    return float(gap.max()) if gap.size else 0.0
