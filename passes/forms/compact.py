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

from collections.abc import Callable
from dataclasses import replace

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
    with_indicator,
    write_output,
)
from passes.match.projections import projections_of
from passes.programs.groups import Group, as_written, groups_of
from passes.programs.program import Program, largest_change
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView, LostError

_DOUBLE = onnx.TensorProto.DOUBLE
_LARGEST_VALUE = 2.0**20
"""float32 rounds its logarithm by up to 4.8e-7."""


def prepare_compact(view: GraphView, conversion: Conversion) -> Conversion:
    """The projections as plain matrices; where they are something else, the linear operators stay as they are."""
    prepared = prepare_spelled(view, conversion)
    try:
        return replace(prepared, projections=projections_of(view, conversion.block))
    except LostError as lost:
        return replace(prepared, by_reference=lost.miss.reason)


def prepare_spelled(view: GraphView, conversion: Conversion) -> Conversion:
    """The program as written, where the linear operators stay; values that the graph stores in float32 are rounded."""
    prepared = prepare_softmax(view, conversion)
    if not _wide(prepared):
        return prepared
    program = _narrowed(prepared.program)
    before, after = (as_written(each, np.float64) for each in (prepared.program, program))
    change = largest_change(before, after) if after != before else 0.0
    program = replace(program, coefficient_error=program.coefficient_error + change)
    return replace(prepared, program=program)


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
    return not conversion.widened or _beyond_float32(conversion.program)


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
    emit = _by_reference if conversion.projections is None else _sublayer
    return emit(b, view, conversion)


OwnKey = Callable[[Group, str, int], Tensor]
"""The tokens' own keys [batch, tokens, 1, d_head] in the type of the scores: of a group, with a suffix for names, for a
d_head."""


def _attend(b: Builder, conversion: Conversion, y: Tensor, z: Tensor, each: Tensor, own_key: OwnKey) -> Tensor:
    """What the heads write, [batch, tokens, heads, 1], in the type of the projections.

    Args:
        b: builds nodes in the type of the projections.
        conversion: the block.
        y: pre-activations, [batch, tokens, heads, 1].
        z: what the values are multiples of, of the same shape.
        each: the sizes batch and tokens, 1-D.
        own_key: makes the tokens' own keys.
    """
    scoring, wide = b.typed(conversion.compute_type), _wide(conversion)
    made = b if wide else scoring  # the pattern, and what follows
    groups = groups_of(conversion.program)
    if wide:
        groups = tuple(replace(group, head=group.head.conditioned()) for group in groups)
    neurons, dimension = conversion.block.neurons, max(group.dimension for group in groups)
    # W_Q has one column. A second one would be the indicator, and its product with the stream the number 1, at the
    # cost of another W1.
    query = b.bounded(y, "q") if dimension == 1 else b.paired(b.bounded(y, "finite_q"), "q")
    b.expose("q", query, (None, None, neurons, dimension))
    scored = scoring.cast(query, b.compute_type, "wide_q")
    terms: list[Tensor] = []
    for number, group in enumerate(groups):
        suffix, head, m = f"_{number}" if len(groups) > 1 else "", group.head, group.bias_tokens
        key = own_key(group, suffix, dimension)
        if m:
            keys = np.asarray([(token.slope, token.offset) for token in head.bias_tokens])[:, :dimension]
            shape = b.concat([each, b.integers(*keys.shape)], 0, f"k_bias{suffix}_shape")
            bias = b.node("Expand", [scoring.numbers(f"k_bias{suffix}", keys), shape], f"k_bias{suffix}_everywhere")
            key = b.concat([key, bias], 2, f"k{suffix}")
        # d of a self value z + d is added to the projection: b + d would be rounded.
        constant = made.numbers(f"v{suffix}_constant", head.d)
        value = made.cast(z, b.compute_type, f"wide_v{suffix}") if head.c else constant
        if head.c and head.d:
            value = made.node("Add", [value, constant], f"v{suffix}")
        own = made.pattern(scored, key, suffix, sizes=(None, None, neurons, 1 + m), narrow=wide)
        if m:
            own, others = made.split(own, (1, m), (f"self_weight{suffix}", f"bias_weight{suffix}"))
        values = np.asarray([token.value for token in head.bias_tokens])[:, None]
        if not values.any():
            terms.append(made.node("Mul", [own, value], f"z{suffix}"))
            continue
        mine = made.node("Mul", [own, value], f"z_self{suffix}")
        rest = made.node("MatMul", [others, made.numbers(f"v_bias{suffix}", values)], f"z_bias{suffix}")
        terms.append(made.node("Add", [mine, rest], f"z{suffix}"))
    return b.cast(add_groups(made, terms, groups), made.compute_type, "narrow_z")


def _sublayer(b: Builder, view: GraphView, conversion: Conversion) -> Replacement:
    """The whole block, with the projections W_Q, W_K, W_V and W_O."""
    del view
    projections, elem_type = conversion.whole_block, conversion.block.elem_type
    neurons, scoring = projections.query.out_features, b.typed(conversion.compute_type)
    layout = StreamColumns(projections.query.in_features, bias_tokens=0)  # bias tokens are no rows of this stream
    data = b.read(projections.query.data, elem_type, "input")
    stream, sizes = with_indicator(b, as_batches(b, data, projections.rank), name="stream")
    each = b.concat([*sizes], 0, "each_token")
    wide_stream = scoring.cast(stream, b.compute_type, "wide_stream")
    weights, of_scores = (HeadWeights(each, layout, neurons, elem_type, by_token=True) for each in (b, scoring))

    def own_key(group: Group, suffix: str, dimension: int) -> Tensor:
        alone = replace(group, head=replace(group.head, bias_tokens=()))
        weight = of_scores.key(alone, dimension, f"W_K{suffix}")
        return of_scores.project(wide_stream, weight, 1, dimension, f"k_self{suffix}")

    y = weights.project(stream, weights.functional(projections.query, "W_Q"), neurons, 1, "unbounded_q")
    z = y
    if projections.gated:
        z = weights.project(stream, weights.functional(projections.value, "W_V"), neurons, 1, "v")
    written = write_output(b, weights, _attend(b, conversion, y, z, each, own_key), projections, by_token=True)
    b.write(as_before(b, written, data, projections), projections.result, elem_type)
    return replacement(b, conversion, projections.result)


def _by_reference(b: Builder, view: GraphView, conversion: Conversion) -> Replacement:
    """The attention of a block whose own linear operators stay, and are its projections."""
    block = conversion.block
    rank, axes = view.type_of(block.gate).rank, {operator.axis for operator in block.first}
    order = [*range(rank or 0)]
    if len(axes) == 1 and rank is not None and rank > 1:
        order.append(order.pop(axes.pop()))  # the permutation that moves the channels last
    back = [order.index(axis) for axis in range(len(order))]

    def rows_of(tensor: str, elem_type: int, name: str) -> tuple[Variable, Variable]:
        """[batch, tokens, heads] of any layout, and the shape that it has with the channels last."""
        given = b.read(tensor, elem_type, name)
        if back != sorted(back):
            given = b.transpose(given, order, f"{name}_channels_last")
        shape = b.node("Shape", [given], f"{name}_shape")
        # Axes between the first and the channels merge into the tokens. Each token attends only to itself, so any
        # grouping into sequences gives the same result.
        lead = b.integers(0 if rank is not None and rank > 2 else 1, -1)
        sizes = b.concat([lead, b.rows(shape, -1, 2**31, 0, f"{name}_heads")], 0, f"{name}_rows_shape")
        return b.reshape(given, sizes, f"{name}_rows"), shape

    def own_key(group: Group, suffix: str, dimension: int) -> Tensor:
        numbers = np.asarray([group.head.beta, group.head.gamma])[:dimension]
        constants = b.typed(conversion.compute_type).numbers(f"k_self{suffix}_constants", numbers)
        shape = b.concat([each, b.integers(1, dimension)], 0, f"k_self{suffix}_shape")
        return b.node("Expand", [constants, shape], f"k_self{suffix}")

    rows, shape = rows_of(block.gate, block.gate_type, "query")
    each = b.sizes(rows, 0, 2, "each_token")
    y = z = b.unsqueeze(rows, 3, "y")
    if block.value != block.gate:
        z = b.unsqueeze(rows_of(block.value, block.value_type, "value")[0], 3, "u")
    by_token = _attend(b, conversion, y, z, each, own_key)
    b.expose("z", by_token, (None, None, block.neurons, 1))
    shaped = b.reshape(by_token, shape, "activation")
    if back != sorted(back):
        shaped = b.transpose(shaped, back, "activation_as_before")
    b.write(shaped, block.output, block.elem_type)
    return replacement(b, conversion, block.output)
