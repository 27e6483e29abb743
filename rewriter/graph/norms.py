"""Normalisations in a graph: an operator, or arithmetic that divides by a mean."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView, integer_of

_MAX_DISTANCE = 8
"""Nodes between the scale of a normalisation in primitive operators and its mean."""

NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
"""Operators whose output is normalised along the last axis; scale and bias follow the data."""


@dataclass(frozen=True)
class Norm:
    """A normalisation `x_hat * scale + bias` of `data` over the last axis; absent tensors are empty."""

    output: str
    scale: str
    bias: str
    data: str

    @property
    def constants(self) -> dict[str, str]:
        """The present constants: `w` to the scale, `b` to the bias."""
        return {name: held for name, held in (("w", self.scale), ("b", self.bias)) if held}


def norm_before(view: GraphView, constants: Constants, tensor: str) -> Norm | None:
    """The normalisation that computes `tensor`, up to its layout; None without one."""
    tensor = view.before(tensor)
    node = view.made_by(tensor)
    if node is None:
        return None
    if node.op_type in NORMS and integer_of(node, "axis", -1) == -1:
        data, scale, bias = [*node.input, ""][:3]
        return Norm(tensor, scale, bias, data)
    # In primitive operators: an Add and a Mul of constants after a division by a mean.
    data, held = tensor, {"Add": "", "Mul": ""}
    for kind in held:
        node = view.made_by(data)
        own = [each for each in node.input if each in constants] if node is not None and node.op_type == kind else []
        if node is not None and len(own) == 1:
            held[kind], data = own[0], next(each for each in node.input if each not in constants)
    shape = constants.shape(held["Mul"]) or ()
    fits = len([size for size in shape if size != 1]) == 1 and _contains_mean(view, data)
    return Norm(tensor, held["Mul"], held["Add"], _normalised(view, data)) if fits else None


def _contains_mean(view: GraphView, tensor: str, reach: int = _MAX_DISTANCE) -> bool:
    """Whether a tensor's arithmetic includes a mean."""
    node = view.made_by(tensor)
    if node is None or reach < 0:
        return False
    through = node.op_type in ("Div", "Mul", "Reciprocal", "Sqrt", "Add", "Pow", "Cast", "Sub")
    means = node.op_type in ("ReduceMean", "ReduceSum", "ReduceSumSquare")
    return means or (through and any(_contains_mean(view, name, reach - 1) for name in node.input))


def _normalised(view: GraphView, tensor: str) -> str:
    """The x of x / sqrt(mean(x x)) or (x - mean(x)) / sqrt(...), where x is not the result of a mean."""
    node = view.made_by(view.before(tensor))
    names = list(node.input) if node is not None else []
    makers = [view.made_by(name) for name in names]
    centred = [maker.input[0] for maker in makers if maker is not None and maker.op_type == "Sub"]
    return next((name for name in (*names, *centred) if not _contains_mean(view, name)), "")
