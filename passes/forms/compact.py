"""Form `compact`: the sublayer of form `masked` at a cost that is linear in the number of tokens (Theorems 3 and 6).

Each query is scored against exactly the keys that the mask of form `masked` leaves it (docs/forms.md#compact). All of
it is float32 in models of that type or narrower, with logits less an affine function of y (`Head.conditioned`), but
programs marked `double` are float64 up to z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
from passes.programs.groups import groups_of, spread_error
from passes.programs.head import Head, narrowed
from passes.programs.program import largest_change
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView, LostError

_LARGEST_VALUE = 2.0**20  # float32 rounds its logarithm by up to 4.8e-7


def prepare_compact(view: GraphView, conversion: Conversion) -> Conversion:
    """The projections as plain matrices; by reference where they are not."""
    prepared = _as_written(prepare_softmax(view, conversion))
    try:
        return replace(prepared, projections=projections_of(view, conversion.block))
    except LostError as lost:
        return replace(prepared, by_reference=lost.miss.reason)


def _as_written(prepared: Conversion) -> Conversion:
    """The program in float32 where float64 is not needed."""
    program, single = prepared.program, partial(narrowed, dtype=np.float32)
    # Values may be so large, as those of exp and ELU, that float32 rounds their keys' offsets too much: an offset is
    # -ln(value), and half a unit in its last place is the relative error of the product with the weight.
    values = [abs(value) for head in program.heads for value in (head.d, *(token.value for token in head.bias_tokens))]
    if not prepared.widened or program.double or max(values, default=0.0) > _LARGEST_VALUE:
        return prepared
    heads = tuple(head.rounded(np.float32, factored=False, conditioned=True) for head in program.heads)
    program = replace(program, heads=heads, linear=single(program.linear), constant=single(program.constant))
    change = largest_change(prepared.program, program) + spread_error(program, np.float32)
    program = replace(program, coefficient_error=program.coefficient_error + change)
    return replace(prepared, program=program, double=False)


def emit_compact(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    single = conversion.widened and conversion.program.double
    b = Builder.of(view, conversion).typed(onnx.TensorProto.FLOAT if single else conversion.compute_type)
    return _by_reference(b, view, conversion) if conversion.projections is None else _sublayer(b, conversion)


OwnKey = Callable[[np.ndarray, str], Tensor]  # [batch, tokens, 1, d_head] from d_head numbers and a suffix for names


def _attend(b: Builder, conversion: Conversion, y: Tensor, z: Tensor, each: Tensor, own_key: OwnKey) -> Tensor:
    """The heads' output [batch, tokens, heads, 1]; `b` has the type of the projections, `each` is (batch, tokens)."""
    made, groups = b.typed(conversion.compute_type), groups_of(conversion.program)
    neurons, dimension = conversion.block.neurons, max(group.dimension for group in groups)
    # W_Q has one column. A further one would be the indicator, and its product with the stream the number 1, at the
    # cost of another W1.
    query = b.bounded(y, "q") if dimension == 1 else b.paired(b.bounded(y, "finite_q"), "q", one_first=True)
    b.expose("q", query, (None, None, neurons, dimension))
    query = made.cast(query, b.compute_type, "wide_q")
    terms: list[Tensor] = []
    for number, group in enumerate(groups):
        suffix, head, m = f"_{number}" if len(groups) > 1 else "", group.head, group.bias_tokens
        keys = np.asarray([(offset, slope) for slope, offset in head.logits])[:, -dimension:]
        key = own_key(keys[0], suffix)
        if m:
            shape = b.concat([each, b.integers(m, dimension)], 0, f"k_bias{suffix}_shape")
            bias = b.node("Expand", [made.numbers(f"k_bias{suffix}", keys[1:]), shape], f"k_bias{suffix}_everywhere")
            key = b.concat([key, bias], 2, f"k{suffix}")
        pattern = made.pattern(query, key, suffix, sizes=(None, None, neurons, 1 + m))
        terms.append(_weighed(made, head, pattern, made.cast(z, b.compute_type, f"wide_v{suffix}"), suffix))
    return b.cast(add_groups(made, terms, groups), made.compute_type, "narrow_z")


def _weighed(b: Builder, head: Head, pattern: Tensor, z: Tensor, suffix: str) -> Tensor:
    constants = [head.d, *(token.value for token in head.bias_tokens)]
    if not any(constants) and head.c:
        parts = (1, len(head.bias_tokens)), (f"self_weight{suffix}", f"bias_weight{suffix}")
        return b.node("Mul", [b.split(pattern, *parts)[0] if head.bias_tokens else pattern, z], f"z{suffix}")
    rows = [[head.c, head.d], *([0.0, token.value] for token in head.bias_tokens)]
    if not head.c:
        return b.node("MatMul", [pattern, b.numbers(f"v_rows{suffix}", np.asarray(rows)[:, 1:])], f"z{suffix}")
    # One product for both: where a row of weights is short, taking it apart costs more than multiplying it.
    both = b.node("MatMul", [pattern, b.numbers(f"v_rows{suffix}", rows)], f"weighed_rows{suffix}")
    own, constant = b.split(both, (1, 1), (f"self_weight{suffix}", f"z_constant{suffix}"))
    return b.node("Add", [b.node("Mul", [own, z], f"z_self{suffix}"), constant], f"z{suffix}")


def _sublayer(b: Builder, conversion: Conversion) -> Replacement:
    projections, elem_type = conversion.whole_block, conversion.block.elem_type
    neurons, scoring = projections.query.out_features, b.typed(conversion.compute_type)
    layout = StreamColumns(projections.query.in_features, bias_tokens=0)  # this stream has no rows of bias tokens
    data = b.read(projections.query.data, elem_type, "input")
    stream, sizes = with_indicator(b, as_batches(b, data, projections.rank), name="stream")
    each = b.concat([*sizes], 0, "each_token")
    wide_stream = scoring.cast(stream, b.compute_type, "wide_stream")
    weights, of_scores = (HeadWeights(each, layout, neurons, elem_type, by_token=True) for each in (b, scoring))

    def own_key(numbers: np.ndarray, suffix: str) -> Tensor:
        columns = np.stack([layout.column(number, ()) for number in numbers], axis=-1)
        weight = scoring.numbers(f"W_K{suffix}", columns[None])
        return of_scores.project(wide_stream, weight, 1, len(numbers), f"k_self{suffix}")

    y = z = weights.project(stream, weights.functional(projections.query, "W_Q"), neurons, 1, "unbounded_q")
    if projections.gated:
        z = weights.project(stream, weights.functional(projections.value, "W_V"), neurons, 1, "v")
    written = write_output(weights, _attend(b, conversion, y, z, each, own_key), projections)
    b.write(as_before(b, written, data, projections), projections.result, elem_type)
    return replacement(b, conversion, projections.result)


def _by_reference(b: Builder, view: GraphView, conversion: Conversion) -> Replacement:
    """The attention of a block whose linear operators stay as projections."""
    block = conversion.block
    rank, axes = view.type_of(block.gate).rank, {operator.axis for operator in block.first}
    order = [*range(rank or 0)]
    if len(axes) == 1 and rank is not None and rank > 1:
        order.append(order.pop(axes.pop()))  # the permutation that moves the channels last
    back = [order.index(axis) for axis in range(len(order))]
    # Each token attends only to itself, so any grouping into sequences gives the same result.
    lead = (0, 0) if rank == 3 else (0, 1) if rank == 2 and not b.has_allowzero else (1, -1)

    def rows_of(tensor: str, elem_type: int, name: str) -> tuple[Variable, Variable]:
        """[batch, tokens, heads] of any layout, and its shape with the channels last."""
        given = b.read(tensor, elem_type, name)
        given = b.transpose(given, order, f"{name}_channels_last") if back != sorted(back) else given
        shape = b.node("Shape", [given], f"{name}_shape")
        known = view.type_of(tensor).shape or (None,)
        width = known[order[-1]] if len(known) == rank else block.neurons
        if isinstance(width, int):
            return b.reshape(given, (*lead, width), f"{name}_rows"), shape
        # Does not run at a size of 0: onnxruntime's fusion of Reshapes writes the computed size as -1.
        heads = b.rows(shape, -1, 2**31, 0, f"{name}_heads")
        sizes = b.concat([b.integers(*lead), heads], 0, f"{name}_rows_shape")
        return b.reshape(given, sizes, f"{name}_rows"), shape

    def own_key(numbers: np.ndarray, suffix: str) -> Tensor:
        constants = b.typed(conversion.compute_type).numbers(f"k_self{suffix}_constants", numbers)
        shape = b.concat([each, b.integers(1, len(numbers))], 0, f"k_self{suffix}_shape")
        return b.node("Expand", [constants, shape], f"k_self{suffix}")

    rows, shape = rows_of(block.gate, block.gate_type, "query")
    each = b.sizes(rows, 0, 2, "each_token")
    y = z = b.unsqueeze(rows, 3, "y")
    if block.value != block.gate:
        z = b.unsqueeze(rows_of(block.value, block.value_type, "value")[0], 3, "u")
    by_token = _attend(b, conversion, y, z, each, own_key)
    b.expose("z", by_token, (None, None, block.neurons, 1))
    shaped = b.reshape(by_token, shape, "activation", zeros=rank != 3)
    shaped = b.transpose(shaped, back, "activation_as_before") if back != sorted(back) else shaped
    b.write(shaped, block.output, block.elem_type)
    return replacement(b, conversion, block.output)
