"""Expand fused operators of onnxruntime, SwiGLU and mixtures of experts by their definitions.

Plan and certificate both use these definitions, so neither detects an error in one. The run does: it uses onnxruntime's
own kernels.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rewriter.evaluate.scalar import activation_numbers
from rewriter.evaluate.table import MICROSOFT
from rewriter.graph.edit import set_nodes
from rewriter.graph.view import attributes, integer_of, key_of, opsets
from rewriter.graph.walk import all_graphs, own_names
from rewriter.text import quoted

Definition = Callable[[onnx.NodeProto], list[onnx.NodeProto] | None]  # expands an operator; None if it stays


@dataclass(frozen=True)
class Writer:
    """An operator, and the nodes that replace it, which are written in order."""

    node: onnx.NodeProto
    nodes: list[onnx.NodeProto] = field(default_factory=list, init=False)

    def number(self, name: str, default: float) -> float:
        return float(attributes(self.node).get(name, default))

    def put(
        self, operator: str, *inputs: str, domain: str = "", name: str = "", output: str = "", **attributes: Any
    ) -> str:
        """Append a node and return its output, which is called `output` or after the operator."""
        suffix, whole = name or f"{operator.lower()}_{len(self.nodes)}", self.node.output[0]
        output, name = output or f"{whole}/{suffix}", f"{self.node.name or whole}/{suffix}"
        self.nodes.append(helper.make_node(operator, inputs, [output], name, domain=domain))
        self.nodes[-1].attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        return output

    def constant(self, values: Any, elem_type: int = TensorProto.INT64) -> str:
        array = np.asarray(values, helper.tensor_dtype_to_np_dtype(elem_type))
        return self.put("Constant", value=numpy_helper.from_array(array))

    def dequantised(self, packed: str, scales: str, zeros: str, bits: int, blocks: Sequence[int], kind: int) -> str:
        """(number - zero point) scale as type `kind`, for numbers of 4 or 8 bits.

        Scales and zero points (of type `kind`; empty for the middle of the range) are one for each of the `blocks`; the
        result has one axis more, of a block's numbers.
        """
        each = self.constant([*blocks, 1])
        middle = self.put("Reshape", zeros, each) if zeros else self.constant(2 ** (bits - 1), kind)
        numbers = self.put("Reshape", self.unpacked(packed, (), bits, kind), self.constant([*blocks, -1]))
        scales = self.put("Reshape", self.put("Cast", scales, to=kind), each)
        return self.put("Mul", self.put("Sub", numbers, middle), scales)

    def unpacked(self, tensor: str, shape: Sequence[int], bits: int, kind: int) -> str:
        """Numbers of 8 bits, or of 4 bits with the first of two in the lower half of an entry, as type `kind`.

        The last entry along the last axis of `shape` may be half full.
        """
        if bits == 8:
            return self.put("Cast", tensor, to=kind)
        pairs = self.put("Cast", tensor, to=TensorProto.INT32)
        base, last = self.constant(16, TensorProto.INT32), self.constant([-1])
        halves = [self.put("Unsqueeze", self.put(each, pairs, base), last) for each in ("Mod", "Div")]
        numbers = self.put("Concat", *halves, axis=-1)
        if shape:
            numbers = self.put("Reshape", numbers, self.constant([*shape[:-1], -1]))
            numbers = self.put("Slice", numbers, self.constant([0]), self.constant(shape[-1:]), last)
        return self.put("Cast", numbers, to=kind)


def with_parts(
    model: onnx.ModelProto, parts_of: Callable[[onnx.NodeProto], Sequence[onnx.NodeProto] | str | None]
) -> onnx.ModelProto:
    """A copy with the expansions by `parts_of`; the model itself if there are none.

    A node stays if there is a reason instead of an expansion, or if an intermediate tensor of it already exists.
    """
    graphs = list(all_graphs(model.graph))
    taken = set[str]().union(*map(own_names, graphs))

    def apart(node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
        parts = parts_of(node)
        if not parts or isinstance(parts, str):
            return [node]
        if any(name in taken for part in parts for name in part.output if name not in node.output):
            return [node]
        for part in parts:
            if part is not node:
                part.metadata_props.extend(node.metadata_props)  # block names come from the exporter's scopes in it
        return parts

    nodes = [[part for node in graph.node for part in apart(node)] for graph in graphs]
    if all(len(made) == len(graph.node) for made, graph in zip(nodes, graphs, strict=True)):
        return model
    model = deepcopy(model)
    for graph, made in zip(all_graphs(model.graph), nodes, strict=True):
        set_nodes(graph, made)
    return model


def _written(*texts: str) -> Definition:
    """Expand by the text with as many operands as the node; its tensors are the suffixes of new names."""
    header = f'<domain: "local", opset_import: ["": {onnx.defs.onnx_opset_version()}, "{MICROSOFT}": 1]> f'
    functions = [onnx.parser.parse_function(header + text) for text in texts]

    def lowered(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        operands = [*node.input]
        while operands and not operands[-1]:
            operands.pop()
        function = next((each for each in functions if len(each.input) == len(operands)), None)
        if function is None:
            return None
        given, names = {each.name: each for each in node.attribute}, dict(zip(function.input, operands, strict=True))
        written = Writer(node)
        for part in function.node:
            inputs, (name,) = [names[each] for each in part.input], part.output
            suffix, output = (part.op_type.lower(), node.output[0]) if name in function.output else (name, "")
            names[name] = written.put(part.op_type, *inputs, domain=part.domain, name=suffix, output=output)
            written.nodes[-1].attribute.extend(given[each.name] for each in part.attribute if each.name in given)
        return written.nodes

    return lowered


def _quantised(text: str, operands: int) -> Definition:
    """An operator on quantised numbers: each operand with its scale and zero point, then those of the result."""
    formals = [f"x{place}, s{place}, z{place}" for place in range(operands)]
    inner = " ".join(f"operand_{place} = DequantizeLinear({each})" for place, each in enumerate(formals))
    result = f"y = QuantizeLinear({text.split(' ', 1)[0]}, s, z)"
    return _written(f"({', '.join(formals)}, s, z) => (y) {{ {inner} {text} {result} }}")


def _fused_linear(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """FusedGemm and FusedConv: the linear operator, then the activation that its attributes name."""
    given, operator = attributes(node), node.op_type.removeprefix("Fused")
    stated = given.get("activation", b"")  # of a broken file, of any type
    activation = stated.decode("utf-8", "replace") if isinstance(stated, bytes) else ""
    # The fourth input of FusedConv is a tensor that is added before the activation.
    if activation not in ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "HardSigmoid") or len(node.input) > 3:
        return None
    written, numbers = Writer(node), activation_numbers(activation, given)
    linear = written.put(operator, *node.input, name=operator.lower())
    written.nodes[0].attribute.extend(each for each in node.attribute if not each.name.startswith("activation"))
    written.put(activation, linear, name=activation.lower(), output=node.output[0], **numbers)
    return written.nodes


def einsum_map(equation: str, weight: int) -> tuple[int, int, int, int] | None:
    """Read `bsd,df->bsf`, `ecd,edf->ecf` and the like, `weight` being the position of the matrices; None for others.

    Returns the mapped axis of data and output, from the end; the weight's contracted and output axes; and its number of
    axes, of which further ones index experts.
    """
    left, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    operands = left.split(",")
    if not arrow or len(operands) != 2:
        return None
    matrix, data = operands[weight], operands[1 - weight]
    # A letter that occurs twice in a term takes a diagonal.
    diagonal = any(len(set(term)) < len(term) for term in (matrix, data, output))
    # Letters of the weight alone are output channels; letters missing in the output are contracted. All tokens remain.
    contracted = [letter for letter in data if letter in matrix and letter not in output]
    made = [letter for letter in output if letter in matrix and letter not in data]
    summed = {*data}.difference(output, matrix) | {*matrix}.difference(data, output)
    if diagonal or "." in matrix or summed or not contracted or not made:
        return None
    # Of several, for example if a sum over experts follows, the last one is that of the neurons.
    axis = data.index(contracted[-1]) - len(data)
    if output.index(made[-1]) - len(output) != axis or "." in data[axis:]:
        return None  # the dots hide an unknown number of axes, so the axis cannot be counted from the end
    if len(matrix) == 2 and data.replace(contracted[0], made[0]) != output:
        return None
    return axis, matrix.index(contracted[-1]), matrix.index(made[-1]), len(matrix)


FUSED: dict[tuple[str, str], Definition] = {
    (MICROSOFT, "BiasGelu"): _written("(x, b) => (y) { bias = Add(x, b) y = com.microsoft.Gelu(bias) }"),
    (MICROSOFT, "FastGelu"): _written("(x, b) => (y) { bias = Add(x, b) y = com.microsoft.FastGelu(bias) }"),
    (MICROSOFT, "GemmFastGelu"): _written(
        "(x, w) => (y) { matmul = MatMul(x, w) y = com.microsoft.FastGelu(matmul) }",
        "(x, w, b) => (y) { matmul = MatMul(x, w) bias = Add(matmul, b) y = com.microsoft.FastGelu(bias) }",
    ),
    (MICROSOFT, "FusedGemm"): _fused_linear,
    (MICROSOFT, "FusedConv"): _fused_linear,
    (MICROSOFT, "QLinearSigmoid"): _quantised("sigmoid = Sigmoid(operand_0)", 1),
    (MICROSOFT, "QLinearLeakyRelu"): _quantised("leakyrelu = LeakyRelu <alpha: float = @alpha> (operand_0)", 1),
    (MICROSOFT, "QLinearAdd"): _quantised("add = Add(operand_0, operand_1)", 2),
    (MICROSOFT, "QLinearMul"): _quantised("mul = Mul(operand_0, operand_1)", 2),
    ("", "SwiGLU"): _written("(x, z) => (y) { swish = Swish <alpha: float = @alpha> (x) y = Mul(swish, z) }"),
}
"""Operators to expand, always or only where a block needs their parts."""

SATURATING: dict[tuple[str, str], Definition] = {
    ("", "QLinearMatMul"): _quantised("matmul = MatMul(operand_0, operand_1)", 2),
    (MICROSOFT, "QGemm"): _written(
        """(x, xs, xz, w, ws, wz, b, s, z) => (y) { qgemm = com.microsoft.QGemm
        <alpha: float = @alpha, transA: int = @transA, transB: int = @transB> (x, xs, xz, w, ws, wz, b)
        y = QuantizeLinear(qgemm, s, z) }"""
    ),
}
"""Operators that are expanded only if they saturate at 0."""

# -- quantisers that saturate ------------------------------------------------------------------------------------------

_QUANTISED_TYPES = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16)
_QUANTISING = {
    ("", "QuantizeLinear"): 3,
    ("", "QLinearMatMul"): 8,
    (MICROSOFT, "QLinearAdd"): 8,
    (MICROSOFT, "QGemm"): 9,
}
"""Number of operands of operators whose last two are scale and zero point of the output."""


def saturating(
    graph: onnx.GraphProto, read: Callable[[TensorProto], np.ndarray | None], given: Container[str] = ()
) -> frozenset[str]:
    """The outputs of quantising operators that saturate negative values at 0 without a preceding Relu.

    Quantisers drop a Relu if the zero point is the smallest number of its type. `read` gives the values of an
    initializer, or None; a caller may replace the ones in `given`. Bodies are left out.
    """
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer if tensor.name not in given}
    single = {each.name: each for each in graph.initializer if each.name in ranks and math.prod(each.dims) == 1}
    relus = {name for node in graph.node if node.op_type == "Relu" for name in node.output}
    found = set()
    for node in graph.node:
        scale, zero = [None, None, *map(single.get, node.input)][-2:]
        if _QUANTISING.get(key_of(node)) != len(node.input) or scale is None or zero is None:
            continue
        # Scales for each column of a matrix are on the axis that DequantizeLinear takes by default.
        plain = node.op_type != "QLinearMatMul" or (node.input[1] in single and ranks.get(node.input[3]) == 2)
        if plain and zero.data_type in _QUANTISED_TYPES and relus.isdisjoint(node.input[:1]):
            factor, lowest = read(scale), read(zero)
            if factor is not None and factor.item() > 0 and lowest is not None:
                found |= {node.output[0]} if lowest.item() == np.iinfo(lowest.dtype).min else set()
    return frozenset(found)


def in_parts(node: onnx.NodeProto, low: Container[str]) -> list[onnx.NodeProto]:
    """The expansion of an operator, itself by default; with a Relu if its output is in `low`."""
    saturates = bool(node.output) and node.output[0] in low
    write = FUSED.get(key_of(node)) or (SATURATING.get(key_of(node)) if saturates else None)
    *parts, last = (write and write(node)) or [node]
    if saturates and last.op_type == "QuantizeLinear":
        written, last = Writer(node), deepcopy(last)
        last.input[0] = written.put("Relu", last.input[0], name="relu")
        parts += written.nodes
    return [*parts, last]


# -- mixtures of experts in one operator, com.microsoft::MoE and QMoE --------------------------------------------------
#
#     p   = Softmax(router_probs), or router_weights             [tokens, experts]
#     i   = the k experts with the largest router_probs          [tokens, k]
#     w   = p at i; over its sum with normalize_routing_weights  [tokens, k]
#     out = sum over i of w_i (W2_i f(W1_i x + b1_i) + b2_i)     like x
#
# SwiGLU has gates g and values l in the even and odd rows of W1: f = G sigmoid(alpha G) (L + beta) with G = min(g,
# limit) and L = clip(l, -limit, limit). A weight of QMoE is (number - zero point) scale, with one scale for each row or
# for each block of a row. Every expert is applied to every token; the chosen ones are picked from the results.
# Features that the CPU kernel lacks or computes differently are refused.

EXPERTS: Mapping[tuple[str, str], Sequence[str]] = {
    (MICROSOFT, "MoE"): ("x", "router", "fc1", "fc1_bias", "fc2", "fc2_bias", "fc3", "fc3_bias"),
    (MICROSOFT, "QMoE"): (
        *("x", "router", "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias", "fc3", "fc3_scales"),
        *("fc3_bias", "fc1_zeros", "fc2_zeros", "fc3_zeros", "router_weights"),
    ),
}
"""Mixtures, with names for their operands; further operands of QMoE belong to non-integer weights."""

_ACTIVATIONS = (b"relu", b"gelu", b"silu", b"swiglu")
_OPSET = 15  # the first opset with all operators of the definition
_KERNEL = "onnxruntime's CPU kernel"


def with_plain_experts(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which mixtures of experts are expanded where possible; the model itself if none is."""
    weights = {tensor.name: tensor for graph in all_graphs(model.graph) for tensor in graph.initializer}
    opset = opsets(model.opset_import).get("", 1)
    return with_parts(model, lambda node: plain_experts(node, weights, opset))


def plain_experts(
    node: onnx.NodeProto, weights: Mapping[str, TensorProto], opset: int
) -> Sequence[onnx.NodeProto] | str | None:
    """The plain operators that define a mixture of experts, or why there are none; None for any other operator."""
    if key_of(node) not in EXPERTS:
        return None
    mixture = _Mixture(node, weights)
    return mixture.unfit(opset) or mixture.written()


@dataclass(frozen=True)
class _Mixture(Writer):
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
        chosen = partial(integer_of, self.node, default=0)
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
