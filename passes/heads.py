"""The attention of one neuron's head over {self, bias tokens}, as nodes.

Comes in: a head and tensors for query and value. Goes out: nodes of a fragment, or a model-local function holding
them. Two spellings of the same softmax attention:

    `NeuronAttention`    Theorem 3: one bias token whose key and value are zero. With logits (q k, 0) the weight of self
                         is 1 / (1 + exp(-q k)), and the value is divided by that sum directly.
    `NeuronAttention_m`  m bias tokens with keys and values of their own; the largest logit is subtracted first. With
                         `_proportional` every value is a multiple of the token's own, so that the multiples are
                         averaged first: a linear term is taken into the softmax without cancellation.

Each query is scored against exactly its own key and the bias keys: the paper's mask is made structural. The
operators are those of opset 7 (Mul, Add, Sub, Exp, Neg, Div, Max, Sum, Clip) and Gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
from numpy.typing import DTypeLike

from passes.marks import DOMAIN
from passes.programs import Head
from rewriter.graph.surgeon import Fragment, Tensor, Variable

_DOC_ONE = (
    "Softmax attention of each neuron's head over two keys: the token itself (logit query * key, value `value`) "
    "and the bias token, whose key and value are zero. Theorem 3 of Huben and Morris 2023, arXiv 2309.08593; the mask "
    "is structural. query and value: [..., heads], head dimension 1; key: a scalar."
)
_DOC_MANY = (
    "Softmax attention of each neuron's head over {keys} keys: the token itself (logit query * key + key_offset, value "
    "`value`) and {m} constant bias tokens (logit query * bias_key[j] + bias_offset[j], value bias_value[j]); the "
    "largest logit is subtracted first. query, value: [..., heads]; bias_key, bias_offset, bias_value: [{m}].{more}"
)
_DOC_PROPORTIONAL = (
    " Here all values are multiples of `value`: value_factor for the token itself, bias_value[j] for the bias tokens."
)


@dataclass(frozen=True)
class Spelling:
    """Which function computes a head.

    Attributes:
        bias_tokens: m.
        zero_bias: one bias token with key and value zero: the short spelling of Theorem 3.
        proportional: whether all values are multiples of the token's own value.
        double: whether the arithmetic is float64 (else float32).
    """

    bias_tokens: int
    zero_bias: bool
    proportional: bool
    double: bool

    @property
    def name(self) -> str:
        """Name of the model-local function."""
        name = "NeuronAttention"
        if not self.zero_bias:
            name += f"_{self.bias_tokens}"
        if self.proportional:
            name += "_proportional"
        return name + ("_double" if self.double else "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Formal inputs of the function."""
        if self.zero_bias:
            return ("query", "key", "value")
        names = ("query", "key", "key_offset", "value", "bias_key", "bias_offset", "bias_value")
        return (*names, "value_factor") if self.proportional else names

    @property
    def dtype(self) -> DTypeLike:
        """The numpy type of the arithmetic."""
        return np.float64 if self.double else np.float32


def spelling_of(head: Head, linear: float, *, double: bool) -> Spelling:
    """The shortest spelling that computes `head` plus `linear` times its value.

    A linear term needs values that are all multiples of z: no constants among them.
    """
    token = head.bias_tokens[0]
    only_zero = len(head.bias_tokens) == 1 and (token.slope, token.offset, token.value) == (0.0, 0.0, 0.0)
    zero_bias = only_zero and linear == 0.0 and head.gamma == 0.0
    return Spelling(len(head.bias_tokens), zero_bias, linear != 0.0, double)


def takes_linear(head: Head) -> bool:
    """Whether a linear term can be taken into the head's softmax."""
    return head.d == 0.0 and all(token.value == 0.0 for token in head.bias_tokens)


def emit(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str, *, opset: int) -> None:
    """Add the nodes of one head to `fragment`, writing the tensor named `output` in full."""
    if spelling.zero_bias:
        _emit_one(fragment, spelling, inputs, output)
    else:
        _emit_many(fragment, spelling, inputs, output, opset)


@cache
def function_of(spelling: Spelling, opset: int) -> onnx.FunctionProto:
    """The spelling as a model-local function of domain `attnonly`; callers do not change it."""
    body = Fragment("")
    emit(body, spelling, {name: body.tensor(name) for name in spelling.inputs}, "output", opset=opset)
    doc = _DOC_ONE
    if not spelling.zero_bias:
        m = spelling.bias_tokens
        doc = _DOC_MANY.format(keys=m + 1, m=m, more=_DOC_PROPORTIONAL if spelling.proportional else "")
    return body.function(DOMAIN, spelling.name, spelling.inputs, "output", opset=opset, doc=doc)


def _emit_one(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str) -> None:
    logit = fragment.node("Mul", [inputs["query"], inputs["key"]], "logit")
    bias_weight = fragment.node("Exp", [fragment.node("Neg", [logit], "bias_logit")], "bias_weight")
    one = fragment.constant("self_weight", np.ones((), dtype=spelling.dtype))
    total = fragment.node("Add", [one, bias_weight], "total_weight")
    fragment.node("Div", [inputs["value"], total], "output", output=output)


def _emit_many(fragment: Fragment, spelling: Spelling, inputs: dict[str, Tensor], output: str, opset: int) -> None:
    query, value = _bounded(fragment, spelling, inputs["query"], opset), inputs["value"]
    logits = [_logit(fragment, query, inputs["key"], inputs["key_offset"], "self")]
    bias_values = []
    for j in range(spelling.bias_tokens):
        row = fragment.constant(f"index_{j}", np.asarray(j, dtype=np.int64))
        slope, offset, bias_value = (
            fragment.node("Gather", [inputs[name], row], f"{name}_{j}", axis=0)
            for name in ("bias_key", "bias_offset", "bias_value")
        )
        logits.append(_logit(fragment, query, slope, offset, f"bias_{j}"))
        bias_values.append(bias_value)
    top = fragment.node("Max", logits, "largest_logit")
    names = ["self", *(f"bias_{j}" for j in range(spelling.bias_tokens))]
    weights = [
        fragment.node("Exp", [fragment.node("Sub", [logit, top], f"{name}_shifted")], f"{name}_weight")
        for name, logit in zip(names, logits, strict=True)
    ]
    total = fragment.node("Sum", weights, "total_weight")
    own = inputs["value_factor"] if spelling.proportional else value
    parts = [
        fragment.node("Mul", [weight, carried], f"{name}_part")
        for name, weight, carried in zip(names, weights, [own, *bias_values], strict=True)
    ]
    weighted = fragment.node("Sum", parts, "weighted_sum")
    if spelling.proportional:
        share = fragment.node("Div", [weighted, total], "factor")
        fragment.node("Mul", [value, share], "output", output=output)
    else:
        fragment.node("Div", [weighted, total], "output", output=output)


def _logit(fragment: Fragment, query: Tensor, key: Tensor, offset: Tensor, name: str) -> Variable:
    return fragment.node("Add", [fragment.node("Mul", [query, key], f"{name}_score"), offset], f"{name}_logit")


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
