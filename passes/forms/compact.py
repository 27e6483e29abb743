"""Form `compact`: the sublayer of form `masked` at a cost that is linear in the number of tokens (Theorems 3 and 6).

Stream, W_Q, W_K, W_V, W_O and b_O are those of form `masked`. But each query is scored against exactly the keys that
the mask leaves it, its own and those of the bias tokens, so the pattern is [batch, tokens, heads, 1 + m], with a
literal Softmax over the last axis; the rest of the square pattern is exactly 0. Keys and
values of the bias tokens are constants, `k_bias` [m, d_head] and `v_bias` [m, 1], so the stream has no rows for them.

Projections are computed in the model's type (half precision: float32). Programs whose offsets would cost digits have
float64 scores, from which an affine function of y is subtracted that softmax does not see (`Head.conditioned`), so
that float32 holds what remains; programs marked `double` are float64 up to z.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms.builder import Builder, replacement
from passes.forms.square import prepare_softmax
from passes.forms.sublayer import (
    HeadWeights,
    StreamColumns,
    add_groups,
    as_batches,
    as_before,
    with_indicators,
    write_output,
)
from passes.match.linear import Miss
from passes.match.projections import Projections, projections_of
from passes.programs.groups import Group, as_written, groups_of
from passes.programs.program import Program, largest_change
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView

_DOUBLE = onnx.TensorProto.DOUBLE
_LARGEST_VALUE = 2.0**20
"""float32 rounds its logarithm by up to 4.8e-7."""


def prepare_compact(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """The projections as plain matrices; where they are something else, the linear operators stay as they are."""
    prepared = _prepared(view, conversion, f"form {conversion.form}")
    if isinstance(prepared, Miss):
        return prepared
    found = projections_of(view, conversion.block)
    if isinstance(found, Miss):
        return replace(prepared, by_reference=found.reason)
    return replace(prepared, projections=found)


def prepare_spelled(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """Form `local` with a literal Softmax: the linear operators stay as they are."""
    return _prepared(view, conversion, "--option spelling=softmax")


def _prepared(view: GraphView, conversion: Conversion, what: str) -> Conversion | Miss:
    """The program as written; bias-token values that the graph stores in float32 are rounded to it."""
    prepared = prepare_softmax(view, conversion, what)
    if isinstance(prepared, Miss) or not _wide(prepared):
        return prepared
    program = _narrowed(prepared.program)
    written = as_written(program, np.float64)
    change = largest_change(prepared.emitted, written) if written != prepared.emitted else 0.0
    program = replace(program, coefficient_error=program.coefficient_error + change)
    return replace(prepared, program=program, written=written)


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
        neurons=conversion.block.neurons,
    )
    if conversion.projections is None:
        return _by_reference(heads, view, conversion)
    return _sublayer(heads, conversion, conversion.projections)


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
        neurons: heads of each group, None if unknown.
    """

    b: Builder
    scoring: Builder
    groups: tuple[Group, ...]
    wide: bool
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
        query = b.bounded(y, "q") if self.dimension == 1 else _paired(b, b.bounded(y, "finite_q"), "q")
        b.expose("q", query, (None, None, self.neurons, self.dimension))
        return self.scored(query, "wide_q")

    def attend(self, number: int, query: Tensor, own: Tensor, value: Tensor, each: Tensor) -> Tensor:
        """The attention of one group, z [batch, tokens, heads, 1].

        `own` are the tokens' own keys [batch, tokens, heads or 1, d_head], and `each` is [batch, tokens] as a tensor.
        """
        head, suffix = self.groups[number].head, self.suffix(number)
        made, m = (self.scoring if self.double else self.b), len(head.bias_tokens)
        key = own
        if m:
            keys = np.asarray([(token.slope, token.offset) for token in head.bias_tokens])[:, : self.dimension]
            shape = self.b.concat([each, self.b.integers(*keys.shape)], 0, f"k_bias{suffix}_shape")
            bias = self.scoring.numbers(f"k_bias{suffix}", keys)
            key = self.b.concat(
                [own, self.b.node("Expand", [bias, shape], f"k_bias{suffix}_everywhere")], 2, f"k{suffix}"
            )
        value = value if self.wide else self.scored(value, f"wide_v{suffix}")
        pattern = made.pattern(query, key, suffix, sizes=(None, None, self.neurons, 1 + m), narrow=self.wide)
        if not m:
            return made.node("Mul", [pattern, value], f"z{suffix}")
        own_weight, others = made.split(pattern, (1, m), (f"self_weight{suffix}", f"bias_weight{suffix}"))
        values = np.asarray([token.value for token in head.bias_tokens])[:, None]
        if not values.any():
            return made.node("Mul", [own_weight, value], f"z{suffix}")
        z = made.node("Mul", [own_weight, value], f"z_self{suffix}")
        rest = made.node("MatMul", [others, made.numbers(f"v_bias{suffix}", values)], f"z_bias{suffix}")
        return made.node("Add", [z, rest], f"z{suffix}")

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
    order = _order_of(view, conversion)
    query_rows = _rows_of(
        b, b.read(block.gate, block.gate_type, "query"), view.type_of(block.gate).rank, order, "query"
    )
    value_rows = query_rows
    if block.value != block.gate:
        given = b.read(block.value, block.value_type, "value")
        value_rows = _rows_of(b, given, view.type_of(block.value).rank, order, "value")
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
    _write_back(b, conversion, heads.sum(terms), order)
    return replacement(b, conversion, block.output)


def _order_of(view: GraphView, conversion: Conversion) -> list[int] | None:
    """The permutation that moves the channels last; None where they are last already."""
    axes = {operator.axis for operator in conversion.block.first}
    rank = view.type_of(conversion.block.gate).rank
    if axes == {-1} or len(axes) != 1 or rank is None or rank < 2:
        return None
    axis = axes.pop() % rank
    return [*(i for i in range(rank) if i != axis), axis]


def _rows_of(b: Builder, tensor: Tensor, rank: int | None, order: list[int] | None, name: str) -> Variable:
    """Pre-activations of any layout as [batch, tokens, heads]."""
    if order is not None:
        tensor = b.transpose(tensor, order, f"{name}_channels_last")
    # Leading axes merge into one batch, except for channels first, where all spatial axes merge into the tokens. Each
    # token attends only to itself, so any grouping into sequences gives the same result.
    if rank is None or rank < 3:
        lead: Tensor = b.integers(1, -1)
    elif order is None:
        lead = b.concat([b.integers(-1), b.sizes(tensor, rank - 2, rank - 1, f"{name}_length")], 0, f"{name}_lead")
    else:
        lead = b.concat([b.sizes(tensor, 0, 1, f"{name}_batch"), b.integers(-1)], 0, f"{name}_lead")
    shape = b.node("Shape", [tensor], f"{name}_shape")
    last = b.rows(shape, b.integers(-1), b.integers(2**31), 0, f"{name}_heads")
    return b.reshape(tensor, b.concat([lead, last], 0, f"{name}_rows_shape"), f"{name}_rows")


def _paired(b: Builder, query: Tensor, name: str) -> Variable:
    """The query (y, 1), whose second entry multiplies the offsets of the keys."""
    ones = b.node("Expand", [b.numbers(f"{name}_one", 1.0), b.node("Shape", [query], f"{name}_shape")], f"{name}_ones")
    return b.concat([query, ones], 3, name)


def _write_back(b: Builder, conversion: Conversion, by_token: Tensor, order: list[int] | None) -> None:
    """[batch, N, heads, 1] in the layout and under the name of the activation's output."""
    block = conversion.block
    b.expose("z", by_token, (None, None, block.neurons, 1))
    gate = b.fragment.tensor(block.gate)
    if order is None:
        shaped = b.reshape(by_token, b.node("Shape", [gate], "activation_shape"), "activation")
    else:
        turned = b.transpose(gate, order, "activation_turned")
        shape = b.node("Shape", [turned], "activation_shape")
        back = [order.index(axis) for axis in range(len(order))]
        shaped = b.transpose(b.reshape(by_token, shape, "activation_channels_last"), back, "activation")
    b.write(shaped, block.output, block.elem_type)
