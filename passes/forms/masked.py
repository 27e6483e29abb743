"""Form `masked`: each MLP is one attention sublayer over N tokens and m bias tokens (Theorems 3 and 6).

The sublayer is that of the paper. The bias tokens and indicator columns are appended to its input; W_Q, W_K and W_V of
d_ff heads project this stream; each query attends to itself and to the bias tokens, under a mask computed from the
runtime length; W_O writes the result, and the bias tokens' rows are dropped. Linear operators that are not plain
matrices stay in place as the projections (`passes.forms.by_reference`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from passes.conversion import Conversion
from passes.forms.attention import SMALLEST_OPSET, whole_of
from passes.forms.builder import Builder, replacement
from passes.forms.by_reference import emit_by_reference
from passes.forms.sublayer import as_batches, as_before, attend_block, write_output
from passes.forms.weights import Layout, Weights
from passes.match.linear import Miss
from passes.match.projections import Projections, projections_of
from passes.programs.groups import Group, as_written, groups_of, spread_error
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView


def prepare_masked(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """Decide whether the projections are plain matrices; a Miss where the model's opset is too old for the form."""
    opset, output = view.opsets.get("", 1), conversion.block.output
    if opset < SMALLEST_OPSET:
        return Miss(
            f"form {conversion.form} needs opset {SMALLEST_OPSET}, and the model has {opset}; convert the model to a "
            "newer opset first, or use form local",
            output,
        )
    program = conversion.program
    changed = program.coefficient_error + spread_error(program, conversion.dtype)
    written = as_written(program, conversion.dtype)
    conversion = replace(conversion, program=replace(program, coefficient_error=changed), written=written)
    found = projections_of(view, conversion.block)
    if isinstance(found, Miss):
        return replace(conversion, projections=None, by_reference=found.reason)
    return replace(conversion, projections=found)


def emit_masked(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    b = Builder.of(view, conversion)
    if conversion.projections is None:
        return emit_by_reference(b, view, conversion, lambda count: lambda *given: attend_masked(b, count, *given))
    return _sublayer(b, conversion, conversion.projections)


def attend_masked(b: Builder, count: Tensor, group: Group, inputs: dict[str, Tensor], suffix: str) -> Variable:
    """Attention of one group under its mask: the diagonal, and the columns of its bias tokens. `count` is N."""
    given = {**inputs, "tokens": count, "bias_tokens": b.integers(group.bias_tokens)}
    if b.exposes:
        given["forbidden"] = b.numbers(f"z{suffix}_forbidden", -np.inf)
        nodes = whole_of(b.opset, suffix)
        for kind in ("scores", "pattern"):
            b.expose(kind, b.fragment.tensor(b.fragment.qualified(f"{kind}{suffix}")), (None, None, None, None))
        return b.fragment.inlined(nodes, [given[name] for name in nodes.input], "")
    return b.attend(given, f"z{suffix}", mask=True)


def _sublayer(b: Builder, conversion: Conversion, projections: Projections) -> Replacement:
    elem_type = conversion.block.elem_type
    groups = groups_of(conversion.program)
    layout = Layout(projections.query.in_features, max(group.bias_tokens for group in groups))
    data = b.read(projections.query.data, elem_type, "input")
    stream, count = with_bias_tokens(b, as_batches(b, data, projections.rank), layout)
    weights = Weights(b, layout, projections.query.out_features, elem_type)
    attended = attend_block(b, weights, stream, projections, groups, lambda *given: attend_masked(b, count, *given))
    written = write_output(b, weights, attended, projections)
    dropped = b.rows(written, b.integers(0), count, 1, "tokens_only")
    b.write(as_before(b, dropped, data, projections), projections.result, elem_type)
    return replacement(b, conversion, projections.result)


def with_bias_tokens(b: Builder, tokens: Tensor, layout: Layout) -> tuple[Variable, Variable]:
    """The stream [batch, N + m, width] with indicator columns, and N as a 1-D tensor."""
    batch, count = b.sizes(tokens, 0, 1, "batch"), b.sizes(tokens, 1, 2, "token_count")
    rows = np.eye(layout.bias_tokens, layout.width, layout.model + 1)[None]
    shape = b.concat([batch, b.integers(layout.bias_tokens, layout.width)], 0, "bias_tokens_shape")
    bias_tokens = b.node("Expand", [b.numbers("bias_token", rows), shape], "bias_tokens")
    return b.concat([with_indicators(b, tokens, layout, (batch, count), "tokens"), bias_tokens], 1, "stream"), count


def with_indicators(b: Builder, tokens: Tensor, layout: Layout, sizes: tuple[Tensor, Tensor], name: str) -> Variable:
    """The tokens with their indicator columns, [batch, N, width]; `sizes` are batch and N, 1-D."""
    one = np.zeros((1, 1, 1 + layout.bias_tokens))
    one[..., 0] = 1.0
    shape = b.concat([*sizes, b.integers(1 + layout.bias_tokens)], 0, "indicators_shape")
    indicators = b.node("Expand", [b.numbers("token_indicator", one), shape], "indicators")
    return b.concat([tokens, indicators], 2, name)
