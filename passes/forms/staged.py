"""Form `staged`: three attention sublayers per MLP, as in the post (linear, activation, linear; Theorems 7 and 8).

They act on a stream of D + hidden + positions columns and N + m rows:

1. linear: heads that attend only to themselves write x W1 + b1 to the hidden columns; the rank is split over
   ceil(d_ff / d_head) heads.
2. activation: d_ff heads read the hidden columns and write f(y) - y to them, so that the skip connection leaves f(y).
   A gated block has 2 d_ff hidden columns, y and u; heads write f(y) u - u to those of u. This loses no digits where
   f(y) - y is again a weighted mean of multiples of y, as for SiLU, whose heads write -y sigma(-y). For other programs,
   such as GELU or tanh, f(y) - y + y would lose digits where |y| is larger than |f|, so they write f(y) to d_ff columns
   of their own.
3. linear: heads write z W2 + b2 to the model's columns, and clear the hidden columns by writing their negatives.

b1 and b2 ride on the tokens' position columns, and one-hot positions keep tokens apart, as in form `maskless`. The skip
connection of the third sublayer is the model's own Add, because a normalisation stands between the residual stream and
the block's input; the block's output is what the third sublayer's heads write.
"""

from __future__ import annotations

from dataclasses import replace

from passes.conversion import Conversion
from passes.forms.builder import Builder, replacement
from passes.forms.square import emit_maskless, prepare_maskless
from passes.forms.sublayer import (
    HeadWeights,
    Positions,
    as_before,
    attend_to_self,
    attend_with_activation,
    default_omega,
    open_stream,
    position_scores,
    sequences_of,
)
from passes.match.linear import Miss
from passes.match.projections import Projection, Projections
from passes.programs.groups import as_written, groups_of, spread_error, spreads
from passes.programs.program import Program
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView


def emit_staged(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights.

    Where the linear operators are not plain matrices, only the second sublayer is built, by reference.
    """
    if conversion.projections is None:
        return emit_maskless(view, conversion)
    return _three(Builder.of(view, conversion), conversion, conversion.projections)


def prepare_staged(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """As for form `maskless`; if the activation is written in place, the skip connection adds the linear term."""
    prepared = prepare_maskless(view, conversion)
    if isinstance(prepared, Miss) or prepared.projections is None:
        return prepared
    minus, in_place = activation(prepared)
    return replace(prepared, written=replace(as_written(minus, prepared.dtype), linear=1.0)) if in_place else prepared


def activation(conversion: Conversion) -> tuple[Program, bool]:
    """The program that the second sublayer writes, and whether in place.

    In place it is f(y) - z, to which the skip connection adds z; where that would lose digits, it is f(y).
    """
    program = conversion.program
    minus = replace(program, linear=program.linear - 1.0)
    in_place = spreads(minus) and spread_error(minus, conversion.dtype) == 0.0
    return (minus if in_place else program), in_place


def _linear_values(
    b: Builder, source: Tensor, projections: list[Projection], positions: Positions, elem_type: int, name: str
) -> Variable:
    """Values of heads that attend only to themselves: x W + b for each row of `source` [batch, rows, in + slots]."""
    layout = positions.layout(projections[0].in_features)
    made: list[Variable] = []
    for number, projection in enumerate(projections):
        suffix = f"_{number}" if len(projections) > 1 else ""
        weights = HeadWeights(b, layout, projection.out_features, elem_type)
        by_neuron = weights.functional(projection, f"W_V_{name}{suffix}")
        flat = b.reshape(
            b.transpose(by_neuron, (1, 0, 2), f"W_V_{name}{suffix}_turned"),
            (layout.width, -1),
            f"W_V_{name}{suffix}_flat",
        )
        made.append(b.node("MatMul", [source, flat], f"{name}_values{suffix}"))
    return b.concat(made, 2, f"{name}_values") if len(made) > 1 else made[0]


def _three(b: Builder, conversion: Conversion, projections: Projections) -> Replacement:
    elem_type, options = conversion.block.elem_type, conversion.options
    program, direct = activation(conversion)
    groups = groups_of(program)
    query, width = projections.query, projections.output.out_features
    model, neurons = query.in_features, query.out_features
    first = [query, projections.value] if projections.gated else [query]
    made = neurons * len(first)
    hidden = made if direct else made + neurons
    m = max([1, *(group.bias_tokens for group in groups)])
    omega = default_omega(groups, conversion.compute_type)
    positions = Positions(b, m, options.positions, omega)
    data = b.read(projections.query.data, elem_type, "input")
    stream = open_stream(b, sequences_of(b, data, conversion, projections), model, hidden, positions)
    alone = position_scores(b, stream, "self_scores", bias_tokens=False)

    read = [stream.columns(b, 0, model, "model_columns"), stream.ones(b, "linear_1_positions")]
    values = _linear_values(b, b.concat(read, 2, "linear_1_reads"), first, positions, elem_type, "linear_1")
    stream = stream.plus(b, attend_to_self(b, values, made, options.d_head, alone, "linear_1"), model, made)

    scores = position_scores(b, stream, "activation_scores", bias_tokens=True)
    y = stream.columns(b, model, model + neurons, "y_columns")
    z = stream.columns(b, model + neurons, model + made, "u_columns") if projections.gated else y
    ones = stream.ones(b, "activation_positions")
    # In place these are the columns of y, or of u in a gated block; otherwise the last ones, which are still 0.
    target = model + hidden - neurons
    stream = stream.plus(b, attend_with_activation(b, y, z, ones, scores, groups, positions, omega), target, neurons)

    activated = stream.columns(b, target, target + neurons, "z_side_by_side")
    read = [activated, stream.ones(b, "linear_2_positions")]
    written = _linear_values(
        b, b.concat(read, 2, "linear_2_reads"), [projections.output], positions, elem_type, "linear_2"
    )
    cleared = b.node("Neg", [stream.columns(b, model, model + hidden, "hidden_columns")], "cleared_columns")
    every = b.concat([written, cleared], 2, "linear_2_and_clear")
    last = attend_to_self(b, every, width + hidden, options.d_head, alone, "linear_2")
    result = b.rows(last, b.integers(0), b.integers(width), 2, "model_columns_written")
    dropped = b.rows(result, b.integers(0), stream.count, 1, "tokens_only")
    b.write(as_before(b, dropped, data, projections), projections.result, elem_type)
    return replacement(b, conversion, projections.result)
