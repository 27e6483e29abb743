"""Attention of every token's heads over {self, bias tokens}, with a literal Softmax, as nodes or in chunks of tokens.

    query [batch, tokens, heads, d_head]
    key   [batch, tokens, 1 + m, d_head], the token's own key first; the same for all heads
    value [batch, tokens, heads or 1, 1], the token's own
    bias_value [m, 1], those of the bias tokens

become the pattern [batch, tokens, heads, 1 + m] and z [batch, tokens, heads, 1].

`nodes_of` are the nodes themselves; `chunked` is a model-local function that flattens batch and tokens into rows, and
takes as many rows at a time as keep the chunk's pattern within `pattern_size` entries. Softmax acts on one row of one
head, so chunks change nothing. Operators are those of opset 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import onnx

from passes.forms.attention import parsed
from passes.match.marks import DOMAIN

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


_DOC = (
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
    function.doc_string = _DOC.format(
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
