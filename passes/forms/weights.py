"""W_Q, W_K, W_V and W_O of a block's heads on a residual stream with indicator columns.

Names and shapes are those of TransformerLens, [n_heads, d_model, d_head] (W_O: [n_heads, d_head, d_model]).

The stream has `Layout.width` columns: the model's own, then indicators. One column is 1 on every token and 0 on bias
tokens; b1 and the constants of self keys and values ride on it. Bias token j has a column of its own. W1 and W2 are
stored once: nodes with constant inputs compute W_Q, W_V and W_O from them, and onnxruntime folds these when it loads
the model. Projections that are the same for all heads (keys, constant values) have one head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.forms.builder import Builder
from passes.match.projections import Projection, Vector
from passes.programs.groups import Group
from rewriter.graph.surgeon import Tensor, Variable


@dataclass(frozen=True)
class Layout:
    """Columns of the stream.

    Attributes:
        model: columns of the model's own residual stream.
        tokens: number of columns that are 1 on tokens: one, or one per position.
        bias_tokens: number of columns of the bias tokens.
        bias_first: whether the bias tokens' columns come before those of the tokens (position slot 0).
    """

    model: int
    bias_tokens: int
    tokens: int = 1
    bias_first: bool = False

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.model + self.tokens + self.bias_tokens

    def column(self, on_tokens: float, on_bias: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """A functional of the indicator columns, [width], with one value on tokens and one on each bias token."""
        # Bias tokens that only other groups attend to have the value 0.
        on_bias = [*on_bias, *[0.0] * (self.bias_tokens - len(on_bias))]
        parts = ([on_bias, [on_tokens] * self.tokens], [[on_tokens] * self.tokens, on_bias])[not self.bias_first]
        return np.asarray([*[0.0] * self.model, *parts[0], *parts[1]], dtype=np.float64)


class Weights:
    """The weights of one block's heads; `neurons` is the number of heads.

    `by_token`: what they project is [batch, tokens, heads, d_head].
    """

    def __init__(
        self, builder: Builder, layout: Layout, neurons: int, elem_type: int, *, by_token: bool = False
    ) -> None:
        self._by_token = by_token
        self._b = builder
        self._layout = layout
        self.neurons = neurons
        self._elem_type = elem_type

    def functional(self, projection: Projection, name: str) -> Tensor:
        """`x W + b` on tokens and 0 on bias tokens, as [neurons, width, 1]."""
        # Rows of the result: W for the model's columns, b for each column that is 1 on tokens (a token is 1 in exactly
        # one of them), and 0 for those of the bias tokens.
        b, layout = self._b, self._layout
        matrix = self._matrix(projection, name)
        parts: list[Tensor] = [b.unsqueeze(matrix, 2, f"{name}_columns")]
        bias = self.bias(projection, name)
        zero = b.numbers(f"{name}_zero", 0.0)
        on_tokens = zero if bias is None else b.reshape(bias, (-1, 1, 1), f"{name}_bias_column")
        on_tokens = b.node("Expand", [on_tokens, b.integers(self.neurons, layout.tokens, 1)], f"{name}_on_tokens")
        if layout.bias_tokens == 0:
            return b.concat([*parts, on_tokens], 1, name)
        empty = b.node("Expand", [zero, b.integers(self.neurons, layout.bias_tokens, 1)], f"{name}_on_bias_tokens")
        parts += [empty, on_tokens] if layout.bias_first else [on_tokens, empty]
        return b.concat(parts, 1, name)

    def query(self, functional: Tensor, dimension: int, on_bias: float = 1.0) -> Tensor:
        """W_Q: y, or (y, 1), with `on_bias` for the 1 in the rows of bias tokens."""
        if dimension == 1:
            return functional
        one = self._b.numbers("W_Q_one", self._layout.column(1.0, [on_bias] * self._layout.bias_tokens)[None, :, None])
        return self._with_column(functional, one, "W_Q")

    def key(self, group: Group, dimension: int, name: str, unused: float = 0.0) -> Tensor:
        """W_K [1, width, d_head], one for all heads: logits have the same coefficients for every neuron.

        The logit of bias tokens of other groups is the self logit plus `unused`.
        """
        columns = [self._layout.column(*each) for each in group.logits(self._layout.bias_tokens, unused)]
        return self._b.numbers(name, np.stack(columns[:dimension], axis=-1)[None])

    def value(self, functional: Tensor, group: Group, name: str) -> Tensor:
        """W_V: z + d on tokens and v_j on bias tokens; [1, width, 1], one for all heads, where z does not occur."""
        head = group.head
        constants = self._layout.column(head.d, [token.value for token in head.bias_tokens])[None, :, None]
        if head.c == 0.0:
            return self._b.numbers(name, constants)
        if not constants.any():
            return functional
        return self._b.node("Add", [functional, self._b.numbers(f"{name}_constants", constants)], name)

    def output(self, projection: Projection) -> Tensor:
        """W_O [neurons, 1, d_model]."""
        return self._b.unsqueeze(self._matrix(projection, "W_O", rows_are_heads=True), 1, "W_O")

    def bias(self, projection: Projection, name: str) -> Tensor | None:
        """The biases of a projection, added up, [neurons] or [1]; None where it has none."""
        vectors = [self._vector(vector, f"{name}_bias_{i}") for i, vector in enumerate(projection.biases)]
        if not vectors:
            return None
        total = vectors[0]
        for number, vector in enumerate(vectors[1:], start=1):
            total = self._b.node("Add", [total, vector], f"{name}_biases_{number}")
        return total

    def project(self, stream: Tensor, weight: Tensor, heads: int, dimension: int, name: str) -> Variable:
        """The stream [batch, tokens, width] by a weight [heads, width, d_head]: [batch, heads, tokens, d_head].

        This is one product for all heads, with their weights side by side.
        """
        b = self._b
        flat = b.reshape(
            b.transpose(weight, (1, 0, 2), f"{name}_side_by_side"), (self._layout.width, -1), f"{name}_flat"
        )
        made = b.node("MatMul", [stream, flat], f"{name}_all_heads")
        shape = (0, 0, heads, dimension)
        if self._by_token:
            return b.reshape(made, shape, name)
        return b.transpose(b.reshape(made, shape, f"{name}_by_head"), (0, 2, 1, 3), name)

    def _with_column(self, first: Tensor, second: Tensor, name: str) -> Variable:
        shape = self._b.integers(self.neurons, self._layout.width, 1)
        return self._b.concat([first, self._b.node("Expand", [second, shape], f"{name}_second")], 2, name)

    def _matrix(self, projection: Projection, name: str, *, rows_are_heads: bool = False) -> Tensor:
        """The constant matrix with one row per head, [heads, the other side], in the arithmetic's type."""
        b = self._b
        matrix = b.read(projection.weight, self._elem_type, f"{name}_weight")
        if projection.stop is not None:
            axis = 0 if projection.transposed else 1
            bounds = b.integers(projection.start), b.integers(projection.stop)
            matrix = b.rows(matrix, *bounds, axis, f"{name}_part")
        # The neurons are the columns of W1 and the rows of W2; `transposed` exchanges the two.
        if projection.transposed != rows_are_heads:
            return matrix
        return b.transpose(matrix, (1, 0), f"{name}_by_head")

    def _vector(self, vector: Vector, name: str) -> Tensor:
        b = self._b
        flat = b.reshape(b.read(vector.name, self._elem_type, f"{name}_wide"), (-1,), name)
        if vector.stop is None:
            return flat
        return b.rows(flat, b.integers(vector.start), b.integers(vector.stop), 0, f"{name}_part")
