"""Form `whole` on a network: constant rows and columns, joined to what each sublayer reads (Theorems 3, 6 and 9).

The stream is [tokens | is token | positions of R bias tokens | positions of T tokens] over R bias tokens. Its further
columns and rows are the same at every layer, so they are constants of the graph, and every sublayer joins them to the
model's D columns; what it writes is added to these. Nothing between the sublayers is touched.

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
from passes.forms.square import BIAS_ROWS, POSITION_ROWS, PREFIX, neuron_scores, type_of_positions
from passes.forms.sublayer import LARGEST_PATTERN, default_omega
from passes.options import DEFAULT_MAX_TOKENS
from passes.programs.groups import groups_of
from passes.whole.cores import Core, cores_of
from passes.whole.tables import OMEGA, Array, Data, Mask, Reader, Scores
from rewriter.graph.constants import Read
from rewriter.graph.edit import LOOSE_INITIALIZERS, Replacement
from rewriter.graph.extract import cut
from rewriter.graph.surgeon import Tensor
from rewriter.graph.view import GraphView, LostError, Miss, attributes

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
    def data(self) -> tuple[str, ...]:
        """The masks that depend on data."""
        return tuple(dict.fromkeys(each.term.tensor for _, scores in self.cores for each in scores.data))

    @property
    def notes(self) -> tuple[str, ...]:
        heads = f"positions and bias tokens are joined to {len(self.cores)} attention sublayers of the model"
        capped = sum(bool(scores.cap) for _, scores in self.cores)
        masks = (
            f"'{mask}' depends on data and stays an addition to the scores, without what W_QK forbids by position"
            for mask in self.data
        )
        return (heads, *masks, *([f"{capped} of them cap q k, to which p P p is added"] if capped else []))

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


def unfit(conversion: Conversion) -> Miss | None:
    """Why a block cannot read the network's bias tokens; None where it can."""
    if conversion.block.path:
        return Miss("it is in a subgraph of control flow, which the network's bias token does not enter", "")
    return None


def whole_for(
    model: onnx.ModelProto, view: GraphView, conversions: Sequence[Conversion], read: Read, longest: int | None
) -> Whole | Miss:
    """What form `whole` does with a network of up to `longest` tokens (or what fits), or why it cannot."""
    try:
        return _whole(model, view, conversions, read, longest)
    except LostError as lost:
        return Miss(f"the network cannot be attention only: {lost.miss.reason}; use form masked", lost.miss.node)


def _whole(
    model: onnx.ModelProto, view: GraphView, conversions: Sequence[Conversion], read: Read, longest: int | None
) -> Whole:
    opset = view.opsets.get("", 1)
    if opset < SMALLEST_OPSET or model.ir_version < LOOSE_INITIALIZERS:
        old = f"IR version {model.ir_version}" if opset >= SMALLEST_OPSET else f"opset {opset}"
        needed = LOOSE_INITIALIZERS if opset >= SMALLEST_OPSET else SMALLEST_OPSET
        raise LostError(f"{old} is older than {needed}; convert the model to a newer opset first", "")
    if any(name.startswith(f"{PREFIX}/") for name in (*view.producer, *view.initializers)):
        raise LostError("the model carries a bias token already; convert all of its blocks at once", "")
    inside = frozenset(index for each in conversions for index in cut(view, each.inputs, each.outputs).nodes)
    cores = cores_of(view, inside, [name for each in conversions for name in each.outputs])
    fitting = min(_longest_fitting(each) for each in conversions)
    reader = Reader(model, view, read, longest or min(fitting, DEFAULT_MAX_TOKENS))
    scores = [(core, reader.scores(core)) for core in cores]
    groups = [group for each in conversions for group in groups_of(each.program)]
    kinds = {type_of_positions(each) for each in conversions}
    if len(kinds) > 1:
        raise LostError("some of its blocks are float64 and some are not", conversions[0].block.output)
    return Whole(
        cores=tuple(scores),
        bias_tokens=max(1, *(group.bias_tokens for group in groups)),
        max_tokens=reader.longest,
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


def joined(whole: Whole, view: GraphView, core: Core, scores: Scores) -> list[Replacement]:
    """The nodes of a core with the further rows and columns, from queries and keys to the heads' outputs."""
    return _Join(whole, view, core, scores).parts()


class _Join:
    def __init__(self, whole: Whole, view: GraphView, core: Core, scores: Scores) -> None:
        self.whole, self.view, self.core, self.scores = whole, view, core, scores
        softmax = view.nodes[core.softmax]
        self.given = view.type_of(softmax.output[0]).elem_type or whole.elem_type
        self.kind = TensorProto.DOUBLE if self.given == TensorProto.DOUBLE else TensorProto.FLOAT
        self.b = Builder(f"{PREFIX}/{softmax.output[0]}", opset=view.opsets.get("", 1), compute_type=self.kind)

    def parts(self) -> list[Replacement]:
        """The replacement of the heads' outputs, and of a pattern that something else reads, without bias tokens."""
        b, softmax = self.b, self.view.nodes[self.core.softmax]
        pattern: Tensor = b.node("Softmax", [self._scores()], "pattern", axis=-1)
        if self.given != self.kind:
            pattern = b.node("Cast", [pattern], "pattern_narrow", to=self.given)
        earlier = []
        if self._read_elsewhere(softmax.output[0]):
            own = [b.integers(0), b.rows(self._shape(self.key, "k_shape"), -1, 2**31, 0, "own_keys"), b.integers(-1)]
            b.node("Slice", [pattern, *own], "own_pattern", output=softmax.output[0])
            earlier.append(self._replacement(softmax.output[0]))
            self.b = b = Builder(f"{b.prefix}/values", opset=self.view.opsets.get("", 1), compute_type=self.kind)
            pattern = b.tensor(str(pattern.name))
        product, last = self.view.nodes[self.core.values], softmax.output[0]
        value = self._padded(b.tensor(product.input[1]), self._rank(product.input[1]), -2, 0.0, "v_joined")
        for index, place in self.core.after:
            node = self.view.nodes[index]
            pattern = self._guarded(node, place, last, pattern, value)
            last = node.output[0]
        b.node("MatMul", [pattern, value], "z", output=product.output[0])
        return [*earlier, self._replacement(product.output[0])]

    def _replacement(self, output: str) -> Replacement:
        return Replacement(output, tuple(self.b.nodes({})), tuple(self.b.initializers()))

    def _read_elsewhere(self, pattern: str) -> bool:
        steps = {self.core.values, *(index for index, _ in self.core.after)}
        readers = (index for index in self.view.consumers.get(pattern, ()) if index not in steps)
        return pattern in self.view.outputs or any(self.view.nodes[index].op_type != "IsNaN" for index in readers)

    def _guarded(self, node: onnx.NodeProto, place: int, last: str, pattern: Tensor, value: Tensor) -> Tensor:
        """A step behind the softmax, on the joined pattern."""
        b, operands = self.b, [self.b.tensor(name) for name in node.input]
        operands[place] = pattern
        if node.op_type == "Reshape":
            lead, own = (
                b.rows(self._shape(each, f"{name}_shape"), *ends, 0, name)
                for each, name, ends in ((value, "lead_of_v", (0, -2)), (pattern, "pattern_square", (-2, 2**31)))
            )
            return b.reshape(pattern, b.concat([lead, own], 0, f"{node.output[0]}/shape"), node.output[0])
        if node.op_type == "Where" and place:
            maker = self.view.made_by(node.input[0])
            if maker is not None and maker.op_type == "IsNaN" and maker.input[0] == last:
                operands[0] = b.node("IsNaN", [pattern], f"{node.output[0]}/nan")
            elif (self.whole.reader.sizes(node.input[0]) or (0,))[-1] != 1:
                operands[0] = self._padded(operands[0], self._rank(node.input[0]), -1, None, f"{node.output[0]}/kept")
        return b.node(node.op_type, operands, node.output[0], domain=node.domain, **attributes(node))

    # -- scores

    def _scores(self) -> Tensor:
        b, scores, product = self.b, self.scores, self.view.nodes[self.core.product]
        query, self.key = (self._wide(name, side) for name, side in zip(product.input, "qk", strict=True))
        for index in scores.scales:
            query = self._copy(index, product, query, f"q_scaled_{index}")
        for index in scores.layout:
            query, self.key = (
                self._laid_out(index, each, f"{side}_laid_out_{index}")
                for side, each in (("q", query), ("k", self.key))
            )
        rank = self._rank(self.view.nodes[scores.layout[-1]].output[0] if scores.layout else product.input[1])
        positions, keys = self._positions(query)
        key = self._padded(self.key, rank, -1, 0.0, "k_padded")
        if scores.cap:
            made = b.node("MatMul", [query, key], "content")
            for index, place in scores.cap:
                made = self._copy(index, product, made, f"content_{index}", place)
            made = b.node("Add", [made, b.node("MatMul", [positions, keys], "position_scores")], "scores")
        else:
            made = b.node(
                "MatMul",
                [
                    b.concat([query, positions], -1, f"query/{self._limit}"),
                    b.concat([key, keys], -2, f"key/{self._limit}"),
                ],
                "scores",
            )
        for number, each in enumerate(scores.data):
            made = b.node("Add", [made, self._data(each, number)], f"scores_with_data_{number}")
        return made

    @property
    def _limit(self) -> str:
        """Name of nodes whose operands do not fit together if a sequence is too long."""
        return f"sequence_longer_than_max_tokens_{self.whole.max_tokens}"

    def _positions(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """p P of queries [..., N, R + T], and the positions of keys and bias tokens [..., R + T, S + R]."""
        b, whole = self.b, self.whole
        of_query, of_key = self._shape(query, "q_shape"), self._shape(self.key, "k_shape")
        self.stop = b.rows(of_key, -1, 2**31, 0, "key_count")
        count, self.start = b.rows(of_query, -2, -1, 0, "query_count"), b.integers(0)
        last = count
        if self.scores.by_position:  # behind a cache, queries are the last tokens
            self.start, last = b.node("Sub", [self.stop, count], "first_query"), self.stop
        slots, axes = b.integers(1), b.integers(1, 2)

        def columns(start: Tensor, stop: Tensor, name: str) -> Tensor:
            ends = [
                b.concat(each, 0, f"{name}_{end}")
                for end, each in (("start", [start, slots]), ("stop", [stop, b.integers(2**31)]))
            ]
            return b.node("Slice", [b.read(POSITION_ROWS, whole.elem_type, "token_columns"), *ends, axes], name)

        weight = b.read(whole.name_of(self.scores.table, self.scores.bias), whole.elem_type, "W_QK_positions")
        weighed = b.node("MatMul", [columns(self.start, last, "p_q"), weight], "p_q_W_QK")
        bias = b.rows(b.read(BIAS_ROWS, whole.elem_type, "bias_token_rows"), 1, 2**31, 2, "p_bias")
        keys = b.transpose(
            b.concat([columns(b.integers(0), self.stop, "p_k"), bias], 1, "p_keys"), (0, 2, 1), "p_keys_turned"
        )
        return self._spread(weighed, of_query, "q_positions"), self._spread(keys, of_key, "k_positions")

    def _spread(self, tensor: Tensor, shape: Tensor, name: str) -> Tensor:
        """A tensor for every batch and head of a shape."""
        lead = self.b.concat([self.b.rows(shape, 0, -2, 0, f"{name}_lead"), self.b.integers(1, 1)], 0, f"{name}_each")
        return self.b.node("Expand", [tensor, lead], name)

    def _data(self, each: Data, number: int) -> Tensor:
        """[..., N or 1, S + R or 1] of data that is added."""
        b, term, name = self.b, each.term, f"data_{number}"
        made: Tensor = b.tensor(term.tensor)
        if term.other:
            other = self._wide(term.other, f"{name}_other")
            zero = b.numbers("nought", 0.0)
            made = b.node("Where", [made, *((zero, other) if term.kept else (other, zero))], f"{name}_chosen")
        else:
            made = self._wide(term.tensor, name)
        if term.negative:
            made = b.node("Neg", [made], f"{name}_negative")
        for index in each.scales:
            made = self._copy(index, self.view.nodes[self.core.product], made, f"{name}_scaled_{index}")
        if each.allowed is not None:
            own = [
                b.concat([self.start, b.integers(0)], 0, f"{name}_start"),
                b.concat([self.stop, self.stop], 0, f"{name}_stop"),
                b.integers(0, 1),
            ]
            allowed = b.node("Slice", [b.tensor(self.whole.name_of(each.allowed)), *own], f"{name}_not_by_position")
            made = b.node("Where", [allowed, made, b.numbers("nought", 0.0)], f"{name}_without_positions")
        if each.share < 1.0:
            made = b.node("Mul", [made, b.numbers(f"share_{each.share:g}", each.share)], f"{name}_share")
        low = 0.0 if each.low == -np.inf else each.low * each.share
        return (
            self._padded(made, max(each.rank, 2 if each.allowed is not None else 1), -1, low, f"{name}/{self._limit}")
            if each.wide
            else made
        )

    # -- parts

    def _wide(self, tensor: str, name: str) -> Tensor:
        kind = self.view.type_of(tensor).elem_type or self.given
        return self.b.read(tensor, kind, name)

    def _shape(self, tensor: Tensor, name: str) -> Tensor:
        return self.b.node("Shape", [tensor], name)

    def _rank(self, tensor: str) -> int:
        return len(self.whole.reader.sizes(tensor) or ())

    def _copy(self, index: int, product: onnx.NodeProto, tensor: Tensor, name: str, place: int | None = None) -> Tensor:
        """A node that scales scores, on another tensor."""
        node = self.view.nodes[index]
        at = dict((*self.core.before, *self.core.after))[index] if place is None else place
        operands = [tensor if here == at else self._wide(each, f"{name}_by") for here, each in enumerate(node.input)]
        return self.b.node(node.op_type, operands, name, **attributes(node))

    def _laid_out(self, index: int, tensor: Tensor, name: str) -> Tensor:
        """Queries or keys with the leading axes that a step gives the scores."""
        b, node = self.b, self.view.nodes[index]
        if node.op_type != "Reshape":
            return b.node(node.op_type, [tensor, *map(b.tensor, node.input[1:])], name)
        lead = b.rows(b.tensor(node.input[1]), 0, -2, 0, f"{name}_lead")
        own = b.rows(self._shape(tensor, f"{name}_from"), -2, 2**31, 0, f"{name}_square")
        return b.reshape(tensor, b.concat([lead, own], 0, f"{name}_shape"), name)

    def _padded(self, tensor: Tensor, rank: int, axis: int, value: float | None, name: str) -> Tensor:
        """R entries behind an axis: numbers, or truth values False."""
        ends = [0] * rank
        ends[axis] = self.whole.bias_tokens
        fill = [] if not value else [self.b.numbers(f"low_{value:g}", value)]
        return self.b.node("Pad", [tensor, self.b.integers(*[0] * rank, *ends), *fill], name)
