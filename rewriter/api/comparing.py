"""`validate` and `diff`: whether two models compute the same function, and where they differ. Nothing is written.

The verdict is the one of `rewriter.proof.validate`: a certificate and a run. What B says of itself, the plan in its
metadata, names blocks and options only: A is planned again with these options, and B is held to what this tool would
claim.
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
from rewriter.files.load import LoadedModel, Source, load_model, read_tensor
from rewriter.options import build
from rewriter.proof.claims import Claim, Side
from rewriter.proof.nudge import Point
from rewriter.proof.rule import Judgement
from rewriter.proof.settings import Settings, checked
from rewriter.proof.validate import Judge, Progress, Validation
from rewriter.report.comparison import Comparison


@described(CompareKeywords, Settings, CompareOptions)
def validate(
    original: Source, rewritten: Source, *, progress: Progress | None = None, **options: Unpack[CompareKeywords]
) -> Comparison:
    """Judge whether `rewritten` computes what `original` does: a certificate, and a run on a few inputs.

    Any two models with the same inputs and outputs can be compared.

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
        UsageError, ModelError, ProviderError, ValidationError, TypeError: as for `validate`.
    """
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
        result = pair.judged(result)
    return replace(result, seconds=run.seconds())


class Known(NamedTuple):
    """What is known about a pair from its files: A's blocks, and those of them that B's plan names."""

    side: Side
    """A, or its lowered form if B was made from that: the form whose tensors name the blocks."""
    blocks: tuple[Claim, ...]
    """Where A's blocks are."""
    claims: tuple[Claim, ...]
    """What this tool claims about the blocks that B's plan names."""
    notes: tuple[str, ...]


def known_of(a: LoadedModel, b: LoadedModel, accuracy: float | None = None) -> Known:
    """Find A's blocks, and those of them that B's plan names; `accuracy` is what the user allows the plan to claim."""
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
    claims: tuple[Claim, ...] = ()
    if plan.whole is None:  # blocks whose bias tokens the network carries cannot be cut out of B
        conversions = tuple(each for each in plan.conversions if each.block.place in named)
        claims = claims_of(replace(plan, conversions=conversions), accuracy or 0.0)
    for block in plan.undetermined:
        stated = named.get(block.place)
        if stated is not None and stated.form == "local":
            # Of a program that was fitted, what B's plan says is proved or fails, within the usual limits.
            domain = stated.program.domain if stated.program.domain >= NARROWEST else math.inf
            claim = replace(place_of(block), max_error=stated.bound, domain=domain, accuracy=accuracy or 0.0)
            claims += (claim,)
    side = Side.of(replace(a, proto=plan.model, path=None) if named and plan.model is not a.proto else a)
    made, places = side.main.producer.keys(), map(place_of, blocks)
    main = (each for each in places if not each.path)
    within = tuple(each for each in main if {*each.block_outputs, *each.inputs, each.output} <= made)
    return Known(side, within, claims, tuple(notes))


@dataclass(frozen=True)
class _Pair:
    """Two models with the same inputs and outputs, and how to compare what they compute."""

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
                lowered=known.side.model, tolerance=self.tolerance, noise=self._points(),
            ).verdict()  # fmt: skip
        empty = dict.fromkeys(each.name for each in self._decisive(proof) if each.proves_nothing)
        why = "rounding moves it as far as it is large"
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

    def _decisive(self, proof: Validation) -> list[Judgement]:
        """What the rule found where the verdict rests on it: without certificate, tests of blocks, and tolerance."""
        judged = self.tolerance is not None or proof.certified
        return [] if judged else [each for run in proof.providers.values() for each in run.compared.values()]

    def _points(self) -> tuple[Point, ...]:
        view = self.known.side.main
        return tuple(
            Point(each.output, (), view.type_of(each.output).elem_type, argument=each.gate)
            for each in self.known.blocks
        )
