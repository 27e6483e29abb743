"""`validate` and `diff`: whether two models compute the same function, and where they differ. Nothing is written.

The verdict is that of `rewriter.proof.validate`: a certificate and a run. The plan in B's metadata only provides block
names and options: A is planned again with these options, and B must meet the bounds that this tool would claim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

from passes.plan import make_plan
from passes.record import UnreadableError, read_record
from rewriter.api.rows import claims_of, place_of
from rewriter.api.run import NARROWEST, CompareKeywords, Run, described, name_of, recorded_options, settings_of, taken
from rewriter.compare import CompareOptions
from rewriter.compare.graphs import difference, signature_differences
from rewriter.compare.parts import Bisection, Part, boundaries
from rewriter.errors import UsageError
from rewriter.files.load import LoadedModel, Source, load_model, read_tensor
from rewriter.options import build
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.accepted import run_accepted
from rewriter.proof.nudge import Point
from rewriter.proof.rule import Judgement
from rewriter.proof.run import Way
from rewriter.proof.settings import Settings, checked
from rewriter.proof.validate import Judge, Progress, Validation, longest_of, noise_points
from rewriter.report.comparison import Comparison

_MAX_ALLOWANCE = 2.0**-10
"""A pair that is not certified must hold part by part if the rule allows an output to be off by more than this share
of its norm: quantised models amplify rounding, and such an output is not conclusive."""

_MOST_FAULTS = 8
"""Number of faulty parts that are explained."""


@described(CompareKeywords, Settings, CompareOptions)
def validate(
    original: Source, rewritten: Source, *, progress: Progress | None = None, **options: Unpack[CompareKeywords]
) -> Comparison:
    """Judge whether `rewritten` computes what `original` does: a certificate, and a run on a few inputs.

    Any two models with the same inputs and outputs can be compared. Heads that the plan in the metadata of `rewritten`
    names, but that are not certified, are tested block by block.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: path of the rewritten model, or a model in memory.
        progress: called with (current activity, steps done, total steps).
        **options: listed below. With a tolerance, outputs are judged only by
            |rewritten - original| <= atol + rtol |original|.

    Returns:
        The comparison; `verdict` says what is proved, and `exit_status` is 0 if the models are the same or agree.

    Raises:
        UsageError: an option is invalid, or the given inputs left nothing to compare.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: nothing could be compared, for example because a model does not run.
        TypeError: an option does not exist.
    """
    return _compared((original, rewritten), options, Run(progress), graph=False, outputs=True)


@described(CompareKeywords, Settings, CompareOptions)
def diff(
    a: Source,
    b: Source,
    *,
    outputs: bool = True,
    progress: Progress | None = None,
    **options: Unpack[CompareKeywords],
) -> Comparison:
    """Compare two models: their files (operators, nodes, metadata, weights bit for bit), and what they compute.

    Args:
        a: path of an ONNX file, or a model in memory.
        b: path of the second model, or a model in memory.
        outputs: run both and compare the outputs as `validate` does.
        progress: as for `validate`.
        **options: those of `validate`, listed below.

    Returns:
        The comparison; `exit_status` is 0 if both compute the same or agree (without `outputs`: if graphs and weights
        are the same), else 1.

    Raises:
        UsageError: an option that needs a run is given without `outputs`; otherwise as for `validate`.
    """
    if options.get("bisect") and not outputs:
        raise UsageError("bisect needs the models to be run: leave the outputs in")
    return _compared((a, b), options, Run(progress), graph=True, outputs=outputs)


def _compared(
    sources: tuple[Source, Source], options: Mapping[str, Any], run: Run, *, graph: bool, outputs: bool
) -> Comparison:
    of_run, of_comparison = taken(options, Settings, CompareOptions)
    settings, asked = checked(settings_of(of_run)), build(CompareOptions, of_comparison)
    with run.step("load", "loading"):
        a, b = (load_model(each, mapped=True) for each in sources)
    names = [name_of(each) for each in sources]
    result = Comparison(names[0], names[1], signature=signature_differences(a.proto, b.proto))
    if graph:
        with run.step("graph", "comparing the graphs"):
            result = replace(result, files=difference(a, b))
    if outputs and not result.signature:
        with run.step("plan", "finding the blocks"):
            known = known_of(a, b, asked.accuracy)
        pair = _Pair(a, b, settings, asked.tolerance, known, run)
        result = pair.located(pair.judged(result), bisect=asked.bisect)
    return replace(result, seconds=run.seconds())


class Known(NamedTuple):
    """The analysis of a pair of files: A's blocks, and which of them B's plan names."""

    side: Side
    """A, or its lowered form if B was built from that: the form whose tensors name the blocks."""
    blocks: tuple[Claim, ...]
    """Where A's blocks are."""
    claims: tuple[Claim, ...]
    """What this tool claims about the blocks that B's plan names."""
    notes: tuple[str, ...]
    longest: int | None
    """The longest sequence that B takes, as far as its plan says."""


def known_of(a: LoadedModel, b: LoadedModel, accuracy: float | None = None) -> Known:
    """Find A's blocks, and which of them B's plan names; `accuracy` is the largest error that the plan may claim."""
    notes: list[str] = []
    record = None
    try:
        record = read_record(b.proto)
    except UnreadableError as error:
        notes.append(f"the plan in the metadata of the second model is ignored: {error}")
    coarser = record.options.get("accuracy") if record is not None else None
    if isinstance(coarser, float) and coarser > (accuracy or 0.0):
        notes.append(f"the second model was made with accuracy {coarser:.2g}, which counts only if given here too")
    options = recorded_options(record, accuracy)
    plan = make_plan(a.proto, options, partial(read_tensor, a))
    named = {each.place: each for each in record.blocks} if record is not None else {}
    blocks = [each.block for each in plan.conversions] + [left.block for left in plan.left if left.block is not None]
    missing = named.keys() - {block.place for block in blocks}
    if missing:
        notes.append(
            f"the plan of the second model names a block that the first does not have: {named[min(missing)].name}"
        )
    conversions = tuple(each for each in plan.conversions if each.block.place in named)
    claims = claims_of(replace(plan, conversions=conversions), accuracy or 0.0)
    longest = longest_of(claims)
    if plan.whole is not None:  # blocks whose bias tokens the network carries cannot be cut out of B
        claims = ()
    for block in plan.undetermined:
        stated = named.get(block.place)
        if stated is not None and stated.form == "local":
            # The claim of B's plan about a fitted program is proved or fails, within the usual limits.
            domain = stated.program.domain if stated.program.domain >= NARROWEST else math.inf
            claim = replace(place_of(block), max_error=stated.bound, domain=domain, accuracy=accuracy or 0.0)
            claims += (replace(claim, unstable=True),)
    side = Side.of(replace(a, proto=plan.model, path=None) if named and plan.model is not a.proto else a)
    made, places = side.main.producer.keys(), map(place_of, blocks)
    main = (each for each in places if not each.path)
    within = tuple(each for each in main if {*each.block_outputs, *each.inputs, each.output} <= made)
    return Known(side, within, claims, tuple(notes), longest)


@dataclass(frozen=True)
class _Pair:
    """Two models with the same inputs and outputs, and how to compare their results."""

    a: LoadedModel
    b: LoadedModel
    settings: Settings
    tolerance: tuple[float, float] | None
    known: Known
    run: Run

    def judged(self, result: Comparison) -> Comparison:
        known = self.known
        with self.run.step("validate", "proving"):
            proof = Judge(
                self.a, self.b, known.claims, self.settings, self.run.progress,
                lowered=known.side.model, tolerance=self.tolerance, noise=self._points(), longest=known.longest,
            ).verdict()  # fmt: skip
        empty = dict.fromkeys(each.name for each in self._decisive(proof) if each.proves_nothing)
        why = "rounding changes it by its own magnitude"
        return replace(
            result,
            proof=proof,
            tolerance=self.tolerance,
            undecided=(
                *(proof.unproved if known.claims else ()),
                *proof.uncompared,
                *(f"nothing could be compared: output {name}, since {why}" for name in empty),
            ),
            notes=(*known.notes, *proof.notes),
        )

    def located(self, result: Comparison, *, bisect: bool) -> Comparison:
        """Add the parts, and the faulty ones among them.

        Where amplified rounding hides errors in the outputs, every part must hold by itself.
        """
        proof = result.validation
        loose = [each.name for each in self._decisive(proof) if each.allowed > _MAX_ALLOWANCE]
        failed = bool(result.failures or result.undecided)
        if not proof.providers or not (bisect if failed else loose):
            return result
        bisection = self._bisection(proof)
        if not failed and not any(map(bisection.a.main.consumers.get, bisection.marks)):  # there is nothing to bisect
            return result
        with self.run.step("parts", "testing every part alone"):
            isolated = bisection.parts()
        guilty = [each for each in isolated if not each.found.holds]
        if not failed:
            # A tensor of the same name may differ although the outputs agree: another operator may compensate.
            undecided = tuple(f"{each.label} by itself {each.found.reason}" for each in guilty)
            note = (
                f"rounding is amplified, so that output {loose[0]} says little; {len(isolated) - len(guilty)} of "
                f"{len(isolated)} parts hold by themselves"
            )
            result = replace(result, undecided=undecided, notes=(*result.notes, note))
        elif not guilty:
            text = "every part alone is within its share: the difference is the sum of small errors"
            result = replace(result, notes=(*result.notes, text))
        faults = (_refuted(bisection.explained(each), proof) for each in guilty[: _MOST_FAULTS if bisect else 0])
        return replace(result, isolated=isolated, faults=tuple(faults))

    def _decisive(self, proof: Validation) -> list[Judgement]:
        """The judgements on which the verdict rests: none with a certificate, tested blocks or a tolerance."""
        judged = self.tolerance is not None or proof.certified or proof.blocks
        return [] if judged else [each for run in proof.providers.values() for each in run.compared.values()]

    def _points(self) -> tuple[Point, ...]:
        view = self.known.side.main
        return tuple(
            Point(each.output, (), view.type_of(each.output).elem_type, argument=each.gate)
            for each in self.known.blocks
        )

    def _bisection(self, proof: Validation) -> Bisection:
        known, b = self.known, Side.of(self.b)
        accepted = run_accepted(
            known.side, [Way(self.settings.providers[0], optimise=False)], self.settings,
            most=known.longest, beside=self.a.path, by_blocks=self.settings.by_blocks(self.a.size),
        )  # fmt: skip
        marks = boundaries(known.side.main, b.main, known.blocks)
        return Bisection(
            known.side,
            b,
            marks,
            [case for case in accepted.cases if case.name in proof.cases],
            self.settings.providers[0],
            noise_points(proof.certificate, known.claims, self._points()),
            progress=self.run.progress,
        )


def _refuted(fault: Part, proof: Validation) -> Part:
    refusals = () if proof.certificate is None else proof.certificate.refusals
    found = tuple(
        each.text for each in refusals if each.refuted and (each.path, each.original) == ((), fault.found.name)
    )
    return replace(fault, causes=(*found, *fault.causes))
