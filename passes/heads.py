"""The attention of one neuron's head over {self, bias tokens}, as nodes.

Comes in: a head and tensors for query and value. Goes out: nodes of a fragment, or a model-local function holding
them. Two spellings of the same softmax attention:

    `NeuronAttention`    Theorem 3: one bias token whose key and value are zero. With logits (q k, 0) the weight of self
                         is 1 / (1 + exp(-q k)), and the value is divided by that sum directly.
    `NeuronAttention_m`  m bias tokens with keys and values of their own; the largest logit is subtracted first.

Each query is scored against exactly its own key and the bias keys: the paper's mask is made structural. The
operators are those of opset 7 (Mul, Add, Sub, Exp, Neg, Div, Max, Sum, Clip) and Gather.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import DTypeLike

from passes.marks import DOMAIN
from passes.programs import Head
from rewriter.graph.surgeon import Fragment

_DOC_ONE = (
    "Softmax attention of each neuron's head over two keys: the token itself (logit query * key, value `value`) "
    "and the bias token, whose key and value are zero. Theorem 3 of Huben and Morris 2023, arXiv 2309.08593; the mask "
    "is structural. query and value: [..., heads], head dimension 1; key: a scalar."
)
_DOC_MANY = (
    "Softmax attention of each neuron's head over {keys} keys: the token itself (logit query * key + key_offset, value "
    "`value`) and {m} constant bias tokens (logit query * bias_key[j] + bias_offset[j], value bias_value[j]); the "
    "largest logit is subtracted first. query, value: [..., heads]; bias_key, bias_offset, bias_value: [{m}].{linear}"
)
_DOC_LINEAR = (
    " linear_value is added to every value: a further head that attends to itself alone, taken into the weighted sum "
    "since the weights sum to one (`value` holds it already)."
)


@dataclass(frozen=True)
class Spelling:
    """Which function computes a head.

    Attributes:
        bias_tokens: m.
        zero_bias: one bias token with key and value zero: the short spelling of Theorem 3.
        linear: whether a linear term is taken into the weighted sum.
        double: whether the arithmetic is float64 (else float32).
    """

    bias_tokens: int
    zero_bias: bool
    linear: bool
    double: bool

    @property
    def name(self) -> str:
        """Name of the model-local function."""
        name = "NeuronAttention"
        if not self.zero_bias:
            name += f"_{self.bias_tokens}"
        if self.linear:
            name += "_linear"
        return name + ("_double" if self.double else "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Formal inputs of the function."""
        if self.zero_bias:
            return ("query", "key", "value")
        names = ("query", "key", "key_offset", "value", "bias_key", "bias_offset", "bias_value")
        return (*names, "linear_value") if self.linear else names

    @property
    def dtype(self) -> DTypeLike:
        """The numpy type of the arithmetic."""
        return np.float64 if self.double else np.float32


def spelling_of(head: Head, linear: float, *, double: bool) -> Spelling:
    """The shortest spelling that computes `head` plus `linear` times its value."""
    token = head.bias_tokens[0]
    only_zero = len(head.bias_tokens) == 1 and (token.slope, token.offset, token.value) == (0.0, 0.0, 0.0)
    zero_bias = only_zero and linear == 0.0 and head.gamma == 0.0
    return Spelling(len(head.bias_tokens), zero_bias, linear != 0.0, double)


def emit(fragment: Fragment, spelling: Spelling, inputs: dict[str, gs.Tensor], output: str, *, opset: int) -> None:
    """Add the nodes of one head to `fragment`, writing the tensor named `output` in full."""
    if spelling.zero_bias:
        _emit_one(fragment, spelling, inputs, output)
    else:
        _emit_many(fragment, spelling, inputs, output, opset)


def function_of(spelling: Spelling, opset: int) -> onnx.FunctionProto:
    """The spelling as a model-local function of domain `attnonly`."""
    body = Fragment("")
    emit(body, spelling, {name: body.tensor(name) for name in spelling.inputs}, "output", opset=opset)
    doc = _DOC_ONE
    if not spelling.zero_bias:
        m = spelling.bias_tokens
        doc = _DOC_MANY.format(keys=m + 1, m=m, linear=_DOC_LINEAR if spelling.linear else "")
    return body.function(DOMAIN, spelling.name, spelling.inputs, "output", opset=opset, doc=doc)


def _emit_one(fragment: Fragment, spelling: Spelling, inputs: dict[str, gs.Tensor], output: str) -> None:
    logit = fragment.node("Mul", [inputs["query"], inputs["key"]], "logit")
    bias_weight = fragment.node("Exp", [fragment.node("Neg", [logit], "bias_logit")], "bias_weight")
    one = fragment.constant("self_weight", np.ones((), dtype=spelling.dtype))
    total = fragment.node("Add", [one, bias_weight], "total_weight")
    fragment.node("Div", [inputs["value"], total], "output", output=output)


def _emit_many(fragment: Fragment, spelling: Spelling, inputs: dict[str, gs.Tensor], output: str, opset: int) -> None:
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
    if spelling.linear:
        bias_values = [
            fragment.node("Add", [bias_value, inputs["linear_value"]], f"bias_{j}_value")
            for j, bias_value in enumerate(bias_values)
        ]
    parts = [
        fragment.node("Mul", [weight, carried], f"{name}_part")
        for name, weight, carried in zip(names, weights, [value, *bias_values], strict=True)
    ]
    fragment.node("Div", [fragment.node("Sum", parts, "weighted_sum"), total], "output", output=output)


def _logit(fragment: Fragment, query: gs.Tensor, key: gs.Tensor, offset: gs.Tensor, name: str) -> gs.Variable:
    return fragment.node("Add", [fragment.node("Mul", [query, key], f"{name}_score"), offset], f"{name}_logit")


def _bounded(fragment: Fragment, spelling: Spelling, query: gs.Tensor, opset: int) -> gs.Variable:
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
