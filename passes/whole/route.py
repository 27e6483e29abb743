"""Form `whole` on a network: the path of one residual stream through it, operator by operator (Theorems 3, 6 and 9).

The stream is one tensor [batch, N + R, D + 1 + R + T]: behind the model's D columns it has one that is 1 on tokens,
then one-hot positions, of the R bias tokens first and of T tokens after them. It starts behind the embeddings, at the
last tensor [batch, N, D] through which everything reaches the first attention and the blocks; residual additions add to
it, and in post-norm models a normalisation renews its first D columns. All other operators read these D columns.

Tensors that are not carried, shapes included, keep their original values, and so do all rows of a carried tensor except
the last R. These have zeros in the model's columns throughout: every operator on the path maps a row of zeros to zeros.
Biases do not, so they ride on the column that is 1 on tokens. `whole_for` refuses what would break this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms.square import PREFIX
from passes.forms.sublayer import LARGEST_PATTERN, default_omega
from passes.match.blocks import Block
from passes.options import DEFAULT_MAX_TOKENS
from passes.programs.groups import groups_of
from passes.sizes import BATCH, BROADCAST, TOKENS, Shapes, Sizes, token_axes
from passes.whole.masks import MaskReader
from rewriter.graph.constants import Constants
from rewriter.graph.elementwise import NONLINEAR
from rewriter.graph.extract import ancestors, cut
from rewriter.graph.view import SAME_NUMBERS, GraphView, LostError, Miss, attributes
from rewriter.graph.walk import captured_names

SMALLEST_OPSET = 13  # Pad of booleans, Softmax over one axis, Squeeze with axes as an input
_SUMS = ("Add", "Sub")
_NORMS = ("LayerNormalization", "RMSNormalization")
_LAYOUT = SAME_NUMBERS | {"Transpose", "Expand"}
_OVER_AXES = {
    **dict.fromkeys(_NORMS, "it normalises over tokens"),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2"), "it reduces over tokens"),
    **dict.fromkeys(("Slice", "Gather"), "it selects tokens before the last converted block"),
    "Split": "it splits the tokens",
    "Concat": "it appends tokens",
}
"""Operators that treat axes differently, and why none of these may hold the tokens."""
_KEEP_ZEROS = frozenset((*_LAYOUT, *_OVER_AXES, "MatMul", "Gemm", "Div", "Pow", "Neg", "Abs", "Sqrt", "Sin"))
"""Operators whose output is 0 in a row where their first operand is 0."""
_NO_HEADS = NONLINEAR - {"Exp"} | {"Where", "Min", "Max", "Softmax"}
"""Operators that form `whole` allows only inside a block that becomes heads, or as the softmax of a head."""
_ALLOWED = _KEEP_ZEROS | _NO_HEADS | {*BROADCAST, "Reciprocal", "Exp", "Log", "Cos", "Shape"}
_SUBLAYER = re.compile(r".*Attention.*|.*CausalConv.*|Scan|Loop|LSTM|GRU|RNN")  # or hold some
_MIN_OMEGA = 2.0**60  # outweighs any score of the network's own heads
_MAX_AXES = 3
_KEEP_COLUMNS = ("Reshape", "Cast", "Identity", "Dropout")


def unfit(conversion: Conversion) -> Miss | None:
    """Why a block cannot read the network's bias tokens; None where it can."""
    block, projections = conversion.block, conversion.projections
    if block.path:
        return Miss("it is in a subgraph of control flow, which the network's bias token does not enter", block.output)
    if projections is None or max(projections.rank, projections.result_rank) > _MAX_AXES:
        return Miss("its input has more axes than batch, tokens and channels; use form masked", block.output)
    return None


def whole_for(view: GraphView, conversions: Sequence[Conversion], longest: int | None) -> Whole | Miss:
    """What form `whole` does with a network of up to `longest` tokens (or what fits), or why it cannot."""
    try:
        return Whole(view, conversions, longest)
    except LostError as lost:
        return Miss(f"the network cannot be attention only: {lost.miss.reason}; use form masked", lost.miss.node)


class Whole:
    """What form `whole` does with a network; `entry` is the residual stream after the embeddings, [batch, N, D]."""

    def __init__(self, view: GraphView, conversions: Sequence[Conversion], longest: int | None) -> None:
        self._view = view
        self._constants = Constants(view)
        self._blocks = frozenset(index for each in conversions for index in cut(view, each.inputs, each.outputs).nodes)
        self._results = frozenset(name for each in conversions for name in each.outputs)
        self.entry, self.width, needed = _entry(view, self._constants, [each.block for each in conversions])
        known = view.type_of(self.entry)
        self.elem_type = known.elem_type
        length = (known.shape or (None, None))[1]
        self._fixed = length if isinstance(length, int) else None
        self.shapes = Shapes(view, _symbols(view, self.entry))
        self.sizes = self.shapes.known
        self.nodes: list[int] = []  # that read carried tensors
        self._patterns: set[str] = set()
        self._softmaxes: list[int] = []
        self._carry(needed)
        self._check_inputs(conversions)
        self._check_others()

        groups = tuple(group for conversion in conversions for group in groups_of(conversion.program))
        self.omega = max(default_omega(groups, self.elem_type), _MIN_OMEGA)  # the mask penalty
        self.neurons = tuple(sorted({group.bias_tokens for group in groups}))
        values = any(token.value for group in groups for token in group.head.bias_tokens)
        self.bias_tokens = max(1, *self.neurons) + values  # R; an attention sink if any value is non-zero
        fitting = min(_longest_fitting(each) for each in conversions)
        self.max_tokens = longest or self._fixed or min(fitting, DEFAULT_MAX_TOKENS)

        masks = MaskReader(view, self._constants, self.shapes, self.max_tokens, self._fixed)
        self.scores = {index: masks.scores(view.nodes[index]) for index in self._softmaxes}
        self.moved = frozenset(index for each in self.scores.values() for index in each.nodes)
        self.pads: dict[int, list[tuple[str, tuple[int, ...]]]] = {}  # operands that get R rows, axes from the end
        self.sums: dict[int, tuple[str, str]] = {}  # residual addition to (the stream, a sublayer's output)
        self.renewed: dict[str, str] = {}  # tensors that replace the model's columns, to the stream before
        self.stream: dict[str, str] = {self.entry: self.entry}  # of each carried tensor
        self.biases: dict[int, int] = {}  # node to the operand that is a bias
        self._zero = {self.entry}
        self._roots = {self.entry: self.entry}
        self._follow()

    @property
    def data(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.data for each in self.scores.values() for m in each.masks if m.data))

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"the bias tokens are appended to '{self.entry}' and carried through the network; blocks are proved one "
            "by one with separate bias tokens, the file end to end",
            *(
                f"the mask '{mask}' depends on data and stays, without the pairs that W_QK forbids by position"
                for mask in self.data
            ),
        )

    def flat(self, tensor: str) -> bool:
        return len(self.sizes[tensor]) == 2

    def _carry(self, needed: frozenset[int]) -> None:
        """The sizes of all tensors that are computed from the entry."""
        self.sizes[self.entry] = (BATCH, TOKENS, self.width)
        for index, node in enumerate(self._view.nodes):
            carried = [name for name in node.input if name in self.sizes]
            if any(name in self.sizes for name in captured_names(node)):
                raise LostError.at(node, "a subgraph of control flow reads the residual stream")
            # The path consists of ancestors of the last block's output; all other nodes read the tokens, cut off. A
            # Shape needs no cut, since its sizes are known.
            shape = node.op_type == "Shape" and self._view.is_onnx(node)
            if not carried or not (index in needed or (shape and carried != [self.entry])):
                self.shapes.note(node)
                continue
            self.nodes.append(index)
            if shape:
                continue
            if index not in self._blocks:
                self._check_rows(node)
            outputs = self.shapes.infer(node, self._fixed)
            if node.op_type == "Reshape" and _place_size(outputs[0]) != _place_size(self.sizes[node.input[0]]):
                raise LostError.at(node, "it mixes tokens with other axes")
            if node.op_type in BROADCAST and index not in self._blocks:
                there = {axis for name in carried for axis in token_axes(self.sizes[name])}
                if not there.issuperset(token_axes(outputs[0])):
                    raise LostError.at(node, "another operand has an axis of tokens that the stream has not")
            self.sizes.update({name: sizes for name, sizes in zip(node.output, outputs, strict=True) if name})

    def _check_rows(self, node: onnx.NodeProto) -> None:
        kind = node.op_type
        if not self._view.is_onnx(node) or kind not in _ALLOWED:
            raise LostError.at(node, "no rule says how it treats an extra row of the residual stream")
        if kind == "MatMul":
            self._check_product(node)
            return
        if kind in BROADCAST or kind in _NO_HEADS - {"Softmax"}:
            return
        concat = kind == "Concat"
        sizes = next((self.sizes[name] for name in node.input[: None if concat else 1] if name in self.sizes), None)
        if sizes is None:
            raise LostError.at(node, "its first operand is not part of the residual stream")
        tokens, axes = token_axes(sizes), self._axes(node, len(sizes))
        if kind == "Softmax" and axes & set(tokens):
            if sizes[-2:] != (TOKENS, TOKENS) or axes != {-1}:
                raise LostError.at(node, "its scores are not [tokens, tokens], so its mask cannot be extended")
            self._softmaxes.append(self._view.producer[node.output[0]])
            self._patterns.add(node.output[0])
        elif kind in _OVER_AXES and axes & set(tokens):
            raise LostError.at(node, _OVER_AXES[kind])
        elif concat and any(name not in self.sizes for name in node.input):
            raise LostError.at(node, "it concatenates the stream with another tensor")
        elif kind == "Gemm" and (
            attributes(node).get("transA") or -1 in tokens or any(n not in self._constants for n in node.input[1:] if n)
        ):
            raise LostError.at(node, "it is not a linear map of rows by constants")
        elif kind in ("Cast", "Identity", "Dropout") and node.input[0] in self._patterns:
            self._patterns.add(node.output[0])

    def _axes(self, node: onnx.NodeProto, rank: int) -> set[int]:
        """The axes, from the end, that an operator treats differently; all if it does not say."""
        kind, given = node.op_type, attributes(node)
        axes: list[int] | None
        if kind in _NORMS:
            axes = list(range(given.get("axis", -1) % rank, rank))
        elif kind in ("Softmax", "Split", "Gather", "Concat"):
            axes = [given.get("axis", -1 if kind == "Softmax" else 0)]
        else:
            place = 3 if kind == "Slice" else 1
            named = node.input[place] if len(node.input) > place else ""
            axes = given.get("axes") or (self.shapes.numbers(named) if named else None) or list(range(rank))
        return {axis % rank - rank for axis in axes}

    def _check_product(self, node: onnx.NodeProto) -> None:
        left, right = (self.sizes.get(name) for name in node.input)
        if left is None:
            raise LostError.at(node, "its first factor is not part of the residual stream")
        mixes = -1 in token_axes(left)
        if right is None:
            if node.input[1] not in self._constants:
                raise LostError.at(node, "its second factor is neither constant nor computed from the stream")
            weight = self._constants.shape(node.input[1]) or ()
            if any(weight[axis] != 1 for axis in token_axes(left) if -len(weight) <= axis < -2):
                raise LostError.at(node, f"'{node.input[1]}' has a matrix for each token")
        elif mixes and -2 in token_axes(right) and node.input[0] in self._patterns:
            return  # in an attention pattern the weights of the bias tokens' rows are 0 for every token
        else:
            mixes = mixes or -2 in token_axes(right)
        if mixes:
            raise LostError.at(node, "it mixes tokens outside a softmax")

    def _check_inputs(self, conversions: Sequence[Conversion]) -> None:
        for name in (operator.data for each in conversions for operator in each.block.first):
            if name not in self.sizes:
                raise LostError(f"a block reads '{name}', to which the stream does not lead", name)
        for name in (name for each in conversions for name in each.inputs):
            if self.sizes[name][-1] != self.width:
                other = f"which has other channels than the stream's {self.width}"
                raise LostError(f"a block reads '{name}', {other}", name)
        if self.elem_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            raise LostError(
                "its residual stream is not in float32 or float64, whose numbers can hold omega", self.entry
            )

    def _check_others(self) -> None:
        for index in sorted({*range(len(self._view.nodes))}.difference(self.nodes)):
            node = self._view.nodes[index]
            if _SUBLAYER.fullmatch(node.op_type) or _is_pattern(self._view, self._constants, node):
                raise LostError.at(node, "the bias tokens do not pass through this sublayer")

    def _follow(self) -> None:
        """Find the residual additions and the biases; raise LostError where rows of zeros do not stay zeros."""
        current, streams = self.entry, {self.entry}
        for index in self.nodes:
            node = self._view.nodes[index]
            if node.op_type == "Shape":
                continue
            carried = [name for name in node.input if name in self.sizes]
            for name in node.output:
                self.stream[name] = current
                if node.op_type in _KEEP_COLUMNS and self.sizes[name][-1] == self.sizes[carried[0]][-1]:
                    self._roots[name] = self._roots.get(carried[0], carried[0])
            if index in self._blocks:
                self._zero.update(self._results.intersection(node.output))
            elif index not in self.moved:
                self._step(index, node, carried)
            if index in self.sums:
                root, out = self.sums[index][0], str(node.output[0])
                if root not in streams:
                    # The skip connection starts at a normalisation of the stream.
                    self.renewed[root] = self.stream[root]
                self.stream[out] = current = out
                streams |= {root, out}

    def _step(self, index: int, node: onnx.NodeProto, carried: Sequence[str]) -> None:
        if node.op_type == "Softmax" and node.output[0] in self._patterns:
            return
        if node.op_type in _NO_HEADS:
            raise LostError.at(node, "it would stay in a network of attention only")
        pair = self._residual(node, carried)
        if pair is not None:
            self.sums[index] = pair
            lost = next((name for name in carried if name not in self._zero), None)
            if lost is not None:
                raise LostError.at(node, f"'{lost}' is not 0 in the rows of bias tokens")
            self._zero.update(node.output)
            return
        self._bias(index, node, carried)
        if node.op_type in BROADCAST:
            self.pads[index] = [pad for name in node.input if (pad := self._pad(node, name, carried))[1]]
        if self._keeps_zeros(index, node):
            self._zero.update(node.output)

    def _pad(self, node: onnx.NodeProto, name: str, carried: Sequence[str]) -> tuple[str, tuple[int, ...]]:
        """An operand and its axes that get R rows, if it neither is carried nor broadcasts."""
        if name in carried:
            return name, ()
        sizes = self.shapes.of(name)
        axes = sorted({axis for each in carried for axis in token_axes(self.sizes[each])})
        if sizes is None or any(sizes[axis] is None for axis in axes if -axis <= len(sizes)):
            raise LostError.at(node, f"the shape of '{name}' is unknown")
        return name, tuple(axis for axis in axes if -axis <= len(sizes) and sizes[axis] != 1)

    def _residual(self, node: onnx.NodeProto, carried: Sequence[str]) -> tuple[str, str] | None:
        """(the stream, a sublayer's output) if an Add joins a tensor with one computed from it."""
        if node.op_type != "Add" or len(carried) != 2 or self._row_width(node.output[0]) != self.width:
            return None
        for skip, written in (carried, carried[::-1]):
            root = self._roots.get(skip, skip)
            above = ancestors(self._view, frozenset((root,)), [written])
            if any(root in self._view.nodes[each].input for each in above):
                return root, written
        return None

    def _bias(self, index: int, node: onnx.NodeProto, carried: Sequence[str]) -> None:
        """Note a bias. Raises LostError if it is not one number for each column of the stream."""
        place = _bias_operand(node, carried)
        if place is None:
            return
        name = node.input[place]
        shape = self._constants.shape(name) if name in self._constants else None
        if shape is None:
            raise LostError.at(node, f"it adds '{name}', which is not part of the stream, to rows of it")
        if all(size == 1 for size in shape):
            return
        width, rank = self._row_width(str(node.output[0])), len(self.sizes[carried[0]])
        if width != shape[-1] or any(size != 1 for size in shape[:-1]) or len(shape) > rank:
            raise LostError.at(node, "its bias is not one number for each column of the stream")
        self.biases[index] = place

    def _keeps_zeros(self, index: int, node: onnx.NodeProto) -> bool:
        zero = [name in self._zero for name in node.input]
        if node.op_type in _SUMS:
            return all(zero) or (any(zero) and index in self.biases)
        if node.op_type in ("Mul", "Concat"):
            return any(zero) if node.op_type == "Mul" else all(zero)
        if node.op_type == "MatMul" and node.input[1] in self.sizes:
            return zero[1]  # a bias token attends to bias tokens only, so it mixes rows of zeros
        if index not in self.biases and _bias_operand(node, ()) is not None:
            return False  # one number for all columns
        return node.op_type in _KEEP_ZEROS and zero[0]

    def _row_width(self, tensor: str) -> int | None:
        """The width of [batch, tokens, width] or [batch tokens, width]; else None."""
        sizes = self.sizes[tensor]
        by_token = len(sizes) == 3 and sizes[1] == TOKENS
        return sizes[-1] if by_token or (len(sizes) == 2 and sizes[0] == BATCH * TOKENS) else None


def _place_size(sizes: Sizes) -> int:
    """The number of entries per place on the first axis that holds tokens."""
    return prod(size or 1 for size in sizes[len(sizes) + min(token_axes(sizes), default=0) + 1 :])


def _bias_operand(node: onnx.NodeProto, carried: Sequence[str]) -> int | None:
    if node.op_type in ("Gemm", "LayerNormalization"):
        return 2 if len(node.input) > 2 and node.input[2] else None
    if node.op_type in _SUMS:
        return next((place for place, name in enumerate(node.input) if name not in carried), None)
    return None


def _longest_fitting(conversion: Conversion) -> int:
    """The largest number of tokens for which the patterns of all heads stay within `LARGEST_PATTERN`."""
    one = (conversion.block.neurons or 1) * np.dtype(conversion.dtype).itemsize
    return max(1, int((LARGEST_PATTERN / one) ** 0.5) - 1 - conversion.program.bias_tokens)


# -- where the stream starts ----------------------------------------------------------------------------------------


def _symbols(view: GraphView, entry: str) -> dict[str, int]:
    """The sizes of symbolic dimensions, from the entry and from integer inputs [batch, tokens]."""
    # Masks and position ids may name the dimensions otherwise than the embeddings. The entry comes last, so it wins.
    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    shapes = [view.type_of(name).shape or () for name in view.inputs if view.type_of(name).elem_type in integers]
    pairs = [*(shape for shape in shapes if len(shape) == 2), (view.type_of(entry).shape or ())[:2]]
    return {
        dim: size for pair in pairs for dim, size in zip(pair, (BATCH, TOKENS), strict=True) if isinstance(dim, str)
    }


def _after_residual(view: GraphView, constants: Constants, block: Block) -> str:
    """The sum of a block's output and the residual stream; the block's output, after b2, without such an Add."""
    start = block.second[0].output
    tensor = start
    above = ancestors(view, frozenset(), [start])
    while len(readers := view.consumers.get(tensor, ())) == 1:
        node = view.nodes[readers[0]]
        free = [name for name in node.input if name not in constants]
        output = str(node.output[0])
        others = [name for name in free if name != tensor]
        if node.op_type == "Add" and others:  # an Add with one constant operand is b2 instead
            # The block reads the stream. Otherwise the operand is a parallel attention, and the stream is added later.
            if others[0] not in view.producer or view.producer[others[0]] in above:
                return output
        elif node.op_type not in (*_KEEP_COLUMNS, "Add", "Mul") or free[:1] != [tensor]:
            break
        if node.op_type == "Add" and not others and tensor == start and tensor not in view.outputs:
            start = output  # the heads add b2 as well, so theirs is this tensor
        tensor = output
    return start


def _entry(view: GraphView, constants: Constants, blocks: Sequence[Block]) -> tuple[str, int, frozenset[int]]:
    """Where the stream starts, its width, and the nodes down to where it ends. Raises LostError.

    It starts at the last candidate that no other stream bypasses on the path to a sublayer.
    """
    opset, width = view.opsets.get("", 1), blocks[0].first[0].in_features or 0
    if opset < SMALLEST_OPSET:
        raise LostError(f"opset {opset} is older than {SMALLEST_OPSET}; convert the model to a newer opset first", "")
    if any(name.startswith(f"{PREFIX}/") for name in (*view.producer, *view.initializers)):
        raise LostError("the model carries a bias token already; convert all of its blocks at once", "")
    ends = [_after_residual(view, constants, block) for block in blocks]
    needed = frozenset(ancestors(view, frozenset(), ends))
    # The bias token must be there before the first sublayer: the first attention or the first block.
    starts = [operator.node for block in blocks for operator in block.first]
    mixing = (i for i in needed if (kind := view.nodes[i].op_type) == "Softmax" or _SUBLAYER.fullmatch(kind))
    stop = min([*starts, *mixing])
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
        part = cut(view, [name], ends)
        # Another stream that joins after the entry would have N rows where the carried one has N + R.
        if set(part.nodes).issuperset(starts) and not any(_is_stream(view, each, width) for each in part.inputs[1:]):
            return name, width, needed
    raise LostError(
        "no tensor [batch, tokens, d_model] was found through which the token embeddings reach every attention and "
        "every block",
        blocks[0].output,
    )


def _is_pattern(view: GraphView, constants: Constants, node: onnx.NodeProto) -> bool:
    """Whether a softmax is an attention pattern: its output mixes rows of another tensor."""
    onward = view.onward(node.output[0]) if node.op_type == "Softmax" else ()
    reader = next((each for each in onward if each.op_type not in SAME_NUMBERS), None)
    return reader is not None and reader.op_type == "MatMul" and not any(name in constants for name in reader.input)


def _is_stream(view: GraphView, name: str, width: int) -> bool:
    known = view.type_of(name)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    return known.rank == 3 and known.elem_type in floats and known.shape is not None and known.shape[-1] == width
