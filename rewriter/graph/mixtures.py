"""Expand mixtures of experts in one operator, com.microsoft::MoE and QMoE, by their definition.

    p   = Softmax(router_probs), or router_weights             [tokens, experts]
    i   = the k experts with the largest router_probs          [tokens, k]
    w   = p at i; over its sum with normalize_routing_weights  [tokens, k]
    out = sum over i of w_i (W2_i f(W1_i x + b1_i) + b2_i)     like x

SwiGLU has gates g and values l in the even and odd rows of W1: f = G sigmoid(alpha G) (L + beta) with G = min(g, limit)
and L = clip(l, -limit, limit). A weight of QMoE is (number - zero point) scale, with one scale for each row or for each
block of a row. Every expert is applied to every token; the chosen ones are picked from the results.

Only the run, by onnxruntime's own kernel, detects an error in this definition. Features that the CPU kernel lacks
or computes differently are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from onnx import TensorProto

from rewriter.graph.elementwise import MICROSOFT
from rewriter.graph.fused import Writer, with_parts
from rewriter.graph.view import attributes, integer_of, key_of, opsets
from rewriter.graph.walk import all_graphs
from rewriter.text import quoted

EXPERTS: Mapping[tuple[str, str], Sequence[str]] = {
    (MICROSOFT, "MoE"): ("x", "router", "fc1", "fc1_bias", "fc2", "fc2_bias", "fc3", "fc3_bias"),
    (MICROSOFT, "QMoE"): (
        *("x", "router", "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias", "fc3", "fc3_scales"),
        *("fc3_bias", "fc1_zeros", "fc2_zeros", "fc3_zeros", "router_weights"),
    ),
}
"""The operators, with names for their operands; further operands of QMoE belong to non-integer weights."""

_ACTIVATIONS = (b"relu", b"gelu", b"silu", b"swiglu")
_OPSET = 15  # the first opset with all operators of the definition
_KERNEL = "onnxruntime's CPU kernel"


def with_plain_experts(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which mixtures of experts are expanded where possible; the model itself if none is."""
    weights = {tensor.name: tensor for graph in all_graphs(model.graph) for tensor in graph.initializer}
    opset = opsets(model.opset_import).get("", 1)

    def plain(node: onnx.NodeProto) -> Sequence[onnx.NodeProto] | None:
        parts = plain_experts(node, weights, opset)
        return None if isinstance(parts, str) else parts

    return with_parts(model, plain)


def plain_experts(
    node: onnx.NodeProto, weights: Mapping[str, TensorProto], opset: int
) -> Sequence[onnx.NodeProto] | str | None:
    """The plain operators that define a mixture of experts; None for any other operator.

    The last node has its output. If the operator cannot be expanded, the reason. Values of weights are not read.
    """
    if key_of(node) not in EXPERTS:
        return None
    mixture = _Mixture(node, weights)
    return mixture.unfit(opset) or mixture.written()


@dataclass(frozen=True)
class _Mixture(Writer):
    """One operator, and the nodes that replace it."""

    weights: Mapping[str, TensorProto]

    @cached_property
    def given(self) -> Mapping[str, str]:
        return {key: name for key, name in zip(EXPERTS[key_of(self.node)], self.node.input, strict=False) if name}

    @cached_property
    def activation(self) -> bytes:
        return bytes(attributes(self.node).get("activation_type", b"relu"))

    @cached_property
    def bits(self) -> int:
        """Bits of a weight in an entry of its tensor; 8 where it is not quantised."""
        return integer_of(self.node, "expert_weight_bits", 4) if self.node.op_type == "QMoE" else 8

    def unfit(self, opset: int) -> str:
        """Why it cannot be expanded; empty if it can."""
        chosen = functools.partial(integer_of, self.node, default=0)
        unknown = quoted(self.activation.decode("utf-8", "replace"))
        in_pairs = "fc3" not in self.given and chosen("swiglu_fusion") == (self.activation == b"swiglu")
        reasons = {
            "its experts have no activation": self.activation == b"identity",
            f"{_KERNEL} has no activation {unknown}": self.activation not in _ACTIVATIONS,
            "it routes with use_sparse_mixer": chosen("use_sparse_mixer"),
            f"{_KERNEL} has gates in pairs of rows only (swiglu_fusion 1)": not in_pairs,
            f"{_KERNEL} does not clip behind the activation": chosen("swiglu_limit_after_activation"),
            f"its parts need opset {_OPSET}, and the model has {opset}": opset < _OPSET,
        }
        if self.node.op_type == "QMoE":
            bits = {integer_of(self.node, f"fc{each}_expert_weight_bits", self.bits) for each in (1, 2, 3)}
            others = attributes(self.node).get("quant_type", b"int") != b"int" or any(self.node.input[15:])
            rounds = f"{_KERNEL} rounds its activations to 8 bits (blocks of 8-bit weights, or accuracy_level 4)"
            shares = f"{_KERNEL} normalises its routing weights, though normalize_routing_weights is not 1"
            reasons |= {
                f"{_KERNEL} has integers as weights only": others,
                "its weights are not of 4 bits or 8 bits throughout": bits | {self.bits} not in ({4}, {8}),
                "its weights are packed for one kernel": chosen("weights_prepacked") == 1,
                rounds: chosen("block_size") > 0 and (self.bits == 8 or chosen("accuracy_level") == 4),
                shares: chosen("normalize_routing_weights") != 1 and "router_weights" not in self.given,
            }
        reason = next((reason for reason, holds in reasons.items() if holds), "")
        return reason or ("" if self.sizes else "its weights are not initializers of the shapes that it asks for")

    @cached_property
    def sizes(self) -> Mapping[str, tuple[int, list[int]]]:
        """For fc1 and fc2 the columns, and the shape of its scales: experts, rows, blocks; empty if inconsistent."""
        dims = {key: list(self.weights[name].dims) for key, name in self.given.items() if name in self.weights}
        if [len(dims.get(key, ())) for key in ("fc1", "fc2")] != [3, 3] or not {"x", "router"} <= self.given.keys():
            return {}
        experts, hidden, packed = dims["fc2"]
        each, block = 8 // self.bits, max(integer_of(self.node, "block_size", 0), 0)
        inner, wanted, made = packed * each, dict[str, list[int]](), dict[str, tuple[int, list[int]]]()
        outer = inner * (1 + (self.activation == b"swiglu"))
        for key, rows, columns in (("fc1", outer, hidden), ("fc2", hidden, inner)):
            if columns % each or columns % (block or 1):
                return {}
            whole = [experts, rows, columns // block] if block else [experts, rows]
            made[key], wanted[key] = (columns, whole), [experts, rows, columns // each]
            zeros = [*whole[:-1], -(-whole[-1] // each)]
            wanted |= {f"{key}_bias": [experts, rows], f"{key}_scales": whole, f"{key}_zeros": zeros}
        needed = {*self.given, *(("fc1_scales", "fc2_scales") if self.node.op_type == "QMoE" else ())}
        return made if all(dims.get(key) == shape for key, shape in wanted.items() if key in needed) else {}

    # -- the nodes -------------------------------------------------------------------------------------------------

    def written(self) -> Sequence[onnx.NodeProto]:
        given, last = self.given, self.constant([-1])
        hidden, kind = self.sizes["fc2"][1][1], self.weights[given["fc1"]].data_type
        if self.node.op_type == "QMoE":
            kind = self.weights[given["fc1_scales"]].data_type  # may differ from that of the data
        shares = given.get("router_weights") or self.put("Softmax", given["router"], axis=-1)
        count = self.constant([integer_of(self.node, "k", 1)])
        chosen = f"{self.put('TopK', given['router'], count, axis=-1)}/experts"
        self.nodes[-1].output.append(chosen)
        shares = self.put("GatherElements", shares, chosen, axis=-1)
        if integer_of(self.node, "normalize_routing_weights", 0) == 1:
            shares = self.put("Div", shares, self.put("ReduceSum", shares, last, keepdims=1))
        data = self.put("Cast", self.put("Flatten", given["x"], axis=-1), to=kind)
        data = self.linear("fc2", self.activated(self.linear("fc1", data, kind), kind), kind)
        # [experts, tokens, hidden] to [k, tokens, hidden]
        places = self.put("Unsqueeze", self.put("Transpose", chosen, perm=[1, 0]), last)
        places = self.put("Expand", places, self.constant([1, 1, hidden]))
        data = self.put("GatherElements", data, places, axis=0)
        data = self.put("Einsum", self.put("Cast", shares, to=kind), data, equation="tk,ktd->td")
        data = self.put("Reshape", data, self.put("Shape", given["x"]))
        self.put("CastLike", data, given["x"], output=self.node.output[0])
        return self.nodes

    def linear(self, key: str, data: str, kind: int) -> str:
        """The linear layer of each expert."""
        weight = self.given[key]
        if self.node.op_type == "QMoE":
            columns, whole = self.sizes[key]
            scales, zeros = self.given[f"{key}_scales"], self.given.get(f"{key}_zeros", "")
            zeros = self.unpacked(zeros, whole, self.bits, kind) if zeros else ""
            weight = self.dequantised(weight, scales, zeros, self.bits, whole, kind)
            weight = self.put("Reshape", weight, self.constant([*whole[:2], columns]))
        data = self.put("MatMul", data, self.put("Transpose", weight, perm=[0, 2, 1]), name=key)
        bias = self.given.get(f"{key}_bias")
        if not bias:
            return data
        return self.put("Add", data, self.put("Unsqueeze", self.put("Cast", bias, to=kind), self.constant([1])))

    def activated(self, data: str, kind: int) -> str:
        if self.activation == b"relu":
            return self.put("Relu", data)
        if self.activation == b"gelu":
            return self.put("FastGelu", data, domain=MICROSOFT)
        if self.activation == b"silu":
            return self.put("Mul", data, self.put("Sigmoid", data))
        limit = self.number("swiglu_limit", np.inf)
        last, two, end = self.constant([-1]), self.constant([2]), self.constant([2**31])
        gate, value = (self.put("Slice", data, self.constant([start]), end, last, two) for start in (0, 1))
        if np.isfinite(limit):
            gate = self.put("Min", gate, self.constant(limit, kind))
            value = self.put("Clip", value, self.constant(-limit, kind), self.constant(limit, kind))
        scaled = self.put("Mul", gate, self.constant(self.number("activation_alpha", 1.0), kind))
        gate = self.put("Mul", gate, self.put("Sigmoid", scaled))
        value = self.put("Add", value, self.constant(self.number("activation_beta", 0.0), kind))
        return self.put("Mul", gate, value)
