"""The route of the bias tokens through a graph: where it enters, which nodes it passes, where it leaves.

It enters at the residual stream after the embeddings: the last tensor [batch, N, D] that dominates everything that the
first attention and the blocks read. It leaves after the residual addition of the last converted block.

**Rules** say how each operator on the route carries bias tokens: the sizes of its outputs, and the edits it needs.
A carried tensor has N + R rows where the original has N. A rule gives a `Step`, or a `Miss` with the reason why the
bias tokens cannot pass. Two invariants make the rules local: tensors that are not carried, shapes included, keep their
original values, and so do all rows of a carried tensor except the last R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from passes.forms.whole import PREFIX
from passes.match.blocks import Block
from passes.match.linear import MICROSOFT, Miss
from passes.sizes import BATCH, REST, TOKENS, ShapeReader, Size, Sizes, product
from rewriter.graph.constants import Constants
from rewriter.graph.extract import ancestors
from rewriter.graph.view import GraphView, attributes, captured_names, label

# -- rules ----------------------------------------------------------------------------------------------------------

_MATRIX = 2


@dataclass(frozen=True)
class Pad:
    """Rows to append to an operand that is not carried, along axes (counted from the end) where its size is not 1."""

    tensor: str
    axes: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class Target:
    """The edits of a shape operand.

    Attributes:
        rows: elements that become N + m.
        fixed: (position, value) pairs to set.
        length: the number of elements.
    """

    rows: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]
    length: int


@dataclass(frozen=True)
class Step:
    """The edits of one node.

    Attributes:
        outputs: sizes of its outputs; empty where they are not carried (a Shape).
        pads: operands to pad.
        target: how its shape operand changes.
        softmax: whether it is the softmax of an attention, whose scores W_QK masks.
        pattern: whether its output is an attention pattern, in which no token attends to a bias token.
        correct: for a Shape, the elements of its output from which m is subtracted.
    """

    outputs: tuple[Sizes, ...]
    pads: tuple[Pad, ...] = ()
    target: Target | None = None
    softmax: bool = False
    pattern: bool = False
    correct: tuple[bool, ...] = ()


@dataclass
class Carried:
    """What the rules read: the graph, and the tensors carried so far."""

    view: GraphView
    constants: Constants
    shapes: ShapeReader
    patterns: set[str] = field(default_factory=set)
    static_tokens: int | None = None

    def carried(self, tensor: str) -> Sizes | None:
        """Sizes of a carried tensor, None for other tensors."""
        return self.shapes.carried.get(tensor)


Rule = Callable[[Carried, onnx.NodeProto], Step | Miss]


def token_axes(sizes: Sizes) -> tuple[int, ...]:
    """The axes that hold tokens, counted from the end."""
    return tuple(axis - len(sizes) for axis, size in enumerate(sizes) if size is not None and size.tokens)


def apply_rule(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """The rule for `node`."""
    fused = node.domain == MICROSOFT and node.op_type in _FUSED_ACTIVATIONS and len(node.input) == 1
    rule = _unary if fused else RULES.get(node.op_type) if known.view.is_onnx(node) else None
    if rule is None:
        return Miss(f"{label(node)}: no rule says how it treats an extra row of the residual stream", label(node))
    return rule(known, node)


def _elementwise(known: Carried, node: onnx.NodeProto) -> Step | Miss:
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
    if any(size is not None and size.tokens > 1 for size in out):
        return Miss(f"{label(node)}: it multiplies two token axes into one", label(node))
    wide = _others(known, operands, out)
    if wide is None:
        return Miss(f"{label(node)}: an operand outside the stream adds a token axis", label(node))
    return Step((wide,), tuple(pads))


def _others(known: Carried, operands: list[str], out: Sizes) -> Sizes | None:
    """The sizes after broadcasting with operands off the route; None where one of them would add a token axis."""
    sizes = list(out)
    for name in operands:
        other = None if known.carried(name) is not None else known.shapes.sizes_of(name)
        for axis in range(-len(other or ()), 0):
            size = None if other is None else other[axis]
            if out[axis] == Size(1) and size != Size(1):
                if size is not None and size.tokens:
                    return None
                sizes[axis] = size
    return tuple(sizes)


def _at(sizes: Sizes, axis: int) -> Size | None:
    return sizes[axis] if -axis <= len(sizes) else Size(1)


def _broadcast(sizes: list[Size | None]) -> Size | None:
    """The size to which compatible sizes broadcast."""
    # The model is valid, so an unknown size is 1 or equal to the known ones.
    known = {size for size in sizes if size != Size(1)}
    with_tokens = [size for size in known if size is not None and size.tokens]
    if with_tokens:
        return with_tokens[0]
    told = [size for size in known if size is not None]
    return told[0] if told else (None if known else Size(1))


def _unary(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    sizes = known.carried(node.input[0])
    if sizes is None:
        return Miss(f"{label(node)}: its first operand is not part of the residual stream", label(node))
    keeps = node.op_type in ("Cast", "Identity", "Dropout") and node.input[0] in known.patterns
    return Step((sizes,), pattern=keeps)


def _normalised(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """A normalisation over features, which treats rows separately."""
    sizes = known.carried(node.input[0])
    axis = attributes(node).get("axis", -1)
    if sizes is None or not isinstance(axis, int):
        return Miss(f"{label(node)}: it does not normalise the residual stream", label(node))
    first = axis % len(sizes) - len(sizes)
    if any(place >= first for place in token_axes(sizes)):
        return Miss(f"{label(node)}: it normalises over tokens", label(node))
    return Step((sizes,))


def _softmax(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    sizes = known.carried(node.input[0])
    axis = attributes(node).get("axis", -1)
    if sizes is None or not isinstance(axis, int):
        return Miss(f"{label(node)}: it does not read the residual stream", label(node))
    # Over features (routing weights, say) a softmax treats rows separately. Over tokens it must be an attention, whose
    # scores can be masked.
    if axis % len(sizes) - len(sizes) not in token_axes(sizes):
        return Step((sizes,))
    if axis % len(sizes) != len(sizes) - 1 or token_axes(sizes)[-2:] != (-2, -1) or sizes[-2:] != (TOKENS, TOKENS):
        return Miss(f"{label(node)}: its scores are not [tokens, tokens], so its mask cannot be extended", label(node))
    return Step((sizes,), softmax=True, pattern=True)


def _reduced(known: Carried, node: onnx.NodeProto) -> Step | Miss:
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


def _matmul(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    left, right = (known.carried(name) for name in node.input[:2])
    flat = Miss(f"{label(node)}: it mixes tokens outside a softmax", label(node))
    if left is None:
        return Miss(f"{label(node)}: its first factor is not part of the residual stream", label(node))
    if right is None:
        if node.input[1] not in known.constants:
            return Miss(
                f"{label(node)}: its second factor is neither constant nor computed from the stream", label(node)
            )
        weight = known.constants.shape(node.input[1])
        return flat if weight is None or -1 in token_axes(left) else _by_constant(node, left, weight)
    # A sum over tokens must not include the bias tokens' rows. In an attention pattern their weights are 0 for every
    # token; in any other tensor they need not be.
    contracted = -1 in token_axes(left)
    if contracted != (-2 in token_axes(right)) or (contracted and node.input[0] not in known.patterns):
        return flat
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


def _gemm(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    sizes, given = known.carried(node.input[0]), attributes(node)
    weight = known.constants.shape(node.input[1])
    others = [name for name in node.input[1:] if name]
    if sizes is None or given.get("transA") or -1 in token_axes(sizes) or weight is None:
        return Miss(f"{label(node)}: it is not a linear map of rows", label(node))
    if any(name not in known.constants for name in others):
        return Miss(f"{label(node)}: its weight or bias is not constant", label(node))
    return Step(((sizes[0], Size(weight[0] if given.get("transB") else weight[1])),))


# -- operators that rearrange axes: where the token axis is afterwards ------------------------------------------------


def _transpose(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Permute the axes."""
    sizes = known.carried(node.input[0]) or ()
    perm = attributes(node).get("perm") or list(range(len(sizes)))[::-1]
    return (
        Step((tuple(sizes[axis] for axis in perm),))
        if isinstance(perm, list) and sorted(perm) == list(range(len(sizes)))
        else Miss(f"{label(node)}: its axes are unknown", label(node))
    )


def _axes(known: Carried, node: onnx.NodeProto, rank: int) -> list[int] | None:
    axes = known.shapes.integers(node.input[1]) if len(node.input) > 1 else attributes(node).get("axes")
    return sorted(axis % rank for axis in axes) if isinstance(axes, list) else None


def _unsqueeze(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Insert axes of size 1."""
    sizes = list(known.carried(node.input[0]) or ())
    count = len(known.shapes.integers(node.input[1]) or ()) if len(node.input) > 1 else 1
    axes = _axes(known, node, len(sizes) + count)
    if axes is None:
        return Miss(f"{label(node)}: its axes are unknown", label(node))
    for axis in axes:
        sizes.insert(axis, Size(1))
    return Step((tuple(sizes),))


def _squeeze(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Remove axes of size 1."""
    sizes = known.carried(node.input[0]) or ()
    axes = _axes(known, node, len(sizes))
    if axes is None:
        return Miss(f"{label(node)}: its axes are unknown", label(node))
    return Step((tuple(size for axis, size in enumerate(sizes) if axis not in axes),))


def _reshape(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Find the token axis by the number of elements; a size of N becomes N + m, a merged axis becomes -1."""
    sizes = known.carried(node.input[0])
    total = None if sizes is None else product(sizes)
    elements = known.shapes.elements(node.input[1])
    unknown = Miss(f"{label(node)}: which axis of its shape holds the tokens is unknown", label(node))
    if sizes is None or total is None or elements is None:
        return unknown
    # 0 copies the size of the input. A single unknown size follows from the number of elements, as -1 does.
    copied = [sizes[i] if element == 0 and i < len(sizes) else element for i, element in enumerate(elements)]
    if copied.count(None) == 1 and REST not in copied:
        copied[copied.index(None)] = REST
    # With a static sequence length, exporters write N as a number; it means the tokens only if that fits the product.
    out = _filled(total, copied) or _filled(total, _with_tokens(copied, known.static_tokens))
    target = None if out is None else _target(out)
    if out is None or target is None:
        return unknown
    return Step((out,), target=target)


def _filled(total: Size, elements: list[Size | int | None]) -> tuple[Size, ...] | None:
    """The sizes, with `REST` resolved; None where they do not multiply to `total`."""
    sizes = [element for element in elements if isinstance(element, Size)]
    given = product(tuple(sizes))
    rest = None if given is None else total.over(given)
    if rest is None or len(sizes) + elements.count(REST) != len(elements) or elements.count(REST) > 1:
        return None
    if REST not in elements and rest != Size():
        return None
    return tuple(element if isinstance(element, Size) else rest for element in elements)


def _with_tokens(elements: list[Size | int | None], static: int | None) -> list[Size | int | None]:
    """The elements, with numbers equal to the static sequence length read as the tokens."""
    return [TOKENS if isinstance(element, Size) and element == Size(static or 0) else element for element in elements]


def _target(out: tuple[Size, ...]) -> Target | None:
    """How the shape operand changes; elements that contain the batch only stay as computed."""
    # An axis that merges tokens with others becomes the one -1 that a Reshape allows. A batch size stays as computed
    # and may be a -1 itself, so the two do not go together.
    rows = tuple(i for i, size in enumerate(out) if size == TOKENS)
    mixed = [i for i, size in enumerate(out) if size.tokens and size != TOKENS]
    if len(mixed) > 1 or (mixed and any(size.batch and not size.tokens for size in out)):
        return None
    fixed = [(i, size.number) for i, size in enumerate(out) if size.constant]
    return Target(rows, tuple([(i, REST) for i in mixed] + fixed), len(out))


def _expand(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Broadcast axes of size 1; N becomes N + m."""
    sizes, elements = known.carried(node.input[0]), known.shapes.elements(node.input[1])
    if sizes is None or elements is None or len(elements) < len(sizes):
        return Miss(f"{label(node)}: which axis of its shape holds the tokens is unknown", label(node))
    lead = len(elements) - len(sizes)
    rows = tuple(lead + axis for axis, size in enumerate(sizes) if size is not None and size.tokens)
    out = [element if isinstance(element, Size) else None for element in elements]
    for axis, size in enumerate(sizes):
        out[lead + axis] = size if lead + axis in rows or size != Size(1) else out[lead + axis]
    return Step((tuple(out),), target=Target(rows, (), len(elements)))


def _split(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Split an axis without tokens."""
    sizes = known.carried(node.input[0])
    axis = attributes(node).get("axis", 0)
    if sizes is None or not isinstance(axis, int) or axis % len(sizes) - len(sizes) in token_axes(sizes):
        return Miss(f"{label(node)}: it splits the tokens", label(node))
    lengths = known.shapes.integers(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    outs = []
    for number, name in enumerate(node.output):
        shape = known.view.type_of(name).shape
        part = shape[axis] if shape is not None else None
        if not isinstance(part, int) and lengths is not None:
            part = lengths[number]
        out = list(sizes)
        out[axis] = Size(part) if isinstance(part, int) else None
        outs.append(tuple(out))
    return Step(tuple(outs))


def _sliced(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Slice axes without tokens."""
    sizes = known.carried(node.input[0])
    axes = known.shapes.integers(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    if sizes is None or axes is None:
        return Miss(f"{label(node)}: the axes that it slices are unknown", label(node))
    places = {axis % len(sizes) for axis in axes}
    if places & {axis % len(sizes) for axis in token_axes(sizes)}:
        return Miss(f"{label(node)}: it selects tokens before the last converted block", label(node))
    out = list(sizes)
    for number, axis in enumerate(axes):
        out[axis % len(sizes)] = _part(known, node, number, sizes[axis])
    return Step((tuple(out),))


def _part(known: Carried, node: onnx.NodeProto, number: int, size: Size | None) -> Size | None:
    """What a Slice leaves of one axis, None where that cannot be told."""
    bounds = []
    for name in [*node.input[1:3], *node.input[4:5]]:
        elements = known.shapes.elements(name)
        element = elements[number] if elements is not None and number < len(elements) else None
        bounds.append(element.number if isinstance(element, Size) and element.constant else element)
    if size is None or not size.constant or not all(isinstance(bound, int) for bound in bounds):
        return None
    return Size(len(range(*slice(*bounds).indices(size.number))))


def _gather(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Select along an axis without tokens, such as the query of a stacked projection."""
    sizes, axis = known.carried(node.input[0]), attributes(node).get("axis", 0)
    rows = known.constants.shape(node.input[1]) if node.input[1] in known.constants else None
    if sizes is None or rows is None or not isinstance(axis, int):
        return Miss(f"{label(node)}: it does not gather from the residual stream", label(node))
    # Behind the last converted block a pooler may select tokens; there the bias tokens have been cut off.
    if axis % len(sizes) - len(sizes) in token_axes(sizes):
        return Miss(f"{label(node)}: it selects tokens before the last converted block", label(node))
    place = axis % len(sizes)
    return Step(((*sizes[:place], *(Size(row) for row in rows), *sizes[place + 1 :]),))


def _concat(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Concatenate carried tensors along an axis without tokens."""
    parts, axis = [known.carried(name) for name in node.input], attributes(node).get("axis", 0)
    known_parts = [part for part in parts if part is not None]
    first = known_parts[0]
    if not isinstance(axis, int) or axis % len(first) - len(first) in token_axes(first):
        return Miss(f"{label(node)}: it appends tokens", label(node))
    if len(known_parts) < len(parts):
        return Miss(f"{label(node)}: it concatenates the stream with another tensor", label(node))
    numbers = [part[axis].number if part[axis] and part[axis].constant else None for part in known_parts]  # type: ignore[union-attr]
    total = None if None in numbers else Size(sum(number or 0 for number in numbers))
    return Step(((*first[: axis % len(first)], total, *first[axis % len(first) + 1 :]),))


def _shape(known: Carried, node: onnx.NodeProto) -> Step | Miss:
    """Keep the original value of a shape by subtracting m."""
    sizes = known.carried(node.input[0]) or ()
    given = attributes(node)
    start, end = given.get("start", 0), given.get("end", len(sizes))
    part = sizes[start:end] if isinstance(start, int) and isinstance(end, int) else sizes
    if any(size is not None and size.tokens and size != TOKENS for size in part):
        return Miss(f"{label(node)}: it reads the size of an axis that merges batch and tokens", label(node))
    return Step((), correct=tuple(size == TOKENS for size in part))


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
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Expand": _expand,
    "Split": _split,
    "Slice": _sliced,
    "Gather": _gather,
    "Concat": _concat,
    "Shape": _shape,
}
"""Operator type to its rule."""


# -- the route ------------------------------------------------------------------------------------------------------

SMALLEST_OPSET = 13
"""From this opset on, Pad accepts booleans, Softmax normalises one axis and Squeeze takes its axes as an input."""

_TRANSPARENT = ("Reshape", "Cast", "Identity", "Dropout")
_RANK = 3


@dataclass(frozen=True)
class Route:
    """The nodes that a bias token passes.

    Attributes:
        entry: the residual stream after the embeddings, [batch, N, width].
        width: d_model.
        elem_type: element type of the entry.
        steps: node index to the edits of that node.
        sizes: sizes of every carried tensor, including the entry.
    """

    entry: str
    width: int
    elem_type: int
    steps: Mapping[int, Step]
    sizes: Mapping[str, Sizes]


def find_route(view: GraphView, blocks: Sequence[Block]) -> Route | Miss:
    """The route on which all `blocks` of `view` can read the bias token, or why there is none."""
    if view.opsets.get("", 1) < SMALLEST_OPSET:
        return Miss(
            f"opset {view.opsets.get('', 1)} is older than {SMALLEST_OPSET}; convert the model to a newer opset first",
            "",
        )
    if any(name.startswith(f"{PREFIX}/") for name in (*view.producer, *view.initializers)):
        return Miss("the model carries a bias token already; convert all of its blocks at once", "")
    constants = Constants(view)
    ends = tuple(_behind_residual(view, constants, block) for block in blocks)
    needed = frozenset(ancestors(view, frozenset(), ends))
    width = blocks[0].first[0].in_features
    entry = _entry(view, constants, needed, blocks, width)
    if entry is None or width is None:
        return Miss(
            "no tensor [batch, tokens, d_model] was found through which the token embeddings reach every attention "
            "and every block",
            blocks[0].output,
        )
    read = [operator.data for block in blocks for operator in block.first]
    return _walk(view, constants, entry, width, needed, read)


def _walk(
    view: GraphView, constants: Constants, entry: str, width: int, needed: frozenset[int], read: Sequence[str]
) -> Route | Miss:
    shape = view.type_of(entry).shape or ()
    known = Carried(view, constants, ShapeReader(view, constants, symbols_of(view, entry)))
    known.static_tokens = shape[1] if isinstance(shape[1], int) else None
    known.shapes.carried[entry] = (BATCH, TOKENS, Size(width))
    steps: dict[int, Step] = {}
    for index, node in enumerate(view.nodes):
        carried = [name for name in node.input if name in known.shapes.carried]
        if any(name in known.shapes.carried for name in captured_names(node)):
            return Miss(f"{label(node)}: a subgraph of control flow reads the residual stream", label(node))
        # The route consists of ancestors of the last block's output; all other nodes read the tokens, cut off. A Shape
        # needs no cut, since m can be subtracted from it; the shape of the entry itself is right as it is.
        through = index in needed or (node.op_type == "Shape" and carried != [entry])
        if not through or not carried:
            continue
        step = apply_rule(known, node)
        if isinstance(step, Miss):
            return step
        steps[index] = step
        for name, sizes in zip(node.output, step.outputs, strict=False):
            known.shapes.carried[name] = sizes
            if step.pattern:
                known.patterns.add(name)
    lost = next((name for name in read if name not in known.shapes.carried), None)
    if lost is not None:
        return Miss(f"a block reads '{lost}', to which the stream does not lead", lost)
    return Route(entry, width, view.type_of(entry).elem_type, steps, known.shapes.carried)


def symbols_of(view: GraphView, entry: str) -> dict[str, Size]:
    """The sizes that symbolic dimensions stand for, by the entry and by integer inputs [batch, tokens]."""
    # Masks and position ids may name the dimensions otherwise than the embeddings. The entry comes last, so it wins.
    shape = view.type_of(entry).shape or ()
    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    shapes = [view.type_of(name).shape for name in view.inputs if view.type_of(name).elem_type in integers]
    pairs = [*(given for given in shapes if given is not None and len(given) == len((BATCH, TOKENS))), shape[:2]]
    return {
        dim: size for pair in pairs for dim, size in zip(pair, (BATCH, TOKENS), strict=True) if isinstance(dim, str)
    }


def _behind_residual(view: GraphView, constants: Constants, block: Block) -> str:
    """The sum of a block's output and the residual stream; the block's output, after b2, if no Add follows."""
    start = block.second[0].output
    tensor = start
    above = ancestors(view, frozenset(), [start])
    while len(readers := view.consumers.get(tensor, ())) == 1:
        node = view.nodes[readers[0]]
        free = [name for name in node.input if name not in constants]
        output = str(node.output[0])
        others = [name for name in free if name != tensor]
        if node.op_type == "Add" and others:  # an Add with one constant operand is b2 instead
            # The block reads the stream. What it does not read is a parallel attention, and the stream is added later.
            if others[0] not in view.producer or view.producer[others[0]] in above:
                return output
        elif node.op_type not in (*_TRANSPARENT, "Add", "Mul") or free[:1] != [tensor]:
            break
        if node.op_type == "Add" and not others and tensor == start and tensor not in view.outputs:
            start = output  # the heads add b2 as well, so theirs is this tensor
        tensor = output
    return start


def _entry(
    view: GraphView,
    constants: Constants,
    needed: frozenset[int],
    blocks: Sequence[Block],
    width: int | None,
) -> str | None:
    """The last candidate that no other stream bypasses on its way to a sublayer."""
    # The bias token must be there before the first sublayer: the first softmax or the first block.
    starts = [operator.node for block in blocks for operator in block.first]
    first = min(starts)
    softmaxes = [index for index, node in enumerate(view.nodes) if node.op_type == "Softmax" and index in needed]
    stop = min([first, *softmaxes])
    candidates = [name for name in view.inputs if _is_stream(view, name, width)]
    # Constants are position embeddings of shape [1, N, d_model], for example, and not a stream.
    candidates += [
        name
        for index in sorted(needed)
        if index < stop
        for name in view.nodes[index].output
        if name not in constants and _is_stream(view, name, width)
    ]
    # The last one, so that as few operators as possible need a rule: embeddings and their norm stay before it.
    for name in reversed(candidates):
        below = _descendants(view, name) & needed
        if below.issuperset(starts) and not _passed(view, constants, below, name, width):
            return name
    return None


def _passed(view: GraphView, constants: Constants, below: frozenset[int], entry: str, width: int | None) -> bool:
    """Whether a stream that does not come from `entry` reaches one of its descendants."""
    # Another stream that joins after the entry would have N rows where the carried one has N + m.
    made = {name for index in below for name in view.nodes[index].output} | {entry}
    return any(
        name not in made and name not in constants and _is_stream(view, name, width)
        for index in below
        for name in view.nodes[index].input
    )


def _is_stream(view: GraphView, name: str, width: int | None) -> bool:
    known = view.type_of(name)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    return known.rank == _RANK and known.elem_type in floats and known.shape is not None and known.shape[-1] == width


def _descendants(view: GraphView, tensor: str) -> frozenset[int]:
    """The nodes that read `tensor`, directly or indirectly."""
    found: set[int] = set()
    pending = [tensor]
    while pending:
        for index in view.consumers.get(pending.pop(), ()):
            if index not in found:
                found.add(index)
                pending.extend(view.nodes[index].output)
    return frozenset(found)
