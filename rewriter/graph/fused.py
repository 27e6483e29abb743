"""Fused operators of onnxruntime, and SwiGLU, written out by their definitions.

The plan takes operators apart by these definitions, and the certificate reads both models by them: neither would see an
error in one. The run does, which has onnxruntime's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx

MICROSOFT = "com.microsoft"
Definition = Callable[[onnx.NodeProto], list[onnx.NodeProto] | None]
"""Gives the nodes that an operator stands for; None for one that stays as it is."""


def step(
    node: onnx.NodeProto, operator: str, inputs: list[str], last: bool, domain: str = "", part: str = ""
) -> onnx.NodeProto:
    """One node of the decomposition; the last one has the output of the fused operator."""
    suffix = part or operator.lower()
    output = node.output[0] if last else f"{node.output[0]}/{suffix}"
    return onnx.helper.make_node(operator, inputs, [output], f"{node.name or node.output[0]}/{suffix}", domain=domain)


def _biased(operator: str) -> Definition:
    """The activation behind the sum of all inputs; without a bias it is a plain activation, and stays."""

    def lowered(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if len(node.input) < 2 or not node.input[1]:
            return None
        bias = step(node, "Add", list(node.input), last=False, part="bias")
        return [bias, step(node, operator, list(bias.output), last=True, domain=MICROSOFT)]

    return lowered


def _gemm_fast_gelu(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    parts = [step(node, "MatMul", list(node.input[:2]), last=False)]
    if len(node.input) > 2 and node.input[2]:
        parts.append(step(node, "Add", [*parts[-1].output, node.input[2]], last=False, part="bias"))
    return [*parts, step(node, "FastGelu", list(parts[-1].output), last=True, domain=MICROSOFT)]


def _fused_linear(operator: str) -> Definition:
    """FusedGemm and FusedConv: the linear operator, then the activation that its attributes name."""

    def lowered(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        # The fourth input of FusedConv is a tensor that is added before the activation.
        if "activation" not in attributes or len(node.input) > 3:
            return None
        activation = attributes["activation"].s.decode("utf-8", "replace")
        if activation not in _ACTIVATION_PARAMETERS:
            return None
        linear = step(node, operator, list(node.input), last=False)
        linear.attribute.extend(a for name, a in attributes.items() if not name.startswith("activation"))
        result = step(node, activation, list(linear.output), last=True)
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
    gate = step(node, "Swish", [node.input[0]], last=False)
    gate.attribute.extend(node.attribute)
    return [gate, step(node, "Mul", [*gate.output, node.input[1]], last=True)]


def _quantised(operator: str, operands: int) -> Definition:
    """An operator on quantised numbers: each operand with its scale and zero point, then those of the result."""

    def lowered(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if len(node.input) != 3 * operands + 2:
            return None
        parts = [
            step(
                node, "DequantizeLinear", list(node.input[start : start + 3]), last=False, part=f"operand_{start // 3}"
            )
            for start in range(0, 3 * operands, 3)
        ]
        parts.append(step(node, operator, [name for part in parts for name in part.output], last=False))
        parts[-1].attribute.extend(node.attribute)
        return [*parts, step(node, "QuantizeLinear", [*parts[-1].output, *node.input[3 * operands :]], last=True)]

    return lowered


def _quantised_gemm(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    if len(node.input) != 9:
        return None
    linear = step(node, "QGemm", list(node.input[:-2]), last=False, domain=MICROSOFT)
    linear.attribute.extend(node.attribute)
    return [linear, step(node, "QuantizeLinear", [*linear.output, *node.input[-2:]], last=True)]


SATURATING: dict[tuple[str, str], Definition] = {
    ("", "QLinearMatMul"): _quantised("MatMul", 2),
    (MICROSOFT, "QGemm"): _quantised_gemm,
}
"""What is taken apart only where it saturates at 0."""

FUSED: dict[tuple[str, str], Definition] = {
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
"""What is written out, or taken apart where a block needs its parts."""
