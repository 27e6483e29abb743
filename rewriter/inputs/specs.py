"""The inputs of a model: element type, shape, role, kinds of axes, valid numbers.

The operators that read an input are the best source: a convolution fixes the number of channels; attention with a past
fixes the number of key heads and their size; a table bounds the indices of its rows. Otherwise names decide: the role
is that of the first matching line of `_NAMES`, the kind of an axis follows from the name of its dimension, or else from
role and place.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import onnx

from rewriter.errors import UsageError
from rewriter.graph.edit import inlined
from rewriter.graph.types import FLOATS, Dim, elem_name
from rewriter.graph.view import GraphView, all_views, integer_of, key_of
from rewriter.text import quoted

Role = Enum(
    "Role",
    "BRANCH FLAG MASK PAST STATE POSITIONS TOKEN_TYPES PAST_LENGTH TOTAL_LENGTH LAST_INDEX LENGTHS GRID IDS INTEGERS "
    "FLOATS",
)
"""The meaning of an input, which determines its valid values."""


class Kind(Enum):
    """The quantity that a dimension counts; the values appear in the names of cases."""

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
    PATCHES = "patches"
    FEATURES = "features"
    ONE = "one"


@dataclass(eq=False)
class InputSpec:
    """One graph input that has no default."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[Dim, ...]
    role: Role
    kinds: tuple[Kind, ...]
    rows: int | None = None  # exclusive bound on its numbers: the rows of the smallest table that it indexes
    sizes: dict[int, int] = field(default_factory=dict)  # an axis to the size that its readers require
    least: dict[int, int] = field(default_factory=dict)  # an axis to their minimum size


_INTEGERS, _BOOL, _FLOATS = "iu", "b", "f"
_NAMES: tuple[tuple[str, str, Role], ...] = (
    (r"cache|branch", _BOOL, Role.BRANCH),
    (r"mask|padding", _INTEGERS + _BOOL + _FLOATS, Role.MASK),
    (r"past_seq(uence)?_len|past_len", _INTEGERS, Role.PAST_LENGTH),
    (r"grid_(thw|hws?)|spatial_shapes", _INTEGERS, Role.GRID),
    (r"past.*(conv|recurrent|ssm)", _FLOATS, Role.STATE),  # of constant size, independent of the number of tokens
    (r"past|cache\.|kv_cache|(key|value)_cache|cache_(key|value)|(^|[._])mems?[._]?\d", _FLOATS, Role.PAST),
    (r"position|^pos(_ids)?$", _INTEGERS, Role.POSITIONS),
    (r"token_type|segment", _INTEGERS, Role.TOKEN_TYPES),
    (r"length|lengths|_lens?$", _INTEGERS, Role.LENGTHS),
    (r"(^|[._/:])(ids?|tokens?|input|inputs)$|_ids?$|_tokens?$|ids?[._:]?\d*$", _INTEGERS, Role.IDS),
    ("", _BOOL, Role.FLAG),
    ("", _INTEGERS, Role.INTEGERS),
    ("", _FLOATS, Role.FLOATS),
)
"""Pattern in the lower-case name, kinds of numpy element types, role. The order matters: `position_ids` matches the
pattern of token ids too. The product of a row of a grid is the number of patches of an image. By default booleans are
switches, floats are activations, integers are small numbers."""

_DIMENSIONS: tuple[tuple[str, Kind], ...] = (
    (r"encoder", Kind.ENCODER),
    (r"total|kv_len|mask.*(len|seq)", Kind.TOTAL),
    (r"past|mem(s|ory)?_len|cache", Kind.PAST),
    (r"batch|^b$|^n$|^bs$|num_images", Kind.BATCH),
    (r"patches", Kind.PATCHES),
    (r"channel", Kind.CHANNELS),
    (r"height|^h$", Kind.HEIGHT),
    (r"width|^w$", Kind.WIDTH),
    (r"samples|wave", Kind.SAMPLES),
    (r"frame|time|^t$", Kind.FRAMES),
    (r"feature|mel|bins|freq", Kind.FEATURES),
    (r"seq|len|token|^s$|^l$", Kind.SEQUENCE),
)


def _axes(*spelled: str) -> dict[int, tuple[Kind, ...]]:
    return {len(each.split()): tuple(Kind[name] for name in each.split()) for each in spelled}


_TEXT = _axes("SEQUENCE", "BATCH SEQUENCE", "BATCH CHOICES SEQUENCE")
_AXES: Mapping[Role, Mapping[int, tuple[Kind, ...]]] = {
    **dict.fromkeys((Role.IDS, Role.TOKEN_TYPES), _TEXT),
    Role.INTEGERS: _TEXT | _axes("BATCH"),
    Role.POSITIONS: _axes("SEQUENCE", "BATCH SEQUENCE", "ONE BATCH SEQUENCE"),  # three for time, height and width
    Role.MASK: _axes("TOTAL", "BATCH TOTAL", "BATCH SEQUENCE TOTAL", "BATCH ONE SEQUENCE TOTAL"),
    Role.PAST: _axes("BATCH PAST FEATURES", "BATCH ONE PAST FEATURES", "ONE BATCH ONE PAST FEATURES"),
    Role.FLOATS: _axes("BATCH", "BATCH SAMPLES", "BATCH SEQUENCE FEATURES", "BATCH CHANNELS HEIGHT WIDTH")
    | _axes("BATCH FRAMES CHANNELS HEIGHT WIDTH"),
}
"""Maps role and rank to the kinds of the axes; otherwise the first one is a batch."""


def numpy_type(elem_type: int) -> np.dtype[np.generic] | None:
    """The numpy element type for `elem_type`; None if no values of that type can be generated."""
    try:
        found: np.dtype[np.generic] = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    except KeyError:
        return None
    return found if found.kind in "biu" or found.name in ("float16", "float32", "float64", "bfloat16") else None


def _spec(value: onnx.ValueInfoProto) -> InputSpec:
    name = quoted(value.name)
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        what = (kind or "unknown type").removesuffix("_type").replace("_", " ")
        raise UsageError(f"input {name} is not a tensor ({what}): models with such inputs cannot be validated")
    tensor = value.type.tensor_type
    dtype = numpy_type(tensor.elem_type)
    if dtype is None:
        spelled = elem_name(tensor.elem_type)
        raise UsageError(f"no values can be made for input {name} of type {spelled}: give them with --inputs")
    if not tensor.HasField("shape"):
        raise UsageError(f"input {name} has no declared shape: give its values with --inputs")
    # Some exporters write -1 or 0 for a dynamic dimension.
    shape = tuple(dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in tensor.shape.dim)
    letter = dtype.kind if dtype.kind in _INTEGERS + _BOOL else _FLOATS
    role = next(r for pattern, kinds, r in _NAMES if letter in kinds and re.search(pattern, value.name.lower()))
    return InputSpec(value.name, dtype, shape, role, _kinds(value.name.lower(), shape, role))


def kind_of(dim: str) -> Kind | None:
    """The kind of a dimension by its name, if known."""
    return next((kind for pattern, kind in _DIMENSIONS if re.search(pattern, dim.lower())), None)


def _kinds(name: str, shape: tuple[Dim, ...], role: Role) -> tuple[Kind, ...]:
    """The kinds of an input's axes: by the name of the dimension, or else by role and place."""
    rank, kinds = len(shape), _places(role, len(shape))
    if role is Role.FLOATS and rank == 3 and re.search(r"feature|mel|spectro|audio", name):
        kinds = (Kind.BATCH, Kind.FEATURES, Kind.FRAMES)  # in spectrograms the frames come last
    if "encoder" in name:
        tokens = {Kind.PAST, Kind.TOTAL, Kind.SEQUENCE}
        kinds = tuple(Kind.ENCODER if kind in tokens else kind for kind in kinds)
    found = []
    for axis, (dim, place) in enumerate(zip(shape, kinds, strict=True)):
        by_name = kind_of(dim) if isinstance(dim, str) else None
        if by_name is Kind.PAST and role is Role.MASK:
            by_name = Kind.TOTAL  # `past_sequence_length + sequence_length`, in any spelling
        if by_name is Kind.SEQUENCE and role is Role.FLOATS and axis == rank - 1:
            by_name = {2: Kind.SAMPLES, 3: Kind.FRAMES}.get(rank, by_name)  # speech models call them a sequence
        found.append(by_name or place)
    return tuple(found)


def _places(role: Role, rank: int) -> tuple[Kind, ...]:
    kinds = _AXES.get(role, {}).get(rank, (Kind.BATCH,))
    return (*kinds, *(Kind.ONE,) * rank)[:rank]


# -- requirements of operators ---------------------------------------------------------------------------------------

_CARRIERS = frozenset(
    """
    Cast Identity Reshape Unsqueeze Squeeze Flatten Transpose Slice Expand Tile Clip Gather Concat Where Min Max Mul Add
    """.split()  # noqa: SIM905 - more readable
)
"""Operators whose outputs contain values of operands. Differences, as of relative positions, are not among them."""

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

_ATTENTION: Mapping[tuple[str, str], tuple[tuple[int, int], Mapping[int, Role]]] = {
    ("com.microsoft", "GroupQueryAttention"): ((3, 4), {5: Role.LAST_INDEX, 6: Role.TOTAL_LENGTH}),
    ("com.microsoft", "MultiHeadAttention"): ((6, 7), {8: Role.PAST_LENGTH}),
    ("", "Attention"): ((4, 5), {6: Role.TOTAL_LENGTH}),
}
"""Maps domain and operator to the operands with past keys and values, and to operands that are one number. Queries,
keys and values are the first three operands."""

_FEWEST = 8  # minimum number of positions; smaller tables hold token types

_COMPUTED = ""
"""The source of positions that the model computes: Range, CumSum, stored positions up to a computed length."""


class Inputs:
    """The inputs of a model, from one walk over it, control-flow bodies and local functions included."""

    def __init__(self, model: onnx.ModelProto, views: Sequence[GraphView] = ()) -> None:
        """`views` are those of a model without functions, if known.

        Raises UsageError for inputs that cannot be generated: not tensors, without a shape, strings and the like.
        """
        defaults = {tensor.name for tensor in model.graph.initializer}
        self.specs = {value.name: _spec(value) for value in model.graph.input if value.name not in defaults}
        if any(spec.role is Role.GRID for spec in self.specs.values()):
            for spec in self.specs.values():  # patches of images, of one row each or of one image per row
                if spec.role is Role.FLOATS and len(spec.shape) in (2, 3):
                    spec.kinds = (*spec.kinds[:-2], Kind.PATCHES, Kind.ONE)
        self.longest: int | None = None  # number of positions of the smallest position table
        # The inputs, or computed positions, whose numbers a tensor carries; and the input that it equals, perhaps cast.
        self._flows: dict[str, set[str]] = defaultdict(set, {name: {name} for name in self.specs})
        self._plain = {name: name for name in self.specs}
        for view in views or all_views(inlined(model) if model.functions else model):
            for node in view.nodes:
                self._read(view, node)

    def _read(self, view: GraphView, node: onnx.NodeProto) -> None:
        shapes = [view.type_of(name).shape or () for name in node.input]
        operands = [self.specs.get(self._plain.get(name, "")) for name in node.input]
        slices = node.op_type == "Slice" and node.input[0] in view.constants
        cut = slices and not all(not name or name in view.constants for name in node.input[1:3])
        if cut:
            self._limit(view, node.input[0])
        for index, table in _LOOKUPS.get(key_of(node), ()):
            if table < len(node.input) and node.input[table]:
                given = index < len(node.input) and node.input[index]
                self._look_up(view, node, table, self._flows[node.input[index]] if given else {_COMPUTED})
        if key_of(node) in _ATTENTION:
            _note_attention(node, shapes, operands)
        if node.op_type == "TensorScatter" and operands[0] is not None:
            self._note_cache(node, operands[0], operands[2])
        if node.op_type in {"ScatterND", "ScatterElements"}:
            (held,) = view.back(node.input[0], ("Transpose", "Identity", "Cast"))
            if held in self.specs:
                self._note_cache(node, self.specs[held], None)
        kernel = shapes[1] if node.op_type == "Conv" and len(shapes) > 1 else ()
        if len(kernel) > 1 and isinstance(kernel[1], int) and operands[0] is not None:
            operands[0].sizes[1] = kernel[1] * integer_of(node, "group", 1)
        carried = {_COMPUTED} if cut or key_of(node) in {("", "Range"), ("", "CumSum")} else set[str]()
        if key_of(node)[1] in _CARRIERS and not key_of(node)[0] and not slices:
            taken = node.input[:1] if node.op_type == "Gather" else node.input
            carried = carried.union(*(self._flows[name] for name in taken if name))
        for name in filter(None, node.output):
            self._flows[name] |= carried
        if node.op_type in {"Identity", "Cast"} and node.input[0] in self._plain:
            self._plain[node.output[0]] = self._plain[node.input[0]]

    def _look_up(self, view: GraphView, node: onnx.NodeProto, table: int, sources: Iterable[str]) -> None:
        """Numbers from `sources` select rows of an operand."""
        shape = view.type_of(node.input[table]).shape or ()
        axis = integer_of(node, "axis", integer_of(node, "gather_axis", 0))
        rows = shape[axis] if -len(shape) <= axis < len(shape) else None
        for source in sources:
            if source == _COMPUTED:
                self._limit(view, node.input[table])
            elif isinstance(rows, int):
                spec = self.specs[source]
                spec.rows = max(min(rows, spec.rows or rows), 1)

    def _note_cache(self, node: onnx.NodeProto, cache: InputSpec, start: InputSpec | None) -> None:
        """A static cache, into which new tokens are written: its size is the maximum number of tokens."""
        if start is not None and node.op_type == "TensorScatter":
            start.role = Role.PAST_LENGTH
        elif cache.role is not Role.PAST or Kind.PAST not in cache.kinds:
            return
        rank = len(cache.shape)
        axis = integer_of(node, "axis", -2) % rank if start is not None else cache.kinds.index(Kind.PAST)
        capacity = cache.shape[axis]
        if isinstance(capacity, int):
            self.longest = min(capacity, self.longest or capacity)
        kinds = [Kind.BATCH, *(Kind.ONE,) * (rank - 1)]
        cache.role, cache.kinds = Role.STATE, tuple(Kind.TOTAL if each == axis else kinds[each] for each in range(rank))

    def _limit(self, view: GraphView, table: str) -> None:
        """Positions index `table`, if it is a matrix of floats."""
        kind = view.type_of(table)
        shape, floats = kind.shape or (), kind.elem_type in FLOATS
        if table in view.constants and floats and len(shape) == 2 and isinstance(shape[0], int) and shape[0] >= _FEWEST:
            self.longest = min(shape[0], self.longest or shape[0])


def _note_attention(
    node: onnx.NodeProto, shapes: Sequence[tuple[Dim, ...]], operands: Sequence[InputSpec | None]
) -> None:
    """The roles of attention's operands; for past keys and values, the number of heads and their size."""
    pasts, numbers = _ATTENTION[key_of(node)]
    queries = integer_of(node, "num_heads", integer_of(node, "q_num_heads", 0))
    keys = integer_of(node, "kv_num_heads", queries)
    for place, spec in enumerate(operands):
        if spec is None or place not in {*pasts, *numbers}:
            continue
        spec.role = numbers.get(place, Role.PAST)
        spec.kinds = _places(spec.role, len(spec.shape))  # overrides names
        if place in pasts:
            own = shapes[1 + pasts.index(place)]
            projected, heads = (own, keys) if own else (shapes[0], queries + 2 * keys)  # or all three are packed
            size = projected[-1] if projected else None
            known = {1: keys, 3: size // max(heads, 1) if isinstance(size, int) else 0}
            spec.sizes |= {axis: size for axis, size in known.items() if size}
            if integer_of(node, "sliding_window_cache", 0) == 1:  # its capacity, not the number of tokens in it
                spec.least[2] = integer_of(node, "local_window_size", 1)
