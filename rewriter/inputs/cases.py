"""Inputs generated for a model, valid by construction, and inputs given by the user.

Generated are ids within their tables, masks with padding, matching lengths. The operators that read an input are the
best source of what it may be: a convolution fixes the number of channels; attention with a past fixes the number of key
heads and their size; a table bounds the indices of its rows. Otherwise names decide: the role is that of the first
matching line of `_NAMES`, the kind of an axis follows from the name of its dimension, or else from role and place.

Each `Setting` exercises one aspect of the model: padding, one token, a past, a long sequence. The size of a dimension
is declared, given by the caller, required by an operator, or chosen by the setting for its kind. Random numbers depend
on the seed, the name of the input and the number of the case alone.

Given inputs, arrays in Python or in an npz file, are converted to the types of the model. In a file a key is the name
of an input, or `case/input` if there are several cases. Nothing is unpickled.
"""

import math
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.errors import UsageError
from rewriter.graph.edit import inlined
from rewriter.graph.types import FLOATS, Dim, elem_name, terms_of, type_of
from rewriter.graph.view import GraphView, all_views, integer_of, key_of
from rewriter.inputs import Given, spelled
from rewriter.ort import fits
from rewriter.text import one_line, quoted

Role = Enum(
    "Role",
    "BRANCH FLAG MASK PAST STATE POSITIONS TOKEN_TYPES PAST_LENGTH TOTAL_LENGTH KEY_LENGTHS LAST_INDEX LENGTHS GRID "
    "IDS INTEGERS FLOATS",
)
"""The meaning of an input, which determines its valid values."""


Kind = Enum(
    "Kind",
    "BATCH SEQUENCE PAST TOTAL ENCODER FRAMES SAMPLES CHOICES CHANNELS HEIGHT WIDTH PATCHES FEATURES ONE",
)
"""The quantity that a dimension counts; `TOTAL` is the past and the sequence."""


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
    causal: bool = False  # whether queries of the attention that reads it are the last ones


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


def _spec(value: onnx.ValueInfoProto, rank: int | None) -> InputSpec:
    name = quoted(value.name)
    if (kind := value.type.WhichOneof("value")) != "tensor_type":
        what = (kind or "unknown type").removesuffix("_type").replace("_", " ")
        raise UsageError(f"input {name} is not a tensor ({what}): models with such inputs cannot be validated")
    tensor = value.type.tensor_type
    dtype = numpy_type(tensor.elem_type)
    if dtype is None:
        spelled = elem_name(tensor.elem_type)
        raise UsageError(f"no values can be made for input {name} of type {spelled}: commands with --inputs take them")
    if not tensor.HasField("shape") and rank is None:
        raise UsageError(f"input {name} has no declared shape: commands with --inputs take its values")
    # Some exporters write -1 or 0 for a dynamic dimension.
    shape = tuple(dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in tensor.shape.dim)
    shape = shape if tensor.HasField("shape") else (None,) * (rank or 0)
    letter = dtype.kind if dtype.kind in _INTEGERS + _BOOL else _FLOATS
    role = next(r for pattern, kinds, r in _NAMES if letter in kinds and re.search(pattern, value.name.lower()))
    return InputSpec(value.name, dtype, shape, role, _kinds(value.name.lower(), shape, role))


def kind_of(dim: str) -> Kind | None:
    """The kind of a dimension by its name, if known."""
    return next((kind for pattern, kind in _DIMENSIONS if re.search(pattern, dim.lower())), None)


def _kinds(name: str, shape: tuple[Dim, ...], role: Role) -> tuple[Kind, ...]:
    rank, kinds = len(shape), _places(role, len(shape))
    if role is Role.FLOATS and rank == 3 and re.search(r"feature|mel|spectro|audio", name):
        kinds = (Kind.BATCH, Kind.FEATURES, Kind.FRAMES)  # in spectrograms the frames come last
    if "encoder" in name:
        kinds = tuple(Kind.ENCODER if kind in {Kind.PAST, Kind.TOTAL, Kind.SEQUENCE} else kind for kind in kinds)
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
    return (*_AXES.get(role, {}).get(rank, (Kind.BATCH,)), *(Kind.ONE,) * rank)[:rank]


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
    ("", "GatherElements"): ((1, 0),),
    ("com.microsoft", "EmbedLayerNormalization"): ((0, 2), (1, 4), (8, 3)),
    ("com.microsoft", "GatherBlockQuantized"): ((1, 0),),
    ("com.microsoft", "GroupQueryAttention"): ((9, 7),),
    ("com.microsoft", "RotaryEmbedding"): ((1, 2), (1, 3)),
    ("", "RotaryEmbedding"): ((3, 1), (3, 2)),
}
"""Maps domain and operator to pairs of (operand with row numbers, operand with the table); an operator without row
numbers counts itself."""

_ATTENTION: Mapping[tuple[str, str], Mapping[int, Role]] = {
    ("com.microsoft", "GroupQueryAttention"): {3: Role.PAST, 4: Role.PAST, 5: Role.LAST_INDEX, 6: Role.TOTAL_LENGTH},
    ("com.microsoft", "MultiHeadAttention"): {6: Role.PAST, 7: Role.PAST, 8: Role.PAST_LENGTH},
    ("", "Attention"): {4: Role.PAST, 5: Role.PAST, 6: Role.KEY_LENGTHS},
}
"""Maps domain and operator to roles of operands. Queries, keys and values are the first three operands."""

_FEWEST = 8  # minimum number of positions; smaller tables hold token types
ANY_LENGTH = 2**31 - 1  # of a sequence, where nothing limits it

_COMPUTED = ""
"""The source of positions that the model computes: Range, CumSum, stored positions up to a computed length."""


class Inputs:
    """The inputs of a model, from one walk over it, control-flow bodies and local functions included."""

    def __init__(
        self, model: onnx.ModelProto, views: Sequence[GraphView] = (), ranks: Mapping[str, int] | None = None
    ) -> None:
        """`views` are those of a model without functions, if known; `ranks` those of inputs that may declare none.

        Raises UsageError for inputs that cannot be generated: not tensors, without a shape, strings and the like.
        """
        defaults = {tensor.name for tensor in model.graph.initializer}
        given = (value for value in model.graph.input if value.name not in defaults)
        self.specs = {value.name: _spec(value, (ranks or {}).get(value.name)) for value in given}
        if any(spec.role is Role.GRID for spec in self.specs.values()):
            for spec in self.specs.values():  # patches of images, of one row each or of one image per row
                if spec.role is Role.FLOATS and len(spec.shape) in (2, 3):
                    spec.kinds = (*spec.kinds[:-2], Kind.PATCHES, Kind.ONE)
        self.longest = ANY_LENGTH  # number of positions of the smallest position table
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
            self._note_cache(node, operands[0], *operands[2:])
        if node.op_type in {"ScatterND", "ScatterElements"}:
            (held,) = view.back(node.input[0], ("Transpose", "Identity", "Cast"))
            if held in self.specs:
                self._note_cache(node, self.specs[held])
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

    def _note_cache(self, node: onnx.NodeProto, cache: InputSpec, start: InputSpec | None = None) -> None:
        """A static cache, into which new tokens are written: its size is the maximum number of tokens."""
        if start is not None:
            start.role = Role.PAST_LENGTH
        elif cache.role is not Role.PAST or Kind.PAST not in cache.kinds:
            return
        rank = len(cache.shape)
        axis = integer_of(node, "axis", -2) % rank if start is not None else cache.kinds.index(Kind.PAST)
        if isinstance(capacity := cache.shape[axis], int):
            self.longest = min(capacity, self.longest)
        kinds = [Kind.BATCH, *(Kind.ONE,) * (rank - 1)]
        cache.role, cache.kinds = Role.STATE, tuple(Kind.TOTAL if each == axis else kinds[each] for each in range(rank))

    def _limit(self, view: GraphView, table: str) -> None:
        """Positions index `table`, if it is a matrix of floats."""
        kind = view.type_of(table)
        shape, floats = kind.shape or (), kind.elem_type in FLOATS
        if table in view.constants and floats and len(shape) == 2 and isinstance(shape[0], int) and shape[0] >= _FEWEST:
            self.longest = min(shape[0], self.longest)


def _note_attention(
    node: onnx.NodeProto, shapes: Sequence[tuple[Dim, ...]], operands: Sequence[InputSpec | None]
) -> None:
    """The roles of attention's operands; for past keys and values, the number of heads and their size."""
    roles = _ATTENTION[key_of(node)]
    queries = integer_of(node, "num_heads", integer_of(node, "q_num_heads", 0))
    keys = integer_of(node, "kv_num_heads", queries)
    for place, spec in enumerate(operands):
        if spec is None or place not in roles:
            continue
        spec.role, spec.kinds = roles[place], _places(roles[place], len(spec.shape))  # overrides names
        spec.causal = integer_of(node, "is_causal", 0) == 1
        if spec.role is Role.PAST:
            own = shapes[1 + place - min(roles)]
            projected, heads = (own, keys) if own else (shapes[0], queries + 2 * keys)  # or all three are packed
            size = projected[-1] if projected else None
            known = {1: keys, 3: size // max(heads, 1) if isinstance(size, int) else 0}
            spec.sizes |= {axis: size for axis, size in known.items() if size}
            if integer_of(node, "sliding_window_cache", 0) == 1:  # its capacity, not the number of tokens in it
                spec.least[2] = integer_of(node, "local_window_size", 1)


# -- inputs that are generated -----------------------------------------------------------------------------------------

_NAMED = {
    Kind.BATCH: "batch", Kind.SEQUENCE: "sequence", Kind.PAST: "past", Kind.ENCODER: "encoder sequence",
    Kind.FRAMES: "frames", Kind.SAMPLES: "samples", Kind.HEIGHT: "height", Kind.WIDTH: "width",
    Kind.CHANNELS: "channels", Kind.FEATURES: "features",
}  # fmt: skip
"""Kinds of dimensions that the name of a case states."""
_USUAL = {Kind.CHOICES: 2, Kind.CHANNELS: 3, Kind.FEATURES: 80, Kind.ONE: 1}
_COUNTS = {Role.PAST_LENGTH: (Kind.PAST, 0), Role.LAST_INDEX: (Kind.TOTAL, 1)}
"""Roles of numbers of tokens: the size of a kind of dimension, minus an offset; that of all tokens by default."""
_VOCABULARY = 100  # number of token ids if no table bounds them
_MOST_ENTRIES = 2**28  # of an input
_PATCHES = 24  # number of patches of an image: 4 x 6

Texts = Sequence[Sequence[int]]  # the token ids of texts
States = Callable[[tuple[int, ...], int], NDArray[Any] | None]
"""An encoder's output of a shape for a case by number; None if no output has that shape."""

Setting = tuple[int, int, int]
"""Number of rows, of tokens, and of past tokens, for dimensions that the model leaves open."""


@dataclass(frozen=True, eq=False)
class Case:
    """A set of inputs, under a name such as `batch 3, sequence 17`."""

    name: str
    feeds: Mapping[str, NDArray[Any]]


class Maker:
    """Makes inputs for one model."""

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        seed: int = 0,
        dims: Mapping[str, int] | None = None,
        most: int | None = None,
        texts: Texts = (),
        states: States | None = None,
        views: Sequence[GraphView] = (),
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        """Read the model's requirements; its weights are not read. `views` and `ranks` are as for `Inputs`.

        The values of an input depend on `seed`, not on the other inputs. `dims` are sizes of symbolic dimensions, in
        every case; sequences have at most `most` tokens. `states` is the output of an encoder on `texts`, for a
        decoder. Raises UsageError where `dims` names a dimension that the model lacks, or no values can be generated.
        """
        inputs = Inputs(model, views, ranks)
        self.specs = tuple(inputs.specs.values())
        self.longest, self._most = min(inputs.longest, most or ANY_LENGTH), most  # the largest number of tokens
        self.seed, self.kinds, self._fixed = seed, dict[Kind, int](), dict(dims or {})
        self.loose = False  # whether masks, positions and lengths are drawn independently of the sizes
        dims_of = ((spec, axis, dim) for spec in self.specs for axis, dim in enumerate(spec.shape))
        self._symbols = [(spec, axis, _terms(spec, dim)) for spec, axis, dim in dims_of if isinstance(dim, str)]
        known = dict.fromkeys(name for *_, terms in self._symbols for name in terms if name)
        for name, value in self._fixed.items():
            if name not in known:
                listed = ", ".join(quoted(each) for each in known) or "none"
                raise UsageError(f"no input has a dimension {quoted(name)}; the model's symbolic dimensions: {listed}")
            if value < 0:
                raise UsageError(f"dimension {quoted(name)} cannot be {value}: give a non-negative number")
        roles = {spec.role for spec in self.specs}
        self.branches = Role.BRANCH in roles  # whether an input indicates a past
        self.cached = not roles.isdisjoint({Role.PAST, Role.PAST_LENGTH, Role.BRANCH})
        pairs = [pair for spec in self.specs for pair in zip(spec.shape, spec.kinds, strict=True)]
        self.varied = {kind for dim, kind in pairs if not isinstance(dim, int)}  # what a setting decides
        if (Role.PAST in roles and Kind.TOTAL in self.varied) or Role.PAST_LENGTH in roles:
            self.varied |= {Kind.PAST, Kind.SEQUENCE}
        self.free = self.varied - self._pinned().keys()  # not fixed by the caller
        self._packed = any(spec.role is Role.FLOATS and spec.kinds[:1] == (Kind.PATCHES,) for spec in self.specs)
        most_token = max(map(max, texts), default=math.inf)
        able = (spec for spec in self.specs if spec.role is Role.IDS and most_token < (spec.rows or 0))
        # Text in the model's vocabulary.
        self._worded = {spec.name for spec in able if spec.kinds[-1:] in {(Kind.SEQUENCE,), (Kind.ENCODER,)}}
        self.texts = texts if self._worded else ()  # alternate with random numbers, if the model has these tokens
        self._states = states if self.texts else None

    def changed(self, *, most: int | None = None, **changed: Any) -> "Maker":
        """The same with another `seed`, other sizes of `kinds`, or fewer tokens, of an encoder too."""
        other = copy(self)
        vars(other).update(changed, longest=min(self.longest, most or ANY_LENGTH))
        return other

    def usual(self, *, few: bool = False) -> list[Case]:
        """Two to six cases; `few` are the first and the last two, and with a longest sequence, `most`, that is one."""
        with_past = (1, 1 if self.branches else 2, 5), (1, 1, 9), (3, 1, 17)
        settings: list[Setting] = [(3, 17, 0), (1, 64, 0), (1, 17, 0)]
        settings += with_past if self.cached else ((1, 1, 0), (3, 2, 0))
        if few and self._most:
            settings[-1] = settings.pop(1)
        made = self.cases(settings)
        if len(made) == 1:  # a fixed shape is tried with different values
            made += [self.case(settings[0], number=number) for number in range(1, 3 if self.texts else 2)]
            return [Case(f"{case.name}, values {number}", case.feeds) for number, case in enumerate(made, 1)]
        first = 3 if self.texts and Kind.BATCH not in self.free else 1  # three texts: in three rows, or in three cases
        return [*made[:first], *made[first:][-2:]] if few else made

    def cases(self, settings: Sequence[Setting], first: int = 0) -> list[Case]:
        """Cases with numbers from `first` on, fewer than settings where the model fixes sizes in which they differ."""
        distinct: dict[object, Setting] = {}
        for setting in settings:
            shapes, kinds = self.sizes(setting)
            key = (*shapes.values(), self.branches and setting[-1] > 0, self.cached and kinds[Kind.PAST])
            distinct.setdefault(key, setting)
        return [self.case(setting, number) for number, setting in enumerate(distinct.values(), first)]

    def sizes(self, setting: Setting) -> tuple[Mapping[str, tuple[int, ...]], Mapping[Kind, int]]:
        """The shape of each input in one case, and the size of each kind of dimension."""
        kinds, values = self._kind_sizes(setting), {"": 1, **self._fixed}

        def size(spec: InputSpec, axis: int) -> int:
            return spec.sizes.get(axis, max(kinds[spec.kinds[axis]], spec.least.get(axis, 0)))

        def total(terms: Mapping[str, int]) -> int:
            return sum(factor * values.get(name, 0) for name, factor in terms.items())

        # Single names first, sizes required by operators before sizes by kind; then sums.
        order = sorted(self._symbols, key=lambda each: (len(each[2]), *each[2].values(), each[1] not in each[0].sizes))
        for spec, axis, terms in order:
            for name, factor in terms.items():
                kind = kind_of(name) if len(terms) > 1 else None
                left = math.ceil((size(spec, axis) - total(terms)) / factor) if name not in values else 0
                values.setdefault(name, max(left, 0) if kind is None else kinds[kind])
        shapes = {
            spec.name: [dim if isinstance(dim, int) else size(spec, axis) for axis, dim in enumerate(spec.shape)]
            for spec in self.specs
        }
        for spec, axis, terms in self._symbols:
            shapes[spec.name][axis] = max(total(terms), 0)
        return {name: tuple(shape) for name, shape in shapes.items()}, kinds

    def _kind_sizes(self, setting: Setting) -> dict[Kind, int]:
        pinned = self._pinned()
        (batch, sequence, past), longest = setting, self.longest
        # Positions beyond the table would be out of range; at least one new token must remain.
        past = min(pinned.get(Kind.PAST, past if self.cached else 0), longest - 1)
        sequence = pinned.get(Kind.SEQUENCE, max(min(sequence, longest - past), 1))
        alone = not any(Kind.SEQUENCE in spec.kinds for spec in self.specs)
        # Different from the decoder's length, so that a mix-up shows, and even, because speech encoders halve it.
        encoder = sequence if alone else min(sequence + sequence % 2 + 4, longest - longest % 2)
        film = any(spec.kinds.count(Kind.FRAMES) and spec.kinds.count(Kind.HEIGHT) for spec in self.specs)
        side = 224 if pinned.get(Kind.CHANNELS, 3) == 3 else 32
        return {
            **_USUAL,
            Kind.BATCH: batch,
            Kind.PATCHES: _PATCHES * (pinned.get(Kind.BATCH, batch) if self._packed else 1),
            Kind.ENCODER: encoder,
            Kind.FRAMES: 8 if film else 64 + 2 * sequence,
            Kind.SAMPLES: 3200 + 100 * sequence,
            Kind.HEIGHT: side,
            Kind.WIDTH: side,
            **pinned,
            Kind.PAST: past,
            Kind.SEQUENCE: sequence,
            Kind.TOTAL: past + sequence,
        }

    def _pinned(self) -> dict[Kind, int]:
        """Sizes of kinds that the caller or an input's declared shape fixes; token ids take precedence."""
        pinned = dict(self.kinds)
        for spec, axis, terms in self._symbols:
            if terms.keys() <= self._fixed.keys() and axis not in spec.least:
                pinned[spec.kinds[axis]] = sum(factor * self._fixed[name] for name, factor in terms.items())
        roles = {Role.IDS, Role.POSITIONS, Role.TOKEN_TYPES, Role.PAST, Role.FLOATS}
        for spec in sorted(self.specs, key=lambda spec: spec.role is not Role.IDS):
            for dim, kind in zip(spec.shape, spec.kinds, strict=True) if spec.role in roles else ():
                # A batch of 1 in one input (position ids) is often meant to broadcast.
                if isinstance(dim, int) and kind is not Kind.ONE and (kind, dim) != (Kind.BATCH, 1):
                    pinned.setdefault(kind, dim)
        return pinned

    def case(self, setting: Setting, number: int = 0) -> Case:
        """One case; the number varies the values."""
        shapes, kinds = self.sizes(setting)
        parts = [f"{name} {kinds[kind]}" for kind, name in _NAMED.items() if kind in self.varied]
        if self.branches:
            parts.append(f"cache branch {'on' if setting[-1] else 'off'}")
        if any([*self._texts(shapes[name], number)] for name in self._worded):
            parts.append("text")
        for name, shape in shapes.items():
            if math.prod(shape) > _MOST_ENTRIES:
                what = f"input {quoted(name)} of {' x '.join(map(str, shape))} entries is too large to generate"
                raise UsageError(f"{what}: commands with --inputs take it")
        feeds = {spec.name: self._values(spec, shapes[spec.name], kinds, setting, number) for spec in self.specs}
        return Case(", ".join(parts or ["fixed shapes"]), feeds)

    def _texts(self, shape: tuple[int, ...], number: int) -> Iterator[tuple[tuple[int, ...], Sequence[int]]]:
        """The rows of one case that are text: texts and random numbers alternate."""
        for place, row in enumerate(np.ndindex(shape[:-1]), number):
            if self.texts and place % (len(self.texts) + 1) < len(self.texts):
                yield row, self.texts[place % (len(self.texts) + 1)]

    def _values(
        self, spec: InputSpec, shape: tuple[int, ...], kinds: Mapping[Kind, int], setting: Setting, number: int
    ) -> NDArray[Any]:
        random = np.random.default_rng([self.seed, zlib.crc32(spec.name.encode()), number])
        length = kinds[next((kind for kind in (Kind.FRAMES, Kind.SAMPLES) if kind in self.varied), Kind.SEQUENCE)]
        made: Any
        match spec.role:
            case Role.POSITIONS | Role.LENGTHS | Role.KEY_LENGTHS | Role.FLAG if self.loose:
                least = kinds[Kind.SEQUENCE] if spec.causal else 1  # else the first queries see no keys
                valid = {
                    Role.POSITIONS: (0, spec.rows or kinds[Kind.TOTAL]), Role.LENGTHS: (1, length + 1),
                    Role.KEY_LENGTHS: (least, max(kinds[Kind.TOTAL], least + 1)),  # shorter than all keys
                }  # fmt: skip
                made = random.integers(*valid.get(spec.role, (0, 2)), shape)
            case Role.MASK if self.loose and shape:  # any mask that has both values in each row
                order = random.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
                made = order < random.integers(1, max(shape[-1], 2), (*shape[:-1], 1))
            case Role.FLOATS | Role.PAST | Role.STATE:
                encoded = spec.role is Role.FLOATS and spec.kinds[1:2] == (Kind.ENCODER,)
                made = self._states(shape, number) if self._states and encoded else None
                made = random.standard_normal(shape) if made is None else made
            case Role.IDS | Role.TOKEN_TYPES | Role.INTEGERS:
                made = random.integers(0, _id_bound(spec, loose=self.loose), shape)
                words = spec.name in self._worded
                past = kinds[Kind.PAST] if spec.kinds[-1:] == (Kind.SEQUENCE,) else 0
                for row, text in self._texts(shape, number) if words or spec.role is Role.TOKEN_TYPES else ():
                    made[row] = np.resize(text, past + shape[-1])[past:] if words else 0
            case Role.GRID:
                made = _grid(kinds[Kind.PATCHES] // (math.prod(shape[:-1]) if self._packed else 1), shape[-1])
            case Role.BRANCH:
                made = setting[-1] > 0
            case Role.FLAG:
                # Single switches alternate from case to case, each at another pace, so that all positions occur.
                place = [each.name for each in self.specs if each.role is Role.FLAG].index(spec.name)
                made = (number >> place) % 2 == 0 if np.prod(shape) == 1 else random.integers(0, 2, shape) == 1
            case Role.MASK:
                # A bounded cache accepts new tokens without padding only.
                most = kinds[Kind.PAST if any(each.least for each in self.specs) else Kind.TOTAL]
                made = _mask(spec, shape, most, number)
            case Role.POSITIONS:
                made = kinds[Kind.PAST] + np.arange((shape or (1,))[-1])
                made = made if spec.rows is None else np.minimum(made, spec.rows - 1)
            case Role.LENGTHS:  # full lengths, except a shorter one for the last row of a batch
                made = np.full(shape, length)
                made.reshape(-1)[1:][-1:] -= length // 3
            case _:
                kind, less = _COUNTS.get(spec.role, (Kind.TOTAL, 0))
                made = max(kinds[kind] - less, 0)
        return np.resize(made, shape).astype(spec.dtype)


def _id_bound(spec: InputSpec, *, loose: bool) -> int:
    """The number of valid ids, or of small integers, of an input."""
    usual = {Role.IDS: _VOCABULARY, Role.TOKEN_TYPES: 2}
    most = spec.rows or (_VOCABULARY if loose else usual.get(spec.role, 256 if spec.dtype.itemsize == 1 else 8))
    return min(most, int(np.iinfo(spec.dtype.name).max) + 1) if spec.dtype.kind in "iu" else most


def _mask(spec: InputSpec, shape: tuple[int, ...], most: int, number: int) -> NDArray[np.bool_]:
    """True at tokens: the last row of a batch is padded at its end, by a third but at most `most`.

    With three rows or more, the second one is padded at its start; the second of two is in every other case. Audio is
    padded at the end only: models halve its length repeatedly, and with it the length of the mask.
    """
    mask, sound = np.ones(shape, np.bool_), spec.kinds[-1:] in {(Kind.FRAMES,), (Kind.SAMPLES,)}
    if len(shape) < 2 or min(shape[0], shape[-1]) < 2 or spec.kinds[0] is not Kind.BATCH:
        return mask
    padding = min(max(shape[-1] // 3, 1), most)
    mask[-1, ..., shape[-1] - padding :] = False
    if (shape[0] > 2 or number % 2) and not sound:
        mask[1], mask[1, ..., :padding] = True, False
    return mask


def _terms(spec: InputSpec, dim: str) -> Mapping[str, int]:
    """A dimension as a sum of names. `past + 1` of a mask is one name: exporters assume a single new token."""
    terms = terms_of(dim)
    return {dim: 1} if spec.role is Role.MASK and "" in terms else terms


def _grid(patches: int, axes: int) -> list[int]:
    """Frames, height and width, or height and width, of an image: as square as possible, and even where possible."""
    step = 2 if patches % 4 == 0 else 1
    high = max((each for each in range(step, math.isqrt(patches) + 1, step) if patches % (each * step) == 0), default=1)
    return [1, high, patches // high][-axes:]


# -- inputs that are given ---------------------------------------------------------------------------------------------


_ONLY = "the given inputs"


def load_cases(given: Given, model: onnx.ModelProto) -> tuple[Case, ...]:
    """The user's cases, whose names, types (which may be widened), ranks and fixed dimensions are those of the model.

    Inputs with a default may be omitted. Raises UsageError.
    """
    arrays, told = (_read(given) if isinstance(given, Path) else given), spelled(given)
    defaults = {tensor.name for tensor in model.graph.initializer}
    known = {value.name: value for value in model.graph.input}
    cases: dict[str, dict[str, NDArray[Any]]] = {}
    for key, array in arrays.items():
        case, name = _split(key, known)
        if name not in known:
            listed = ", ".join(quoted(each) for each in known if each not in defaults)
            raise UsageError(f"{told}: the model has no input {quoted(name)}; its inputs are {listed}")
        cases.setdefault(case, {})[name] = _fitted(f"{told}: input {quoted(name)}", np.asarray(array), known[name])
    if not cases:
        raise UsageError(f"{told}: there are no arrays")
    for case, feeds in cases.items():
        if missing := [quoted(name) for name in known if name not in {*defaults, *feeds}]:
            where = "" if case == _ONLY else f" of case {quoted(case)}"
            raise UsageError(f"{told}: input{'s' * (len(missing) > 1)} {', '.join(missing)}{where} missing")
    return tuple(Case(one_line(case, 80), feeds) for case, feeds in cases.items())


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise UsageError(f"{path.name}: a single array; name the inputs with numpy.savez")
        with archive:
            return {key: np.asarray(archive[key]) for key in archive.files}
    except OSError as error:
        raise UsageError(f"{path.name}: {(error.strerror or 'not a readable npz file').lower()}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError, NotImplementedError) as error:
        raise UsageError(f"{path.name}: not a readable npz file of numbers; write one with numpy.savez") from error


def _split(key: str, known: Mapping[str, object]) -> tuple[str, str]:
    """The case and the input that a key names. Names of inputs may contain slashes, so whole names take precedence."""
    if key in known:
        return _ONLY, key
    # The shortest case whose rest is an input: `case/a/b` names the input `a/b` before it names `b` in case `case/a`.
    parts = key.split("/")
    pairs = [("/".join(parts[:cut]), "/".join(parts[cut:])) for cut in range(1, len(parts))]
    rest = parts[-1] if len(parts) == 2 else key
    return next(((case, name) for case, name in pairs if name in known), (_ONLY, rest))


def _fitted(what: str, array: NDArray[Any], value: onnx.ValueInfoProto) -> NDArray[Any]:
    if not value.type.HasField("tensor_type"):
        raise UsageError(f"{what} is not a tensor in the model, so an npz file cannot hold it")
    tensor = value.type.tensor_type
    wanted = type_of(value.type).shape
    sizes = [None if isinstance(dim, int) and dim <= 0 else dim for dim in wanted or ()]
    if wanted is not None and not fits(array.shape, sizes):
        spelled = ", ".join("?" if dim is None else one_line(dim, 40) for dim in wanted)
        raise UsageError(f"{what} has shape {list(array.shape)}, the model takes [{spelled}]")
    if tensor.elem_type == onnx.TensorProto.STRING:
        if array.dtype.kind != "U":
            raise UsageError(f"{what} is of type {array.dtype}, the model takes strings")
        return array.astype(object)
    dtype = numpy_type(tensor.elem_type)
    if dtype is None:
        raise UsageError(f"{what} has an element type in the model that numpy does not support")
    if dtype.name == "bfloat16" and array.dtype.kind in "Vf":
        # numpy saves bfloat16 as raw pairs of bytes. Other floats are rounded to it.
        return array.view(dtype) if array.dtype == np.dtype("V2") else array.astype(dtype)
    if array.dtype != dtype and not (array.dtype.kind != "b" and np.can_cast(array.dtype, dtype, "safe")):
        raise UsageError(f"{what} is of type {array.dtype}, the model takes {dtype}")
    return np.ascontiguousarray(array.astype(dtype)).reshape(array.shape)
