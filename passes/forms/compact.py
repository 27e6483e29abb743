"""Form `compact`: the sublayer of form `masked` at a cost that is linear in the number of tokens (Theorems 3 and 6).

Stream, W_Q, W_K, W_V, W_O and b_O are those of form `masked`. But each query is scored against exactly the keys that
the mask leaves it, its own and those of the bias tokens, so the pattern is [batch, tokens, heads, 1 + m], with a
literal Softmax over the last axis; the rest of the square pattern is exactly 0. Keys and
values of the bias tokens are constants, `k_bias` [m, d_head] and `v_bias` [m, 1], so the stream has no rows for them.

The pattern is a tensor of the graph where it stays within `max_pattern_mb`, and is computed in chunks of tokens in a
Loop where it does not. Sizes that the model leaves open count as one sequence of `max_tokens` tokens.

Projections are computed in the model's type (half precision: float32). Programs whose offsets would cost digits have
float64 scores, from which an affine function of y is subtracted that softmax does not see (`Head.conditioned`), so
that float32 holds what remains; programs marked `double` are float64 up to z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms.attention import SMALLEST_OPSET, Neighbourhood, chunked, nodes_of
from passes.forms.builder import Builder, replacement
from passes.forms.square import order_of, paired, prepare_masked, rows_of, with_indicators, write_back
from passes.forms.sublayer import HeadWeights, StreamColumns, add_groups, as_batches, as_before, write_output
from passes.match.linear import Miss
from passes.match.projections import Projections
from passes.programs.groups import Group, as_written, groups_of
from passes.programs.program import Program, largest_change
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor
from rewriter.graph.view import GraphView

_DOUBLE = onnx.TensorProto.DOUBLE
_MEGABYTE = 2**20
_LARGEST_VALUE = 2.0**20
"""float32 rounds its logarithm by up to 4.8e-7."""


def prepare_compact(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """As for form `masked`; bias-token values that the graph stores in float32 are rounded to it."""
    prepared = prepare_masked(view, conversion)
    if isinstance(prepared, Miss) or not _wide(prepared):
        return prepared
    program = _narrowed(prepared.program)
    written = as_written(program, np.float64)
    change = largest_change(prepared.emitted, written) if written != prepared.emitted else 0.0
    program = replace(program, coefficient_error=program.coefficient_error + change)
    return replace(prepared, program=program, written=written)


def prepare_softmax(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """As for form `compact`, for form `local` with a literal Softmax: the linear operators stay as they are."""
    opset = view.opsets.get("", 1)
    if opset < SMALLEST_OPSET:
        return Miss(
            f"--option spelling=softmax needs opset {SMALLEST_OPSET}, and the model has {opset}; convert the model "
            "to a newer opset first, or omit it",
            conversion.block.output,
        )
    prepared = prepare_compact(view, conversion)
    return prepared if isinstance(prepared, Miss) else replace(prepared, projections=None, by_reference="")


def _narrowed(program: Program) -> Program:
    """The program with its values as products of float32 numbers: the factor of a head, and what it multiplies."""

    def narrow(number: float) -> float:
        return float(np.float32(number))

    heads = []
    for head in program.heads:
        factor = narrow(head.c) if head.c != 0.0 else 1.0
        inner = head if head.c == 0.0 else head.unscaled()
        tokens = tuple(replace(token, value=narrow(token.value) * factor) for token in inner.bias_tokens)
        heads.append(replace(head, c=factor if head.c else 0.0, d=narrow(inner.d) * factor, bias_tokens=tokens))
    constants = narrow(program.linear), narrow(program.constant)
    return replace(program, heads=tuple(heads), linear=constants[0], constant=constants[1])


def _wide(conversion: Conversion) -> bool:
    """Whether scores are float64 and the rest is float32."""
    return conversion.compute_type == _DOUBLE and not conversion.program.double and not _double(conversion)


def _double(conversion: Conversion) -> bool:
    """Whether everything is float64, if the scores are."""
    block, program = conversion.block, conversion.program
    # d of a self value z + d stands in W_V.
    shifted = program.double and any(head.d != 0.0 for head in program.heads)
    given = _DOUBLE in (block.elem_type, block.gate_type, block.value_type)
    return given or shifted or _beyond_float32(program)


def _beyond_float32(program: Program) -> bool:
    """Whether a value is so large, as those of exp and ELU, that float32 rounds its key's offset too much.

    Its weight is as small, from an offset of -ln(value), and half a unit in the last place of the offset is the
    relative error of their product.
    """
    values = [abs(value) for head in program.heads for value in (head.d, *(token.value for token in head.bias_tokens))]
    return max(values, default=0.0) > _LARGEST_VALUE


def emit_compact(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    double = conversion.compute_type == _DOUBLE and _double(conversion)
    b = Builder.of(view, conversion).typed(_DOUBLE if double else onnx.TensorProto.FLOAT)
    heads = _Heads(
        b=b,
        scoring=b.typed(conversion.compute_type),
        groups=_groups(conversion),
        wide=_wide(conversion),
        in_chunks=not _fits(view, conversion) and not b.exposes,
        neurons=conversion.block.neurons,
    )
    if conversion.projections is None:
        return _by_reference(heads, view, conversion)
    return _sublayer(heads, conversion, conversion.projections)


def _fits(view: GraphView, conversion: Conversion) -> bool:
    """Whether the whole pattern of every group stays within the limit at the sizes that the model states."""
    options, row_size = conversion.options, row_size_of(conversion)
    data = conversion.block.gate if conversion.projections is None else conversion.projections.query.data
    shape = view.type_of(data).shape
    if not row_size or shape is None:
        return False
    leading = (1, *shape[:-1])[-max(2, len(shape) - 1) :] if len(shape) > 1 else (1, None)
    sizes = [dim if isinstance(dim, int) else 1 for dim in leading[:-1]]
    tokens = leading[-1] if isinstance(leading[-1], int) else options.positions
    entries = int(np.prod(sizes)) * tokens * row_size
    return entries * np.dtype(conversion.dtype).itemsize <= options.max_pattern_mb * _MEGABYTE


def row_size_of(conversion: Conversion) -> int:
    """Entries of one token's pattern over all heads of its largest group; 0 if their number is not known."""
    return (conversion.block.neurons or 0) * (1 + max(group.bias_tokens for group in groups_of(conversion.program)))


def _groups(conversion: Conversion) -> tuple[Group, ...]:
    """The groups whose coefficients the graph stores."""
    groups = groups_of(conversion.program)
    if not _wide(conversion):
        return groups
    return tuple(replace(group, head=group.head.conditioned()) for group in groups)


@dataclass(frozen=True, eq=False)
class _Heads:
    """How the attention of a block is computed.

    Attributes:
        b: builds nodes in the type of the projections.
        scoring: builds nodes in the type of the scores.
        groups: the heads.
        wide: whether the scores are float64 and the pattern float32.
        in_chunks: whether the pattern is computed in a Loop.
        neurons: heads of each group, None if unknown.
    """

    b: Builder
    scoring: Builder
    groups: tuple[Group, ...]
    wide: bool
    in_chunks: bool
    neurons: int | None

    def suffix(self, number: int) -> str:
        return f"_{number}" if len(self.groups) > 1 else ""

    @property
    def dimension(self) -> int:
        return max(group.dimension for group in self.groups)

    @property
    def double(self) -> bool:
        """Whether pattern and z are float64."""
        return self.scoring.compute_type == _DOUBLE and not self.wide

    def scored(self, tensor: Tensor, name: str) -> Tensor:
        """A tensor of the projections' type in that of the scores."""
        return self.scoring.cast(tensor, self.b.compute_type, name)

    def query(self, y: Tensor) -> Tensor:
        """The queries of the pre-activations [batch, tokens, heads, 1], bounded: y, or (y, 1)."""
        # W_Q has one column. A second one would be the indicator, and its product with the stream the number 1, at the
        # cost of another W1.
        b = self.b
        query = b.bounded(y, "q") if self.dimension == 1 else paired(b, b.bounded(y, "finite_q"), "q")
        b.expose("q", query, (None, None, self.neurons, self.dimension))
        return self.scored(query, "wide_q")

    def attend(self, number: int, query: Tensor, own: Tensor, value: Tensor, each: Tensor) -> Tensor:
        """The attention of one group, z [batch, tokens, heads, 1].

        `own` are the tokens' own keys [batch, tokens, heads or 1, d_head], and `each` is [batch, tokens] as a tensor.
        """
        head, suffix = self.groups[number].head, self.suffix(number)
        kind = Neighbourhood(
            bias_tokens=len(head.bias_tokens),
            bias_values=any(token.value for token in head.bias_tokens),
            wide=self.wide,
            double=self.double,
        )
        given = {"query": query, "value": value if self.wide else self.scored(value, f"wide_v{suffix}")}
        given |= {"key": own}
        if head.bias_tokens:
            keys = np.asarray([(token.slope, token.offset) for token in head.bias_tokens])[:, : self.dimension]
            bias = self._everywhere(self.scoring.numbers(f"k_bias{suffix}", keys), each, keys.shape, suffix)
            given["key"] = self.b.concat([own, bias], 2, f"k{suffix}")
        if kind.bias_values:
            values = np.asarray([token.value for token in head.bias_tokens])[:, None]
            given["bias_value"] = (self.scoring if self.double else self.b).numbers(f"v_bias{suffix}", values)
        ordered = [given[name] for name in kind.inputs]
        if not self.in_chunks:
            made = self.scoring if self.double else self.b
            for name in ("scores", "pattern"):
                tensor = self.b.fragment.tensor(self.b.fragment.qualified(f"{name}{suffix}"))
                made.expose(name, tensor, (None, None, self.neurons, 1 + kind.bias_tokens))
            return self.b.fragment.inlined(nodes_of(kind, self.b.opset, suffix), ordered, "")
        return self.b.call(chunked(kind, self.b.opset), [*ordered, self.scoring.pattern_size()], f"z{suffix}")

    def _everywhere(self, keys: Tensor, each: Tensor, sizes: Sequence[int], suffix: str) -> Tensor:
        """The bias tokens' keys [m, d_head] beside every token, [batch, tokens, m, d_head]."""
        shape = self.b.concat([each, self.b.integers(*sizes)], 0, f"k_bias{suffix}_shape")
        return self.b.node("Expand", [keys, shape], f"k_bias{suffix}_everywhere")

    def sum(self, terms: list[Tensor]) -> Tensor:
        """The groups' outputs added up, in the type of the projections."""
        made = self.scoring if self.double else self.b
        return self.b.cast(add_groups(made, terms, self.groups), made.compute_type, "narrow_z")


def _sublayer(heads: _Heads, conversion: Conversion, projections: Projections) -> Replacement:
    b, elem_type, neurons = heads.b, conversion.block.elem_type, projections.query.out_features
    layout = StreamColumns(projections.query.in_features, bias_tokens=0)  # bias tokens are no rows of this stream
    data = b.read(projections.query.data, elem_type, "input")
    tokens = as_batches(b, data, projections.rank)
    sizes = b.sizes(tokens, 0, 1, "batch"), b.sizes(tokens, 1, 2, "token_count")
    stream = with_indicators(b, tokens, layout, sizes, "stream")
    scored_stream = heads.scored(stream, "wide_stream")
    weights, scoring = (HeadWeights(each, layout, neurons, elem_type, by_token=True) for each in (b, heads.scoring))
    y = weights.functional(projections.query, "W_Q")
    z = weights.functional(projections.value, "W_V") if projections.gated else y
    unbounded = weights.project(stream, y, neurons, 1, "unbounded_q")
    query = heads.query(unbounded)
    terms: list[Tensor] = []
    for number, group in enumerate(heads.groups):
        constant = group.head.c == 0.0
        # d of a self value z + d is added to the projection: b + d would be rounded.
        shift = 0.0 if constant else group.head.d
        head = replace(group.head, bias_tokens=(), d=group.head.d - shift)
        suffix, alone = heads.suffix(number), replace(group, head=head)
        w_k = scoring.key(alone, heads.dimension, f"W_K{suffix}")
        own = scoring.project(scored_stream, w_k, 1, heads.dimension, f"k_self{suffix}")
        w_v = weights.value(z, alone, f"W_V{suffix}")
        value: Tensor = unbounded  # the query's projection, but not clipped: values beyond 2^60 must pass
        if w_v is not y:
            value = weights.project(stream, w_v, 1 if constant else neurons, 1, f"v{suffix}")
        if shift:
            value = b.node("Add", [value, b.numbers(f"v{suffix}_constant", shift)], f"v{suffix}_shifted")
        terms.append(heads.attend(number, query, own, value, b.concat([*sizes], 0, f"each_token{suffix}")))
    written = write_output(b, weights, heads.sum(terms), projections, by_token=True)
    b.write(as_before(b, written, data, projections), projections.result, elem_type)
    return replacement(b, conversion, projections.result)


def _by_reference(heads: _Heads, view: GraphView, conversion: Conversion) -> Replacement:
    """The attention of a block whose own linear operators stay, and are its projections."""
    b, block = heads.b, conversion.block
    order = order_of(view, conversion)
    query_rows = rows_of(b, b.read(block.gate, block.gate_type, "query"), view.type_of(block.gate).rank, order, "query")
    value_rows = query_rows
    if block.value != block.gate:
        given = b.read(block.value, block.value_type, "value")
        value_rows = rows_of(b, given, view.type_of(block.value).rank, order, "value")
    unbounded, value_all = (b.unsqueeze(rows, 3, name) for rows, name in ((query_rows, "y"), (value_rows, "u")))
    query = heads.query(unbounded)
    each = b.sizes(query_rows, 0, 2, "each_token")
    shape = b.concat([each, b.integers(1, heads.dimension)], 0, "k_shape")
    terms: list[Tensor] = []
    for number, group in enumerate(heads.groups):
        head, suffix = group.head, heads.suffix(number)
        numbers = [head.beta, head.gamma][: heads.dimension]
        own: Tensor = heads.scoring.numbers(f"k_self{suffix}_constants", np.asarray(numbers))
        own = b.node("Expand", [own, shape], f"k_self{suffix}")
        value: Tensor = value_all
        if head.c == 0.0:
            constant = b.concat([each, b.integers(1, 1)], 0, f"v{suffix}_shape")
            value = b.node("Expand", [b.numbers(f"v{suffix}_constant", head.d), constant], f"v{suffix}")
        elif head.d != 0.0:
            value = b.node("Add", [value_all, b.numbers(f"v{suffix}_constant", head.d)], f"v{suffix}")
        terms.append(heads.attend(number, query, own, value, each))
    write_back(b, conversion, heads.sum(terms), order)
    return replacement(b, conversion, block.output)
