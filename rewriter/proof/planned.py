"""The planned model: the original with the plan in place of its activations, which the rewritten model should equal.

Each claimed activation becomes one node of a private domain, which numpy evaluates in float64 from the coefficients of
the head program (`Claim.planned`); no emitted node takes part. This splits the proof in two: the distance of the
planned model from the original is the effect of the certified errors, and the distance of the rewritten model from the
planned one must be rounding alone. A wrong node, weight or splice therefore cannot pass for a certified error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.graph.view import graph_at
from rewriter.proof.claims import Claim, Planned, Side
from rewriter.proof.distance import in_pieces, magnitude
from rewriter.proof.reference.operators.table import Operator

DOMAIN = "attnonly.planned"


@dataclass(frozen=True, eq=False)
class PlannedOperator:
    """A head program as an operator of the float64 evaluation.

    Attributes:
        planned: the plan.
        shaken: whether to add the largest float64 rounding error, with alternating signs, to see what it amounts to.
        reached: largest finite |pre-activation| that was evaluated so far, under the key "y".
    """

    planned: Planned
    shaken: bool = False
    reached: dict[str, float] = field(default_factory=dict)

    def __call__(self, _attributes: Mapping[str, Any], y: Array, z: Array | None = None) -> Array:
        """The program at pre-activations `y` and values `z`; any shape."""
        self.reached["y"] = max(self.reached.get("y", 0.0), magnitude(y))
        with np.errstate(all="ignore"):
            result = in_pieces(self.planned.evaluate, y, z)
            if self.shaken:
                result += _signs(result.size).reshape(result.shape) * in_pieces(self.planned.float64_rounding, y, z)
        return result


def planned_side(original: Side, claims: Sequence[Claim]) -> Side:
    """The original, in the form whose tensors the claims name, with every claimed activation as planned."""
    proto = onnx.ModelProto()
    proto.CopyFrom(original.model.proto)
    own: dict[tuple[str, str], Operator] = {}
    for number, claim in enumerate(claims):
        name = f"Program{number}"
        own[DOMAIN, name] = PlannedOperator(claim.planned)
        _put(graph_at(proto, claim.path), claim, name)
        # Type inference stops at the private operator, and what depends on it would lose its types with it.
        kind = original.views[claim.path].type_of(claim.output)
        if kind.elem_type:
            value = onnx.helper.make_tensor_value_info(claim.output, kind.elem_type, kind.shape)
            graph_at(proto, claim.path).value_info.append(value)
    proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return Side.of(replace(original.model, proto=proto, path=None), own)


def shaken(planned: Side) -> Side:
    """The planned model with every activation perturbed by its largest float64 rounding error, in mixed directions."""
    own = {
        key: replace(item, shaken=True) if isinstance(item, PlannedOperator) else item
        for key, item in planned.own.items()
    }
    return replace(planned, own=own)


def reached(side: Side, claims: Sequence[Claim]) -> dict[str, float]:
    """Maps each block to the largest |pre-activation| at which its plan was evaluated, in control-flow bodies too."""
    operators = zip(claims, side.own.values(), strict=True)
    return {
        claim.name: operator.reached["y"]
        for claim, operator in operators
        if isinstance(operator, PlannedOperator) and "y" in operator.reached
    }


def _put(graph: onnx.GraphProto, claim: Claim, name: str) -> None:
    """Replace the producer of the claim's output by a node of the private domain."""
    # The region's other nodes stay: dead ones are not evaluated.
    place = next(index for index, node in enumerate(graph.node) if claim.output in node.output)
    inputs = [claim.gate, claim.value] if claim.gated else [claim.gate]
    node = onnx.helper.make_node(name, inputs, [claim.output], f"{claim.name}/planned", domain=DOMAIN)
    graph.node[place].CopyFrom(node)


def _signs(count: int) -> Array:
    """+1 and -1 in a fixed pseudo-random order."""
    return np.random.default_rng(0).integers(0, 2, count) * 2.0 - 1.0
