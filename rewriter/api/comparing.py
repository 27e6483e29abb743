"""`certify`, `validate`, `diff` and `bench`: what is proved about models, where they differ, and how long they take.

Nothing is written. Of the plan in the second model's metadata only the errors of its activations count: the model is
held to them.
"""

import hashlib
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack, overload

import numpy as np
import onnx

from passes.options import Options
from passes.plan import PlanError, make_plan, read_record
from rewriter.api.rewriting import held_by, longest_of
from rewriter.api.run import CompareKeywords, Run, described, environment, name_of, options_among
from rewriter.compare import difference, renamed, signature_differences
from rewriter.errors import RewriteError, UsageError
from rewriter.files.load import LoadedModel, Source, load_model, read_tensor
from rewriter.files.save import sha256_of
from rewriter.graph.view import Place
from rewriter.graph.walk import iter_nodes
from rewriter.inputs.cases import Case, Kind, Maker
from rewriter.ort import LEVELS, RULES, Session, chosen_providers, open_session, optimisers, write_optimised
from rewriter.proof.records import UNCLAIMED, Certificate, Claimed
from rewriter.proof.run import Point, Progress, silent
from rewriter.proof.settings import CompareOptions, Settings
from rewriter.proof.validate import Judge
from rewriter.proof.values.compare import prove
from rewriter.report.report import Certification, Comparison, FileDigest, Level, Result, RuntimeCertification
from rewriter.text import quoted

NARROWEST = 1.0  # domain that a file may state for its own programs: no fit is narrower that nobody asked for


@overload
def certify(original: Source, *, limit: float = UNCLAIMED, progress: Progress = silent) -> RuntimeCertification: ...
@overload
def certify(
    original: Source,
    rewritten: Source,
    *,
    claims: Mapping[str, tuple[float, float | None]] | None = None,
    limit: float = UNCLAIMED,
    accuracy: float | None = None,
    names: Mapping[str, str] | None = None,
) -> Certification: ...
def certify(
    original: Source,
    rewritten: Source | None = None,
    *,
    claims: Mapping[str, tuple[float, float | None]] | None = None,
    limit: float = UNCLAIMED,
    accuracy: float | None = None,
    names: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> Certification | RuntimeCertification:
    """Prove that `rewritten` computes the outputs of `original` over the reals.

    All tensors of both are compared by value; every activation of `original` that `rewritten` computes otherwise is
    bounded for all real numbers. No input is run, and nothing that a file says of itself is believed: the plan that a
    model of this tool carries only states which bound is to be proved.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: the model to be judged. Default: what this onnxruntime makes of `original` at each of its levels of
            optimisation; where one is not certified, the optimiser at fault is named.
        claims: output of an activation in `original` to (limit, domain): the largest |f_B - f_A| / max(1, |f_A|) for
            all |y| up to `domain`, or everywhere if that is None. Default: what the plan in `rewritten` claims.
        limit: the limit of all other activations.
        accuracy: the largest bound that a plan may claim, if that is more than the rounding of the block's type.
        names: inputs and outputs of `original` to their names in `rewritten`, where these differ.
        progress: called with (current activity, steps done, total steps).

    Returns:
        The certificate; `problems` are the reasons where it is none.

    Raises:
        UsageError: the limit of a claim is negative, its domain empty, or the accuracy not between 0 and 1.
        ModelError: a model is unreadable, malformed or unsafe.
        ValidationError: onnxruntime cannot load `original`, where that is the only model.
    """
    if not 0.0 <= limit < math.inf:
        raise UsageError(f"the limit is {limit:g}; it must be finite and at least 0")
    if accuracy is not None and not 0.0 < accuracy < 1.0:
        raise UsageError(f"the accuracy is {accuracy:g}; it must be between 0 and 1")
    if rewritten is None:
        if claims or accuracy or names:
            raise UsageError("claims, an accuracy and names are for two models")
        return _optimised(original, limit, progress)
    a, b = (load_model(source, mapped=True) for source in (original, rewritten))
    b = renamed(a, b, names or {})
    held, longest, _ = stated(b.proto, accuracy)
    if claims is not None:
        for name, (most, domain) in claims.items():
            if not 0.0 <= most < math.inf or (domain is not None and not 0.0 < domain < math.inf):
                what = "a limit of at least 0 and a domain above 0, or None"
                raise UsageError(f"the claim about {quoted(name)} is not {what}")
        held = {(path, name): Claimed(*each) for name, each in claims.items() for path in a.views}
    found = prove(a, b, claims=held, limit=limit, longest=longest)
    return Certification(_digest(original, a), _digest(rewritten, b), found)


def _optimised(source: Source, limit: float, progress: Progress) -> RuntimeCertification:
    model, levels = load_model(source, mapped=True), list[Level]()
    proved: dict[str, tuple[Certificate, int]] = {}  # by digest

    def proof(level: str, *disabled: str) -> tuple[Certificate, int]:
        """The certificate of the file that onnxruntime writes, and its number of nodes."""
        with TemporaryDirectory() as folder:  # of one file, since a large model fills a disk
            path = write_optimised(model, level, Path(folder), disabled)
            digest = " ".join(sha256_of(each) for each in sorted(path.parent.iterdir()))
            if digest not in proved:
                made = load_model(path, mapped=True)
                proved[digest] = prove(model, made, limit=limit), sum(1 for _ in iter_nodes(made.proto.graph.node))
        return proved[digest]

    def guilty(level: str) -> Iterator[str]:
        """The optimisers without one of which the file is certified."""
        found, names = set[str](), optimisers(model, level)
        for done, name in enumerate(names):
            progress(f"level {level} without {name}", done, len(names))
            if found.isdisjoint(RULES.get(name, ())) and proof(level, name)[0].certified:
                found.add(name)
                yield name

    for done, level in enumerate(LEVELS):
        progress(f"certifying level {level}", done, len(LEVELS))
        certificate, nodes = proof(level)
        levels.append(Level(level, nodes, certificate, () if certificate.certified else tuple(guilty(level))))
    count = sum(1 for _ in iter_nodes(model.proto.graph.node))
    return RuntimeCertification(_digest(source, model), environment()["onnxruntime"], count, tuple(levels))


def certification_of(original: Source, rewritten: Source, certificate: Certificate) -> Certification:
    """A certificate with digests of the files that it is about; it is not computed again."""
    a, b = (_digest(source, load_model(source, mapped=True)) for source in (original, rewritten))
    return Certification(a, b, certificate)


def stated(model: onnx.ModelProto, accuracy: float | None) -> tuple[Mapping[Place, Claimed], int | None, list[str]]:
    """What a model's plan states, to be proved: the errors of activations, and the longest sequence; and notes."""
    try:
        record = read_record(model)
    except PlanError as error:
        return {}, None, [f"the plan in the metadata of the second model is ignored: {error}"]
    coarser, notes = record.options.get("accuracy"), list[str]()
    if isinstance(coarser, float) and coarser > (accuracy or 0.0):
        notes.append(f"the second model was written with accuracy {coarser:.2g}, which counts only if given here too")
    held = {(each.block.path, each.block.output): held_by(each, accuracy, NARROWEST) for each in record.blocks}
    return held, longest_of(record.blocks), notes


def _digest(source: Source, model: LoadedModel) -> FileDigest:
    if model.path is None:
        content = hashlib.sha256(model.proto.SerializeToString(deterministic=True)).hexdigest()
        return FileDigest(name_of(source), content)
    return FileDigest(name_of(source), sha256_of(model.path), {ref.location: ref.path for ref in model.external})


# -- proof and run ---------------------------------------------------------------------------------------------------


@described(CompareKeywords, Settings, CompareOptions)
def validate(
    original: Source, rewritten: Source, *, progress: Progress | None = None, **options: Unpack[CompareKeywords]
) -> Comparison:
    """Judge whether `rewritten` computes what `original` does: a proof by value, and a run on a few inputs.

    Any two models with the same inputs and outputs can be compared, files or models in memory; `names` are those that
    have other names. With a tolerance, outputs are judged only by |rewritten - original| <= atol + rtol |original|.

    Returns:
        The comparison; `verdict` says what is proved, and `exit_status` is 0 if it is certified or agrees.

    Raises:
        UsageError: an option is invalid, or the given inputs left nothing to compare.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: nothing could be compared, for example because a model does not run.
        TypeError: an option does not exist.
    """
    return _compared((original, rewritten), options, Run(progress), files=False, outputs=True)


@described(CompareKeywords, Settings, CompareOptions)
def diff(
    a: Source, b: Source, *, outputs: bool = True, progress: Progress | None = None, **options: Unpack[CompareKeywords]
) -> Comparison:
    """Compare two models: their files (operators, weights bit for bit, declarations), and what they compute.

    Tensors are matched by value, not by names and operators: `validation.certificate.departure` has the first
    node of B that computes what A does not, and the regions that differ. `outputs`: run both, too. Everything else is
    as for `validate`.
    """
    return _compared((a, b), options, Run(progress), files=True, outputs=outputs)


def _compared(
    sources: tuple[Source, Source], options: Mapping[str, Any], run: Run, *, files: bool, outputs: bool
) -> Comparison:
    asked, settings = options_among(options, CompareOptions)
    settings = replace(settings, providers=chosen_providers(settings.providers))
    with run.step("load", "loading"):
        a, b = (load_model(each, mapped=True) for each in sources)
    b = renamed(a, b, asked.names or {})
    result = Comparison(name_of(sources[0]), name_of(sources[1]), signature_differences(a.proto, b.proto))
    if files:
        with run.step("graph", "comparing the files"):
            result = replace(result, files=difference(a, b))
    if result.signature:
        return replace(result, seconds=run.seconds())
    with run.step("plan", "finding activations"):
        found = make_plan(a.proto, Options(), partial(read_tensor, a))
        blocks = [each.block for each in found.conversions] + [each.block for each in found.left if each.block]
        points = [Point(each.output, each.path, each.coarsest, argument=each.gate) for each in blocks]
    with run.step("validate", "proving"):
        held, longest, notes = stated(b.proto, asked.accuracy)
        proof = Judge(
            a, b, (), settings, run.progress, tolerance=asked.tolerance, noise=points, run=outputs,
            held=held, longest=longest, isolate=files,
        ).verdict()  # fmt: skip
    # Outputs of which the run shows nothing, where the verdict rests on the run.
    runs = () if asked.tolerance is not None or proof.certified else proof.providers.values()
    empty = dict.fromkeys(each.name for ran in runs for each in ran.compared.values() if each.proves_nothing)
    why = "rounding moves it as far as it is large"
    texts = (f"nothing could be compared: output {name}, since {why}" for name in empty)
    result = replace(result, proof=proof, tolerance=asked.tolerance, undecided=(*proof.uncompared, *texts))
    return replace(result, notes=(*notes, *proof.notes), seconds=run.seconds())


# -- time --------------------------------------------------------------------------------------------------------------

_TOKENS, _ROUNDS = 128, 10
_TURN, _PAUSE = 0.1, 0.05  # seconds; after the pause onnxruntime's idle threads have stopped spinning


@dataclass(frozen=True)
class TimeRow:
    """One model on inputs of one size: the median time, and the quartiles of its ratio to the original in a round."""

    model: str
    provider: str
    inputs: str
    milliseconds: float
    over_original: tuple[float, float, float]


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
    """What `bench` measured: for every provider and size a row of each model, the original first."""

    times: tuple[TimeRow, ...]
    environment: Mapping[str, str]
    seconds: Mapping[str, float]

    @property
    def summary(self) -> str:
        original, *others = dict.fromkeys(row.model for row in self.times)
        parts = []
        for name in others:
            ratios = sorted(f"{row.over_original[1]:.2f}" for row in self.times if row.model == name)
            parts.append(f"{name} takes {' to '.join(dict.fromkeys((ratios[0], ratios[-1])))} times as long")
        return f"MEASURED  {', '.join(parts)} as {original}, in {self.seconds['total']:.1f} s"


def bench(
    original: Source,
    rewritten: Source,
    *more: Source,
    tokens: int | Sequence[int] = (),
    providers: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Benchmark:
    """Measure how long models, files or in memory, take beside the original, on onnxruntime; they take turns.

    Args:
        original: given again, its ratio is the noise.
        rewritten: the model to compare it with.
        *more: further models.
        tokens: numbers of tokens of a sequence; default: 128, or what the models take.
        providers: execution providers; default: cpu, and cuda where it works.
        progress: called with (current activity, steps done, total steps).

    Raises:
        UsageError: the models take different inputs, or not so many tokens.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: a model does not run.
    """
    run, given, rows = Run(progress), (original, rewritten, *more), list[TimeRow]()
    chosen = chosen_providers((providers,) if isinstance(providers, str) else providers)
    with run.step("load", "loading"):
        models = [load_model(model, mapped=True) for model in given]
        paths = [name_of(model) for model in given]
        names = [each if each not in paths[:place] else f"{each} ({place})" for place, each in enumerate(paths)]
        for name, model in zip(names, models, strict=True):
            differences = signature_differences(models[0].proto, model.proto)
            if found := [text for text in differences if text.startswith("input ")]:
                raise UsageError(f"{name} (B) takes other inputs than {names[0]} (A): {'; '.join(found)}")
        maker = Maker(models[0].proto)
        longest = min(stated(model.proto, None)[1] or sys.maxsize for model in models)
        cases = [_case(maker, asked, longest) for asked in ((tokens,) if isinstance(tokens, int) else tokens)]
    for provider in chosen:
        with run.step("measure", f"measuring on {provider}"):
            opened = [open_session(each.proto, provider, base_dir=each.base_dir, spin=True) for each in models]
            for case in cases or [maker.case((1, min(_TOKENS, longest), 0))]:
                times = _rounds(dict(zip(names, opened, strict=True)), case)
                for name, taken in times.items():
                    low, middle, high = np.percentile(np.divide(taken, times[names[0]]), [25, 50, 75]).tolist()
                    rows.append(TimeRow(name, provider, case.name, 1e3 * float(np.median(taken)), (low, middle, high)))
    return Benchmark(tuple(rows), environment(), run.seconds())


def _case(maker: Maker, tokens: int, longest: int) -> Case:
    taken = 1 <= tokens <= longest and Kind.SEQUENCE in maker.varied
    if not taken or maker.sizes((1, tokens, 0))[1][Kind.SEQUENCE] != tokens:
        raise UsageError(f"the models do not take {tokens} tokens; give another number, or none")
    return maker.case((1, tokens, 0))


def _rounds(sessions: Mapping[str, Session], case: Case) -> dict[str, list[float]]:
    """The median seconds of a run per round, in turns, since the speed of a shared machine drifts."""
    found: dict[str, list[float]] = {name: [] for name in sessions}
    for done in range(_ROUNDS + 1):
        for name in [*sessions][:: -1 if done % 2 else 1]:
            runs, end = list[float](), time.perf_counter() + _TURN
            while not runs or time.perf_counter() < end:
                start = time.perf_counter()
                try:
                    sessions[name].run(case.feeds)
                except RewriteError as error:
                    raise type(error)(f"{name}: {error.args[0]}") from error
                runs.append(time.perf_counter() - start)
            time.sleep(_PAUSE)
            found[name].append(float(np.median(runs[len(runs) // 5 :])))  # threads wake up in the first ones
    return {name: times[1:] for name, times in found.items()}  # the first round warms up
