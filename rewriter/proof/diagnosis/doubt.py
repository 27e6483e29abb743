"""Find out why an original is further from its float64 evaluation than rounding should explain.

Either a discontinuous operator decides differently (which bucket a relative position falls into), so that the two
compute different functions; or an operator of the float64 evaluation is wrong; or onnxruntime runs something else than
the model's nodes, such as its own operator where a local function has the same name; or the model amplifies rounding,
and the evaluation is right. Only in the last case can the evaluation serve as the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.sessions import open_session
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.pass_rule import Channels
from rewriter.proof.reference.audit import audit, in_pieces
from rewriter.proof.reference.decisions import decided_by_rounding
from rewriter.proof.reference.float64 import open_reference
from rewriter.proof.reference.widen import NoReference
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


def doubt(model: LoadedModel, cases: Sequence[Case]) -> Doubt:
    """Look for the operator that explains the distance, each on the operands of the model's own run."""
    if model.size > LARGE:
        return Doubt(
            False,
            "the float64 evaluation differs by more than rounding explains; the model is too large to find out where",
        )
    # The smallest case first: it is the quickest, and one finding is enough.
    for case in sorted(cases, key=lambda case: sum(value.size for value in case.feeds.values())):
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
            other = None if decided is not None else _other_function(model, case)
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


def _other_function(model: LoadedModel, case: Case) -> str | None:
    """What is said where the model as a whole is not what its operators are, one by one."""
    whole = open_session(model.proto, optimise=False, base_dir=model.base_dir).run(case.feeds)
    apart = in_pieces(model.proto, model.base_dir, case.feeds)
    truth = open_reference(model.proto, model.base_dir).run(case.feeds)
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
