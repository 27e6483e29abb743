"""Form `whole`: a network of attention only, on one stream with constant rows and columns (Theorems 3, 6 and 9).

The attention of a network is found first, each softmax over keys between two products:

    product ─► scales, a cap, masks and biases ─► Softmax ─► guards ─► product with values

Everything else between embedding and unembedding must be a converted block, linear, a norm, a gate, a router or data
movement; `cores_of` refuses other nodes.

A head has score(i, j) = q_i k_j + p_i P p_j for the positions p of a query and a key. P, [R + T, R + T] or one for each
head, holds the masks and biases that depend on positions alone, sinks, and what keeps tokens from bias tokens. The
graph's own nodes evaluate what is added to the scores at several lengths: a number that two positions have at every
length is an entry of P, as is a pair that is forbidden for all data; other terms stay additions.

The stream is [tokens | is token | positions of R bias tokens | positions of T tokens] over R bias tokens. All but the
model's D columns are constants of the graph, which every sublayer joins to its input.
"""

import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import floor, log2, prod

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.conversion import Builder, Conversion
from passes.forms.softmax import BIAS_ROWS, LARGEST_PATTERN, POSITION_ROWS, PREFIX, default_omega, neuron_scores
from passes.match.linear import routing
from passes.options import DEFAULT_MAX_TOKENS, WHOLE
from passes.programs.program import Array, groups_of
from rewriter.arrays import distinct
from rewriter.evaluate.scalar import NONLINEAR
from rewriter.graph.attention import keys_alone
from rewriter.graph.constants import Constants, Read, Shapes, Sizes, computed
from rewriter.graph.edit import Replacement, ancestors, between
from rewriter.graph.surgeon import Tensor
from rewriter.graph.types import FLOATS
from rewriter.graph.view import SIZES, GraphView, LostError, Route, Step, attributes, integer_of, integers_of
from rewriter.graph.walk import iter_nodes, reads, subgraphs

SAME_SCORES = frozenset(("Cast", "Identity", "Dropout"))
LAYOUT = frozenset(("Reshape", "Unsqueeze", "Squeeze"))
SCORING = SAME_SCORES | LAYOUT | {"Add", "Sub", "Mul", "Div", "Where", "Max", "Tanh"}
_GUARDING = SAME_SCORES | {"Where", "Mul", "Reshape", "Slice"}  # between a softmax and the product with values
_SUBLAYER = re.compile(r".*Attention.*|.*CausalConv.*|Scan|Loop|LSTM|GRU|RNN")  # or hold some
_NO_HEADS = NONLINEAR - {"Exp"} | {"Min", "Max", "Softmax", "TopK"}


# -- what is added to scores -------------------------------------------------------------------------------------------

Mask = NDArray[np.bool_]
Term = tuple[str, tuple[str, ...]]  # what a node adds to scores: an operator and its operands, an empty one 0
Pair = tuple[str, str]  # the scores after the addition, and the input of the softmax
Case = tuple[int, int]  # numbers of tokens, and of tokens before them in a cache
OMEGA = 2.0**60  # no finite mask lowers a score by more
LOWEST = -4.0 * OMEGA
_LENGTHS, _CACHED, _BATCH = (1, 2, 3, 7), (3, 4), 2
_FAR = 448  # as a side of an image it is many patches
_USUAL = (_LENGTHS[-1], 0)
_DATA_TRIALS = 8
_INFINITE = "is not finite, or -infinity for all keys of a token"
_MIN_PENALTY = 1000.0  # exp of a score lowered by as much is 0 beside any other
_MAX_READ = 2**24  # elements of the weights from which a table is computed


@dataclass(frozen=True)
class Data:
    """A term that stays an addition to the scores, and why."""

    term: Term
    sizes: Sizes
    why: str = "depends on data"
    low: float = 0.0  # what it adds to a forbidden score
    allowed: Mask | None = None  # [T, T], without what positions forbid
    layout: tuple[int, ...] = ()  # nodes behind the addition that split or insert axes before the last two

    @property
    def share(self) -> float:
        """A power of two by which it is multiplied, so that bias tokens can weigh less."""
        return min(1.0, 2.0 ** floor(60.0 - log2(-self.low))) if -np.inf < self.low < 0.0 else 1.0


@dataclass(frozen=True)
class Core:
    """The heads of one attention sublayer; indices are those of nodes, steps in graph order by scores or pattern.

    Their scores, once read: q k^T, scaled, perhaps capped, plus a table by position, plus data.
    """

    product: int
    before: tuple[Step, ...]
    scores: str  # those of keys alone
    softmax: int
    after: tuple[Step, ...]
    values: int
    beside: frozenset[int]  # nodes that join a sink to the scores, or subtract the largest
    sink: Array | None  # [heads or 1] the score of one more key, which has no value
    table: Array = field(default_factory=partial(np.zeros, (1, 0, 0)))  # [heads or 1, T, T] of query and key
    data: tuple[Data, ...] = ()
    scales: tuple[Step, ...] = ()  # of queries
    layout: tuple[int, ...] = ()  # nodes that split or insert axes before the last two
    cap: tuple[Step, ...] = ()  # up to a tanh of the product, and its scale

    @property
    def nodes(self) -> set[int]:
        steps = {index for index, _ in (*self.before, *self.after)}
        return steps | self.beside | {self.product, self.softmax, self.values}

    @property
    def bias(self) -> float:
        """The score of bias tokens: above pairs forbidden by -infinity, which may be all of a row; below all others."""
        infinite = self.table.min() < -OMEGA or any(each.low == -np.inf for each in self.data)
        return -OMEGA if infinite else LOWEST


def cores_of(reader: "Reader", blocks: Container[int], ends: Sequence[str]) -> tuple[Core, ...]:
    """All attention of a main graph; `ends` are the results of its blocks, whose nodes are `blocks`.

    Raises LostError where something else than heads, linear operators, norms and gates would remain.
    """
    view = reader.view
    softmaxes = [index for index, node in enumerate(view.nodes) if node.op_type == "Softmax" and index not in blocks]
    cores = tuple(core for index in softmaxes if (core := reader.core(index)) is not None)
    ends = [*ends, *(view.nodes[core.values].output[0] for core in cores)]
    way, made, taken = ancestors(view, frozenset(), ends), set(ends), set[int]().union(*(core.nodes for core in cores))
    for index, node in enumerate(view.nodes):
        behind = not made.isdisjoint(reads(node))  # a sublayer
        made.update(node.output if behind else ())
        if index not in taken and index not in blocks and not view.data.isdisjoint(node.output):
            reader.check(index, on_way=index in way, behind=behind)
    return cores


class Reader:
    """Finds cores and reads their scores; `read` reads initializers."""

    def __init__(self, view: GraphView, read: Read) -> None:
        self.view, self.read, self.routing = view, read, routing(view)
        self.shapes: Callable[[int, int], Shapes] = cache(self._shapes)
        self._constants = Constants(view, read)
        self._known = dict[tuple[Term, Sizes], Array | Data]()
        self._stops = frozenset(name for node in view.nodes if node.op_type in SIZES for name in node.output)
        # Inputs by head hold past keys and values if outputs by head hold the next ones.
        types = {name: view.type_of(name) for name in (*view.inputs, *view.outputs)}
        caches = {name for name, kind in types.items() if kind.elem_type in FLOATS and (kind.rank or 0) >= 4}
        pasts = caches.intersection(view.inputs) if not caches.isdisjoint(view.outputs) else ()
        dims = ((name, axis, dim) for name in pasts for axis, dim in enumerate(types[name].shape or ()) if axis)
        self._pasts = {dim or f"{name}[{axis}]" for name, axis, dim in dims if not isinstance(dim, int)}

    def core(self, softmax: int) -> Core | None:
        """The attention around a softmax; None if that weighs no values. Raises LostError."""
        view, node = self.view, self.view.nodes[softmax]
        ways = [*view.routes(node.output[0], self._is_product, lambda each, _: each.op_type in _GUARDING, onward=True)]
        nearest = [way for way in ways if len(way[1]) == len(ways[0][1])]
        if len(nearest) != 1:
            return None
        if integer_of(node, "axis", -1) not in (-1, (view.type_of(node.input[0]).rank or 0) - 1):
            raise LostError.at(node, "it is not over the last axis")
        scores, sink, beside = keys_alone(view, node.input[0], lambda name: self._from_product(name) is not None)
        if (before := self._from_product(scores)) is None:
            reason = "its scores are not a product of queries and keys, scaled, masked or capped"
            raise LostError.at(view.made_by(scores) or node, reason)
        (product, steps), (values, after) = before, nearest[0]
        parts = [view.nodes[index] for index, _ in after if view.nodes[index].op_type == "Slice"]
        if len(parts) != bool(sink) or not all(map(self._drops_last, parts)):
            raise LostError.at(view.nodes[values], "it weighs values by other columns than those of keys")
        return Core(product, steps[::-1], scores, softmax, after, values, beside, self._sink(sink) if sink else None)

    def _from_product(self, scores: str) -> Route | None:
        """The product that makes scores, and the steps back to it."""

        def passes(node: onnx.NodeProto, place: int) -> bool:
            return node.op_type in SCORING and (node.op_type != "Sub" or not place)

        for least in (2, 1):  # queries may be weights, as of a head that pools
            if routes := [*self.view.routes(scores, partial(self._is_product, least=least), passes)]:
                return min(routes, key=lambda way: [place for _, place in way[1]])
        return None

    def _drops_last(self, node: onnx.NodeProto) -> bool:
        """Whether a Slice keeps all columns but the last."""
        before, kept = (self.sizes(name) for name in (node.input[0], node.output[0]))
        starts = self._constants.numbers(node.input[1])
        return kept == (*before[:-1], (before[-1] or 0) - 1) and starts is not None and not any(starts)

    def _sink(self, name: str) -> Array:
        """A score [heads or 1] beside those of all keys. Raises LostError unless it is a constant."""
        maker = self.view.made_by(name)
        value = self._constants.value(maker.input[0] if maker is not None and maker.op_type == "Expand" else name)
        if value is None or value.size != [1, 1, 1, *value.shape][-3]:
            raise LostError(f"'{name}', which is joined to its scores, is not one number for each head", name)
        return np.asarray(value, np.float64).reshape(-1)

    def _is_product(self, node: onnx.NodeProto, least: int = 2) -> bool:
        """Whether a node multiplies two tensors, of which so many depend on data."""
        return node.op_type == "MatMul" and sum(map(self.view.data.__contains__, node.input)) >= least

    def check(self, index: int, *, on_way: bool, behind: bool) -> None:
        """Raise LostError for a node that a network of attention cannot have: `on_way` to or `behind` a sublayer."""
        node = self.view.nodes[index]
        kind, known = node.op_type, self.view.type_of(node.output[0]).elem_type
        inner = [each.op_type for _, body in subgraphs(node) for each in iter_nodes(body.node)]
        if "Softmax" in inner or any(_SUBLAYER.fullmatch(each) for each in (kind, *inner)):
            raise LostError.at(node, "no heads were found in this sublayer")
        if not on_way or (known and known not in FLOATS):
            return
        reduced = "Reduce" in kind and len(self.tokens(node.input[0])) > len(self.tokens(node.output[0]))
        convolved = "Conv" in kind and max(integers_of(node, "kernel_shape") or [2]) > 1
        multiplied = kind in ("MatMul", "Gemm") and (self._is_product(node) or -1 in self.tokens(node.input[0]))
        if multiplied or (behind and (reduced or convolved or kind == "CumSum")):
            raise LostError.at(node, "it mixes tokens outside a softmax")
        if behind and kind in _NO_HEADS and index not in self.routing:
            raise LostError.at(node, "it would stay in a network of attention only")

    def count(self, core: Core) -> int | None:
        """The larger number of queries and keys; None where inputs decide. Raises LostError."""
        product = self.view.nodes[core.product]
        sides = [self.sizes(name) for name in product.input]
        if any(None in sizes or len(sizes) < 3 for sizes in sides):
            raise LostError.at(product, "its queries and keys are not [batch, heads, tokens, d_head]")
        return None if self.tokens(product.output[0]) else max(sides[0][-2] or 0, sides[1][-1] or 0)

    def scores(self, core: Core, longest: int) -> Core:
        """A core with its scores for positions up to `longest`. Raises LostError if W_QK cannot hold them."""
        product, steps = self.view.nodes[core.product], [*core.before]
        fixed = {-2, -1}.difference(self.tokens(product.output[0]))
        if (count := max((self.sizes(product.output[0])[axis] or 0 for axis in fixed), default=0)) > longest:
            raise LostError.at(product, f"it has {count} tokens; raise --max-tokens from {longest} to {count}")
        caps = [place for place, (index, _) in enumerate(steps) if self.view.nodes[index].op_type == "Tanh"]
        end = caps[-1] + 1 if caps else 0
        while caps and end < len(steps) and self._factor(steps[end]) is not None:
            end += 1
        cap, steps = steps[:end], steps[end:]
        found = replace(core, table=np.zeros((1, longest, longest)), cap=tuple(cap))
        for index, place in steps:
            node = self.view.nodes[index]
            others = [name for at, name in enumerate(node.input) if at != place and name]
            lows = [self._constants.scalar(name) for name in others if node.op_type == "Max"]
            if node.op_type in ("Add", "Sub", "Where"):
                found = self._added(found, node, place)
            elif (factor := self._factor((index, place))) is not None and not cap and not found.data:
                if found.table.any() and np.isnan(factor):
                    raise LostError.at(node, "data scales what is added to its scores by position")
                table = found.table * factor if found.table.any() else found.table
                found = replace(found, scales=(*found.scales, (index, place)), table=table)
            elif node.op_type in LAYOUT and not cap:
                data = tuple(self._laid_out(each, node, index, place) for each in found.data)
                found = replace(found, layout=(*found.layout, index), data=data)
            elif node.op_type not in SAME_SCORES and not all(low is not None and low <= -1e9 for low in lows or [None]):
                raise LostError.at(node, "it changes the scores in a way that W_QK cannot hold")
        return found

    def _factor(self, step: Step) -> float | None:
        """The number by which a step multiplies the scores of each head, NaN if unknown; None if it does not."""
        node = self.view.nodes[step[0]]
        if node.op_type not in ("Mul", "Div") or (node.op_type == "Div" and step[1]):
            return None
        other = node.input[1 - step[1]]
        factor = self._constants.scalar(other)
        if any(size != 1 for size in self.sizes(other)[-2:]):
            return None
        return np.nan if factor is None else 1.0 / factor if node.op_type == "Div" else factor

    def _laid_out(self, data: Data, node: onnx.NodeProto, index: int, place: int) -> Data:
        """A term before a node that rearranges the leading axes of the scores. Raises LostError."""
        before, after = (self.sizes(name)[:-2] for name in (node.input[place], node.output[0]))
        if data.sizes[:-2] == before:
            return replace(data, layout=(*data.layout, index), sizes=(*after, *data.sizes[-2:]))
        if len(data.sizes) - 2 > len(after) or any(size != 1 for size in data.sizes[:-2]):
            raise LostError.at(node, "it lays out scores with data in a way that W_QK cannot hold")
        return data

    def _added(self, found: Core, node: onnx.NodeProto, place: int) -> Core:
        both = node.output[0], found.scores
        sizes = self.sizes(both[0])
        for term in self._terms(node, place):
            if (term, sizes) not in self._known:
                self._known[term, sizes] = self._read(term, both, len(found.table[0]))
            made = self._known[term, sizes]
            if not isinstance(made, Data):
                made = np.where(made == -np.inf, LOWEST, np.maximum(made, -OMEGA))
            elif made.why == _INFINITE:
                raise LostError.at(node, f"what it adds to the scores {_INFINITE}")
            else:
                if made.allowed is not None and (found.table[:, ~made.allowed] <= -OMEGA).all():
                    made = replace(made, allowed=None)  # another mask by position forbids these pairs
                found = replace(found, data=(*found.data, made))
                forbidden = LOWEST if made.low == -np.inf else made.low * made.share
                made = np.zeros((1, 1, 1)) if made.allowed is None else np.where(made.allowed, 0.0, forbidden)[None]
            found = replace(found, table=np.maximum(found.table + made, LOWEST))
        return found

    def _terms(self, node: onnx.NodeProto, place: int) -> list[Term]:
        """What a node adds; a sum of a table and data in two terms."""
        if node.op_type == "Where":
            return [("Where", tuple("" if at == place else name for at, name in enumerate(node.input)))]
        maker, parts = self.view.made_by(node.input[1 - place]), [node.input[1 - place]]
        if maker is not None and maker.op_type == "Add" and len(self.view.data.intersection(maker.input)) == 1:
            parts = [*maker.input]
        return [("Neg" if node.op_type == "Sub" else "Identity", (part,)) for part in parts]

    # -- their values

    def _table(self, term: Term, scores: Pair, most: int) -> Array | str:
        """The table of a term, if all data is 1; else why there is none."""
        cases, table = [_USUAL], np.zeros((1, most, most))
        if self.tokens(scores[0]):
            cases = [(length, 0) for length in (most, *_LENGTHS) if length <= most]
            cases += [_CACHED] if self._pasts and most >= sum(_CACHED) else []
        for case in cases:
            square = self._square(term, scores, case, np.ones)
            if square is None and case == _CACHED:
                continue  # its sizes are not the sums that the names of dimensions say
            if square is None or (square != square[:1]).any():
                return "differs between sequences"
            if not (square < np.inf).all() or (square.size and (square == -np.inf).all(-1).any()):
                return _INFINITE
            one = square[0, :1] if (square[0] == square[0, :1]).all() else square[0]
            rows = slice(max(0, one.shape[2] - one.shape[1]), max(one.shape[1:]))
            if case == cases[0]:
                table = np.repeat(table, len(one), axis=0)
                table[:, rows, : one.shape[2]] = one
            elif (table[:, rows, : one.shape[2]] != one).any():
                return "depends on the length"
        return table

    def _read(self, term: Term, scores: Pair, most: int) -> Array | Data:
        """The table of a term; if it has none, the term, with what positions forbid."""
        # With data of ones all tokens are valid, so every forbidden pair is forbidden by position.
        table, rng = self._table(term, scores, most), np.random.default_rng(0)
        static = self.view.data.isdisjoint(term[1])
        if static and not isinstance(table, str):
            return table
        found = Data(term, max((self.sizes(name) for name in term[1] if name), key=len))
        if isinstance(table, str) or len(table) > 1:
            return replace(found, why=str(table)) if static else found
        forbidden, low = table[0] != 0.0, {*distinct(table[table != 0.0])}
        # Data may also be positions, as of a static cache.
        for end in (*[2] * _DATA_TRIALS, most, most):
            square = self._square(term, scores, (min(most, _LENGTHS[-1]), 0), partial(rng.integers, 0, end))
            if square is None or (square[..., forbidden[: square.shape[2], : square.shape[3]]] == 0.0).any():
                return found
            low.update(distinct(square[square != 0.0]) if end == 2 else ())
        if len(low) != 1 or not min(low) <= -_MIN_PENALTY:
            return found
        return replace(found, low=float(min(low)), allowed=~forbidden if forbidden.any() else None)

    def _square(self, term: Term, scores: Pair, case: Case, fill: Callable[..., object]) -> Array | None:
        """What is added to scores, [batch, heads or 1, queries, keys]; None where that cannot be computed."""
        sizes, last = (tuple(size or 0 for size in self.shapes(*case).of(name) or ()) for name in scores)
        if 0 in sizes:  # keys of an encoder that are in a cache
            return np.zeros((1, 1, *sizes[-2:]))
        try:
            made = np.asarray(self._value(term, case, fill), np.float64)
            if len(sizes) < len(last):  # batch and heads are one axis, which is split later
                return np.broadcast_to(made, sizes).reshape(-1, *last[-3:])
            square = np.broadcast_to(made, (*made.shape[:-2], *sizes[-2:]))
        except Exception:  # noqa: BLE001 - onnx's evaluator raises any exception
            return None
        return square.reshape(-1, 1 if len(sizes) < 4 or made.ndim < 3 else made.shape[-3], *sizes[-2:])

    def _value(self, term: Term, case: Case, fill: Callable[..., object]) -> NDArray[np.generic]:
        """A term computed by the graph's nodes. Raises any Exception."""
        view, shapes, (operator, operands) = self.view, self.shapes(*case), term
        names = [name for name in operands if name]
        nodes = [view.nodes[index] for index in sorted(ancestors(view, self._stops, names))]
        given = sorted({name for node in nodes for name in reads(node)}.union(names))
        weights = [view.initializers[name] for name in given if name in view.initializers]
        if sum(prod(each.dims) for each in weights) > _MAX_READ:
            raise LostError("it is computed from large weights", names[0])
        feeds = {each.name: self.read(each) for each in weights}
        for name in given:
            if name in self._stops:
                feeds[name] = np.asarray(shapes.values.numbers(name), np.int64)
            elif name in view.inputs:
                dtype = onnx.helper.tensor_dtype_to_np_dtype(view.type_of(name).elem_type)
                feeds[name] = np.asarray(fill(shapes.of(name)), dtype)
        first, *other = computed(nodes, feeds, names, view.opsets)
        if operator == "Where":
            return np.where(first.astype(np.bool_) == bool(operands[1]), other[0], 0.0)
        return np.asarray(-first if operator == "Neg" else first)

    # -- sizes

    def sizes(self, tensor: str) -> Sizes:
        """The shape of a tensor at some length. Raises LostError if it is not known."""
        if (found := self.shapes(*_USUAL).of(tensor)) is None:
            raise LostError(f"the shape of '{tensor}' is not known", tensor)
        return found

    def tokens(self, tensor: str) -> set[int]:
        """The axes, from the end, whose lengths depend on the inputs."""
        sizes = [*zip(*(self.shapes(length, 0).of(tensor) or () for length in (*_LENGTHS[-2:], _FAR)), strict=False)]
        return {axis - len(sizes) for axis, each in enumerate(sizes) if len({*each}) > 1}

    def _shapes(self, length: int, past: int) -> Shapes:
        def size_of(axis: int, name: str) -> int:
            if not axis or name in self._pasts:
                return past if axis else _BATCH
            return length + past * (not self._pasts.isdisjoint(name.split(" + ")))

        return Shapes(self.view, size_of, self.read)


# -- the network ------------------------------------------------------------------------------------------------------

_END = 2**31  # of a slice
SMALLEST_OPSET = 13  # Pad of booleans, Softmax over one axis, Squeeze with axes as an input


@dataclass(frozen=True)
class Whole:
    """What form `whole` does with a network."""

    cores: tuple[Core, ...]
    bias_tokens: int  # R
    max_tokens: int  # T
    elem_type: int  # of the constants
    omega: float
    neurons: tuple[int, ...]  # numbers of bias tokens that heads of neurons attend to
    reader: Reader
    _names: dict[str, dict[tuple[bytes, tuple[float, ...]], int]] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        view, stay = self.reader.view, "stays an addition to the scores, without what W_QK forbids by position"
        masks = {each.term[1][0]: each.why for core in self.cores for each in core.data}
        sublayers = f"{len(self.cores)} attention sublayers of the model read positions and bias tokens"
        nodes = (view.nodes[index] for index in sorted(self.reader.routing))
        kinds = Counter(each.op_type for each in nodes if each.op_type in _NO_HEADS and each.output[0] in view.data)
        routers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        routed = (f"routers and gates of one number for each token stay: {routers}",) if routers else ()
        return (sublayers, *routed, *(f"'{mask}' {why} and {stay}" for mask, why in masks.items()))

    def constants(self) -> list[onnx.TensorProto]:
        """The further columns and rows of the stream, and every W_QK between positions."""
        r, t, made = self.bias_tokens, self.max_tokens, dict[str, Array | Mask]()
        if self.neurons:
            made[POSITION_ROWS] = np.concatenate([np.ones((t, 1)), np.eye(t, r + t, r)], axis=1)[None]
            made[BIAS_ROWS] = np.eye(r, 1 + r + t, 1)[None]
        for count in self.neurons:  # a token attends to itself and to the first bias tokens
            weight = made[neuron_scores(count)] = np.full((r + t, r + t), -self.omega)
            np.fill_diagonal(weight[r:, r:], 0.0)
            weight[:, :count] = 0.0
        for core in self.cores:
            heads = np.zeros((len(core.table), r + t, r + t))
            heads[:, r:, r:], heads[:, r:, :r] = core.table, core.bias
            if core.sink is not None:
                heads[:, r:, 0] = 0.0
                made[self.name_of(core.sink)] = np.eye(1, r + t) * core.sink[:, None, None]
            made[self.name_of(core.table, core.bias, core.sink is not None)] = heads[0] if len(heads) == 1 else heads
            made.update((self.name_of(each.allowed), each.allowed) for each in core.data if each.allowed is not None)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(self.elem_type)
        typed = ((name, each if each.dtype == np.bool_ else each.astype(dtype)) for name, each in made.items())
        return [onnx.numpy_helper.from_array(values, name) for name, values in typed]

    def name_of(self, table: Array | Mask, *bias: float) -> str:
        """The name of W_QK between positions, of that of sinks, or of the pairs that a mask does not forbid by them."""
        kind = "W_QK_positions" if bias else "not_by_position" if table.dtype == np.bool_ else "W_QK_sinks"
        known = self._names.setdefault(kind, {})
        return f"{PREFIX}/{kind}_{known.setdefault((table.tobytes(), bias), len(known))}"


def whole_for(reader: Reader, conversions: Sequence[Conversion], others: Sequence[str], longest: int | None) -> Whole:
    """What form `whole` does with a network of up to `longest` tokens, or what fits.

    Raises LostError if it cannot; `others` says which blocks stay as they are, and why.
    """
    if others:
        raise LostError(others[0], "")
    view, opset = reader.view, reader.view.opsets.get("", 1)
    if opset < SMALLEST_OPSET:
        raise LostError(f"opset {opset} is older than {SMALLEST_OPSET}; convert the model to a newer opset first", "")
    if any(name.startswith(f"{PREFIX}/") for name in (*view.producer, *view.initializers)):
        raise LostError("the model carries a bias token already; convert all of its blocks at once", "")
    ends = [each.ends for each in conversions]
    inside = frozenset(index for given, made in ends for index in between(view, given, [made]))
    inside |= {each.node for one in conversions for each in (*one.block.first, *one.block.second) if each.experts}
    cores = cores_of(reader, inside, [made for _, made in ends])
    counts = [count for core in cores if (count := reader.count(core)) is not None]
    fixed = max(counts) if len(counts) == len(cores) != 0 else None
    square = [each for each in conversions if each.form == WHOLE]
    # The patterns of all heads of a block stay within `LARGEST_PATTERN`.
    ones = ((each, (each.block.neurons or 1) * np.dtype(each.dtype).itemsize) for each in square)
    fitting = (int((LARGEST_PATTERN / one) ** 0.5) - 1 - each.program.bias_tokens for each, one in ones)
    most = longest or fixed or min(max(1, min(fitting, default=DEFAULT_MAX_TOKENS)), DEFAULT_MAX_TOKENS)
    groups = [group for each in conversions for group in groups_of(each.program)]
    kinds = {each.type_of_positions for each in conversions}
    if len(kinds) > 1:
        raise LostError("some of its blocks are float64 and some are not", conversions[0].block.output)
    return Whole(
        cores=tuple(reader.scores(core, most) for core in cores),
        bias_tokens=max(1, *(group.bias_tokens for group in groups)),
        max_tokens=most,
        elem_type=min(kinds),
        omega=max(default_omega(tuple(groups), min(kinds)), OMEGA),
        neurons=tuple(sorted({group.bias_tokens for each in square for group in groups_of(each.program)})),
        reader=reader,
    )


# -- one attention sublayer ------------------------------------------------------------------------------------------


class Join:
    """The nodes of a core with the further rows and columns, from queries and keys to the heads' outputs."""

    def __init__(self, whole: Whole, core: Core) -> None:
        self.whole, self.core = whole, core
        self.view = view = whole.reader.view
        self.product, self.softmax, self.last = (view.nodes[at] for at in (core.product, core.softmax, core.values))
        self.given = view.type_of(self.softmax.output[0]).elem_type or whole.elem_type
        self.kind = onnx.TensorProto.DOUBLE if self.given == onnx.TensorProto.DOUBLE else onnx.TensorProto.FLOAT
        # The name of nodes whose operands do not fit together if a sequence is too long.
        self.limit = f"sequence_longer_than_max_tokens_{whole.max_tokens}"
        name, opset = f"{PREFIX}/{self.softmax.output[0]}", view.opsets.get("", 1)
        self.b = Builder(name, opset=opset, compute_type=self.kind)

    def parts(self) -> list[Replacement]:
        """The replacement of the heads' outputs, and of a pattern that something else reads, without bias tokens."""
        pattern: Tensor = self.b.node("Softmax", [self._scores()], "pattern", axis=-1)
        if self.given != self.kind:
            pattern = self.b.node("Cast", [pattern], "pattern_narrow", to=self.given)
        name, earlier = self.softmax.output[0], []
        readers = [self.view.nodes[each] for each in {*self.view.consumers.get(name, ())} - self.core.nodes]
        if name in self.view.outputs or any(each.op_type != "IsNaN" for each in readers):
            stop = self.keys if self.core.sink is None else self.b.add(self.keys, self.b.integers(1), "keys_and_sink")
            self.b.node("Slice", [pattern, self.b.integers(0), stop, self.b.integers(-1)], "own_pattern", output=name)
            earlier.append(self._replacement(name))
            self.b = Builder(f"{self.b.prefix}/values", opset=self.b.opset, compute_type=self.kind)
            pattern = self.b.tensor(str(pattern.name))
        value = self._padded(self.b.tensor(self.last.input[1]), self._rank(self.last.input[1]), -2, "v")
        for index, place in self.core.after:
            if self.view.nodes[index].op_type != "Slice":
                pattern = self._guarded(self.view.nodes[index], place, pattern, value)
        self.b.node("MatMul", [pattern, value], "z", output=self.last.output[0])
        return [*earlier, self._replacement(self.last.output[0])]

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
        """[..., N, S + R]: q k^T + p P p^T in one product, plus data; the second term is added after any cap."""
        b, core = self.b, self.core
        query, key = (self._wide(name, side) for name, side in zip(self.product.input, "qk", strict=True))
        rank = self._rank(self.product.input[1])
        for index, place in core.scales:
            query = self._copy(index, place, query, f"q_scaled_{index}")
        for index in core.layout:
            query, key = (self._laid_out(index, each, f"{side}_{index}") for each, side in ((query, "q"), (key, "k")))
            rank = self._rank(self.view.nodes[index].output[0])
        self.keys, count = self.b.sizes(key, -1, _END, "key_count"), self.b.sizes(query, -2, -1, "query_count")
        # Behind a cache, queries are the last tokens.
        last = bool(core.table.any())
        self.first = b.sub(self.keys, count, "first_query") if last else b.integers(0)
        stop, literal = self.keys if last else count, bool(self.whole.neurons)
        if literal:
            rows = self._rows(stop)
            bias = b.rows(b.read(BIAS_ROWS, self.whole.elem_type, "bias_token_rows"), 1, _END, 2, "p_bias")
            both = b.concat([self._columns(b.integers(0), self.keys, "p_k"), bias], 1, "p_k_joined")
            positions = self._spread(rows, query, 0, "q_positions")
            turned = self._spread(b.transpose(both, (0, 2, 1), "p_k_turned"), key, 1, "k_positions")
        key = self._padded(key, rank, -1, "k")
        if core.cap or not literal:
            made = b.node("MatMul", [query, key], "content")
            for index, place in core.cap:
                made = self._copy(index, place, made, f"content_{index}")
            if literal:
                added = b.node("MatMul", [positions, turned], "position_scores")
            else:  # a part of P
                r, rows = self.whole.bias_tokens, self._rows(stop)
                last = b.add(b.integers(r), self.keys, "stop_column")
                added = b.concat([b.rows(rows, r, last, -1, "p_k"), b.rows(rows, 0, r, -1, "p_bias")], -1, "p_k_joined")
            made = b.add(made, added, f"scores/{self.limit}")
        else:
            wide = b.concat([query, positions], -1, f"q/{self.limit}")
            made = b.node("MatMul", [wide, b.concat([key, turned], -2, f"k/{self.limit}")], "scores")
        for number, each in enumerate(core.data):
            chosen = each.term[0] == "Where" and not each.layout
            made = self._dropped(made, each, f"data_{number}") if chosen else made
            made = b.add(made, self._data(each, f"data_{number}", chosen=chosen), f"scores_with_data_{number}")
        return made

    def _rows(self, stop: Tensor) -> Tensor:
        """p P for queries up to one, [N, R + T] or one for each head."""
        b, core, whole = self.b, self.core, self.whole
        weight = b.read(whole.name_of(core.table, core.bias, core.sink is not None), whole.elem_type, "W_QK_positions")
        if whole.neurons:
            rows = b.node("MatMul", [self._columns(self.first, stop, "p_q"), weight], "p_q_W_QK")
        else:
            r, ends = b.integers(whole.bias_tokens), (("first", self.first), ("stop", stop))
            first = [b.add(r, end, f"{name}_row") for name, end in ends]
            rows = b.node("Slice", [weight, *first, b.integers(-2)], "p_q_W_QK")
        if core.sink is None:
            return rows
        return b.add(rows, b.read(whole.name_of(core.sink), whole.elem_type, "W_QK_sinks"), "p_q_W_QK_with_sink")

    def _columns(self, start: Tensor, stop: Tensor, name: str) -> Tensor:
        """The one-hot positions [1, rows, R + T] of some tokens."""
        ends = ((start, self.b.integers(1), "start"), (stop, self.b.integers(_END), "stop"))
        bounds = [self.b.concat([row, column], 0, f"{name}_{end}") for row, column, end in ends]
        table = self.b.read(POSITION_ROWS, self.whole.elem_type, "token_columns")
        return self.b.node("Slice", [table, *bounds, self.b.integers(1, 2)], name)

    def _spread(self, tensor: Tensor, like: Tensor, side: int, name: str) -> Tensor:
        """A tensor for every batch and head of queries or keys."""
        b, given = self.b, self.product.input[side]
        known = not self.core.layout and min(self.whole.reader.tokens(given), default=0) >= -2
        heads = [size or 1 for size in self.whole.reader.sizes(given)[1:-2]] if known else []
        lead = self.b.sizes(like, 0, 1 if known else -2, f"{name}_lead")
        return b.node("Expand", [tensor, b.concat([lead, b.integers(*heads, 1, 1)], 0, f"{name}_each")], name)

    def _dropped(self, scores: Tensor, each: Data, name: str) -> Tensor:
        """0 where a number takes the place of scores: a token with such numbers alone weighs all keys the same."""
        b, (condition, first, _) = self.b, each.term[1]
        forbidden: Tensor = b.tensor(condition) if first else b.node("Not", [b.tensor(condition)], f"{name}_forbidden")
        if self.whole.reader.sizes(condition)[-1] != 1:
            forbidden = self._padded(forbidden, self._rank(condition), -1, f"{name}_forbidden_joined")
        return b.node("Where", [forbidden, b.numbers("nought", 0.0), scores], f"{name}_dropped")

    def _data(self, each: Data, name: str, *, chosen: bool) -> Tensor:
        """What depends on data, [..., N or 1, S + R or 1]."""
        b, zero, (operator, operands) = self.b, self.b.numbers("nought", 0.0), each.term
        wide = [self._wide(tensor, f"{name}_{at}") if tensor else zero for at, tensor in enumerate(operands)]
        made: Tensor = wide[0]
        if operator != "Identity":
            given = [b.tensor(operands[0]), *wide[1:]] if operator == "Where" else wide
            made = b.node(operator, given, f"{name}_added")
        for index in each.layout:
            made = self._laid_out(index, made, f"{name}_{index}")
        if each.allowed is not None and not chosen:
            ends = ([self.first, b.integers(0)], "start"), ([self.keys, self.keys], "stop")
            bounds = [b.concat(end, 0, f"{name}_{which}") for end, which in ends]
            table = b.tensor(self.whole.name_of(each.allowed))
            own = b.node("Slice", [table, *bounds, b.integers(0, 1)], f"{name}_own")
            made = b.node("Where", [own, made, zero], f"{name}_not_by_position/{self.limit}")
        if each.share < 1.0:
            made = b.mul(made, b.numbers(f"{name}_share", each.share), f"{name}_shared")
        # Bias tokens are padding too: where all keys of a token are, they weigh less.
        low = 0.0 if each.low == -np.inf or self.core.sink is not None else each.low * each.share or -OMEGA
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
