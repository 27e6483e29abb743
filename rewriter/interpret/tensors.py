"""The tensors of a sublayer's heads, each made when it is asked for.

Shapes are those of TransformerLens: W_Q, W_K, W_V [n_heads, d_model, d_head], W_O [n_heads, d_head, d_model], b_Q, b_K,
b_V [n_heads, d_head], b_O [d_model]. Heads of neurons also attend to bias tokens, whose keys and values are
bias_K [n_heads, m, d_head] and bias_V [n_heads, m, 1]; a head with fewer of them has keys (0, -inf), of weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from passes.match.linear import LinearOperator
from passes.match.projections import Projection, Vector
from passes.programs.groups import Group
from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView
from rewriter.interpret.original import Attention, HeadColumns
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
class AffineMap:
    """`x W + b` of a linear operator, with a normalisation's scale and bias folded in if there is one.

    Attributes:
        projection: the operator.
        value_of: reads constants.
        norm: the normalisation.
    """

    projection: Projection
    value_of: ValueOf
    norm: Norm | None = None

    def weight(self) -> Array:
        """W, [in, out]."""
        plain = self._plain()
        if self.norm is None or not self.norm.scale:
            return plain
        return np.asarray(self.value_of(self.norm.scale).reshape(-1, 1) * plain)

    def bias(self) -> Array:
        """b, [out]."""
        total = np.zeros(self.projection.out_features, self._plain().dtype)
        for vector in self.projection.biases:
            held = self.value_of(vector.name).reshape(-1)
            total = total + (held if vector.size == 1 else held[vector.start : vector.stop])
        if self.norm is not None and self.norm.bias:
            total = total + self.value_of(self.norm.bias).reshape(-1) @ self._plain()
        return total

    def _plain(self) -> Array:
        held = self.value_of(self.projection.weight)
        held = held.reshape(held.shape[-2:])
        return (held.T if self.projection.transposed else held)[:, self.projection.start : self.projection.stop]


def with_biases(heads: HeadColumns, plain: Array, value_of: ValueOf, *, values: bool) -> Array:
    """Entries [..., channels] of a linear operator as those of heads, [..., heads, d_head], with constants added.

    The factor in the graph is applied to values; that of queries and keys belongs to the scale of the scores.
    """
    factor = heads.factor if values else 1.0
    total = plain[..., heads.columns] * plain.dtype.type(factor)
    for added in heads.added:
        held = value_of(added.name).reshape(-1)[added.positions]
        total = total + held * plain.dtype.type(added.factor * factor / heads.factor)
    return np.asarray(total)


def attention_tensors(
    own: Attention,
    maps: Mapping[str, AffineMap],
    after: tuple[Vector, ...],
    dtype: np.dtype[Any],
) -> Iterator[tuple[str, HeadTensor]]:
    """Name to tensor of an attention sublayer.

    Args:
        own: the sublayer.
        maps: its linear operators, as `Q`, `K`, `V` and `O`.
        after: biases in an Add of their own after the output projection.
        dtype: the element type.
    """
    sides = {"Q": own.query, "K": own.key, "V": own.value}
    value_of = maps["O"].value_of

    def weight(side: str) -> Array:
        factor = sides[side].factor if side == "V" else 1.0
        return np.asarray(np.moveaxis(maps[side].weight()[:, sides[side].columns], 0, 1) * dtype.type(factor))

    def bias(side: str) -> Array:
        return with_biases(sides[side], maps[side].bias(), value_of, values=side == "V")

    def output_bias() -> Array:
        return np.asarray(sum((value_of(vector.name).reshape(-1) for vector in after), maps["O"].bias()))

    out = maps["O"].projection.out_features
    for side, heads in sides.items():
        count, width = heads.columns.shape
        shape = (count, maps[side].projection.in_features, width)
        yield f"W_{side}", HeadTensor(shape, dtype, partial(weight, side))
    yield "W_O", HeadTensor((*own.channels.shape, out), dtype, lambda: maps["O"].weight()[own.channels])
    for side, heads in sides.items():
        yield f"b_{side}", HeadTensor(heads.columns.shape, dtype, partial(bias, side))
    yield "b_O", HeadTensor((out,), dtype, output_bias)


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


def neuron_tensors(
    own: NeuronHeads, norm: Norm | None, value_of: ValueOf, dtype: np.dtype[Any]
) -> Iterator[tuple[str, HeadTensor]]:
    """Name to tensor of a block's neuron heads, with a normalisation before it folded in if there is one."""
    query, value = AffineMap(own.query, value_of, norm), AffineMap(own.value, value_of, norm)
    output = AffineMap(own.output, value_of)
    groups, m, width = own.groups, own.bias_tokens, own.dimension

    def by_group(of_group: Callable[[Group, Array], Array], base: Array) -> Array:
        """One group's heads after the other, [heads, ...] from [neurons, ...]."""
        return np.concatenate([of_group(group, base) for group in groups])

    def pair(first: Array, second: float) -> Array:
        """`first` [neurons, ...] and a number, as the last axis; without the number where d_head is 1."""
        return np.stack([first, np.full_like(first, second)][:width], axis=-1)

    def key(group: Group, bias: Array) -> Array:
        return pair(np.full_like(bias, group.head.beta), group.head.gamma)

    def bias_key(group: Group, of_all: Array) -> Array:
        keys = [(token.slope, token.offset) for token in group.head.bias_tokens]
        keys += [(0.0, -np.inf)] * (m - len(keys))
        return np.asarray(of_all + np.array(keys).reshape(-1, 2)[:, :width])

    def bias_value(group: Group, of_all: Array) -> Array:
        values = [token.value for token in group.head.bias_tokens]
        return np.asarray(of_all + np.array(values + [0.0] * (m - len(values))).reshape(-1, 1))

    of_all = np.zeros((own.neurons, 1, 1))
    count, rows, out = own.heads, own.query.in_features, own.output.out_features
    made: tuple[tuple[str, tuple[int, ...], Callable[[], Array]], ...] = (
        ("W_Q", (count, rows, width), lambda: by_group(lambda _, w: pair(w, 0.0), query.weight().T)),
        ("W_K", (count, rows, width), lambda: np.zeros((count, rows, width), dtype)),
        ("W_V", (count, rows, 1), lambda: by_group(lambda g, w: w[..., None] * g.head.c, value.weight().T)),
        ("W_O", (count, 1, out), lambda: by_group(lambda g, w: w[:, None] * g.factor, output.weight())),
        ("b_Q", (count, width), lambda: by_group(lambda _, b: pair(b, 1.0), query.bias())),
        ("b_K", (count, width), lambda: by_group(key, query.bias())),
        ("b_V", (count, 1), lambda: by_group(lambda g, b: b[..., None] * g.head.c + g.head.d, value.bias())),
        ("b_O", (out,), output.bias),
        ("bias_K", (count, m, width), lambda: by_group(bias_key, of_all)),
        ("bias_V", (count, m, 1), lambda: by_group(bias_value, of_all)),
    )
    for name, shape, make in made:
        yield name, HeadTensor(shape, dtype, make)
