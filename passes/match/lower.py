"""Lowering: decomposing fused operators and inlining local functions that hide parts of MLP blocks.

The result is an equivalent model in which every activation consists of nodes of its own. The plan lowers a second time
with `keep`, to leave alone whatever no converted block needs (`passes.plan`). `LOWERINGS` has an entry per fused
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from passes.match.linear import LINEAR_OPERATORS, MICROSOFT
from rewriter.graph.edit import inlined, set_nodes
from rewriter.graph.elementwise import NONLINEAR
from rewriter.graph.view import ONNX_DOMAINS, REARRANGED, key_of
from rewriter.graph.walk import all_graphs, iter_nodes

_PARTS_OF_BLOCKS = {
    *(operator for _, operator in LINEAR_OPERATORS),
    *NONLINEAR,
    *("Abs", "Max", "Where"),  # activations are spelled with these alone
}
"""Operators for which a local function is inlined: exporters wrap modules, or single activations, in functions."""

_QUANTISED_TYPES = frozenset(
    (onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT16, onnx.TensorProto.UINT16)
)
_QUANTISING = {
    ("", "QuantizeLinear"): 3,
    ("", "QLinearMatMul"): 8,
    (MICROSOFT, "QLinearAdd"): 8,
    (MICROSOFT, "QGemm"): 9,
}
"""Operators whose last operand, of this many, is the zero point of what they make."""
_AFTER_LINEAR = REARRANGED | {"Add", "QLinearAdd", "QuantizeLinear", "DequantizeLinear"}
"""Operators that make another projection of a projection: biases, layouts, rounding."""


@dataclass(frozen=True)
class Lowered:
    """A lowered model.

    Attributes:
        model: the lowered model; the original object where there was nothing to lower.
        fused: names of the outputs of decomposed operators.
        inlined: names of the local functions that were inlined.
    """

    model: onnx.ModelProto
    fused: frozenset[str]
    inlined: tuple[str, ...]


Lower = Callable[[onnx.NodeProto], list[onnx.NodeProto] | None]


def lower(
    model: onnx.ModelProto, keep: frozenset[str] = frozenset(), *, whole: frozenset[tuple[str, str]] = frozenset()
) -> Lowered:
    """Lower `model`.

    Args:
        model: the model.
        keep: outputs of fused operators that stay.
        whole: local functions that stay, (domain, name): those of heads that an earlier run made.
    """
    model, functions = _inlined(model, _relevant_functions(model, whole))
    found = [
        node.output[0]
        for graph in all_graphs(model.graph)
        for saturating in (_saturating(graph),)
        for node in graph.node
        if _lowered(node, saturating) is not None
    ]
    wanted = frozenset(found) - keep
    if wanted:
        if not functions:  # the inliner has made a copy already
            model = deepcopy(model)
        for graph in all_graphs(model.graph):
            _take_apart(graph, wanted)
    return Lowered(model, wanted, tuple(f"{domain}::{name}" for domain, name in functions))


def _inlined(model: onnx.ModelProto, functions: list[tuple[str, str]]) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    """A copy with these functions inlined, and their names; the model itself where onnx refuses.

    It refuses functions that import another operator set than the model, whose nodes would get another meaning.
    """
    if not functions:
        return model, []
    try:
        return inlined(model, functions), functions
    except RuntimeError:
        return model, []


def _relevant_functions(model: onnx.ModelProto, whole: frozenset[tuple[str, str]]) -> list[tuple[str, str]]:
    """Local functions that contain a linear operator or an activation, directly or in a function that they call."""
    holding = {
        (function.domain, function.name)
        for function in model.functions
        if (function.domain, function.name) not in whole and any(_is_part(node) for node in iter_nodes(function.node))
    }
    # Up the call graph to a fixed point. ONNX forbids recursion, so it ends after as many rounds as calls are nested.
    grown = True
    while grown:
        callers = {
            (function.domain, function.name)
            for function in model.functions
            if any((node.domain, node.op_type) in holding for node in iter_nodes(function.node))
        }
        grown = not callers <= holding
        holding |= callers
    return sorted(holding)


def _is_part(node: onnx.NodeProto) -> bool:
    return node.op_type in _PARTS_OF_BLOCKS and node.domain in (*ONNX_DOMAINS, MICROSOFT)


def _take_apart(graph: onnx.GraphProto, wanted: frozenset[str]) -> None:
    if not any(node.output and node.output[0] in wanted for node in graph.node):
        return
    result: list[onnx.NodeProto] = []
    saturating = _saturating(graph)
    for node in graph.node:
        parts = _lowered(node, saturating) if node.output and node.output[0] in wanted else None
        for part in parts or ():
            part.metadata_props.extend(node.metadata_props)  # block names come from the exporter's scopes in it
        result.extend(parts or [node])
    set_nodes(graph, result)


def _lowered(node: onnx.NodeProto, saturating: frozenset[str]) -> list[onnx.NodeProto] | None:
    entry = LOWERINGS.get(key_of(node))
    if entry is None and node.output and node.output[0] in saturating:
        entry = _SATURATING.get(key_of(node), lambda quantise: [quantise])
    made = [node] if entry is None else entry(node)
    if made is not None and made[-1].op_type == "QuantizeLinear" and made[-1].output[0] in saturating:
        relu = _step(node, "Relu", [made[-1].input[0]], last=False)
        made = [*made[:-1], relu, deepcopy(made[-1])]
        made[-1].input[0] = relu.output[0]
    return None if made == [node] else made


def _saturating(graph: onnx.GraphProto) -> frozenset[str]:
    """Quantised projections with the smallest number as zero point: they are those of a Relu, which quantisers drop."""
    sizes = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    numbers = [
        (tensor.name, onnx.numpy_helper.to_array(tensor))
        for tensor in graph.initializer
        if tensor.data_type in _QUANTISED_TYPES and prod(tensor.dims) == 1 and not tensor.external_data
    ]
    lowest = {name for name, zero in numbers if zero == np.iinfo(zero.dtype).min}
    lowest -= {value.name for value in graph.input}
    linear, found = set[str](), set[str]()
    for node in graph.node if lowest else ():
        key = key_of(node)
        follows = node.op_type in _AFTER_LINEAR and not linear.isdisjoint(node.input)
        if key not in LINEAR_OPERATORS and not follows:
            continue
        # Scales for each column of a matrix are on the axis that DequantizeLinear takes by default.
        plain = key != ("", "QLinearMatMul") or [sizes.get(name) for name in node.input[3:4]] == [2]
        if _QUANTISING.get(key) == len(node.input) and node.input[-1] in lowest and plain:
            found.add(node.output[0])
        else:
            linear.update(node.output)
    return frozenset(found)


# -- one function per fused operator -------------------------------------------------------------------------


def _step(
    node: onnx.NodeProto, operator: str, inputs: list[str], last: bool, domain: str = "", part: str = ""
) -> onnx.NodeProto:
    """One node of the decomposition; the last one has the output of the fused operator."""
    suffix = part or operator.lower()
    output = node.output[0] if last else f"{node.output[0]}/{suffix}"
    return onnx.helper.make_node(operator, inputs, [output], f"{node.name or node.output[0]}/{suffix}", domain=domain)


def _biased(operator: str) -> Lower:
    """The activation behind the sum of all inputs; without a bias it is a plain activation, and stays."""

    def lowered(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if len(node.input) < 2 or not node.input[1]:
            return None
        bias = _step(node, "Add", list(node.input), last=False, part="bias")
        return [bias, _step(node, operator, list(bias.output), last=True, domain=MICROSOFT)]

    return lowered


def _gemm_fast_gelu(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    parts = [_step(node, "MatMul", list(node.input[:2]), last=False)]
    if len(node.input) > 2 and node.input[2]:
        parts.append(_step(node, "Add", [*parts[-1].output, node.input[2]], last=False, part="bias"))
    return [*parts, _step(node, "FastGelu", list(parts[-1].output), last=True, domain=MICROSOFT)]


def _fused_linear(operator: str) -> Lower:
    """FusedGemm and FusedConv: the linear operator, then the activation that its attributes name."""

    def lowered(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        # The fourth input of FusedConv is a tensor that is added before the activation.
        if "activation" not in attributes or len(node.input) > 3:
            return None
        activation = attributes["activation"].s.decode("utf-8", "replace")
        if activation not in _ACTIVATION_PARAMETERS:
            return None
        linear = _step(node, operator, list(node.input), last=False)
        linear.attribute.extend(a for name, a in attributes.items() if not name.startswith("activation"))
        result = _step(node, activation, list(linear.output), last=True)
        result.attribute.extend(_activation_attributes(activation, attributes))
        return [linear, result]

    return lowered


# onnxruntime's graph optimiser writes FusedGemm and FusedConv. Their activations are named like ONNX operators, and
# these are the attributes that the operators take, in the order of `activation_params`.
_ACTIVATION_PARAMETERS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Elu": ("alpha",),
}


def _activation_attributes(
    activation: str, attributes: dict[str, onnx.AttributeProto]
) -> Iterator[onnx.AttributeProto]:
    """FusedGemm has `activation_alpha`, FusedConv a list `activation_params`."""
    names = _ACTIVATION_PARAMETERS[activation]
    listed = attributes["activation_params"].floats if "activation_params" in attributes else ()
    given = dict(zip(names, listed, strict=False))
    given |= {name: attributes[f"activation_{name}"].f for name in names if f"activation_{name}" in attributes}
    for name, value in given.items():
        yield onnx.helper.make_attribute(name, value)


def _swiglu(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    gate = _step(node, "Swish", [node.input[0]], last=False)
    gate.attribute.extend(node.attribute)
    return [gate, _step(node, "Mul", [*gate.output, node.input[1]], last=True)]


def _quantised(operator: str, operands: int) -> Lower:
    """An operator on quantised numbers: each operand with its scale and zero point, then those of the result."""

    def lowered(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if len(node.input) != 3 * operands + 2:
            return None
        parts = [
            _step(
                node, "DequantizeLinear", list(node.input[start : start + 3]), last=False, part=f"operand_{start // 3}"
            )
            for start in range(0, 3 * operands, 3)
        ]
        parts.append(_step(node, operator, [name for part in parts for name in part.output], last=False))
        parts[-1].attribute.extend(node.attribute)
        return [*parts, _step(node, "QuantizeLinear", [*parts[-1].output, *node.input[3 * operands :]], last=True)]

    return lowered


def _quantised_gemm(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    linear = _step(node, "QGemm", list(node.input[:-2]), last=False, domain=MICROSOFT)
    linear.attribute.extend(node.attribute)
    return [linear, _step(node, "QuantizeLinear", [*linear.output, *node.input[-2:]], last=True)]


_SATURATING: dict[tuple[str, str], Lower] = {
    ("", "QLinearMatMul"): _quantised("MatMul", 2),
    (MICROSOFT, "QGemm"): _quantised_gemm,
}
"""What is taken apart only where it saturates at 0."""

LOWERINGS: dict[tuple[str, str], Lower] = {
    (MICROSOFT, "BiasGelu"): _biased("Gelu"),
    (MICROSOFT, "FastGelu"): _biased("FastGelu"),
    (MICROSOFT, "GemmFastGelu"): _gemm_fast_gelu,
    (MICROSOFT, "FusedGemm"): _fused_linear("Gemm"),
    (MICROSOFT, "FusedConv"): _fused_linear("Conv"),
    (MICROSOFT, "QLinearSigmoid"): _quantised("Sigmoid", 1),
    (MICROSOFT, "QLinearLeakyRelu"): _quantised("LeakyRelu", 1),
    (MICROSOFT, "QLinearAdd"): _quantised("Add", 2),
    (MICROSOFT, "QLinearMul"): _quantised("Mul", 2),
    ("", "SwiGLU"): _swiglu,
}
