"""Form `local`: every query is scored against exactly its own key and the bias keys.

The nodes replace the activation region. W1 becomes the stacked query and value projection of the d_ff heads, W2 their
stacked output projection. Both stay in the graph unchanged and are never read, so the linear operators may be anything
linear. The pre-activations are the queries, the activation's output is the heads' output, each along its row of W2. The
tensors at both ends keep their names, and the paper's mask is structural.

The attention of a neuron's heads over {self, bias tokens} has three spellings, each a model-local function, or plain
nodes where it is inlined:

    `NeuronAttention`    Theorem 3: one bias token with key and value zero. With logits (q k, 0) the weight of self is
                         1 / (1 + exp(-q k)), and the value is divided by that sum directly.
    `NeuronAttention_m`  one head with m bias tokens that have keys and values of their own.
    `NeuronHeads_n_k`    n heads over the same k keys, every head's own key one of them, whose values are multiples of
                         `value`: the multiples are averaged first. A linear term is a multiple at every key.

A small offset of a logit (`passes.programs.softmax.FACTORED`) becomes a factor of the key's weight, e^(a y + b) =
e^b e^(a y), since the rounding error of a logit is proportional to its magnitude. Steep keys keep theirs (`_steep`).
The largest logit is subtracted first; without offsets it belongs to the smallest or the largest key. Operators are
those of opset 7 (Mul, Add, Sub, Exp, Neg, Div, Max, Sum, Clip) and Gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx
from numpy.typing import DTypeLike

from passes.conversion import Conversion
from passes.match.linear import Miss
from passes.match.marks import BLOCK_KEY, DOMAIN, PROGRAM_KEY
from passes.programs.head import BiasToken, Head
from passes.programs.program import Program
from passes.programs.sharing import Group, Key, groups_of
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Constant, Fragment, Tensor, Variable
from rewriter.graph.view import GraphView


def prepare_local(_view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """Decide how the coefficients are written; every block can be converted."""
    return replace(conversion, written=_as_written(conversion.program, conversion.dtype))


def _as_written(program: Program, dtype: DTypeLike) -> Program:
    """The program that the graph computes: shared keys as stored, with a linear term absorbed into them."""
    groups, linear = groups_of(program)
    heads: list[Head] = []
    for group in groups:
        heads += group.heads if group.keys is None else _heads_over(group.keys, group.own, dtype)
    return replace(program, heads=tuple(heads), linear=float(np.asarray(linear, dtype=dtype)))


def _heads_over(keys: Sequence[Key], own: int, dtype: DTypeLike) -> list[Head]:
    """One head per own key, over all keys, with the coefficients rounded to a type."""
    numbers = [
        Key(*(float(np.asarray(number, dtype=dtype)) for number in (key.slope, key.offset, key.weight, key.part)))
        for key in keys
    ]
    logits = [(key.slope, key.offset + math.log(key.weight)) for key in numbers]
    return [
        Head(
            beta=logits[place][0],
            gamma=logits[place][1],
            c=numbers[place].part / numbers[place].weight,
            bias_tokens=tuple(BiasToken(*logit) for other, logit in enumerate(logits) if other != place),
        )
        for place in range(own)
    ]


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
        # Half precisions compute in float32, and some programs in float64; only the ends have the model's type.
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
        """All heads of the program, its linear term and its constant."""
        program = self._conversion.program
        groups, linear = groups_of(program)
        # The last node must write the block's output under its own name, so the target is passed down.
        alone = len(groups) == 1
        rest: list[Tensor] = []
        if linear != 0.0:
            rest.append(self._scaled(source, linear, 0.0, "linear"))
        if program.constant != 0.0:
            rest.append(self._scalar("constant", program.constant))
        terms: list[Tensor] = []
        for number, group in enumerate(groups):
            prefix = "" if alone else f"{number}/"
            output = target if alone and not rest else self._fragment.qualified(f"{prefix}output")
            terms.append(self._group(prefix, group, query, source, output))
        total = terms[0]
        for number, term in enumerate([*terms[1:], *rest], start=1):
            last = number == len(terms) + len(rest) - 1
            total = self._fragment.node("Add", [total, term], f"sum_{number}", output=target if last else None)

    def _group(self, prefix: str, group: Group, query: Tensor, source: Tensor, output: str) -> Variable:
        if group.keys is not None:
            return self._shared(prefix, group.keys, group.own, query, source, output)
        (head,) = group.heads
        if head.c in (0.0, 1.0):
            return self._plain_head(prefix, head, query, source, output)
        # The factor is applied after the softmax, where it cannot overflow a value of weight 0 (`Head.unscaled`).
        inner = self._fragment.qualified(f"{prefix}unscaled")
        attended = self._plain_head(prefix, head.unscaled(), query, source, inner)
        factor = self._scalar(f"{prefix}factor", head.c)
        return self._fragment.node("Mul", [attended, factor], f"{prefix}scaled", output=output)

    def _plain_head(self, prefix: str, head: Head, query: Tensor, source: Tensor, output: str) -> Variable:
        """A single head with values of its own."""
        plain = head.shifted(0.0, -head.gamma)  # softmax depends on differences only, so the self key needs no offset
        keys = sorted(
            (Key.of(token.slope, token.offset, token.value) for token in plain.bias_tokens), key=lambda key: key.slope
        )
        steep = any(key.offset != 0.0 for key in keys)
        zero_bias = plain.zero_bias
        spelling = Spelling(len(keys) + 1, zero_bias=zero_bias, steep=steep, double=self._double)
        inputs: dict[str, Tensor] = {
            "query": query,
            "key": self._key(prefix, plain, query),
            "value": self._scaled(source, plain.c, plain.d, f"{prefix}self_value"),
        }
        if not zero_bias:
            inputs |= self._arrays(prefix, keys, ("bias_key", "bias_weight", "bias_part", "bias_offset"), steep=steep)
        return self._attend(prefix, spelling, inputs, output)

    def _shared(
        self, prefix: str, keys: tuple[Key, ...], own: int, query: Tensor, source: Tensor, output: str
    ) -> Variable:
        """Heads over the same keys, all values multiples of the source."""
        steep = any(key.offset != 0.0 for key in keys)
        spelling = Spelling(len(keys), own=own, steep=steep, double=self._double)
        inputs: dict[str, Tensor] = {"query": query, "value": source}
        inputs |= self._arrays(prefix, keys, ("keys", "weights", "parts", "offsets"), steep=steep)
        return self._attend(prefix, spelling, inputs, output)

    def _arrays(
        self, prefix: str, keys: Sequence[Key], names: tuple[str, str, str, str], *, steep: bool
    ) -> dict[str, Constant]:
        """The coefficients of the keys as constants; `names` are those of slope, weight, part and offset."""
        columns = zip(names, ("slope", "weight", "part", "offset"), strict=True)
        return {
            name: self._fragment.constant(
                f"{prefix}{name}", np.asarray([getattr(key, column) for key in keys], dtype=self._dtype)
            )
            for name, column in columns
            if steep or column != "offset"
        }

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
        """`factor * tensor + offset`, without nodes for a factor of 1 or an offset of 0."""
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


_DOC_ONE = (
    "Softmax attention of each neuron's head over two keys: the token itself (logit query * key, value `value`) "
    "and the bias token, whose key and value are zero. Theorem 3 of Huben and Morris 2023, arXiv 2309.08593; the mask "
    "is structural. query and value: [..., heads], head dimension 1; key: a scalar."
)
_DOC_MANY = (
    "Softmax attention of each neuron's head over {k} keys: the token itself (logit query * key, value `value`) and "
    "{m} constant bias tokens (logit query * bias_key[j] + log(bias_weight[j]){offset}, value bias_part[j] / "
    "bias_weight[j]), keys in ascending order; the largest logit is subtracted first. query, value: [..., heads]; "
    "bias_key, bias_weight, bias_part: [{m}]."
)
_DOC_SHARED = (
    "Softmax attention of {n} heads of each neuron over the same {k} keys with logits query * keys[j] + log(weights[j])"
    "{offset}; key j is head j's own for j < {n}, with value parts[j] / weights[j] * value, and a bias token's "
    "otherwise. The sum of the heads is value times the mean of these multiples; the largest logit is subtracted "
    "first. query, value: [..., heads]; keys, weights, parts: [{k}]."
)


@dataclass(frozen=True)
class Spelling:
    """The function that computes the heads.

    Attributes:
        keys: number of keys that a head attends to, including its own.
        own: for heads over shared keys, the number of heads; 0 for a single head with values of its own.
        zero_bias: one bias token with key and value zero: the short spelling of Theorem 3.
        steep: whether logits have offsets.
        double: whether the arithmetic is float64 (else float32).
    """

    keys: int
    own: int = 0
    zero_bias: bool = False
    steep: bool = False
    double: bool = False

    @property
    def name(self) -> str:
        """Name of the model-local function."""
        if self.zero_bias:
            name = "NeuronAttention"
        else:
            name = f"NeuronHeads_{self.own}_{self.keys}" if self.own else f"NeuronAttention_{self.keys - 1}"
        return name + ("_steep" if self.steep else "") + ("_double" if self.double else "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Formal inputs of the function."""
        if self.zero_bias:
            return ("query", "key", "value")
        if self.own:
            return ("query", "value", "keys", "weights", "parts", *(["offsets"] if self.steep else []))
        offset = ["bias_offset"] if self.steep else []
        return ("query", "key", "value", "bias_key", "bias_weight", "bias_part", *offset)

    @property
    def dtype(self) -> DTypeLike:
        """The numpy type of the arithmetic."""
        return np.float64 if self.double else np.float32

    @property
    def doc(self) -> str:
        """The function's doc string."""
        if self.zero_bias:
            return _DOC_ONE
        if self.own:
            return _DOC_SHARED.format(n=self.own, k=self.keys, offset=" + offsets[j]" if self.steep else "")
        return _DOC_MANY.format(k=self.keys, m=self.keys - 1, offset=" + bias_offset[j]" if self.steep else "")


def emit(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str, *, opset: int) -> None:
    """Add the nodes of the heads to `fragment`; `output` is the full name of the result."""
    if spelling.zero_bias:
        _emit_one(fragment, spelling, inputs, output)
    elif spelling.own:
        _emit_shared(fragment, spelling, inputs, output, opset)
    else:
        _emit_many(fragment, spelling, inputs, output, opset)


@cache
def function_of(spelling: Spelling, opset: int) -> onnx.FunctionProto:
    """The spelling as a model-local function of domain `attnonly`; it is cached, so callers must not change it."""
    body = Fragment("")
    emit(body, spelling, {name: body.tensor(name) for name in spelling.inputs}, "output", opset=opset)
    return body.function(DOMAIN, spelling.name, spelling.inputs, "output", opset=opset, doc=spelling.doc)


def _emit_one(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str) -> None:
    # No maximum is subtracted: where exp(-logit) overflows, the quotient is 0, as it should be.
    logit = fragment.node("Mul", [inputs["query"], inputs["key"]], "logit")
    bias_weight = fragment.node("Exp", [fragment.node("Neg", [logit], "bias_logit")], "bias_weight")
    one = fragment.constant("self_weight", np.ones((), dtype=spelling.dtype))
    total = fragment.node("Add", [one, bias_weight], "total_weight")
    fragment.node("Div", [inputs["value"], total], "output", output=output)


def _emit_many(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str, opset: int) -> None:
    query = _bounded(fragment, spelling, inputs["query"], opset)
    count = spelling.keys - 1
    names = ["self", *(f"bias_{j}" for j in range(count))]
    logits = [fragment.node("Mul", [query, inputs["key"]], "self_logit")]
    logits += [
        _logit(fragment, query, inputs, ("bias_key", "bias_offset"), j, f"bias_{j}", steep=spelling.steep)
        for j in range(count)
    ]
    # Without offsets the largest logit is that of the smallest key, the largest key, or self. Keys are sorted.
    ends = logits if spelling.steep or count == 1 else [logits[0], logits[1], logits[-1]]
    shares = _exponentials(fragment, names, logits, ends)
    weights: list[Tensor] = [shares[0]]
    parts: list[Tensor] = [fragment.node("Mul", [shares[0], inputs["value"]], "self_part")]
    for j, (name, share) in enumerate(zip(names[1:], shares[1:], strict=True)):
        weights.append(fragment.node("Mul", [share, _row(fragment, inputs, "bias_weight", j)], f"{name}_weight"))
        parts.append(fragment.node("Mul", [share, _row(fragment, inputs, "bias_part", j)], f"{name}_part"))
    total = fragment.node("Sum", weights, "total_weight")
    weighted = fragment.node("Sum", parts, "weighted_sum")
    fragment.node("Div", [weighted, total], "output", output=output)


def _emit_shared(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str, opset: int) -> None:
    query = _bounded(fragment, spelling, inputs["query"], opset)
    names = [f"key_{j}" for j in range(spelling.keys)]
    logits = [
        _logit(fragment, query, inputs, ("keys", "offsets"), j, name, steep=spelling.steep)
        for j, name in enumerate(names)
    ]
    shares = _exponentials(fragment, names, logits, logits)
    weights: list[Tensor] = []
    parts: list[Tensor] = []
    for j, (name, share) in enumerate(zip(names, shares, strict=True)):
        weights.append(fragment.node("Mul", [share, _row(fragment, inputs, "weights", j)], f"{name}_weight"))
        if j < spelling.own:
            parts.append(fragment.node("Mul", [share, _row(fragment, inputs, "parts", j)], f"{name}_part"))
    total = fragment.node("Sum", weights, "total_weight")
    weighted = parts[0] if len(parts) == 1 else fragment.node("Sum", parts, "weighted_sum")
    mean = fragment.node("Div", [weighted, total], "mean")
    fragment.node("Mul", [inputs["value"], mean], "output", output=output)


def _exponentials(
    fragment: Fragment, names: Sequence[str], logits: Sequence[Tensor], ends: Sequence[Tensor]
) -> list[Variable]:
    """The exponential of every logit less the largest of `ends`."""
    top = fragment.node("Max", list(ends), "largest_logit")
    return [
        fragment.node("Exp", [fragment.node("Sub", [logit, top], f"{name}_shifted")], f"{name}_share")
        for name, logit in zip(names, logits, strict=True)
    ]


def _row(fragment: Fragment, inputs: dict[str, Tensor], name: str, j: int) -> Variable:
    """Entry j of a constant input."""
    index = fragment.constant(f"{name}_index_{j}", np.asarray(j, dtype=np.int64))
    return fragment.node("Gather", [inputs[name], index], f"{name}_{j}", axis=0)


def _logit(
    fragment: Fragment,
    query: Tensor,
    inputs: dict[str, Tensor],
    names: tuple[str, str],
    j: int,
    name: str,
    *,
    steep: bool,
) -> Variable:
    score = fragment.node("Mul", [query, _row(fragment, inputs, names[0], j)], f"{name}_score")
    return fragment.node("Add", [score, _row(fragment, inputs, names[1], j)], f"{name}_logit") if steep else score


def _bounded(fragment: Fragment, spelling: Spelling, query: Tensor, opset: int) -> Variable:
    """The query clipped to +-2^60 (float64: 2^500), far beyond the point where weights are 0 or 1.

    No logit is infinite then: the difference of two infinite logits would be NaN.
    """
    limit = 2.0**500 if spelling.double else 2.0**60
    if opset < 11:  # the bounds of Clip were attributes
        return fragment.node("Clip", [query], "finite_query", min=-limit, max=limit)
    bounds = [
        fragment.constant(name, np.asarray(value, dtype=spelling.dtype))
        for name, value in (("lowest_query", -limit), ("highest_query", limit))
    ]
    return fragment.node("Clip", [query, *bounds], "finite_query")
