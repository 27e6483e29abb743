"""What heads read and write, as factors of low rank: no d_model by d_model matrix is made.

With W_V = Q R, the norm of W_V W_O X is that of R W_O X, so R W_O, [d_head, d_model], stands for all that a head
writes; likewise for what W_OV, W_QK and its transpose read. Factors are scaled so that the norm of the product they
stand for is 1, or are 0 where it is 0. Those of a neuron are vectors: the row of W2, the columns of W1 for its
pre-activation and for its value, which all heads of its program share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from passes.heads.layers import Named
from passes.heads.neurons import NeuronHeads
from passes.heads.tensors import Affine
from passes.match.projections import Projection
from rewriter.api.interpret.index import HeadIndex
from rewriter.arrays import Array
from rewriter.errors import ModelError

KINDS = "QKV"
"""What is read: by queries, by keys, by values."""


@dataclass(frozen=True, eq=False)
class Side:
    """What the heads of a sublayer read, or what they write.

    Attributes:
        named: the sublayer.
        kinds: the kinds of composition that it is for; empty for what is written.
        data: the tensor that is read, or the result that is written.
        make: [members, rank, d_model]; members are heads, or neurons.
    """

    named: Named
    kinds: str
    data: str
    make: Callable[[], Array]


def written(index: HeadIndex, named: Named) -> Side:
    """What heads write: R W_O for W_V = Q R, or rows of W2."""
    own = named.sublayer
    if isinstance(own, NeuronHeads):
        return Side(named, "", own.result, lambda: _unit(_plain(index, own.output).weight()[:, None], named))
    return Side(named, "", own.output.output, _product(index, named, "W_V", "W_O"))


def read(index: HeadIndex, named: Named) -> list[Side]:
    """What heads read; kinds that read the same are one side."""
    own = named.sublayer
    if isinstance(own, NeuronHeads):
        return _read_by_neurons(index, named, own)
    return [
        Side(named, "Q", own.query.operator.data, _product(index, named, "W_K", "W_Q")),
        Side(named, "K", own.key.operator.data, _product(index, named, "W_Q", "W_K")),
        Side(named, "V", own.value.operator.data, _product(index, named, "W_O", "W_V")),
    ]


def _read_by_neurons(index: HeadIndex, named: Named, own: NeuronHeads) -> list[Side]:
    groups = own.groups
    # Keys are constants; so are values in heads with c = 0.
    passing = any(group.head.c for group in groups)
    if own.value == own.query:
        kinds = "Q" + "V" * passing
        return [Side(named, kinds, own.data, lambda: _columns(index, named, own.query))]
    gate = Side(named, "Q", own.data, lambda: _columns(index, named, own.query))
    return [gate, Side(named, "V" * passing, own.data, lambda: _columns(index, named, own.value))]


def _plain(index: HeadIndex, projection: Projection) -> Affine:
    return Affine(projection, index.value_of)


def _columns(index: HeadIndex, named: Named, projection: Projection) -> Array:
    """[neurons, 1, d_model]."""
    weight = Affine(projection, index.value_of, index.folded(projection.data)).weight()
    return _unit(weight.T[:, None], named)


def _product(index: HeadIndex, named: Named, first: str, second: str) -> Callable[[], Array]:
    """R X for the other factor `first` = Q R up to transposition; X is `second` as [heads, d_head, d_model]."""

    @cache
    def triangle() -> Array:
        return triangles(_tall(_checked(index[f"{named.name}.{first}"], named), first))

    def make() -> Array:
        inner = _tall(_checked(index[f"{named.name}.{second}"], named), second)
        return _unit(triangle() @ np.swapaxes(inner, -1, -2), named)

    return make


def triangles(tall: Array) -> Array:
    """R of the QR decompositions of [heads, d_model, d_head].

    By blocks of rows whose R are decomposed again (Demmel et al., 2012): as accurate, and small enough for LAPACK not
    to share the work among threads, which on a busy machine wait for each other hundreds of times as long.
    """
    count, _, width = tall.shape
    while tall.shape[1] > 2 * width:
        lacking = -tall.shape[1] % (2 * width)
        if lacking:
            tall = np.concatenate([tall, np.zeros((count, lacking, width), tall.dtype)], axis=1)
        blocks = np.asarray(np.linalg.qr(tall.reshape(count, -1, 2 * width, width), mode="r"))
        tall = blocks.reshape(count, -1, width)
    return np.asarray(np.linalg.qr(tall, mode="r"))


def _tall(array: Array, name: str) -> Array:
    """[heads, d_model, d_head]."""
    return np.swapaxes(array, -1, -2) if name == "W_O" else array


def _unit(array: Array, named: Named) -> Array:
    """Each member divided by its norm."""
    array = np.ascontiguousarray(_checked(array, named))
    # Scaled first, so that squares of small or large weights neither vanish nor overflow.
    largest = np.abs(array).max(axis=(1, 2), keepdims=True, initial=0.0)
    array = array / np.where(largest == 0.0, 1.0, largest)
    norms = np.sqrt(np.einsum("mrd,mrd->m", array, array))
    return np.asarray(array / np.where(norms == 0.0, 1.0, norms)[:, None, None])


def _checked(array: Array, named: Named) -> Array:
    """In float32 at least. Raises ModelError for weights that are not finite."""
    array = array.astype(np.result_type(array.dtype, np.float32), copy=False)
    if not np.isfinite(array).all():
        raise ModelError(f"weights of {named.name} are not finite: its heads cannot be compared")
    return array
