"""Why an original is far from its float64 evaluation, where rounding alone would not explain it.

Either a discontinuous operator decided otherwise (which bucket a relative position falls into), so that the two compute
different functions; or an operator of the float64 evaluation is wrong; or the model amplifies rounding, and the
evaluation is right. Only in the last case is it a measure. Asked only where an output gives reason to.
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
    """What was found.

    Attributes:
        trusted: whether the float64 evaluation is a measure all the same.
        wrong: whether an operator of it is wrong.
        why: in words, as the report prints it.
    """

    trusted: bool
    why: str
    wrong: bool = False


def doubt(model: LoadedModel, cases: Sequence[Case]) -> Doubt:
    """Look for the operator that explains the distance; each is tried on what the model's own run feeds it."""
    if model.size > LARGE:
        return Doubt(False, "float64 computes something else in them; the model is too large to find out where")
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
            return Doubt(False, f"where float64 computes something else could not be found: {error}")
        if decided is not None:
            return Doubt(False, f"a rounding decides what {decided} gives")
    return Doubt(True, "every operator agrees with float64 on what it is fed: the model amplifies rounding")
