"""Form `local`: every query is scored against exactly its own key and the bias keys.

The nodes replace the activation region: pre-activations are the queries, the activation's output is the heads' output.
W1 and W2 stay in the graph as the heads' stacked projections and are never read, so they may be anything linear. In a
gate, the self values are the line g as attention, and what the heads make of them is multiplied by the gate's value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx
from numpy.typing import ArrayLike

from passes.conversion import Conversion
from passes.forms.builder import DOMAIN, LARGEST_SINGLE, Builder, replacement
from passes.forms.spelling import (
    BIAS_ARRAYS,
    LARGEST_PART,
    SHARED_ARRAYS,
    Spelling,
    function_of,
    line_of,
    own_keys,
    powers_of,
    progression_over,
    shared_keys,
    zero_bias,
)
from passes.programs.groups import SharedKey, by_keys, progression_of
from passes.programs.head import FACTORED, Head
from passes.programs.line import Line
from passes.programs.powers import Powers
from passes.programs.program import Program
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Constant, Tensor, Variable
from rewriter.graph.view import GraphView


def emit_local(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    return _Emitter(view, conversion).run()


def _one_a_side(keys: Sequence[SharedKey]) -> bool:
    """Whether bias tokens compete only with self: clipped logits do not tell which of two is larger."""
    slopes = [key.slope for key in keys]
    return all(slopes) and sum(slope < 0.0 for slope in slopes) <= 1 and sum(slope > 0.0 for slope in slopes) <= 1


_STEEP = 8.0
"""A head with a steeper key has weights below the smallest normal float32 where trained models have pre-activations."""


class _Emitter:
    def __init__(self, view: GraphView, conversion: Conversion) -> None:
        self._conversion = conversion
        self._b = Builder.of(view, conversion)
        self._opset = view.opsets.get("", 1)
        self._functions: list[onnx.FunctionProto] = []
        self._double = conversion.compute_type == onnx.TensorProto.DOUBLE

    def run(self) -> Replacement:
        b, block = self._b, self._conversion.block
        query = b.read(block.gate, block.gate_type, "query")
        source = query if block.value == block.gate else b.read(block.value, block.value_type, "value")
        result = self._program(query, source)
        # Half precisions compute in float32, and some programs in float64; only the ends have the model's type.
        if block.elem_type != b.compute_type:
            result = b.node("Cast", [b.called(result, "wide_output")], "narrowed", to=int(block.elem_type))
        result.name = block.output
        return replacement(b, self._conversion, block.output, self._functions)

    def _program(self, query: Tensor, source: Tensor) -> Variable:
        b, program, block = self._b, self._conversion.program, self._conversion.block
        own = source if program.line is None else self._line(program.line, query)
        if program.powers is not None:
            result = self._powers(program.powers, query, own)
        elif program.heads:
            result = self._sum(program, query, own)
        else:
            result = b.node("Mul", [own, b.numbers("linear_factor", program.linear)], "linear")
        if program.line is None:
            return result
        if block.value == block.gate and len(program.heads) == 1:
            source = self._finite(program.heads[0], source, "gated_value", zeros=True)
        return b.node("Mul", [source, b.called(result, "weight_of_value")], "gated")

    def _line(self, line: Line, query: Tensor) -> Variable:
        rates = [0.0, *(rate for rate, _ in line.pairs), *([0.5] if line.middle else [])]
        # The step divides the whole, so the sum of weights takes it as a factor, which is exact.
        weights = [line.end, *(weight for _, weight in line.pairs), *([line.middle] if line.middle else [])]
        inputs: dict[str, Tensor] = {
            "query": query,
            "step": self._b.numbers("line_step", -line.step),
            "rates": self._b.numbers("line_rates", rates),
            "weights": self._b.numbers("line_weights", [line.step * weight for weight in weights]),
        }
        spelling = line_of(inputs, len(line.pairs), middle=bool(line.middle), double=self._double)
        return self._b.called(self._attend("line/", spelling, inputs), "line")

    def _powers(self, powers: Powers, query: Tensor, own: Tensor) -> Variable:
        given: dict[str, ArrayLike] = {"parts": powers.parts, "shifts": powers.shifts}
        given |= {"step": powers.step} if powers.step != 1.0 else {}
        given |= {"base": powers.base} if powers.base != 0.0 else {}
        inputs = {"query": query, "value": own, **self._constants("", given)}
        spelling = powers_of(inputs, len(powers.parts) - 2 * powers.pairs, powers.pairs, double=self._double)
        result = self._attend("", spelling, inputs)
        return result if powers.factor == 1.0 else self._times(result, powers.factor, "")

    def _sum(self, program: Program, query: Tensor, source: Tensor) -> Variable:
        groups, linear = by_keys(program)
        rest: list[Tensor] = []
        if linear != 0.0:
            rest.append(self._scaled(source, linear, 0.0, "linear"))
        if program.constant != 0.0:
            rest.append(self._b.numbers("constant", program.constant))
        terms: list[Variable] = []
        for number, group in enumerate(groups):
            prefix = "" if len(groups) == 1 else f"{number}/"
            terms.append(self._b.called(self._group(prefix, group, query, source), f"{prefix}output"))
        total = terms[0]
        for number, term in enumerate([*terms[1:], *rest], start=1):
            total = self._b.node("Add", [total, term], f"sum_{number}")
        return total

    def _group(self, prefix: str, head: Head | tuple[SharedKey, ...], query: Tensor, source: Tensor) -> Variable:
        if isinstance(head, tuple):
            return self._shared(prefix, head, query, source)
        if head.c in (0.0, 1.0):
            return self._plain_head(prefix, head, query, source)
        # The factor is applied after the softmax, where it cannot overflow a value of weight 0 (`Head.unscaled`).
        return self._times(self._plain_head(prefix, head.unscaled(), query, source), head.c, prefix)

    def _times(self, result: Variable, factor: float, prefix: str) -> Variable:
        unscaled, number = self._b.called(result, f"{prefix}unscaled"), self._b.numbers(f"{prefix}factor", factor)
        return self._b.node("Mul", [unscaled, number], f"{prefix}scaled")

    def _plain_head(self, prefix: str, head: Head, query: Tensor, source: Tensor) -> Variable:
        plain = head.shifted(0.0, -head.gamma)  # softmax depends on differences only, so the self key needs no offset
        tokens = sorted(plain.bias_tokens, key=lambda token: token.slope)
        keys = [SharedKey.of(token.slope, token.offset, token.value, plain.largest_factored) for token in tokens]
        offsets = any(key.offset != 0.0 for key in keys)
        # In float64 a self value may be too large for a clipped logit to take all its weight.
        centred = offsets and not self._double and plain.beta == 0.0 and _one_a_side(keys)
        centred = centred and max(max(key.weight, abs(key.part)) for key in keys) <= LARGEST_PART
        # A line is bounded already, and a constant value reads nothing.
        bounded = self._conversion.program.line is not None or plain.c == 0.0
        value = source if bounded else self._finite(plain, source, f"{prefix}finite_value")
        value = self._scaled(value, plain.c, plain.d, f"{prefix}self_value")
        inputs = {"query": query}
        if not centred:
            inputs["key"] = self._b.numbers(f"{prefix}key", plain.beta)
        inputs["value"] = value
        if plain.zero_bias:
            spelling = zero_bias(inputs, steep=abs(plain.beta) > _STEEP, double=self._double)
        else:
            silent = tuple(j for j in dict.fromkeys((0, len(keys) - 1)) if keys[j].part == 0.0)
            parts = len(silent) < len(keys)
            inputs |= self._arrays(prefix, keys, BIAS_ARRAYS, parts=parts, offsets=offsets)
            spelling = own_keys(inputs, len(keys), silent, double=self._double)
        return self._attend(prefix, spelling, inputs)

    def _finite(self, head: Head, source: Tensor, name: str, *, zeros: bool = False) -> Tensor:
        """Values, clipped on the sides where a steep bias token has all the weight (with `zeros`: if its value is 0).

        The weights of the others are tiny there, but not 0, since logits are clipped; times a value they must be.
        """
        if not any(abs(token.offset) > FACTORED for token in head.bias_tokens):
            return source
        by_slope = sorted(head.bias_tokens, key=lambda token: token.slope)
        first, last = (token if token.value == 0.0 or not zeros else None for token in (by_slope[0], by_slope[-1]))
        low = -LARGEST_SINGLE if first is not None and first.slope < head.beta else -math.inf
        high = LARGEST_SINGLE if last is not None and last.slope > head.beta else math.inf
        return self._b.clipped(source, (low, high), name)

    def _shared(self, prefix: str, keys: Sequence[SharedKey], query: Tensor, source: Tensor) -> Variable:
        inputs: dict[str, Tensor] = {"query": query, "value": source}
        progression = progression_of(keys, self._b.dtype)
        if progression is not None:
            step, part = progression.step, progression.part
            given: dict[str, ArrayLike] = {"weights": progression.weights}
            given |= {"step": step} if step != 1.0 else {}
            given |= {"part": part} if part != 0.0 else {}
            inputs |= self._constants(prefix, given)
            keys_of_all, steep = len(progression.weights) + 1, abs(step) > _STEEP
            spelling = progression_over(inputs, keys_of_all, steep=steep, double=self._double)
        else:
            steep = any(key.offset != 0.0 for key in keys)
            inputs |= self._arrays(prefix, keys, SHARED_ARRAYS, parts=True, offsets=steep)
            own = sum(key.part != 0.0 for key in keys)
            spelling = shared_keys(inputs, len(keys), own, double=self._double)
        return self._attend(prefix, spelling, inputs)

    def _arrays(
        self, prefix: str, keys: Sequence[SharedKey], names: Sequence[str], *, parts: bool, offsets: bool
    ) -> dict[str, Constant]:
        """The coefficients of the keys as constants; `names` are those of slope, weight, part and offset."""
        columns = zip(names, ("slope", "weight", "part", "offset"), (True, True, parts, offsets), strict=True)
        given = {name: [getattr(key, column) for key in keys] for name, column, wanted in columns if wanted}
        return self._constants(prefix, given)

    def _constants(self, prefix: str, given: Mapping[str, ArrayLike]) -> dict[str, Constant]:
        return {name: self._b.numbers(f"{prefix}{name}", values) for name, values in given.items()}

    def _attend(self, prefix: str, spelling: Spelling, inputs: Mapping[str, Tensor]) -> Variable:
        if self._conversion.inline:
            # Several functions may follow one another, with the same names inside.
            return spelling.emit(self._b.within(prefix.rstrip("/")), inputs)
        self._functions.append(function_of(spelling, self._opset))
        operands = [inputs[name] for name in spelling.inputs]
        return self._b.node(spelling.name, operands, f"{prefix}attention", domain=DOMAIN)

    def _scaled(self, tensor: Tensor, factor: float, offset: float, name: str) -> Tensor:
        """`factor * tensor + offset`, without nodes for a factor of 1 or an offset of 0."""
        if factor == 0.0:
            return self._b.numbers(name, offset)
        result = tensor
        if factor != 1.0:
            result = self._b.node("Mul", [result, self._b.numbers(f"{name}_factor", factor)], name)
        if offset != 0.0:
            result = self._b.node("Add", [result, self._b.numbers(f"{name}_offset", offset)], f"{name}_shifted")
        return result
