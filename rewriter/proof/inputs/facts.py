"""What the operators that read an input say of it: the size of an axis, what it counts, which numbers are valid.

One walk over the graph. The axes of an input are known where an operator reads it as it is: a matrix product, a
convolution or a norm fixes the width; attention with a past fixes the number of key heads and their size, which follows
from the packed width of the projection. Numbers are followed further, from inputs and from where the model counts
itself (Range, CumSum, a slice of stored positions), to the tables whose rows they select. Tables of relative positions
do not count: their row numbers are differences, at which the walk ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.edit import inlined
from rewriter.graph.types import FLOATS, Dim
from rewriter.graph.view import GraphView, all_views, integer_of, key_of


class Role(Enum):
    """What an input means, and therefore which values are valid."""

    FLAG = auto()
    MASK = auto()
    PAST = auto()
    POSITIONS = auto()
    TOKEN_TYPES = auto()
    PAST_LENGTH = auto()
    TOTAL_LENGTH = auto()
    LAST_INDEX = auto()
    LENGTHS = auto()
    TIMESTEP = auto()
    KEEP = auto()
    IDS = auto()
    INTEGERS = auto()
    FLOATS = auto()


class Kind(Enum):
    """What a dimension counts; the values appear in the names of cases."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    PAST = "past"
    TOTAL = "past and sequence"
    ENCODER = "encoder sequence"
    FRAMES = "frames"
    SAMPLES = "samples"
    CHOICES = "choices"
    CHANNELS = "channels"
    HEIGHT = "height"
    WIDTH = "width"
    HEADS = "heads"
    FEATURES = "features"
    HIDDEN = "hidden size"
    ONE = "one"


_SAME = {"Identity", "Cast"}
_CARRIERS = frozenset(
    """
    Cast Identity Reshape Unsqueeze Squeeze Flatten Transpose Slice Expand Tile Split Clip Dropout Pad Gather CastLike
    """.split()  # noqa: SIM905 - more readable
)
"""Operators whose outputs contain values of their first input."""

_MIXERS = {"Concat", "Where", "Min", "Max", "Mul"}
"""Operators whose outputs contain values of several inputs."""

_LOOKUPS: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("", "Gather"): ((1, 0),),
    ("", "GatherND"): ((1, 0),),
    ("com.microsoft", "EmbedLayerNormalization"): ((0, 2), (1, 4), (8, 3)),
    ("com.microsoft", "GatherBlockQuantized"): ((1, 0),),
    ("com.microsoft", "GroupQueryAttention"): ((9, 7),),
    ("com.microsoft", "RotaryEmbedding"): ((1, 2), (1, 3)),
    ("", "RotaryEmbedding"): ((3, 1), (3, 2)),
}
"""Maps domain and operator to pairs of (operand with row numbers, operand with the table); an operator without row
numbers counts itself."""

_WIDTHS = {
    "MatMul",
    "FusedMatMul",
    "Add",
    "Mul",
    *(f"{kind}Normalization" for kind in ("Layer", "SimplifiedLayer", "RMS")),
}
"""Operators that tie the last axis of their first operand to a weight."""


_ATTENTION: Mapping[tuple[str, str], tuple[tuple[int, int], tuple[str, str], Mapping[int, Role]]] = {
    ("com.microsoft", "GroupQueryAttention"): (
        (3, 4), ("num_heads", "kv_num_heads"), {5: Role.LAST_INDEX, 6: Role.TOTAL_LENGTH}
    ),
    ("com.microsoft", "MultiHeadAttention"): ((6, 7), ("num_heads", "num_heads"), {8: Role.PAST_LENGTH}),
    ("", "Attention"): ((4, 5), ("q_num_heads", "kv_num_heads"), {}),
}  # fmt: skip
"""Maps domain and operator to the operands with past keys and values, the attributes with the number of heads of
queries and of keys, and operands that are one number. Queries, keys and values are the first three operands."""

_PAST_AXES = (Kind.BATCH, Kind.HEADS, Kind.PAST, Kind.HIDDEN)

_FEWEST = 8
"""Minimum number of positions; smaller tables are of token types."""

_COUNTED = None
"""The source of numbers that the model counts itself."""

_Flow = set[tuple[str | None, int]]
"""What a tensor carries: pairs of a source, an input or `_COUNTED`, and the offset that was added to it."""


@dataclass(eq=False)
class Facts:
    """What a graph says of its inputs; an axis is an input's name and the number of the axis.

    Attributes:
        roles: the inputs whose meaning is known.
        kinds: what an axis counts.
        sizes: the size that an axis must have.
        least: the size that an axis must have at least.
        rows: an input's numbers are below this: the rows of the smallest table that it indexes.
        longest: number of positions of the smallest position table; None if there is none.
    """

    roles: dict[str, Role] = field(default_factory=dict)
    kinds: dict[tuple[str, int], Kind] = field(default_factory=dict)
    sizes: dict[tuple[str, int], int] = field(default_factory=dict)
    least: dict[tuple[str, int], int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    longest: int | None = None


def facts_of(model: onnx.ModelProto) -> Facts:
    """Walk over a model once, its control-flow bodies and local functions included."""
    facts = Facts()
    given = {value.name: len(value.type.tensor_type.shape.dim) for value in model.graph.input}
    flows: dict[str, _Flow] = defaultdict(set, {name: {(name, 0)} for name in given})
    plain = dict(zip(given, given, strict=True))
    for view in all_views(inlined(model) if model.functions else model):
        scope = _Scope(view, Constants(view), facts, given, flows, plain)
        for node in view.nodes:
            scope.read(node)
    return facts


@dataclass(frozen=True, eq=False)
class _Scope:
    """One graph on the walk; `plain` maps a tensor to the input that it is, perhaps in another type."""

    view: GraphView
    constants: Constants
    facts: Facts
    ranks: Mapping[str, int]
    flows: dict[str, _Flow]
    plain: dict[str, str]

    def read(self, node: onnx.NodeProto) -> None:
        """Note what one node says, and what its outputs carry."""
        for name in node.input[:1] if node.op_type in _SAME else ():
            if name in self.plain:
                self.plain[node.output[0]] = self.plain[name]
        if self._is_cut(node):
            self._limit(node.input[0])  # cut to a computed length: positions are implicit
        for index, table in _LOOKUPS.get(key_of(node), ()):
            if table < len(node.input) and node.input[table]:
                self._lookup(node, index, table)
        if key_of(node) in _ATTENTION:
            self._attention(node)
        for name in filter(self.plain.__contains__, node.input):
            for axis, size in self._sizes(node, name):
                self.facts.sizes.setdefault((self.plain[name], axis), size)
        carried = self._carried(node)
        for name in filter(None, node.output):
            self.flows[name] |= carried

    def _shape(self, node: onnx.NodeProto, operand: int) -> tuple[Dim, ...]:
        """The shape of an operand; empty if it is missing or unknown."""
        name = node.input[operand] if operand < len(node.input) else ""
        tensor = self.view.initializers.get(name)
        return tuple(tensor.dims) if tensor is not None else self.view.type_of(name).shape or ()

    def _limit(self, table: str, offset: int = 0) -> None:
        """Positions index `table`, if it is a matrix of floats."""
        shape = self.constants.shape(table) or ()
        is_float = self.view.type_of(table).elem_type in FLOATS
        if table in self.constants and is_float and len(shape) == 2 and shape[0] - offset >= _FEWEST:
            self.facts.longest = min(shape[0] - offset, self.facts.longest or shape[0])

    def _is_cut(self, node: onnx.NodeProto) -> bool:
        """Whether it cuts a constant to a computed length."""
        if node.op_type != "Slice" or node.input[0] not in self.constants:
            return False
        return not all(not name or name in self.constants for name in node.input[1:3])

    def _lookup(self, node: onnx.NodeProto, index: int, table: int) -> None:
        """Numbers select rows of a table."""
        shape = self._shape(node, table)
        axis = integer_of(node, "axis", integer_of(node, "gather_axis", 0))
        count = shape[axis] if -len(shape) <= axis < len(shape) else None
        given = index < len(node.input) and node.input[index]
        for source, offset in self.flows[node.input[index]] if given else {(_COUNTED, 0)}:
            if source is _COUNTED:
                self._limit(node.input[table], offset)
            elif isinstance(count, int):
                # Position ids of OPT and RoBERTa are shifted by 2 on their way, which leaves 2 rows fewer.
                self.facts.rows[source] = min(max(count - offset, 1), self.facts.rows.get(source, count))

    def _attention(self, node: onnx.NodeProto) -> None:
        facts, (pasts, heads, numbers) = self.facts, _ATTENTION[key_of(node)]
        read = {place: self.plain[name] for place, name in enumerate(node.input) if name in self.plain}
        facts.roles |= {read[place]: role for place, role in numbers.items() if place in read}
        queries, keys = (integer_of(node, name, 0) for name in heads)
        for projection, place in enumerate(pasts, 1):
            if place not in read:
                continue
            name, size = read[place], self._head_size(node, projection, queries, keys)
            facts.roles[name] = Role.PAST
            facts.kinds |= {(name, axis): kind for axis, kind in enumerate(_PAST_AXES)}
            facts.sizes |= {(name, axis): each for axis, each in ((1, keys), (3, size)) if each}
            if integer_of(node, "sliding_window_cache", 0) == 1:  # its capacity, however many tokens are in it
                facts.least[name, 2] = integer_of(node, "local_window_size", 1)

    def _head_size(self, node: onnx.NodeProto, projection: int, queries: int, keys: int) -> int:
        """From the width of keys, of queries or the packed three, or of half a head's cosines; 0 if unknown."""
        own, query = self._shape(node, projection), self._shape(node, 0)
        grouped = node.op_type == "GroupQueryAttention"
        parts = queries + 2 * keys if grouped and not own else queries
        cosines = self._shape(node, 7) if grouped else ()
        known = [(own, keys) if len(own) == 3 else ((), 0), (query, parts if len(query) == 3 else 1)]
        for shape, heads in known:
            if shape and isinstance(shape[-1], int) and heads:
                return shape[-1] // heads
        return 2 * cosines[1] if len(cosines) == 2 and isinstance(cosines[1], int) else 0

    def _sizes(self, node: onnx.NodeProto, name: str) -> Iterator[tuple[int, int]]:
        """The axes of an input whose sizes a node fixes."""
        kind, rank = node.op_type, self.ranks[self.plain[name]]
        if kind == "Concat" and rank > 2:
            axis = integer_of(node, "axis", 0) % rank
            others = [self._shape(node, place) for place, each in enumerate(node.input) if each != name]
            if node.output[0] in self.view.outputs:  # what is appended to, and handed out again
                self.facts.kinds[self.plain[name], axis] = Kind.PAST
            for dims in others:
                yield from ((k, dim) for k, dim in enumerate(dims) if k != axis and isinstance(dim, int))
        if name != node.input[0] or len(node.input) < 2:
            return
        weight = self._shape(node, 1)
        if kind == "Conv" and len(weight) > 1 and isinstance(weight[1], int):
            yield 1, weight[1] * integer_of(node, "group", 1)
        elif kind == "Gemm" and len(weight) == 2:
            size = weight[int(integer_of(node, "transB", 0) == 1)]
            yield from [(1, size)] if isinstance(size, int) else []
        elif kind == "Reshape" and rank:
            shape = self.constants.value(node.input[1])
            wanted = [] if shape is None else [int(each) for each in shape.ravel()]
            if max(wanted[: rank - 1], default=1) <= 0 < min(wanted[rank - 1 :], default=0):
                yield rank - 1, prod(wanted[rank - 1 :])
        elif kind == "MatMulNBits":
            yield rank - 1, integer_of(node, "K", 0)
        elif kind in _WIDTHS and node.input[1] in self.constants and rank:
            size = weight[-2] if kind.endswith("MatMul") and len(weight) > 1 else weight[-1] if weight else None
            if isinstance(size, int) and size > 1:
                yield rank - 1, size

    def _carried(self, node: onnx.NodeProto) -> _Flow:
        kind, given = node.op_type, [self.flows[name] if name else set() for name in node.input]
        if key_of(node)[0]:
            return set()
        if kind == "Range":
            return {(_COUNTED, 0)}
        if kind == "CumSum":  # counts from 1, unless it leaves the element itself out
            return {(_COUNTED, 1 - integer_of(node, "exclusive", 0))}
        if kind == "Slice" and node.input[0] in self.constants:
            return {(_COUNTED, 0)} if self._is_cut(node) else set()
        if kind in {"Add", "Sub"} and any(given):
            numbers = [self.constants.scalar(name) for name in node.input]
            if kind == "Sub" and (given[1] or numbers[1] is None):
                return set()
            offset = int(sum(number for number in numbers if number is not None)) * (1 if kind == "Add" else -1)
            return {(source, before + offset) for flow in given for source, before in flow}
        if kind in _MIXERS:
            return set().union(*given[kind == "Where" :])
        return given[0] if kind in _CARRIERS and given else set()
