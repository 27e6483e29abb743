"""The tensors of a sublayer's heads, each made when it is asked for.

Shapes are those of TransformerLens: W_Q, W_K, W_V [n_heads, d_model, d_head], W_O [n_heads, d_head, d_model], b_Q, b_K,
b_V [n_heads, d_head], b_O [d_model]. Heads of neurons also attend to bias tokens, whose keys and values are
bias_K [n_heads, m, d_head] and bias_V [n_heads, m, 1]; a head with fewer of them has keys (0, -inf), of weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from passes.match.linear import LinearOperator, Miss
from passes.match.projections import Projection, Vector, matrix_of
from passes.programs.groups import Group
from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView
from rewriter.interpret.original import Attention, Heads
from rewriter.interpret.stream import Norm
from rewriter.interpret.sublayers import NeuronHeads

Array = NDArray[Any]
ValueOf = Callable[[str], Array]
"""The value of a constant tensor of the graph."""


@dataclass(frozen=True, eq=False)
class HeadTensor:
    """One tensor.

    Attributes:
        shape: its shape.
        dtype: its element type.
        make: computes it from the model's weights.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], Array]


@dataclass(frozen=True, eq=False)
class Affine:
    """`x W + b` of a linear operator, with a normalisation's scale and bias folded in if there is one.

    Attributes:
        projection: the operator.
        value_of: reads constants.
        norm: the normalisation.
    """

    projection: Projection
    value_of: ValueOf
    norm: Norm | None = None

    @property
    def rows(self) -> int:
        """Input channels."""
        return self.projection.in_features

    def weight(self) -> Array:
        """W, [in, out]."""
        plain = self._plain()
        if self.norm is None or not self.norm.scale:
            return plain
        return np.asarray(self.value_of(self.norm.scale).reshape(-1, 1) * plain)

    def bias(self) -> Array:
        """b, [out]."""
        projection = self.projection
        total = np.zeros(projection.out_features, self._plain().dtype)
        for vector in projection.biases:
            total = total + self._vector(vector)
        if self.norm is not None and self.norm.bias:
            total = total + self.value_of(self.norm.bias).reshape(-1) @ self._plain()
        return total

    def _plain(self) -> Array:
        held = self.value_of(self.projection.weight)
        held = held.reshape(held.shape[-2:])
        return (held.T if self.projection.transposed else held)[:, self.projection.start : self.projection.stop]

    def _vector(self, vector: Vector) -> Array:
        held = self.value_of(vector.name).reshape(-1)
        return held if vector.size == 1 else held[vector.start : vector.stop]


def readable(view: GraphView, constants: Constants, attention: Attention) -> dict[str, Projection] | Miss:
    """The four linear operators of an attention sublayer as matrices."""
    found: dict[str, Projection] = {}
    operators: Sequence[tuple[str, LinearOperator]] = (
        ("Q", attention.query.operator),
        ("K", attention.key.operator),
        ("V", attention.value.operator),
        ("O", attention.output),
    )
    for name, operator in operators:
        read = matrix_of(view, constants, operator)
        if isinstance(read, Miss):
            return read
        found[name] = read
    return found


def bias_after(view: GraphView, constants: Constants, operator: LinearOperator) -> tuple[Vector, ...]:
    """The bias in an Add of its own after a linear operator."""
    tensor = operator.output
    for _ in range(len(view.nodes)):
        readers = [view.nodes[index] for index in view.consumers.get(tensor, ())]
        readers = [node for node in readers if node.op_type != "Shape"]
        if len(readers) != 1 or readers[0].op_type not in ("Add", "Reshape", "Identity", "Cast"):
            break
        if readers[0].op_type == "Add":
            held = [name for name in readers[0].input if name in constants]
            return tuple(Vector(name, operator.out_features or 0) for name in held)
        tensor = readers[0].output[0]
    return ()


def vector_tensor(value_of: ValueOf, name: str, dtype: np.dtype[Any]) -> HeadTensor:
    """A constant with one entry per channel."""
    size = value_of(name).size
    return HeadTensor((size,), dtype, lambda: value_of(name).reshape(-1))


@dataclass(frozen=True, eq=False)
class AttentionTensors:
    """The tensors of an attention sublayer."""

    attention: Attention
    projections: dict[str, Projection]
    after: tuple[Vector, ...]
    norms: dict[str, Norm | None]
    value_of: ValueOf
    dtype: np.dtype[Any]

    def tensors(self) -> Iterator[tuple[str, HeadTensor]]:
        """Name to tensor."""
        for side, heads in (("Q", self.attention.query), ("K", self.attention.key), ("V", self.attention.value)):
            yield f"W_{side}", self._weight(side, heads)
        heads, width = self.attention.channels.shape
        out = self.projections["O"].out_features
        yield "W_O", HeadTensor((heads, width, out), self.dtype, self._output)
        for side, of_side in (("Q", self.attention.query), ("K", self.attention.key), ("V", self.attention.value)):
            yield f"b_{side}", self._bias(side, of_side)
        yield "b_O", HeadTensor((out,), self.dtype, self._output_bias)

    def _affine(self, side: str) -> Affine:
        return Affine(self.projections[side], self.value_of, self.norms.get(side))

    def _weight(self, side: str, heads: Heads) -> HeadTensor:
        affine = self._affine(side)

        def make() -> Array:
            # [in, heads, d_head]; the factor of queries and keys belongs to the scores' scale, that of values here.
            factor = heads.factor if side == "V" else 1.0
            return np.asarray(np.moveaxis(affine.weight()[:, heads.columns], 0, 1) * self.dtype.type(factor))

        count, width = heads.columns.shape
        return HeadTensor((count, affine.rows, width), self.dtype, make)

    def _bias(self, side: str, heads: Heads) -> HeadTensor:
        affine = self._affine(side)

        def make() -> Array:
            factor = heads.factor if side == "V" else 1.0
            total = affine.bias()[heads.columns] * self.dtype.type(factor)
            for added in heads.added:
                held = self.value_of(added.name).reshape(-1)[added.positions]
                total = total + held * self.dtype.type(added.factor * factor / heads.factor)
            return np.asarray(total)

        return HeadTensor(heads.columns.shape, self.dtype, make)

    def _output(self) -> Array:
        return Affine(self.projections["O"], self.value_of).weight()[self.attention.channels]

    def _output_bias(self) -> Array:
        total = Affine(self.projections["O"], self.value_of).bias()
        for vector in self.after:
            total = total + self.value_of(vector.name).reshape(-1)
        return total


@dataclass(frozen=True, eq=False)
class NeuronTensors:
    """The tensors of a block's neuron heads."""

    heads: NeuronHeads
    norm: Norm | None
    value_of: ValueOf
    dtype: np.dtype[Any]

    @cached_property
    def _groups(self) -> tuple[Group, ...]:
        return self.heads.groups

    def tensors(self) -> Iterator[tuple[str, HeadTensor]]:
        """Name to tensor."""
        own = self.heads
        count, rows, m, width = own.heads, own.query.in_features, own.bias_tokens, own.dimension
        out = own.output.out_features
        for name, shape, make in (
            ("W_Q", (count, rows, width), self._w_q),
            ("W_K", (count, rows, width), self._w_k),
            ("W_V", (count, rows, 1), self._w_v),
            ("W_O", (count, 1, out), self._w_o),
            ("b_Q", (count, width), self._b_q),
            ("b_K", (count, width), self._b_k),
            ("b_V", (count, 1), self._b_v),
            ("b_O", (out,), self._b_o),
            ("bias_K", (count, m, width), self._bias_k),
            ("bias_V", (count, m, 1), self._bias_v),
        ):
            yield name, HeadTensor(shape, self.dtype, make)

    def _affine(self, projection: Projection) -> Affine:
        return Affine(projection, self.value_of, self.norm)

    def _by_group(self, of_group: Callable[[Group], Array]) -> Array:
        """One group's heads after the other, [heads, ...] from [neurons, ...]."""
        return np.concatenate([of_group(group) for group in self._groups]).astype(self.dtype, copy=False)

    def _pair(self, first: Array, second: float) -> Array:
        """`first` [neurons, ...] and a number, as the last axis; without the number where d_head is 1."""
        return np.stack([first, np.full_like(first, second)][: self.heads.dimension], axis=-1)

    def _w_q(self) -> Array:
        columns = self._affine(self.heads.query).weight().T
        return self._by_group(lambda _: self._pair(columns, 0.0))

    def _b_q(self) -> Array:
        bias = self._affine(self.heads.query).bias()
        return self._by_group(lambda _: self._pair(bias, 1.0))

    def _w_k(self) -> Array:
        own = self.heads
        return np.zeros((own.heads, own.query.in_features, own.dimension), self.dtype)

    def _b_k(self) -> Array:
        bias = self._affine(self.heads.query).bias()
        return self._by_group(lambda group: self._pair(np.full_like(bias, group.head.beta), group.head.gamma))

    def _w_v(self) -> Array:
        columns = self._affine(self.heads.value).weight().T
        return self._by_group(lambda group: columns[..., None] * group.head.c)

    def _b_v(self) -> Array:
        bias = self._affine(self.heads.value).bias()
        return self._by_group(lambda group: bias[..., None] * group.head.c + group.head.d)

    def _w_o(self) -> Array:
        rows = Affine(self.heads.output, self.value_of).weight()
        return self._by_group(lambda group: rows[:, None] * group.factor)

    def _b_o(self) -> Array:
        return Affine(self.heads.output, self.value_of).bias().astype(self.dtype, copy=False)

    def _bias_k(self) -> Array:
        return self._by_group(lambda group: self._for_all(self._keys(group)))

    def _bias_v(self) -> Array:
        return self._by_group(lambda group: self._for_all(self._values(group)))

    def _for_all(self, numbers: Array) -> Array:
        return np.broadcast_to(numbers, (self.heads.neurons, *numbers.shape))

    def _keys(self, group: Group) -> Array:
        """[m, d_head]."""
        keys = [(token.slope, token.offset) for token in group.head.bias_tokens]
        keys += [(0.0, -np.inf)] * (self.heads.bias_tokens - len(keys))
        return np.array(keys).reshape(-1, 2)[:, : self.heads.dimension]

    def _values(self, group: Group) -> Array:
        """[m, 1]."""
        values = [token.value for token in group.head.bias_tokens]
        return np.array(values + [0.0] * (self.heads.bias_tokens - len(values))).reshape(-1, 1)
