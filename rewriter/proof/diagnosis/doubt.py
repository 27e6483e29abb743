"""Find out why an original is further from its float64 evaluation than rounding should explain.

Either a discontinuous operator decides differently (which bucket a relative position falls into), so that the two
compute different functions; or an operator of the float64 evaluation is wrong; or onnxruntime runs something else than
the model's nodes, such as its own operator where a local function has the same name; or the model amplifies rounding,
and the evaluation is right. Only in the last case can the evaluation serve as the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.sessions import open_session
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.pass_rule import Channels
from rewriter.proof.reference.audit import audit, in_pieces
from rewriter.proof.reference.decisions import decided_by_rounding
from rewriter.proof.reference.widen import NoReference
from rewriter.proof.run.whole import ModelRuns, Way
from rewriter.proof.settings import LARGE
from rewriter.text import quoted

_FURTHER = 16.0
"""How much further from float64 a model may be as a whole than operator by operator: both amplify the same rounding."""


@dataclass(frozen=True)
class Doubt:
    """The result of the search.

    Attributes:
        trusted: whether the float64 evaluation can serve as the truth all the same.
        wrong: whether one of its operators is wrong, or is not what onnxruntime runs.
        why: the explanation that the report prints.
    """

    trusted: bool
    why: str
    wrong: bool = False


_PLAIN = Way("cpu", optimise=False)
"""How operators run by themselves."""


def doubt(model: LoadedModel, runs: ModelRuns) -> Doubt:
    """Look for the operator that explains the distance, each on the operands of the model's own run.

    Args:
        model: the original.
        runs: its runs and its float64 evaluation.
    """
    if model.size > LARGE:
        return Doubt(
            False,
            "the float64 evaluation differs by more than rounding explains; the model is too large to find out where",
        )
    # The smallest case first: it is the quickest, and one finding is enough.
    for place in sorted(range(len(runs.cases)), key=lambda place: _size(runs.cases[place])):
        case = runs.cases[place]
        try:
            wrong = audit(model.proto, model.base_dir, case.feeds)
            if wrong is not None:
                return Doubt(
                    False,
                    f"the float64 evaluation of {wrong.node} differs from onnxruntime's by {wrong.error:.3g}, more "
                    f"than the {wrong.allowed:.3g} that rounding explains",
                    wrong=True,
                )
            decided = decided_by_rounding(model.proto, model.base_dir, case.feeds)
            other = None if decided is not None else _other_function(model, runs, place)
        except (NoReference, ValidationError) as error:
            return Doubt(
                False,
                f"the float64 evaluation differs by more than rounding explains; where could not be found: {error}",
            )
        if decided is not None:
            return Doubt(False, f"rounding decides what {decided} gives")
        if other is not None:
            return Doubt(False, other, wrong=True)
    return Doubt(True, "every operator agrees with float64 on its own operands, so the model amplifies rounding")


def _size(case: Case) -> int:
    """The number of entries of its inputs."""
    return sum(value.size for value in case.feeds.values())


def _other_function(model: LoadedModel, runs: ModelRuns, place: int) -> str | None:
    """What is said where the model as a whole is not what its operators are, one by one."""
    if runs.truth is None:
        return None
    case, truth = runs.cases[place], runs.truth[place]
    whole: Mapping[str, Array] = (
        runs.ways[_PLAIN].results[place]
        if _PLAIN in runs.ways
        else open_session(model.proto, optimise=False, base_dir=model.base_dir).run(case.feeds)
    )
    apart = in_pieces(model.proto, model.base_dir, case.feeds)
    for name, right in truth.items():
        if not is_float(whole[name].dtype):
            continue
        channels, floor = Channels.of([right]), float(ml_dtypes.finfo(whole[name].dtype).eps)
        far, near = (channels.share(channels.errors([side[name]], [right], [whole[name]])) for side in (whole, apart))
        if far > _FURTHER * max(near, floor):
            return (
                f"onnxruntime runs something else than the model's operators: output {quoted(name)} is {far:.2g} of "
                f"its scale from float64, and {near:.2g} computed operator by operator"
            )
    return None
