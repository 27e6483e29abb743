"""The attention of a neuron's heads over {self, bias tokens}, as nodes.

Comes in: which spelling, and tensors for query, keys and values. Goes out: nodes of a fragment, or a model-local
function holding them. Three spellings of the same softmax attention:

    `NeuronAttention`    Theorem 3: one bias token whose key and value are zero. With logits (q k, 0) the weight of self
                         is 1 / (1 + exp(-q k)), and the value is divided by that sum directly.
    `NeuronAttention_m`  one head with m bias tokens that have keys and values of their own.
    `NeuronHeads_n_k`    n heads over the same k keys, every head's own key one of them, whose values are multiples of
                         `value`: the multiples are averaged first. A linear term is a multiple at every key.

The offset of a logit stands as a factor of the key's weight, e^(a y + b) = e^b e^(a y), where it is small
(`passes.programs.program.FACTORED`): rounding would be proportional to the logit. Steep keys keep theirs (`_steep`).
The largest logit is subtracted first; without offsets it belongs to the smallest or the largest key. Each query is
scored against exactly its own key and the bias keys: the paper's mask is made structural. The operators are those of
opset 7 (Mul, Add, Sub, Exp, Neg, Div, Max, Sum, Clip) and Gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
from numpy.typing import DTypeLike

from passes.match.marks import DOMAIN
from rewriter.graph.surgeon import Fragment, Tensor, Variable

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
    """Which function computes the heads.

    Attributes:
        keys: keys that a head attends to, its own included.
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
        """What the function computes."""
        if self.zero_bias:
            return _DOC_ONE
        if self.own:
            return _DOC_SHARED.format(n=self.own, k=self.keys, offset=" + offsets[j]" if self.steep else "")
        return _DOC_MANY.format(k=self.keys, m=self.keys - 1, offset=" + bias_offset[j]" if self.steep else "")


def emit(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str, *, opset: int) -> None:
    """Add the nodes of the heads to `fragment`, writing the tensor named `output` in full."""
    if spelling.zero_bias:
        _emit_one(fragment, spelling, inputs, output)
    elif spelling.own:
        _emit_shared(fragment, spelling, inputs, output, opset)
    else:
        _emit_many(fragment, spelling, inputs, output, opset)


@cache
def function_of(spelling: Spelling, opset: int) -> onnx.FunctionProto:
    """The spelling as a model-local function of domain `attnonly`; callers do not change it."""
    body = Fragment("")
    emit(body, spelling, {name: body.tensor(name) for name in spelling.inputs}, "output", opset=opset)
    return body.function(DOMAIN, spelling.name, spelling.inputs, "output", opset=opset, doc=spelling.doc)


def _emit_one(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str) -> None:
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
    # without offsets the largest logit is that of the largest key, the smallest, or the token's own
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
    """The exponential of every logit, the largest of `ends` subtracted."""
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
    """The query within +-2^60 (float32), far beyond where the weights are 0 and 1.

    No logit can reach infinity then, whose difference to another infinite logit would be NaN.
    """
    limit = 2.0**500 if spelling.double else 2.0**60
    if opset < 11:
        return fragment.node("Clip", [query], "finite_query", min=-limit, max=limit)
    bounds = [
        fragment.constant(name, np.asarray(value, dtype=spelling.dtype))
        for name, value in (("lowest_query", -limit), ("highest_query", limit))
    ]
    return fragment.node("Clip", [query, *bounds], "finite_query")
