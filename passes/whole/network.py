"""Form `whole` on a network: constant rows and columns, joined to what each sublayer reads (Theorems 3, 6 and 9).

The stream is [tokens | is token | positions of R bias tokens | positions of T tokens] over R bias tokens. Its further
columns and rows are constants of the graph, which every sublayer joins to the model's D columns, as what it writes.

A head of the model has score(i, j) = q_i k_j + p_i P p_j for the positions p of a query and a key. P, [R + T, R + T] or
one for each head, holds the masks and biases that depend on positions alone, and keeps tokens from bias tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto

from passes.conversion import Conversion
from passes.forms.builder import Builder
from passes.forms.softmax import (
    BIAS_ROWS,
    LARGEST_PATTERN,
    POSITION_ROWS,
    PREFIX,
    default_omega,
    neuron_scores,
    type_of_positions,
)
from passes.options import DEFAULT_MAX_TOKENS
from passes.programs.groups import groups_of
from passes.programs.program import Array
from passes.whole.cores import OMEGA, SAME_SCORES, Core, Data, Mask, Reader, Scores, cores_of
from rewriter.graph.constants import Read
from rewriter.graph.edit import Replacement
from rewriter.graph.extract import between
from rewriter.graph.surgeon import Tensor
from rewriter.graph.view import GraphView, LostError, attributes

_END = 2**31  # of a slice
SMALLEST_OPSET = 13  # Pad of booleans, Softmax over one axis, Squeeze with axes as an input


@dataclass(frozen=True)
class Whole:
    """What form `whole` does with a network."""

    cores: tuple[tuple[Core, Scores], ...]
    bias_tokens: int  # R
    max_tokens: int  # T
    elem_type: int  # of the constants
    omega: float
    neurons: tuple[int, ...]  # numbers of bias tokens that heads of neurons attend to
    reader: Reader
    _names: dict[str, dict[tuple[bytes, float], int]] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        what = "depends on data and stays an addition to the scores, without what W_QK forbids by position"
        masks = dict.fromkeys(each.term[1][0] for _, scores in self.cores for each in scores.data)
        sublayers = f"{len(self.cores)} attention sublayers of the model read positions and bias tokens"
        return (sublayers, *(f"'{mask}' {what}" for mask in masks))

    def constants(self) -> list[onnx.TensorProto]:
        """The further columns and rows of the stream, and every W_QK between positions."""
        r, t, made = self.bias_tokens, self.max_tokens, dict[str, Array | Mask]()
        made[POSITION_ROWS] = np.concatenate([np.ones((t, 1)), np.eye(t, r + t, r)], axis=1)[None]
        made[BIAS_ROWS] = np.eye(r, 1 + r + t, 1)[None]
        for count in self.neurons:  # a token attends to itself and to the first bias tokens
            weight = made[neuron_scores(count)] = np.full((r + t, r + t), -self.omega)
            np.fill_diagonal(weight[r:, r:], 0.0)
            weight[:, :count] = 0.0
        for _, scores in self.cores:
            heads = np.zeros((len(scores.table), r + t, r + t))
            heads[:, r:, r:], heads[:, r:, :r] = scores.table, scores.bias
            made[self.name_of(scores.table, scores.bias)] = heads[0] if len(heads) == 1 else heads
            made.update((self.name_of(each.allowed), each.allowed) for each in scores.data if each.allowed is not None)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(self.elem_type)
        typed = ((name, each if each.dtype == np.bool_ else each.astype(dtype)) for name, each in made.items())
        return [onnx.numpy_helper.from_array(values, name) for name, values in typed]

    def name_of(self, table: Array | Mask, bias: float = 0.0) -> str:
        """The name of W_QK between positions, or of the pairs that a mask does not forbid by them."""
        kind = "not_by_position" if table.dtype == np.bool_ else "W_QK_positions"
        known = self._names.setdefault(kind, {})
        return f"{PREFIX}/{kind}_{known.setdefault((table.tobytes(), bias), len(known))}"


def whole_for(
    model: onnx.ModelProto,
    view: GraphView,
    conversions: Sequence[Conversion],
    others: Sequence[str],
    read: Read,
    longest: int | None,
) -> Whole:
    """What form `whole` does with a network of up to `longest` tokens, or what fits.

    Raises LostError if it cannot; `others` says which blocks stay as they are, and why.
    """
    if others:
        raise LostError(others[0], "")
    opset = view.opsets.get("", 1)
    if opset < SMALLEST_OPSET:
        raise LostError(f"opset {opset} is older than {SMALLEST_OPSET}; convert the model to a newer opset first", "")
    if any(name.startswith(f"{PREFIX}/") for name in (*view.producer, *view.initializers)):
        raise LostError("the model carries a bias token already; convert all of its blocks at once", "")
    blocks = [each.whole_block for each in conversions]
    inside = frozenset(index for each in blocks for index in between(view, [each.query.data], [each.result]))
    reader = Reader(model, view, read)
    cores = cores_of(reader, inside, [each.result for each in blocks])
    counts = [count for core in cores if (count := reader.count(core)) is not None]
    fixed = max(counts) if len(counts) == len(cores) != 0 else None
    most = longest or fixed or min(*map(_longest_fitting, conversions), DEFAULT_MAX_TOKENS)
    groups = [group for each in conversions for group in groups_of(each.program)]
    kinds = {type_of_positions(each) for each in conversions}
    if len(kinds) > 1:
        raise LostError("some of its blocks are float64 and some are not", conversions[0].block.output)
    return Whole(
        cores=tuple((core, reader.scores(core, most)) for core in cores),
        bias_tokens=max(1, *(group.bias_tokens for group in groups)),
        max_tokens=most,
        elem_type=min(kinds),
        omega=max(default_omega(tuple(groups), min(kinds)), OMEGA),
        neurons=tuple(sorted({group.bias_tokens for group in groups})),
        reader=reader,
    )


def _longest_fitting(conversion: Conversion) -> int:
    """The largest number of tokens for which the patterns of all heads stay within `LARGEST_PATTERN`."""
    one = (conversion.block.neurons or 1) * np.dtype(conversion.dtype).itemsize
    return max(1, int((LARGEST_PATTERN / one) ** 0.5) - 1 - conversion.program.bias_tokens)


# -- one attention sublayer ------------------------------------------------------------------------------------------


class Join:
    """The nodes of a core with the further rows and columns, from queries and keys to the heads' outputs."""

    def __init__(self, whole: Whole, view: GraphView, core: Core, scores: Scores) -> None:
        self.whole, self.view, self.core, self.scores = whole, view, core, scores
        self.product, self.softmax, self.last = (view.nodes[at] for at in (core.product, core.softmax, core.values))
        self.given = view.type_of(self.softmax.output[0]).elem_type or whole.elem_type
        self.kind = TensorProto.DOUBLE if self.given == TensorProto.DOUBLE else TensorProto.FLOAT
        self.b = self._builder(f"{PREFIX}/{self.softmax.output[0]}")

    def parts(self) -> list[Replacement]:
        """The replacement of the heads' outputs, and of a pattern that something else reads, without bias tokens."""
        pattern: Tensor = self.b.node("Softmax", [self._scores()], "pattern", axis=-1)
        if self.given != self.kind:
            pattern = self.b.node("Cast", [pattern], "pattern_narrow", to=self.given)
        name, earlier = self.softmax.output[0], []
        readers = [self.view.nodes[each] for each in {*self.view.consumers.get(name, ())} - self.core.nodes]
        if name in self.view.outputs or any(each.op_type != "IsNaN" for each in readers):
            own = [self.b.integers(0), self.keys, self.b.integers(-1)]
            self.b.node("Slice", [pattern, *own], "own_pattern", output=name)
            earlier.append(self._replacement(name))
            self.b = self._builder(f"{self.b.prefix}/values")
            pattern = self.b.tensor(str(pattern.name))
        value = self._padded(self.b.tensor(self.last.input[1]), self._rank(self.last.input[1]), -2, "v")
        for index, place in self.core.after:
            pattern = self._guarded(self.view.nodes[index], place, pattern, value)
        self.b.node("MatMul", [pattern, value], "z", output=self.last.output[0])
        return [*earlier, self._replacement(self.last.output[0])]

    def _builder(self, prefix: str) -> Builder:
        return Builder(prefix, opset=self.view.opsets.get("", 1), compute_type=self.kind)

    def _replacement(self, output: str) -> Replacement:
        return Replacement(output, tuple(self.b.nodes({})), tuple(self.b.initializers()))

    def _guarded(self, node: onnx.NodeProto, place: int, pattern: Tensor, value: Tensor) -> Tensor:
        """A step behind the softmax, on the joined pattern."""
        b, name, operands = self.b, node.output[0], [self.b.tensor(each) for each in node.input]
        operands[place] = pattern
        if node.op_type == "Reshape":
            lead, square = self.b.sizes(value, 0, -2, f"{name}/v"), self.b.sizes(pattern, -2, _END, f"{name}/pattern")
            return b.reshape(pattern, b.concat([lead, square], 0, f"{name}/shape"), name)
        if node.op_type == "Where" and place:
            maker = self.view.made_by(node.input[0])
            if maker is not None and maker.op_type == "IsNaN" and maker.input[0] == node.input[place]:
                operands[0] = b.node("IsNaN", [pattern], f"{name}/nan")
            elif self.whole.reader.sizes(node.input[0])[-1:] != (1,):
                operands[0] = self._padded(operands[0], self._rank(node.input[0]), -1, f"{name}/kept")
        return b.node(node.op_type, operands, name, domain=node.domain, **attributes(node))

    def _scores(self) -> Tensor:
        """[..., N, S + R]: q k^T + p P p^T in one product, plus data; with a cap, the second term stands behind it."""
        b, scores = self.b, self.scores
        query, key = (self._wide(name, side) for name, side in zip(self.product.input, "qk", strict=True))
        rank = self._rank(self.product.input[1])
        for index, place in scores.scales:
            query = self._copy(index, place, query, f"q_scaled_{index}")
        for index in scores.layout:
            query, key = (self._laid_out(index, each, f"{side}_{index}") for each, side in ((query, "q"), (key, "k")))
            rank = self._rank(self.view.nodes[index].output[0])
        self.keys, count = self.b.sizes(key, -1, _END, "key_count"), self.b.sizes(query, -2, -1, "query_count")
        # Behind a cache, queries are the last tokens.
        last = bool(scores.table.any())
        self.first = b.node("Sub", [self.keys, count], "first_query") if last else b.integers(0)
        weight = b.read(self.whole.name_of(scores.table, scores.bias), self.whole.elem_type, "W_QK_positions")
        weighed = b.node("MatMul", [self._columns(self.first, self.keys if last else count, "p_q"), weight], "p_q_W_QK")
        bias = b.rows(b.read(BIAS_ROWS, self.whole.elem_type, "bias_token_rows"), 1, _END, 2, "p_bias")
        both = b.concat([self._columns(b.integers(0), self.keys, "p_k"), bias], 1, "p_k_joined")
        positions = self._spread(weighed, query, 0, "q_positions")
        turned = self._spread(b.transpose(both, (0, 2, 1), "p_k_turned"), key, 1, "k_positions")
        key = self._padded(key, rank, -1, "k")
        if scores.cap:
            made = b.node("MatMul", [query, key], "content")
            for index, place in scores.cap:
                made = self._copy(index, place, made, f"content_{index}")
            added = b.node("MatMul", [positions, turned], "position_scores")
            made = b.node("Add", [made, added], f"scores/{self._limit}")
        else:
            wide = b.concat([query, positions], -1, f"q/{self._limit}")
            made = b.node("MatMul", [wide, b.concat([key, turned], -2, f"k/{self._limit}")], "scores")
        for number, each in enumerate(scores.data):
            made = b.node("Add", [made, self._data(each, f"data_{number}")], f"scores_with_data_{number}")
        return made

    @property
    def _limit(self) -> str:
        """Name of nodes whose operands do not fit together if a sequence is too long."""
        return f"sequence_longer_than_max_tokens_{self.whole.max_tokens}"

    def _columns(self, start: Tensor, stop: Tensor, name: str) -> Tensor:
        """The one-hot positions [1, rows, R + T] of some tokens."""
        ends = ((start, self.b.integers(1), "start"), (stop, self.b.integers(_END), "stop"))
        bounds = [self.b.concat([row, column], 0, f"{name}_{end}") for row, column, end in ends]
        table = self.b.read(POSITION_ROWS, self.whole.elem_type, "token_columns")
        return self.b.node("Slice", [table, *bounds, self.b.integers(1, 2)], name)

    def _spread(self, tensor: Tensor, like: Tensor, side: int, name: str) -> Tensor:
        """A tensor for every batch and head of queries or keys."""
        b, given = self.b, self.product.input[side]
        known = not self.scores.layout and min(self.whole.reader.tokens(given), default=0) >= -2
        heads = [size or 1 for size in self.whole.reader.sizes(given)[1:-2]] if known else []
        lead = self.b.sizes(like, 0, 1 if known else -2, f"{name}_lead")
        return b.node("Expand", [tensor, b.concat([lead, b.integers(*heads, 1, 1)], 0, f"{name}_each")], name)

    def _data(self, each: Data, name: str) -> Tensor:
        """What depends on data, [..., N or 1, S + R or 1]."""
        b, zero, (operator, operands) = self.b, self.b.numbers("nought", 0.0), each.term
        wide = [self._wide(tensor, f"{name}_{at}") if tensor else zero for at, tensor in enumerate(operands)]
        made: Tensor = wide[0]
        if operator != "Identity":
            chosen = [b.tensor(operands[0]), *wide[1:]] if operator == "Where" else wide
            made = b.node(operator, chosen, f"{name}_added")
        for index in each.layout:
            made = self._laid_out(index, made, f"{name}_{index}")
        if each.allowed is not None:
            ends = ([self.first, b.integers(0)], "start"), ([self.keys, self.keys], "stop")
            bounds = [b.concat(end, 0, f"{name}_{which}") for end, which in ends]
            table = b.tensor(self.whole.name_of(each.allowed))
            own = b.node("Slice", [table, *bounds, b.integers(0, 1)], f"{name}_own")
            made = b.node("Where", [own, made, zero], f"{name}_not_by_position/{self._limit}")
        if each.share < 1.0:
            made = b.node("Mul", [made, b.numbers(f"{name}_share", each.share)], f"{name}_shared")
        # Bias tokens are padding too: where all keys of a token are, they weigh less.
        low = 0.0 if each.low == -np.inf else each.low * each.share
        wide_enough = each.sizes[-1] != 1 or each.allowed is not None
        return self._padded(made, len(each.sizes), -1, f"{name}_joined", low) if wide_enough else made

    # -- parts

    def _wide(self, tensor: str, name: str) -> Tensor:
        return self.b.read(tensor, self.view.type_of(tensor).elem_type or self.given, name)

    def _rank(self, tensor: str) -> int:
        return len(self.whole.reader.sizes(tensor))

    def _copy(self, index: int, place: int, tensor: Tensor, name: str) -> Tensor:
        """A node that scales or caps scores, on another tensor in their place."""
        node = self.view.nodes[index]
        if node.op_type in SAME_SCORES:
            return tensor
        operands = [self._wide(each, f"{name}_{at}") if at != place else tensor for at, each in enumerate(node.input)]
        return self.b.node(node.op_type, operands, name, **attributes(node))

    def _laid_out(self, index: int, tensor: Tensor, name: str) -> Tensor:
        """Queries or keys with the leading axes that a step gives the scores."""
        b, node = self.b, self.view.nodes[index]
        if node.op_type != "Reshape":
            return b.node(node.op_type, [tensor, *map(b.tensor, node.input[1:])], name)
        lead = b.rows(b.tensor(node.input[1]), 0, -2, 0, f"{name}_lead")
        own = self.b.sizes(tensor, -2, _END, f"{name}_own")
        return b.reshape(tensor, b.concat([lead, own], 0, f"{name}_shape"), name)

    def _padded(self, tensor: Tensor, rank: int, axis: int, name: str, value: float = 0.0) -> Tensor:
        """R entries behind an axis."""
        ends = [0] * 2 * rank
        ends[axis] = self.whole.bias_tokens
        fill = [self.b.numbers(f"{name}_low", value)] if value else []
        return self.b.node("Pad", [tensor, self.b.integers(*ends), *fill], f"{name}_padded")
