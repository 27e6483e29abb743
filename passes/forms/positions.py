"""One-hot positions in the stream, and the weights that replace a mask (Theorem 9).

The bias tokens have slots 0 to m - 1, and tokens the slots after them, so that the weights are static while the number
of tokens is not.

Positions contribute p_i W_QK p_j to a score. W_QK is -omega on forbidden pairs and 0 on allowed ones, so allowed scores
stay exact. (The post's code adds omega to the allowed pairs instead, which rounds y to the spacing of floats near
omega.) A forbidden score is self - omega, since all tokens have the same key, so its weight is at most exp(-omega)
times the largest. In floating point the weight is exactly 0

    if omega exceeds -log of the smallest positive number (104 in float32, 746 in float64),
    and if self - omega does not round back to something near self: omega is at least the largest |self|.

`default_omega` is a power of two above both for every finite pre-activation (queries are clipped to 2^60, in float64
2^500). A large omega costs no accuracy, since it is added to forbidden scores only.
"""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import onnx

from passes.forms.builder import Builder
from passes.forms.weights import Layout
from passes.programs.groups import Group
from rewriter.graph.surgeon import Tensor, Variable

_QUERY_BITS: dict[int, int] = {onnx.TensorProto.FLOAT: 60, onnx.TensorProto.DOUBLE: 500}
_UNDERFLOW: dict[int, float] = {onnx.TensorProto.FLOAT: 256.0, onnx.TensorProto.DOUBLE: 1024.0}


def default_omega(groups: tuple[Group, ...], compute_type: int) -> float:
    """A power of two at which every forbidden weight is 0, whatever the pre-activation."""
    steepest = max(abs(group.head.beta) for group in groups)
    offset = max(abs(group.head.gamma) for group in groups)
    largest = steepest * 2.0 ** _QUERY_BITS[compute_type] + offset
    return float(2.0 ** ceil(log2(max(largest, _UNDERFLOW[compute_type]))))


class Positions:
    """Position columns of one block's stream.

    Attributes:
        bias_tokens: m.
        slots: one per bias token, then one per token.
    """

    def __init__(self, b: Builder, bias_tokens: int, max_tokens: int, omega: float) -> None:
        self._b = b
        self.bias_tokens = bias_tokens
        self._max_tokens = max_tokens
        self._omega = omega
        self.slots = bias_tokens + max_tokens
        self._all = b.fragment.constant("slots", np.arange(self.slots, dtype=np.int64))

    def layout(self, model: int) -> Layout:
        """The layout of a stream with `model` columns and the positions."""
        return Layout(model, self.bias_tokens, tokens=self._max_tokens, bias_first=True)

    def of_tokens(self, count: Tensor) -> Variable:
        """One-hot rows [1, N, slots] of N tokens; fewer rows than N where N exceeds the slots."""
        b = self._b
        own = b.rows(self._all, b.integers(self.bias_tokens), b.integers(self.slots), 0, "token_slots")
        pairs = b.node("Equal", [b.reshape(own, (-1, 1), "token_slots_column"), self._all], "one_hot_pairs")
        table = b.node("Cast", [pairs], "one_hot_positions", to=int(b.compute_type))
        taken = b.rows(table, b.integers(0), count, 0, "token_positions")
        return b.unsqueeze(taken, 0, "token_positions_rows")

    def of_bias_tokens(self) -> Tensor:
        """One-hot rows [1, m, slots]."""
        return self._b.numbers("bias_positions", np.eye(self.bias_tokens, self.slots)[None])

    def checked(self, tensors: list[Tensor], axis: int, name: str) -> Variable:
        """Concatenate with position columns; too long a sequence fails at run time in a node whose name says so."""
        limit = f"sequence_longer_than_max_tokens_{self._max_tokens}"
        return self._b.concat(tensors, axis, f"{name}/{limit}")

    def scores(self, positions: Tensor, name: str, *, bias_tokens: bool) -> Variable:
        """The scores p_i W_QK p_j, [1, 1, rows, rows], of positions [1, rows, slots].

        `bias_tokens` says whether every query may attend to the bias tokens; itself it always may.
        """
        b = self._b
        slots = self._all
        column = b.reshape(slots, (-1, 1), f"{name}_slots")
        allowed = b.node("Equal", [column, slots], f"{name}_same")
        if bias_tokens:
            is_bias = b.node("Less", [slots, b.integers(self.bias_tokens)], f"{name}_is_bias")
            allowed = b.node("Or", [allowed, is_bias], f"{name}_allowed")
        omega = b.numbers(f"{name}_minus_omega", -self._omega)
        weight = b.node("Where", [allowed, b.numbers(f"{name}_zero", 0.0), omega], f"{name}_W_QK")
        queries = b.node("MatMul", [positions, weight], f"{name}_queries")
        keys = b.transpose(positions, (0, 2, 1), f"{name}_keys")
        return b.unsqueeze(b.node("MatMul", [queries, keys], f"{name}_pairs"), 1, name)
