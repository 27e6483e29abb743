"""Theorems 7, 8 and 9 as functions: sublayers of attention heads as small ONNX models, for notebooks and tests.

The models have an input `x` [batch, tokens, width] and an output `out`, and onnxruntime runs them. They contain the
whole sublayer without a skip connection. Those of Theorems 7 and 8 append positions and bias tokens, and drop the bias
tokens' rows. In that of Theorem 9 a static mask stands in W_QK: x is widened by one-hot positions, W_Q and W_K of every
head by a block of positions, -omega on forbidden pairs and the identity. The result is that of the same heads under the
mask.

    >>> model = linear_sublayer(W, b, head_dimension=64)              # x @ W + b, by ceil(out / 64) heads
    >>> model = activation_sublayer(silu, width=256)                  # SiLU of every entry, by 256 heads
    >>> model = masked_sublayer(W_Q, W_K, W_V, W_O, np.tri(64, dtype=bool))  # causal heads without a mask operator
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.forms.builder import Builder
from passes.forms.positions import Positions, default_omega
from passes.forms.staged import linear_values
from passes.forms.stream import attend_to_self, attend_with_activation, open_stream, position_scores
from passes.match.marks import DOMAIN
from passes.match.projections import Projection, Vector
from passes.options import FormOptions
from passes.programs.activations import ACTIVATIONS
from passes.programs.arithmetic import ARITHMETIC
from passes.programs.groups import Group, groups_of
from passes.programs.head import Head
from passes.programs.program import Program
from rewriter.graph.surgeon import Tensor

_OPSET, _IR = 17, 8

_OMEGA = 2.0**60
"""Exact for scores up to 2^59 in float32 and float64."""
_HEADS = 3


def linear_sublayer(
    weight: NDArray[np.floating],
    bias: NDArray[np.floating] | None = None,
    *,
    head_dimension: int = 64,
    max_tokens: int = 512,
    omega: float | None = None,
) -> onnx.ModelProto:
    """Linear map x W + b as attention: every token attends only to itself, and the map is the OV matrix (Theorem 7).

    Args:
        weight: W [in, out], float32 or float64, which is the type of the arithmetic.
        bias: b [out], or None.
        head_dimension: the rank of W is split over ceil(out / head_dimension) heads.
        max_tokens: longest sequence.
        omega: subtracted from forbidden logits; by default large enough that their weights are exactly 0.

    Raises:
        ValueError: W is not a matrix of one of the two types, or the shape of b does not match it.
    """
    if weight.ndim != 2 or weight.dtype not in (np.float32, np.float64):
        raise ValueError(f"the weight must be a float32 or float64 matrix, not {weight.dtype} {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ValueError(f"the bias has shape {list(bias.shape)}, and the weight {list(weight.shape)}")
    rows, width = weight.shape
    biases = () if bias is None else (Vector("b", width),)
    projection = Projection("x", "W", transposed=False, in_features=rows, out_features=width, biases=biases)
    elem_type = onnx.helper.np_dtype_to_tensor_dtype(weight.dtype)
    groups = (Group(Head(beta=0.0)),)
    b = _builder_of("linear", elem_type, max_tokens, omega)
    positions = _positions(b, groups)
    stream = open_stream(b, b.fragment.tensor("x"), rows, 0, positions)
    values = linear_values(b, stream.tensor, [projection], positions, elem_type, "linear")
    scores = position_scores(b, stream, "self_scores", bias_tokens=False)
    written = attend_to_self(b, values, width, head_dimension, scores, "linear_heads")
    given = {"W": weight} if bias is None else {"W": weight, "b": bias.astype(weight.dtype)}
    return _tokens_of(b, written, stream.count, (rows, width), given)


def activation_sublayer(
    program: Program | str,
    width: int,
    *,
    double: bool = False,
    max_tokens: int = 512,
    omega: float | None = None,
) -> onnx.ModelProto:
    """An elementwise activation as attention: one head per column and per head of the program (Theorem 8).

    Args:
        program: the head program of the activation, whose self logits must be affine; or the name of an activation of
            the table, such as "silu" or "gelu".
        width: columns of x.
        double: compute in float64 instead of float32.
        max_tokens: longest sequence.
        omega: subtracted from forbidden logits; by default large enough that their weights are exactly 0.

    Raises:
        ValueError: no activation has that name.
    """
    if isinstance(program, str):
        program = _named(program, double=double)
    groups = groups_of(program)
    elem_type = onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT
    b = _builder_of("activation", elem_type, max_tokens, omega)
    positions = _positions(b, groups)
    stream = open_stream(b, b.fragment.tensor("x"), width, 0, positions)
    scores = position_scores(b, stream, "activation_scores", bias_tokens=True)
    columns = stream.columns(b, 0, width, "columns")
    ones = stream.ones(b, "activation_positions")
    lowered = omega or default_omega(groups, elem_type)
    written = attend_with_activation(b, columns, columns, ones, scores, groups, positions, lowered)
    return _tokens_of(b, written, stream.count, (width, width), {})


def _named(name: str, *, double: bool) -> Program:
    """The program of an activation of the table with its usual parameters."""
    arithmetic = ARITHMETIC[onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT]
    known = {each.name: each for each in ACTIVATIONS if each.program and len(each.usual) == len(each.parameters)}
    if name not in known:
        raise ValueError(f"no activation of the table is called {name!r}; known are: {', '.join(sorted(known))}")
    program = known[name].program_for(known[name].usual, arithmetic)
    if program is None:
        raise ValueError(f"{name} has no head program in this arithmetic")
    return program.rounded(np.float64 if double else np.float32, factored=False)


def masked_sublayer(
    w_q: NDArray[np.floating],
    w_k: NDArray[np.floating],
    w_v: NDArray[np.floating],
    w_o: NDArray[np.floating],
    allowed: NDArray[np.bool_],
    *,
    omega: float = _OMEGA,
) -> onnx.ModelProto:
    """The sum over heads of softmax(x W_Q (x W_K)^T, masked) x W_V W_O, without a mask (Theorem 9).

    Logits are not divided by sqrt(d_head): fold that into W_Q, as the sources do.

    Args:
        w_q: W_Q [heads, D, d_head], float32 or float64, which is the type of the arithmetic.
        w_k: W_K, of the same shape.
        w_v: W_V [heads, D, d_v].
        w_o: W_O [heads, d_v, out].
        allowed: boolean [T, T]: whether the query at a position (row) may attend to the key at another. The longest
            sequence has T tokens. Every query may attend to some key at or before its own position.
        omega: subtracted from forbidden logits; the error falls with exp(-omega).

    Raises:
        ValueError: shapes or types do not fit together, or a query may attend to nothing.
    """
    shapes = [list(each.shape) for each in (w_q, w_k, w_v, w_o)]
    dtype = w_q.dtype
    if dtype not in (np.float32, np.float64) or any(each.dtype != dtype for each in (w_k, w_v, w_o)):
        raise ValueError("the weights must be all float32 or all float64")
    ranks = all(len(shape) == _HEADS for shape in shapes)
    if not ranks or shapes[0] != shapes[1] or shapes[2][:2] != shapes[0][:2] or shapes[3][:2] != shapes[2][::2]:
        raise ValueError(f"W_Q, W_K [heads, D, d], W_V [heads, D, d_v], W_O [heads, d_v, out] have shapes {shapes}")
    if allowed.ndim != 2 or allowed.shape[0] != allowed.shape[1] or allowed.dtype != np.bool_:
        raise ValueError(f"the mask must be a boolean square, not {allowed.dtype} {list(allowed.shape)}")
    if not np.tril(allowed).any(axis=1).all():
        raise ValueError("every query must be allowed to attend to a key at or before its own position")
    heads, width = w_q.shape[:2]
    longest, values, out = len(allowed), w_v.shape[2], w_o.shape[2]
    b = _builder_of("masked", onnx.helper.np_dtype_to_tensor_dtype(dtype), longest, omega)
    x = b.fragment.tensor("x")
    batch, count = b.sizes(x, 0, 1, "batch"), b.sizes(x, 1, 2, "token_count")
    own = b.rows(b.numbers("one_hot_positions", np.eye(longest)[None]), b.integers(0), count, 1, "own_positions")
    spread = b.node("Expand", [own, b.concat([batch, b.integers(1, 1)], 0, "each_batch")], "positions")
    stream = b.concat([x, spread], 2, f"stream/sequence_longer_than_max_tokens_{longest}")
    pseudo = np.where(allowed, 0.0, -omega)
    parts = {
        "q": _diagonal(w_q, pseudo),
        "k": _diagonal(w_k, np.eye(longest)),
        "v": np.concatenate([w_v, np.zeros((heads, longest, values))], axis=1),
    }
    by_head = b.unsqueeze(stream, 1, "stream_of_heads")
    q, k, v = (b.node("MatMul", [by_head, b.numbers(f"W_{name.upper()}", part)], name) for name, part in parts.items())
    scores = b.node("MatMul", [q, b.transpose(k, (0, 1, 3, 2), "k_turned")], "attn_scores")
    z = b.node("MatMul", [b.node("Softmax", [scores], "pattern", axis=3), v], "z")
    flat = b.reshape(b.transpose(z, (0, 2, 1, 3), "z_by_token"), (0, 0, heads * values), "z_side_by_side")
    b.fragment.node("MatMul", [flat, b.numbers("W_O", w_o.reshape(heads * values, out))], "attn_out", output="out")
    return _as_model(b, (width, out), {})


def _diagonal(weight: NDArray[np.floating], positions: NDArray[np.floating]) -> NDArray[np.floating]:
    """[heads, D + T, d + T]: a head's weight and that of positions as two blocks."""
    heads, rows, columns = weight.shape
    whole = np.zeros((heads, rows + len(positions), columns + positions.shape[1]), weight.dtype)
    whole[:, :rows, :columns], whole[:, rows:, columns:] = weight, positions
    return whole


def _builder_of(name: str, elem_type: int, max_tokens: int, omega: float | None) -> Builder:
    """A builder of a sublayer alone."""
    options = FormOptions(max_tokens=max_tokens, omega=omega)
    return Builder(name, opset=_OPSET, compute_type=elem_type, options=options)


def _positions(b: Builder, groups: tuple[Group, ...]) -> Positions:
    omega = b.options.omega or default_omega(groups, b.compute_type)
    return Positions(b, max([1, *(group.bias_tokens for group in groups)]), b.options.max_tokens, omega)


def _tokens_of(
    b: Builder, written: Tensor, count: Tensor, widths: Sequence[int], given: dict[str, NDArray[np.floating]]
) -> onnx.ModelProto:
    b.fragment.node("Slice", [written, b.integers(0), count, b.integers(1)], "tokens_only", output="out")
    return _as_model(b, widths, given)


def _as_model(b: Builder, widths: Sequence[int], given: dict[str, NDArray[np.floating]]) -> onnx.ModelProto:
    """The built nodes from `x` to `out`, of these widths, with weights by name."""
    x, out = (
        onnx.helper.make_tensor_value_info(name, b.compute_type, ["batch", "tokens", width])
        for name, width in zip(("x", "out"), widths, strict=True)
    )
    weights = [onnx.numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in given.items()]
    graph = onnx.helper.make_graph(b.fragment.nodes({}), "sublayer", [x], [out], [*weights, *b.fragment.initializers()])
    functions = {function.name: function for function in b.functions}
    imports = [onnx.helper.make_opsetid("", _OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(
        graph, opset_imports=imports, functions=list(functions.values()), ir_version=_IR, producer_name=DOMAIN
    )
