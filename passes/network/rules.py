"""How each operator carries a bias token: the sizes of its outputs, and the edits that it needs.

A carried tensor has N + m rows where the original has N. A rule gives a `Step`, an `Aside` where the tokens go on
alone, or a `Miss` with the reason why the bias token cannot pass. Two invariants make the rules local: tensors that are
not carried, shapes included, keep their original values, and so do all rows of a carried tensor except the last m.
"""

from __future__ import annotations

import onnx

from passes.match.linear import MICROSOFT, Miss
from passes.network import aside, layout
from passes.network.sizes import KEYS, TOKENS, Size, Sizes
from passes.network.step import Aside, Known, Pad, Rule, Step, token_axes
from rewriter.graph.view import attributes, label


def apply_rule(known: Known, node: onnx.NodeProto) -> Step | Aside | Miss:
    """The rule for `node`."""
    fused = node.domain == MICROSOFT and node.op_type in _FUSED_ACTIVATIONS and len(node.input) == 1
    rule = _unary if fused else RULES.get(node.op_type) if known.view.is_onnx(node) else None
    if rule is None:
        return Miss(f"{label(node)}: no rule says how it treats an extra row of the residual stream", label(node))
    return rule(known, node)


def _elementwise(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Operands broadcast; those that are not carried are padded along the token axes unless they broadcast there."""
    operands = [name for name in node.input if name]
    carried = [sizes for name in operands if (sizes := known.carried(name)) is not None]
    rank = max(len(sizes) for sizes in carried)
    pads: list[Pad] = []
    for name in operands:
        if known.carried(name) is not None:
            continue
        sizes = known.shapes.sizes_of(name)
        if sizes is None:
            return Miss(f"{label(node)}: the rank of '{name}' is unknown", label(node))
        rank = max(rank, len(sizes))
        axes = {axis for other in carried for axis in token_axes(other)}
        long = tuple(sorted(axis for axis in axes if -axis <= len(sizes) and sizes[axis] != Size(1)))
        if long:
            pads.append(Pad(name, long, len(sizes)))
    out = tuple(_broadcast([_at(sizes, axis) for sizes in carried]) for axis in range(-rank, 0))
    if any(size is not None and size.rows > 1 for size in out):
        return Miss(f"{label(node)}: it multiplies two token axes into one", label(node))
    wide = _others(known, operands, out)
    if wide is None:
        return Miss(f"{label(node)}: an operand outside the stream adds a token axis", label(node))
    # Exporters select 0 where all scores are masked and the softmax is NaN. What they select from is still a pattern.
    kept = node.op_type == "Where" and _pattern_or_zero(known, operands[-2:])
    return Step((wide,), tuple(pads), pattern=kept)


def _pattern_or_zero(known: Known, operands: list[str]) -> bool:
    """Whether a choice between the operands is still an attention pattern: one of them is, and the others are 0."""
    patterns = [name for name in operands if name in known.patterns]
    return bool(patterns) and all(name in patterns or known.constants.scalar(name) == 0.0 for name in operands)


def _others(known: Known, operands: list[str], out: Sizes) -> Sizes | None:
    """The sizes after broadcasting with operands off the route; None where one of them would add a token axis."""
    sizes = list(out)
    for name in operands:
        other = None if known.carried(name) is not None else known.shapes.sizes_of(name)
        for axis in range(-len(other or ()), 0):
            size = None if other is None else other[axis]
            if out[axis] == Size(1) and size != Size(1):
                if size is not None and size.rows:
                    return None
                sizes[axis] = size
    return tuple(sizes)


def _at(sizes: Sizes, axis: int) -> Size | None:
    return sizes[axis] if -axis <= len(sizes) else Size(1)


def _broadcast(sizes: list[Size | None]) -> Size | None:
    """The size to which compatible sizes broadcast."""
    # The model is valid, so an unknown size is 1 or equal to the known ones.
    known = {size for size in sizes if size != Size(1)}
    with_tokens = [size for size in known if size is not None and size.rows]
    if with_tokens:
        return with_tokens[0]
    told = [size for size in known if size is not None]
    return told[0] if told else (None if known else Size(1))


def _unary(known: Known, node: onnx.NodeProto) -> Step | Miss:
    sizes = known.carried(node.input[0])
    if sizes is None:
        return Miss(f"{label(node)}: its first operand is not part of the residual stream", label(node))
    keeps = node.op_type in ("Cast", "Identity", "Dropout") and node.input[0] in known.patterns
    return Step((sizes,), pattern=keeps)


def _normalised(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """A normalisation over features, which treats rows separately."""
    sizes = known.carried(node.input[0])
    axis = attributes(node).get("axis", -1)
    if sizes is None or not isinstance(axis, int):
        return Miss(f"{label(node)}: it does not normalise the residual stream", label(node))
    first = axis % len(sizes) - len(sizes)
    if any(place >= first for place in token_axes(sizes)):
        return Miss(f"{label(node)}: it normalises over tokens", label(node))
    return Step((sizes,))


SQUARES = ((TOKENS, TOKENS), (TOKENS, KEYS))
"""The last two axes of scores: keys are the tokens themselves, or those of a cache and the tokens."""


def _softmax(known: Known, node: onnx.NodeProto) -> Step | Miss:
    sizes = known.carried(node.input[0])
    axis = attributes(node).get("axis", -1)
    if sizes is None or not isinstance(axis, int):
        return Miss(f"{label(node)}: it does not read the residual stream", label(node))
    # Over features (routing weights, say) a softmax treats rows separately. Over tokens it must be an attention, whose
    # scores can be masked.
    if axis % len(sizes) - len(sizes) not in token_axes(sizes):
        return Step((sizes,))
    if axis % len(sizes) != len(sizes) - 1 or token_axes(sizes)[-2:] != (-2, -1) or sizes[-2:] not in SQUARES:
        return Miss(f"{label(node)}: its scores are not [tokens, tokens], so its mask cannot be extended", label(node))
    return Step((sizes,), floor=True, pattern=True)


def _reduced(known: Known, node: onnx.NodeProto) -> Step | Miss:
    sizes, given = known.carried(node.input[0]), attributes(node)
    axes = given.get("axes") or (known.shapes.integers(node.input[1]) if len(node.input) > 1 else None)
    if sizes is None or not isinstance(axes, list):
        return Miss(f"{label(node)}: the axes that it reduces are unknown", label(node))
    # A mean over tokens (a pooler's, say) would include the bias tokens.
    places = {axis % len(sizes) - len(sizes) for axis in axes}
    if places & set(token_axes(sizes)):
        return Miss(f"{label(node)}: it reduces over tokens", label(node))
    kept = given.get("keepdims", 1)
    out = [Size(1) if axis in places else sizes[axis] for axis in range(-len(sizes), 0) if kept or axis not in places]
    return Step((tuple(out),))


def _matmul(known: Known, node: onnx.NodeProto) -> Step | Aside | Miss:
    left, right = (known.carried(name) for name in node.input[:2])
    flat = Miss(f"{label(node)}: it mixes tokens outside a softmax", label(node))
    if left is None:
        return Miss(f"{label(node)}: its first factor is not part of the residual stream", label(node))
    if right is None:
        if node.input[1] not in known.constants:
            # Queries times relative positions, say: scores of tokens, which join those of the stream later.
            reason = f"{label(node)}: its second factor is neither constant nor computed from the stream"
            return Aside(reason, label(node), scores=True)
        weight = known.constants.shape(node.input[1])
        return flat if weight is None or -1 in token_axes(left) else _by_constant(node, left, weight)
    # A sum over tokens must not include the bias tokens' rows. In an attention pattern their weights are 0 for every
    # token; in any other tensor they need not be.
    contracted = -1 in token_axes(left)
    if contracted != (-2 in token_axes(right)) or (contracted and node.input[0] not in known.patterns):
        return flat
    if contracted and left[-1] != right[-2]:
        return Miss(f"{label(node)}: its pattern is over other keys than its values", label(node))
    rank = max(len(left), len(right))
    lead = tuple(_broadcast([_at(left, axis), _at(right, axis)]) for axis in range(-rank, -2))
    return Step(((*lead, left[-2], right[-1]),))


def _by_constant(node: onnx.NodeProto, left: Sizes, weight: tuple[int, ...]) -> Step | Miss:
    """Rows times a constant matrix, or one for each head."""
    if len(weight) < _MATRIX or len(left) < _MATRIX:
        return Miss(f"{label(node)}: '{node.input[1]}' is no matrix", label(node))
    stacked = (*(Size(number) for number in weight[:-_MATRIX]), Size(), Size())
    if any(_at(stacked, axis) != Size(1) for axis in token_axes(left) if axis < -_MATRIX):
        return Miss(f"{label(node)}: '{node.input[1]}' has a matrix for each token", label(node))
    rank = max(len(left), len(weight))
    lead = (_broadcast([_at(left, axis), _at(stacked, axis)]) for axis in range(-rank, -_MATRIX))
    return Step(((*lead, left[-_MATRIX], Size(weight[-1])),))


def _gemm(known: Known, node: onnx.NodeProto) -> Step | Miss:
    sizes, given = known.carried(node.input[0]), attributes(node)
    weight = known.constants.shape(node.input[1])
    others = [name for name in node.input[1:] if name]
    if sizes is None or given.get("transA") or -1 in token_axes(sizes) or weight is None:
        return Miss(f"{label(node)}: it is not a linear map of rows", label(node))
    if any(name not in known.constants for name in others):
        return Miss(f"{label(node)}: its weight or bias is not constant", label(node))
    return Step(((sizes[0], Size(weight[0] if given.get("transB") else weight[1])),))


_MATRIX = 2

_FUSED_ACTIVATIONS = frozenset(("Gelu", "QuickGelu", "FastGelu"))
"""Elementwise operators of onnxruntime's domain, which blocks hold."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("Add", "Sub", "Mul", "Div", "Pow", "Where", "Min", "Max", "And", "Or", "Equal", "Less", "Greater", "PRelu"),
        _elementwise,
    ),
    **dict.fromkeys(
        (
            *("Cast", "Identity", "Dropout", "Neg", "Abs", "Sqrt", "Reciprocal", "Exp", "Log", "Erf", "Tanh"),
            *("Sigmoid", "Relu", "LeakyRelu", "Elu", "Selu", "Gelu", "Swish", "Mish", "Softplus", "HardSigmoid"),
            *("HardSwish", "IsNaN", "Not", "Clip", "Sin", "Cos"),
        ),
        _unary,
    ),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _normalised),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"), _reduced),
    "Softmax": _softmax,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Transpose": layout.transpose,
    "Unsqueeze": layout.unsqueeze,
    "Squeeze": layout.squeeze,
    "Reshape": layout.reshape,
    "Expand": layout.expand,
    "Split": layout.split,
    "Slice": layout.part,
    "Gather": layout.gather,
    "Concat": layout.concat,
    "Shape": layout.shape,
    "Conv": aside.conv,
    "Pad": aside.pad,
    "GatherElements": aside.gather_elements,
}
"""Operator type to its rule."""
