"""Find out why an original is further from its float64 evaluation than rounding should explain.

Either a discontinuous operator decides differently (which bucket a relative position falls into), so that the two
compute different functions; or an operator of the float64 evaluation is wrong; or the model amplifies rounding, and the
evaluation is right. Only in the last case can the evaluation serve as the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.inputs.cases import Case
from rewriter.proof.reference.audit import audit
from rewriter.proof.reference.decisions import decided_by_rounding
from rewriter.proof.reference.widen import NoReference
from rewriter.proof.settings import LARGE


@dataclass(frozen=True)
class Doubt:
    """The result of the search.

    Attributes:
        trusted: whether the float64 evaluation can serve as the truth all the same.
        wrong: whether one of its operators is wrong.
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
        except (NoReference, ValidationError) as error:
            return Doubt(
                False,
                f"the float64 evaluation differs by more than rounding explains; where could not be found: {error}",
            )
        if decided is not None:
            return Doubt(False, f"rounding decides what {decided} gives")
    return Doubt(True, "every operator agrees with float64 on its own operands, so the model amplifies rounding")
