"""The cost of a block in each form, before the model is built: heads, widths, parameters, peak memory.

This is arithmetic on sizes; no weight is read. Peak memory counts the block's new tensors alive at one time in a run,
without the loaded model and without allocator overhead. For form `local` it is measured, for the others an estimate
that errs on the high side; `python -m benchmarks.forms` measures both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms import FORMS, choose
from passes.match.linear import Miss
from passes.options import DEFAULT_MAX_TOKENS, DEFAULT_PATTERN_MB
from passes.programs.groups import Group, SharedKeys, by_keys, groups_of, progression_of, spread_error, spreads
from passes.programs.program import Program
from rewriter.graph.view import GraphView

TOKENS = 128
"""The default number of tokens for which costs are stated."""

_MEGABYTE = 2**20
_USUAL_HEAD_DIMENSION = 64
"""d_head of the linear sublayers of form `staged` where the model's own is unknown."""


@dataclass(frozen=True)
class Setting:
    """The sizes and limits for which a cost is stated.

    Attributes:
        tokens: N, the length of the sequence.
        batch: number of sequences.
        max_tokens: one-hot positions of the forms that have them.
        max_pattern_mb: bound of the largest pattern tensor, in units of 2^20 bytes.
        head_dimension: d_head by which form `staged` splits its linear maps; None: unknown.
    """

    tokens: int = TOKENS
    batch: int = 1
    max_tokens: int = DEFAULT_MAX_TOKENS
    max_pattern_mb: float = DEFAULT_PATTERN_MB
    head_dimension: int | None = None


@dataclass(frozen=True)
class FormCost:
    """One block in one form.

    Attributes:
        form: a key of `passes.forms.FORMS`.
        heads: attention heads of each sublayer.
        head_dimension: the larger of the query-key and the value dimension of the neurons' heads.
        rows: rows of the sublayer's stream: N, or N + m with the bias tokens.
        keys: keys against which each query is scored.
        width: columns of the residual stream inside the sublayer.
        parameters_reused: elements of the block's weights that stay as they are, shared with the original.
        parameters_added: elements of new weights.
        pattern_bytes: the largest pattern tensor as built.
        whole_pattern_bytes: the pattern of all heads at once, which the chunks avoid.
        peak_bytes: new tensors alive at one time.
    """

    form: str
    heads: tuple[int, ...]
    head_dimension: int
    rows: int
    keys: int
    width: int
    parameters_reused: int
    parameters_added: int
    pattern_bytes: int
    whole_pattern_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class _Sizes:
    """The sizes that determine a cost in any form; `bytes` is the size of one element of the heads' arithmetic."""

    program: Program
    width: int
    neurons: int
    projections: int
    bytes: int
    setting: Setting

    @property
    def groups(self) -> tuple[Group, ...]:
        return groups_of(self.program)

    @property
    def bias_tokens(self) -> int:
        return self.program.bias_tokens

    @property
    def rows(self) -> int:
        """N + m."""
        return self.setting.tokens + self.bias_tokens

    @property
    def slots(self) -> int:
        """One-hot position columns, including those of the bias tokens."""
        return self.setting.max_tokens + self.bias_tokens

    def tensor(self, rows: int, columns: int) -> int:
        """Bytes of one tensor [batch, rows, columns]."""
        return self.setting.batch * rows * columns * self.bytes


@dataclass(frozen=True)
class _Shape:
    """The part of `FormCost` that depends on the form."""

    heads: tuple[int, ...]
    head_dimension: int
    rows: int
    keys: int
    width: int
    pattern_bytes: int
    whole_pattern_bytes: int
    peak_bytes: int


def cost(view: GraphView, conversion: Conversion, form: str, setting: Setting) -> FormCost | Miss | None:
    """The cost of the block in `form`, or why the form cannot be used; None where its sizes are unknown.

    Raises:
        KeyError: `form` is not a key of `COSTS`.
    """
    block = conversion.block
    width = next((op.in_features for op in block.first if op.in_features), None)
    if width is None or block.neurons is None:
        return None
    options = replace(
        conversion.options,
        max_tokens=setting.max_tokens,
        max_pattern_mb=setting.max_pattern_mb,
        head_dimension=setting.head_dimension or _USUAL_HEAD_DIMENSION,
    )
    chosen = in_form(view, conversion, form)
    if isinstance(chosen, Miss):
        return chosen
    prepared = FORMS[form].prepare(view, replace(chosen, options=options))
    if isinstance(prepared, Miss):
        return prepared
    sizes = _Sizes(
        program=chosen.program,
        width=width,
        neurons=block.neurons,
        projections=1 if block.gate == block.value else 2,
        bytes=8 if chosen.compute_type == onnx.TensorProto.DOUBLE else 4,
        setting=setting,
    )
    softmax = form == "local" and conversion.options.spelling == "softmax"
    shape = replace(_compact(sizes), width=width) if softmax else COSTS[form](sizes)
    return FormCost(
        form=form,
        **vars(shape),
        parameters_reused=sum((op.in_features or 0) * (op.out_features or 0) for op in (*block.first, *block.second)),
        parameters_added=_added(view, prepared),
    )


def in_form(view: GraphView, conversion: Conversion, form: str) -> Conversion | Miss:
    """The conversion of the same block in another form, with the program that suits it, before `Form.prepare`."""
    if form == conversion.form:
        return replace(conversion, projections=None)
    spelling = conversion.options.spelling if form == "local" else "fused"
    return choose(view, conversion.block, form, conversion.accuracy, inline=conversion.inline, spelling=spelling)


def _added(view: GraphView, conversion: Conversion) -> int:
    """The number of elements of the floating-point constants that the form emits for the block."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    made = FORMS[conversion.form].emit(view, conversion).initializers
    total = 0
    for tensor in made:
        count = 1
        for dim in tensor.dims:
            count *= dim
        total += count if tensor.data_type in floats else 0
    return total


def _local(sizes: _Sizes) -> _Shape:
    """Form `local`: each query is scored against its own key and m bias keys, so nothing grows with the square of N."""
    program = sizes.program
    groups = by_keys(program)[0] if program.heads and program.powers is None else ()
    live = max(map(_live_tensors, groups), default=_FEW) + (program.line is not None)
    live = live if program.line is None else max(live, _FEW)
    each = sizes.tensor(sizes.setting.tokens, sizes.neurons)
    heads = sizes.neurons * len(program.attention)
    return _Shape(
        heads=(heads,),
        head_dimension=max(group.dimension for group in sizes.groups),
        rows=sizes.setting.tokens,
        keys=sizes.bias_tokens + 1,
        width=sizes.width,
        pattern_bytes=each,
        whole_pattern_bytes=(sizes.bias_tokens + 1) * len(program.attention) * each,
        peak_bytes=(live + max(len(groups) - 1, 0)) * each,
    )


_PROGRESSION, _FEW = 4, 7
"""Tensors alive at one time in heads over a progression, and in a line or in heads whose shares are powers."""


def _live_tensors(group: SharedKeys) -> int:
    """The number of tensors [batch, N, d_ff] alive at one time in form `local`, including the pre-activation.

    For the short spelling they are query, logit and weight. Otherwise there is a weight for every key, a weighted value
    for every key unless all values are multiples of one, and a few tensors computed from the pre-activation. Keys in
    arithmetic progression share an exponential.
    """
    if group.keys is not None:
        return _PROGRESSION if progression_of(group.keys, np.float32) else len(group.keys) + 4
    (head,) = group.heads
    return 3 if head.zero_bias else 2 * len(head.bias_tokens) + 5


def _compact(sizes: _Sizes) -> _Shape:
    """Form `compact`: N queries, each with its own key and m bias keys.

    Alive at one time are the queries before and after clipping, what the heads write, and the pattern. This is the
    measured peak, with a tensor of the size of z to spare, and one more where several groups are added up.
    """
    dimension = max(group.dimension for group in sizes.groups)
    keys = max(group.bias_tokens for group in sizes.groups) + 1
    each = sizes.tensor(sizes.setting.tokens, sizes.neurons)
    one_token = sizes.neurons * keys * sizes.bytes
    tokens = max(1, int(sizes.setting.max_pattern_mb * _MEGABYTE) // one_token)
    chunk = min(sizes.setting.batch * sizes.setting.tokens, tokens) * one_token
    return _Shape(
        heads=(sizes.neurons * len(sizes.groups),),
        head_dimension=dimension,
        rows=sizes.setting.tokens,
        keys=keys,
        width=sizes.width + 1,
        pattern_bytes=chunk,
        whole_pattern_bytes=keys * len(sizes.groups) * each,
        peak_bytes=(dimension + 3 + (len(sizes.groups) > 1)) * each + chunk,
    )


def _square(sizes: _Sizes) -> _Shape:
    """Form `masked`: N + m queries and keys, with the pattern in chunks.

    Alive at one time are the queries before and after clipping, the parts so far and their concatenation, and three
    patterns (scores, masked scores, weights).
    """
    dimension = max(group.dimension for group in sizes.groups)
    chunk = _chunk(sizes)
    live = 4 + dimension + (len(sizes.groups) > 1)
    heads = sizes.neurons * len(sizes.groups)
    return _Shape(
        heads=(heads,),
        head_dimension=dimension,
        rows=sizes.rows,
        keys=sizes.rows,
        width=sizes.width + 1 + sizes.bias_tokens,
        pattern_bytes=chunk,
        whole_pattern_bytes=sizes.tensor(sizes.rows, sizes.rows) * heads,
        peak_bytes=live * sizes.tensor(sizes.rows, sizes.neurons) + 3 * chunk,
    )


def _chunk(sizes: _Sizes) -> int:
    """Bytes of one chunk's pattern: whole heads if at least one fits, else some queries of one head."""
    one_row = sizes.tensor(1, sizes.rows)
    rows = max(1, int(sizes.setting.max_pattern_mb * _MEGABYTE) // one_row)
    if rows < sizes.rows:
        return rows * one_row  # rows are not spread evenly over the chunks: the last one is padded
    heads = min(sizes.neurons, rows // sizes.rows)
    return ceil(sizes.neurons / ceil(sizes.neurons / heads)) * sizes.rows * one_row


def _maskless(sizes: _Sizes) -> _Shape:
    """Form `maskless`: as `masked`, with one-hot positions in the stream and their scores added to the heads'."""
    shape = _square(sizes)
    width = sizes.width + sizes.slots
    more = 3 * sizes.tensor(sizes.rows, width) + 2 * sizes.tensor(sizes.rows, sizes.rows)
    return replace(shape, width=width, peak_bytes=shape.peak_bytes + more)


def _staged(sizes: _Sizes) -> _Shape:
    """Form `staged`: three sublayers (W1, activation, W2 with the clearing) on a stream with hidden columns.

    The hidden columns hold the output of W1, and the activation's output where that cannot replace it in place.
    """
    minus = replace(sizes.program, linear=sizes.program.linear - 1.0)
    dtype = np.float64 if sizes.bytes == np.dtype(np.float64).itemsize else np.float32
    in_place = spreads(minus) and spread_error(minus, dtype) == 0.0
    sizes = replace(sizes, program=minus) if in_place else sizes
    shape = _square(sizes)
    d_head = sizes.setting.head_dimension or _USUAL_HEAD_DIMENSION
    made = sizes.projections * sizes.neurons
    hidden = made if in_place else made + sizes.neurons
    width = sizes.width + hidden + sizes.slots
    heads = (ceil(made / d_head), *shape.heads, ceil((sizes.width + hidden) / d_head))
    more = 2 * (sizes.tensor(sizes.rows, width) + sizes.tensor(sizes.rows, sizes.rows))
    return replace(shape, heads=heads, width=width, peak_bytes=shape.peak_bytes + more)


COSTS: dict[str, Callable[[_Sizes], _Shape]] = {
    "local": _local,
    "compact": _compact,
    "masked": _square,
    "maskless": _maskless,
    "staged": _staged,
}
"""Form name to its cost; it has an entry for every key of `passes.forms.FORMS`."""
