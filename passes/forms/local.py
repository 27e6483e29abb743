"""Form `local`: every query scored against exactly its own key and the bias keys.

Comes in: a conversion. Goes out: the nodes that take the activation region's place. W1 becomes the stacked query and
value projection of the d_ff heads, W2 their stacked output projection: both stay in the graph as they are,
unread, so the linear operators may be anything linear. The pre-activation is the queries, the activation's output is
what the heads write, each along its row of W2. The tensors at both ends keep their names.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import DTypeLike

from passes.conversion import Conversion
from passes.heads import Spelling, emit, function_of, spelling_of, takes_linear
from passes.marks import BLOCK_KEY, DOMAIN, PROGRAM_KEY
from passes.programs import Head
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Constant, Fragment, Tensor, Variable
from rewriter.graph.view import GraphView


def emit_local(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    return _Emitter(view, conversion).run()


class _Emitter:
    def __init__(self, view: GraphView, conversion: Conversion) -> None:
        self._conversion = conversion
        self._opset = view.opsets.get("", 1)
        self._fragment = Fragment(f"{conversion.block.name}/heads")
        self._functions: list[onnx.FunctionProto] = []
        self._double = conversion.compute_type == onnx.TensorProto.DOUBLE

    def run(self) -> Replacement:
        block, program = self._conversion.block, self._conversion.program
        cast = block.elem_type != self._conversion.compute_type
        query = self._read(block.gate, "query", block.gate_type)
        source = query if block.value == block.gate else self._read(block.value, "value", block.value_type)
        target = self._fragment.qualified("wide_output") if cast else block.output
        self._sum(query, source, target)
        if cast:
            wide = self._fragment.tensor(target)
            self._fragment.node("Cast", [wide], "narrowed", output=block.output, to=int(block.elem_type))
        metadata = {
            BLOCK_KEY: block.name,
            f"{DOMAIN}.form": self._conversion.form,
            f"{DOMAIN}.activation": block.identified.label,
            PROGRAM_KEY: program.name,
            f"{DOMAIN}.max_error": f"{self._conversion.max_error:.3g}",
        }
        return Replacement(
            output=block.output,
            region=block.region.nodes,
            nodes=tuple(self._fragment.nodes(metadata)),
            initializers=tuple(self._fragment.initializers()),
            functions=tuple(self._functions),
        )

    @property
    def _dtype(self) -> DTypeLike:
        return np.float64 if self._double else np.float32

    def _read(self, tensor: str, name: str, elem_type: int) -> Tensor:
        existing = self._fragment.tensor(tensor)
        if elem_type == self._conversion.compute_type:
            return existing
        return self._fragment.node("Cast", [existing], name, to=int(self._conversion.compute_type))

    def _sum(self, query: Tensor, source: Tensor, target: str) -> None:
        """All heads of the program, its linear term and its constant; a lone head takes the linear term in."""
        program = self._conversion.program
        alone = len(program.heads) == 1
        taken = alone and program.linear != 0.0 and takes_linear(program.heads[0])
        rest: list[Tensor] = []
        if program.linear != 0.0 and not taken:
            rest.append(self._scaled(source, program.linear, 0.0, "linear"))
        if program.constant != 0.0:
            rest.append(self._scalar("constant", program.constant))
        terms: list[Tensor] = []
        for number, head in enumerate(program.heads):
            prefix = "" if alone else f"{number}/"
            output = target if alone and not rest else self._fragment.qualified(f"{prefix}output")
            terms.append(self._head(prefix, head, program.linear if taken else 0.0, query, source, output))
        total = terms[0]
        for number, term in enumerate([*terms[1:], *rest], start=1):
            last = number == len(terms) + len(rest) - 1
            total = self._fragment.node("Add", [total, term], f"sum_{number}", output=target if last else None)

    def _head(self, prefix: str, head: Head, linear: float, query: Tensor, source: Tensor, output: str) -> Variable:
        if head.c in (0.0, 1.0) or linear != 0.0:
            return self._plain_head(prefix, head, linear, query, source, output)
        inner = self._fragment.qualified(f"{prefix}unscaled")
        attended = self._plain_head(prefix, head.unscaled(), linear, query, source, inner)
        factor = self._scalar(f"{prefix}factor", head.c)
        return self._fragment.node("Mul", [attended, factor], f"{prefix}scaled", output=output)

    def _plain_head(
        self, prefix: str, head: Head, linear: float, query: Tensor, source: Tensor, output: str
    ) -> Variable:
        spelling = spelling_of(head, linear, double=self._double)
        inputs: dict[str, Tensor] = {
            "query": query,
            "key": self._key(prefix, head, query),
            "value": source if spelling.proportional else self._scaled(source, head.c, head.d, f"{prefix}self_value"),
        }
        if not spelling.zero_bias:
            inputs["key_offset"] = self._scalar(f"{prefix}key_offset", head.gamma)
            for name, attribute in (("bias_key", "slope"), ("bias_offset", "offset"), ("bias_value", "value")):
                row = [getattr(token, attribute) for token in head.bias_tokens]
                if name == "bias_value" and spelling.proportional:
                    row = [linear] * len(row)
                inputs[name] = self._fragment.constant(f"{prefix}{name}", np.asarray(row, dtype=self._dtype))
        if spelling.proportional:
            inputs["value_factor"] = self._scalar(f"{prefix}value_factor", head.c + linear)
        return self._attend(prefix, spelling, inputs, output)

    def _attend(self, prefix: str, spelling: Spelling, inputs: dict[str, Tensor], output: str) -> Variable:
        if self._conversion.inline:
            emit(self._fragment, spelling, inputs, output, opset=self._opset)
            return self._fragment.tensor(output)
        self._functions.append(function_of(spelling, self._opset))
        ordered = [inputs[name] for name in spelling.inputs]
        return self._fragment.node(spelling.name, ordered, f"{prefix}attention", output=output, domain=DOMAIN)

    def _key(self, prefix: str, head: Head, query: Tensor) -> Tensor:
        """The self key: a constant, or affine in y where the self logit is quadratic."""
        if head.alpha == 0.0:
            return self._scalar(f"{prefix}key", head.beta)
        return self._scaled(query, head.alpha, head.beta, f"{prefix}key")

    def _scaled(self, tensor: Tensor, factor: float, offset: float, name: str) -> Tensor:
        """`factor * tensor + offset`, with as few nodes as that needs."""
        if factor == 0.0:
            return self._scalar(name, offset)
        result = tensor
        if factor != 1.0:
            result = self._fragment.node("Mul", [result, self._scalar(f"{name}_factor", factor)], name)
        if offset != 0.0:
            result = self._fragment.node("Add", [result, self._scalar(f"{name}_offset", offset)], f"{name}_shifted")
        return result

    def _scalar(self, name: str, value: float) -> Constant:
        return self._fragment.constant(name, np.asarray(value, dtype=self._dtype))
