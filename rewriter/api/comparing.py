"""`validate` and `diff`: whether two models compute the same function, and where they differ. Nothing is written.

The verdict is the one of `rewriter.proof.validate`. Of the plan in B's metadata only the errors of its activations
count: B is held to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from passes.options import Options
from passes.plan import make_plan
from rewriter.api.certifying import stated
from rewriter.api.run import CompareKeywords, Run, check_known, described, name_of, settings_of
from rewriter.compare import CompareOptions
from rewriter.compare.graphs import difference, renamed, signature_differences
from rewriter.files.load import LoadedModel, Source, load_model, read_tensor
from rewriter.options import build
from rewriter.proof.nudge import Point
from rewriter.proof.run import Side
from rewriter.proof.settings import Settings, checked
from rewriter.proof.validate import Judge, Progress
from rewriter.report.comparison import Comparison


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
    check_known(options, Settings, CompareOptions)
    settings, asked = checked(settings_of(options)), build(CompareOptions, options)
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
        points = _activations(a)
    with run.step("validate", "proving"):
        plan = stated(b.proto, asked.accuracy)
        proof = Judge(
            a, b, (), settings, run.progress, tolerance=asked.tolerance, noise=points, run=outputs,
            held=plan.held, longest=plan.longest, isolate=files,
        ).verdict()  # fmt: skip
    # Outputs of which the run shows nothing, where the verdict rests on the run.
    runs = () if asked.tolerance is not None or proof.certified else proof.providers.values()
    empty = dict.fromkeys(each.name for ran in runs for each in ran.compared.values() if each.proves_nothing)
    why = "rounding moves it as far as it is large"
    texts = (f"nothing could be compared: output {name}, since {why}" for name in empty)
    result = replace(result, proof=proof, tolerance=asked.tolerance, undecided=(*proof.uncompared, *texts))
    return replace(result, notes=(*plan.notes, *proof.notes), seconds=run.seconds())


def _activations(model: LoadedModel) -> tuple[Point, ...]:
    """Where a model gets noise: the activations of what may be MLP blocks."""
    plan, made = make_plan(model.proto, Options(), partial(read_tensor, model)), Side.of(model).main.producer.keys()
    found = [each.block for each in plan.conversions] + [left.block for left in plan.left if left.block is not None]
    return tuple(
        Point(block.output, (), block.coarsest, argument=block.gate)
        for block in found
        if not block.path and {block.output, block.gate} <= made
    )
