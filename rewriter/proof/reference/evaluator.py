"""Compute an operator with onnx's reference evaluator, as the last resort.

For some operators that evaluator follows the newest definition whatever the opset, in some it rounds, and of others it
covers only common attributes. It is therefore used only for the operators in `EVALUATED`, whose results were compared
with onnxruntime's at every opset where their definition changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from rewriter.proof.reference.parts import Node, Value, type_of

EVALUATED = frozenset(
    """
    Acos Acosh Asin Asinh Atan Atanh Celu Clip Col2Im ConcatFromSequence Cosh Det Elu GlobalAveragePool
    HardSigmoid InstanceNormalization LeakyRelu Max MaxUnpool Mean MelWeightMatrix Min NonMaxSuppression
    NonZero OneHot PRelu Selu SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength
    Shrink Sinh Softsign SplitToSequence Tan ThresholdedRelu
    """.split()  # noqa: SIM905 - more readable for 40 names
)
"""Operators of the default domain that the evaluator computes as onnxruntime does."""

_SELECTIONS = {"NonMaxSuppression": (0, 1, 3, 4)}
"""Operators to those operands whose only type is float32."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """An operator, loaded once for each combination of element types."""

    node: Node
    _evaluators: dict[tuple[bytes, ...], Any] = field(default_factory=dict)

    def run(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Evaluate the operator. Raises whatever the evaluator raises."""
        proto = self.node.proto
        operands = dict(zip(proto.input, [values[name] if name else None for name in proto.input], strict=True))
        for index in _SELECTIONS.get(proto.op_type, ()):
            if index < len(proto.input) and proto.input[index]:
                operands[proto.input[index]] = operands[proto.input[index]].astype(np.float32)
        feeds = {name: value for name, value in operands.items() if value is not None}
        kinds = tuple(type_of(value).SerializeToString() for value in feeds.values())
        if kinds not in self._evaluators:
            self._evaluators[kinds] = self._load(feeds)
        results = self._evaluators[kinds].run(None, feeds)
        return dict(zip(self.node.gives, results, strict=True))

    def _load(self, feeds: Mapping[str, Value]) -> Any:
        from onnx.reference import ReferenceEvaluator

        graph = onnx.GraphProto(name="operator", node=[self.node.proto])
        for index, name in enumerate(self.node.proto.input):
            graph.node[0].input[index] = name if name in feeds else ""
        graph.input.extend(onnx.ValueInfoProto(name=name, type=type_of(value)) for name, value in feeds.items())
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.node.gives)
        return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.node.opset)]))
