"""Softmax attention as model-local functions of nodes: over all rows of a stream, or over {self, bias tokens}.

**Square patterns** (forms `masked`, `maskless`, `staged`; `function_of`):

    query [batch, heads, tokens, d_head]
    key   [batch, heads or 1, tokens, d_head]
    value [batch, heads or 1, tokens, d_v]

become [batch, heads, tokens, d_v], where 1 stands for a projection that all heads share. The pattern of all d_ff heads
would have batch * d_ff * tokens^2 entries, so a Loop takes as many heads (or, where even one head is too large, as many
of its queries) as keep the chunk's pattern within `pattern_size` entries. `whole_of` are the nodes without a Loop.

**Neighbourhoods** (form `compact`; `chunked`, or `nodes_of` without a Loop):

    query [batch, tokens, heads, d_head]
    key   [batch, tokens, 1 + m, d_head], the token's own key first; the same for all heads
    value [batch, tokens, heads or 1, 1], the token's own
    bias_value [m, 1], those of the bias tokens

become the pattern [batch, tokens, heads, 1 + m] and z [batch, tokens, heads, 1]. The Loop takes as many tokens at a
time as keep the pattern within `pattern_size` entries.

Sizes are computed from the runtime shapes. Softmax acts on one query's row of one head, so chunks change nothing.
Operators are those of opset 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import onnx
import onnx.parser

from passes.match.marks import DOMAIN

SMALLEST_OPSET = 11
"""Range, and Slice and Pad with computed bounds, came with opset 10 and 11."""


_DOC = (
    "Softmax attention of all heads, in chunks of heads and queries whose pattern [batch, heads, queries, keys] has at "
    "most pattern_size entries. query [batch, heads, keys, d_head]; key, value: the same, or with one head that all "
    "share. {more} Huben and Morris 2023, arXiv 2309.08593, Theorem {theorem}."
)
_DOC_MASK = (
    "The first `tokens` rows are tokens, the rest bias tokens; a query attends to itself and to the first "
    "`bias_tokens` bias tokens."
)
_DOC_MASKLESS = "No mask: position_scores [batch, 1, keys, keys] are added, the part of query * key made of positions."

# One query row of one head has batch * keys pattern entries; `rows` is how many such rows fit, at least one. If that is
# enough for whole heads, a chunk is some heads with all their rows, else some rows of one head. `..._rounded`, `..._up`
# and `..._steps` are the steps of a division rounded up; heads are spread evenly over their steps. An empty batch must
# not divide by zero (`row_size`).
#
# A Loop stacks the outputs of its steps, which must have one shape. The last heads and rows may be fewer, so every part
# is padded to the size of a chunk, and the padding is cut off after the parts are put together.
#
# A projection that all heads share has one head; Slice then starts at 0, and its end is clamped to that head.
_TEXT = """
<opset_import: ["" : {opset}], domain: "{domain}">
{name} ({inputs}) => (output)
{{
  zero = Constant<value = int64[1] {{0}}>()
  one = Constant<value = int64[1] {{1}}>()
  axes_1_2 = Constant<value = int64[2] {{1, 2}}>()
  axis_1 = Constant<value = int64[1] {{1}}>()
  scalar = Constant<value = int64[0] {{}}>()
  shape = Shape(query)
  index_0 = Constant<value = int64[1] {{0}}>()
  index_1 = Constant<value = int64[1] {{1}}>()
  index_2 = Constant<value = int64[1] {{2}}>()
  batch = Gather(shape, index_0)
  heads = Gather(shape, index_1)
  keys = Gather(shape, index_2)
  key_shape = Shape(key)
  key_heads = Gather(key_shape, index_1)
  last_key_head = Sub(key_heads, one)
  value_shape = Shape(value)
  value_heads = Gather(value_shape, index_1)
  index_3 = Constant<value = int64[1] {{3}}>()
  value_size = Gather(value_shape, index_3)
  last_value_head = Sub(value_heads, one)

  entries = Mul(batch, keys)
  nothing = Less(entries, one)
  row_size = Where(nothing, one, entries)
  fitting = Div(pattern_size, row_size)
  none_fits = Less(fitting, one)
  rows = Where(none_fits, one, fitting)
  whole_heads = Div(rows, keys)
  no_head_fits = Less(whole_heads, one)
  some_heads = Where(no_head_fits, one, whole_heads)
  few_heads = Less(heads, some_heads)
  most_heads = Where(few_heads, heads, some_heads)
  heads_rounded = Add(heads, most_heads)
  heads_up = Sub(heads_rounded, one)
  head_steps = Div(heads_up, most_heads)
  steps_rounded = Add(heads, head_steps)
  steps_up = Sub(steps_rounded, one)
  head_chunk = Div(steps_up, head_steps)
  few_keys = Less(keys, rows)
  row_chunk = Where(few_keys, keys, rows)
  rows_rounded = Add(keys, row_chunk)
  rows_up = Sub(rows_rounded, one)
  row_steps = Div(rows_up, row_chunk)
  steps = Mul(head_steps, row_steps)
  trips = Reshape(steps, scalar)
  always = Constant<value = bool {{1}}>()
{outside}
  parts = Loop(trips, always) <body = chunk (int64 step, bool going) => (bool going_on, part) {{
    going_on = Identity(going)
    head_step = Div(step, row_steps)
    heads_before = Mul(head_step, row_steps)
    row_step = Sub(step, heads_before)
    first_head = Mul(head_step, head_chunk)
    end_head = Add(first_head, head_chunk)
    first_row = Mul(row_step, row_chunk)
    end_row = Add(first_row, row_chunk)
    query_start = Concat<axis = 0>(first_head, first_row)
    query_end = Concat<axis = 0>(end_head, end_row)
    query_chunk = Slice(query, query_start, query_end, axes_1_2)
    shared_key = Less(last_key_head, first_head)
    key_start = Where(shared_key, zero, first_head)
    key_chunk = Slice(key, key_start, end_head, axis_1)
    shared_value = Less(last_value_head, first_head)
    value_start = Where(shared_value, zero, first_head)
    value_chunk = Slice(value, value_start, end_head, axis_1)
{chunk}
    made = Shape(chunk_output)
    made_heads = Gather(made, index_1)
    made_rows = Gather(made, index_2)
    missing_heads = Sub(head_chunk, made_heads)
    missing_rows = Sub(row_chunk, made_rows)
    pads = Concat<axis = 0>(zero, zero, zero, zero, zero, missing_heads, missing_rows, zero)
    part = Pad(chunk_output, pads)
  }}>
  part_shape = Concat<axis = 0>(head_steps, row_steps, batch, head_chunk, row_chunk, value_size)
  in_steps = Reshape(parts, part_shape)
  by_batch = Transpose<perm = [2, 0, 3, 1, 4, 5]>(in_steps)
  padded_heads = Mul(head_steps, head_chunk)
  padded_rows = Mul(row_steps, row_chunk)
  padded_shape = Concat<axis = 0>(batch, padded_heads, padded_rows, value_size)
  padded = Reshape(by_batch, padded_shape)
  end = Concat<axis = 0>(heads, keys)
  start = Concat<axis = 0>(zero, zero)
  output = Slice(padded, start, end, axes_1_2)
}}
"""

_MASK_OUTSIDE = """
  last = Reshape(keys, scalar)
  first = Reshape(zero, scalar)
  by_one = Reshape(one, scalar)
  positions = Range(first, last, by_one)
  before_bias = Less(positions, tokens)
  not_before = Not(before_bias)
  end_bias = Add(tokens, bias_tokens)
  before_end = Less(positions, end_bias)
  is_bias = And(not_before, before_end)
  column = Constant<value = int64[2] {-1, 1}>()
"""

# The chunk's rows of the mask: each query's own key, and all bias tokens.
_MASK = """
    own = Slice(positions, first_row, end_row)
    own_column = Reshape(own, column)
    diagonal = Equal(own_column, positions)
    mask = Or(diagonal, is_bias)
"""

_MASKED = (
    _MASK
    + """
    key_transposed = Transpose<perm = [0, 1, 3, 2]>(key_chunk)
    scores = MatMul(query_chunk, key_transposed)
    attn_scores = Where(mask, scores, forbidden)
    pattern = Softmax<axis = 3>(attn_scores)
    chunk_output = MatMul(pattern, value_chunk)
"""
)

_MASKLESS = """
    key_transposed = Transpose<perm = [0, 1, 3, 2]>(key_chunk)
    own_scores = MatMul(query_chunk, key_transposed)
    axis_2 = Constant<value = int64[1] {2}>()
    pair_scores = Slice(position_scores, first_row, end_row, axis_2)
    attn_scores = Add(own_scores, pair_scores)
    pattern = Softmax<axis = 3>(attn_scores)
    chunk_output = MatMul(pattern, value_chunk)
"""

# The steps of a chunk for all heads and queries at once; in the text `@` stands for the suffix of names.
_WHOLE = """
<opset_import: ["" : {opset}], domain: "{domain}">
Whole (query, key, value, tokens, bias_tokens, forbidden) => (z@)
{{
  mask_zero@ = Constant<value = int64 {{0}}>()
  mask_one@ = Constant<value = int64 {{1}}>()
  mask_axis@ = Constant<value = int64 {{2}}>()
  mask_shape@ = Shape(query)
  mask_keys@ = Gather(mask_shape@, mask_axis@)
  mask_positions@ = Range(mask_zero@, mask_keys@, mask_one@)
  before_bias@ = Less(mask_positions@, tokens)
  not_before@ = Not(before_bias@)
  end_bias@ = Add(tokens, bias_tokens)
  before_end@ = Less(mask_positions@, end_bias@)
  is_bias@ = And(not_before@, before_end@)
  mask_column@ = Constant<value = int64[2] {{-1, 1}}>()
  mask_own@ = Reshape(mask_positions@, mask_column@)
  diagonal@ = Equal(mask_own@, mask_positions@)
  mask@ = Or(diagonal@, is_bias@)
  key_transposed@ = Transpose<perm = [0, 1, 3, 2]>(key)
  unmasked_scores@ = MatMul(query, key_transposed@)
  scores@ = Where(mask@, unmasked_scores@, forbidden)
  pattern@ = Softmax<axis = 3>(scores@)
  z@ = MatMul(pattern@, value)
}}
"""


@cache
def whole_of(opset: int, suffix: str) -> onnx.FunctionProto:
    """The attention under its mask, all at once, to be inlined: its pattern is then a tensor of the graph."""
    return parsed(_WHOLE.replace("@", suffix).format(opset=opset, domain=DOMAIN))


def inputs_of(*, mask: bool) -> tuple[str, ...]:
    """Formal inputs of the function; a forbidden score is one, since one function serves float32 and float64."""
    last = ("tokens", "bias_tokens", "forbidden") if mask else ("position_scores",)
    return ("query", "key", "value", "pattern_size", *last)


@cache
def function_of(opset: int, *, mask: bool) -> onnx.FunctionProto:
    """The function of domain `attnonly`; it is cached, so callers must not change it.

    With `mask`, forbidden pairs are masked (Theorems 3, 6); without, they have very negative scores (Theorem 9).
    """
    text = _TEXT.format(
        opset=opset,
        domain=DOMAIN,
        name="MaskedAttention" if mask else "MasklessAttention",
        inputs=", ".join(inputs_of(mask=mask)),
        outside=_MASK_OUTSIDE if mask else "",
        chunk=_MASKED if mask else _MASKLESS,
    )
    function = parsed(text)
    more, theorem = (_DOC_MASK, 3) if mask else (_DOC_MASKLESS, 9)
    function.doc_string = _DOC.format(more=more, theorem=theorem)
    return function


def parsed(text: str) -> onnx.FunctionProto:
    """A function from its text; nodes are named for their outputs."""
    function = onnx.parser.parse_function(text)
    for node in function.node:
        node.name = node.output[0]
    return function


# -- over {self, bias tokens} ----------------------------------------------------------------------------------------

_SIZES_ARE_INPUTS = 13
"""The opset from which on Split takes its sizes as an input."""


@dataclass(frozen=True)
class Neighbourhood:
    """A variant of the attention.

    Attributes:
        bias_tokens: m.
        bias_values: whether some bias token has a value other than 0.
        wide: whether scores are float64 and the pattern float32.
        double: whether the pattern is float64.
    """

    bias_tokens: int
    bias_values: bool = False
    wide: bool = False
    double: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of the attention."""
        return ("query", "key", "value", *(("bias_value",) if self.bias_values else ()))

    @property
    def name(self) -> str:
        """Name of the model-local function."""
        flags = {"values": self.bias_values, "wide": self.wide, "double": self.double}
        return "_".join([f"CompactAttention_{self.bias_tokens}", *(flag for flag, is_set in flags.items() if is_set)])

    def nodes(self, opset: int, suffix: str = "", part: str = "") -> str:
        """The nodes as text; they read `<input><part>` and `bias_value`, and their tensors end in `suffix`."""
        lines = [f"key_transposed = Transpose<perm = [0, 1, 3, 2]>(key{part})", *self._scores(part)]
        lines += ["pattern = Softmax<axis = 3>(scores)", *self._values(opset, part)]
        made = {name for line in lines for name in line.partition(" = ")[0].split(", ")}
        return "\n".join(_suffixed(line, made, suffix) for line in lines)

    def _scores(self, part: str) -> list[str]:
        name = "wide_scores" if self.wide else "scores"
        narrowed = [f"scores = Cast<to = {int(onnx.TensorProto.FLOAT)}>(wide_scores)"] if self.wide else []
        return [f"{name} = MatMul(query{part}, key_transposed)", *narrowed]

    def _values(self, opset: int, part: str) -> list[str]:
        if self.bias_tokens == 0:
            return [f"z = Mul(pattern, value{part})"]
        if opset < _SIZES_ARE_INPUTS:
            split = [f"self_weight, bias_weight = Split<axis = 3, split = [1, {self.bias_tokens}]>(pattern)"]
        else:
            split = [
                f"split_sizes = Constant<value = int64[2] {{1, {self.bias_tokens}}}>()",
                "self_weight, bias_weight = Split<axis = 3>(pattern, split_sizes)",
            ]
        if not self.bias_values:
            return [*split, f"z = Mul(self_weight, value{part})"]
        return [
            *split,
            f"z_self = Mul(self_weight, value{part})",
            "z_bias = MatMul(bias_weight, bias_value)",
            "z = Add(z_self, z_bias)",
        ]


def _suffixed(line: str, names: set[str], suffix: str) -> str:
    """A line of the text with a suffix at every name that the text defines."""
    if not suffix:
        return line
    left, right = line.split(" = ", 1)
    operator, bracket, given = right.rpartition("(")
    outputs = ", ".join(f"{name}{suffix}" for name in left.split(", "))
    inputs = ", ".join(
        f"{name}{suffix}" if name in names else name for name in given.removesuffix(")").split(", ") if name
    )
    return f"{outputs} = {operator}{bracket}{inputs})"


_DOC_COMPACT = (
    "Softmax attention of every token's heads over {keys} keys, its own and those of {m} bias tokens, in chunks of "
    "tokens whose pattern [tokens, heads, {keys}] has at most pattern_size entries. query [batch, tokens, heads, "
    "d_head]; key [batch, tokens, {keys}, d_head], own key first; value [batch, tokens, heads or 1, 1], the token's "
    "own{values}. Huben and Morris 2023, arXiv 2309.08593, Theorem 3; the rest of its square pattern is exactly 0."
)

# The first three lines of a chunk are as many rows as fit, at least one; `rows_up` is a step of a division rounded up,
# and there is at least one chunk, even of no rows. The last chunk may be smaller, so every part is padded to the size
# of a chunk, and the padding is cut off after the parts are put together.
_CHUNKED = """
<opset_import: ["" : {opset}], domain: "{domain}">
{name} ({inputs}, pattern_size) => (output)
{{
  zero = Constant<value = int64[1] {{0}}>()
  one = Constant<value = int64[1] {{1}}>()
  axis_1 = Constant<value = int64[1] {{1}}>()
  scalar = Constant<value = int64[0] {{}}>()
  index_0 = Constant<value = int64[1] {{0}}>()
  index_1 = Constant<value = int64[1] {{1}}>()
  index_2 = Constant<value = int64[1] {{2}}>()
  flat = Constant<value = int64[4] {{1, -1, 0, 0}}>()
  shape = Shape(query)
  batch = Gather(shape, index_0)
  tokens = Gather(shape, index_1)
  heads = Gather(shape, index_2)
  keys = Constant<value = int64[1] {{{keys}}}>()
  rows = Mul(batch, tokens)
{flattened}
  row_size = Mul(heads, keys)
  fitting = Div(pattern_size, row_size)
  none_fits = Less(fitting, one)
  some_rows = Where(none_fits, one, fitting)
  few_rows = Less(rows, some_rows)
  most_rows = Where(few_rows, rows, some_rows)
  no_rows = Less(most_rows, one)
  row_chunk = Where(no_rows, one, most_rows)
  rows_rounded = Add(rows, row_chunk)
  rows_up = Sub(rows_rounded, one)
  full_steps = Div(rows_up, row_chunk)
  no_steps = Less(full_steps, one)
  steps = Where(no_steps, one, full_steps)
  trips = Reshape(steps, scalar)
  always = Constant<value = bool {{1}}>()
  parts = Loop(trips, always) <body = chunk (int64 step, bool going) => (bool going_on, part) {{
    going_on = Identity(going)
    first_row = Mul(step, row_chunk)
    end_row = Add(first_row, row_chunk)
{chunks}
{nodes}
    made = Shape(z)
    made_rows = Gather(made, index_1)
    missing_rows = Sub(row_chunk, made_rows)
    pads = Concat<axis = 0>(zero, zero, zero, zero, zero, missing_rows, zero, zero)
    part = Pad(z, pads)
  }}>
  padded_shape = Constant<value = int64[1] {{-1}}>()
  part_shape = Concat<axis = 0>(padded_shape, heads, one)
  in_rows = Reshape(parts, part_shape)
  kept = Slice(in_rows, zero, rows, index_0)
  output_shape = Concat<axis = 0>(batch, tokens, heads, one)
  output = Reshape(kept, output_shape)
}}
"""


@cache
def chunked(kind: Neighbourhood, opset: int) -> onnx.FunctionProto:
    """The function of domain `attnonly`, whose last input is `pattern_size`; it is cached, so do not change it."""
    rows = [name for name in kind.inputs if name != "bias_value"]
    function = parsed(
        _CHUNKED.format(
            opset=opset,
            domain=DOMAIN,
            name=kind.name,
            inputs=", ".join(kind.inputs),
            keys=kind.bias_tokens + 1,
            flattened="\n".join(f"  {name}_rows = Reshape({name}, flat)" for name in rows),
            chunks="\n".join(f"    {name}_chunk = Slice({name}_rows, first_row, end_row, axis_1)" for name in rows),
            nodes=kind.nodes(opset, part="_chunk"),
        )
    )
    function.doc_string = _DOC_COMPACT.format(
        keys=kind.bias_tokens + 1,
        m=kind.bias_tokens,
        values="; bias_value [m, 1]" if kind.bias_values else "; the values of the bias tokens are 0",
    )
    return function


@cache
def nodes_of(kind: Neighbourhood, opset: int, suffix: str) -> onnx.FunctionProto:
    """The nodes as a function to be inlined, with the output z; its tensors end in `suffix`."""
    text = (
        f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">\n'
        f"Nodes ({', '.join(kind.inputs)}) => (z{suffix})\n{{\n{kind.nodes(opset, suffix)}\n}}"
    )
    return parsed(text)
