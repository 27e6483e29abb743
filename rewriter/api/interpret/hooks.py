"""What a run can record: names as those of TransformerLens' hooks, each with the tensors that it is made of.

Original heads: `hook_q`, `hook_k`, `hook_v` and `hook_z` [batch, tokens, heads, d_head]; `hook_attn_scores` and
`hook_pattern` [batch, heads, dest, src]. Neuron heads: `hook_pre` [batch, tokens, neurons], `hook_z` [batch, tokens,
heads, 1] and `hook_pattern` [batch, tokens, heads, 1 + m], the weights of the token itself and of the bias tokens; all
others are 0. The residual stream before, inside and after a layer: `hook_resid_pre`, `hook_resid_mid`,
`hook_resid_post`; what is added to it: `hook_attn_out`, `hook_mlp_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from passes.heads.layers import Named
from passes.heads.layout import Heads
from passes.heads.neurons import NeuronHeads
from passes.heads.original import Attention
from passes.heads.residual import Write, writes
from passes.programs.groups import Group
from rewriter.api.interpret.index import HeadIndex
from rewriter.arrays import Array
from rewriter.graph.constants import Constants

Values = Mapping[str, Array]

_MERGED = 2
"""Rank of [batch * tokens, channels]."""


@dataclass(frozen=True, eq=False)
class Hook:
    """One thing to record.

    Attributes:
        tensors: the tensors of the model that it is made of.
        make: makes it from their values.
    """

    tensors: tuple[str, ...]
    make: Callable[[Values], Array]


def hooks_of(index: HeadIndex) -> dict[str, Hook]:
    """All hooks of a model, layer by layer. Raises UsageError for a file of form `whole`."""
    index.require_tokens_only("recording")
    added = writes(index.view, Constants(index.view), index.sublayers)
    found: dict[str, Hook] = {}
    for layer, sublayers in index.layers.items():
        z = next((each.sublayer.z for each in sublayers if isinstance(each.sublayer, Attention)), "")
        own = [(each, added[each.name]) for each in sublayers if each.name in added]
        found.update({name: _stream(index, tensor, z) for name, tensor in _streams(layer, own)})
        for each in sublayers:
            sublayer = each.sublayer
            if isinstance(sublayer, Attention):
                hooks = _attention(index, sublayer)
            else:
                hooks = _Neurons(index, each.name, sublayer, z).hooks()
            found.update({f"{each.name}.{name}": hook for name, hook in hooks})
    return found


def _streams(layer: str, own: list[tuple[Named, Write]]) -> Iterator[tuple[str, str]]:
    """The residual stream around the sublayers of a layer, and what they write to it: hook and tensor."""
    last = own[-1][1].after if own else ""
    known: list[str] = []
    for place, (named, write) in enumerate(own):
        kind = named.name.removeprefix(f"{layer}.").replace("mlp_heads", "mlp_out").replace("attn", "attn_out")
        if place == 0:
            yield f"{layer}.hook_resid_pre", write.before
        yield f"{layer}.hook_{kind}", write.out
        if write.after not in (last, *known):
            suffix = "" if not known else "_cross" if "cross" in named.name else f"_{len(known) + 1}"
            yield f"{layer}.hook_resid_mid{suffix}", write.after
            known.append(write.after)
    if last:
        yield f"{layer}.hook_resid_post", last


def _stream(index: HeadIndex, tensor: str, z: str) -> Hook:
    tensors = (tensor, *_sequences(index, tensor, z))
    return Hook(tensors, lambda values: _by_sequence(values[tensor], values.get(z)))


def _sequences(index: HeadIndex, tensor: str, z: str) -> tuple[str, ...]:
    """What tells how long sequences are where an export has batch and tokens as one axis: outputs of attention."""
    return (z,) if z and index.view.type_of(tensor).rank == _MERGED else ()


def _by_sequence(array: Array, z: Array | None) -> Array:
    """[batch, tokens, channels]; `z` [..., tokens, channels] tells how where it is [batch * tokens, channels]."""
    return array if z is None or array.ndim != _MERGED else array.reshape(-1, z.shape[-2], array.shape[-1])


# -- original heads ----------------------------------------------------------------------------------------------


def _attention(index: HeadIndex, own: Attention) -> Iterator[tuple[str, Hook]]:
    for name, heads in (("hook_q", own.query), ("hook_k", own.key), ("hook_v", own.value)):
        yield name, Hook((heads.operator.output, own.z), _projected(index, own, heads, values=name == "hook_v"))
    yield "hook_z", Hook((own.z,), lambda values: _z(own, values[own.z]))
    if own.pattern:
        for name, tensor in (("hook_attn_scores", own.scores), ("hook_pattern", own.pattern)):
            yield name, _by_head(own, tensor)


def _by_head(own: Attention, tensor: str) -> Hook:
    """[batch, heads, dest, src]."""
    return Hook((tensor,), lambda values: values[tensor].reshape(-1, own.heads, *values[tensor].shape[-2:]))


def _z(own: Attention, z: Array) -> Array:
    """[batch, tokens, heads, d_head]."""
    if not own.pattern and z.ndim == 3:  # an operator that joins the heads itself
        return z.reshape(*z.shape[:2], own.heads, -1)
    return z.reshape(-1, own.heads, *z.shape[-2:]).swapaxes(1, 2)


def _projected(index: HeadIndex, own: Attention, heads: Heads, *, values: bool) -> Callable[[Values], Array]:
    """Queries, keys or values as W and b make them: those of values with the factor in the graph, which W_V has."""

    def make(tapped: Values) -> Array:
        made = tapped[heads.operator.output]
        rows = made.reshape(len(_z(own, tapped[own.z])), -1, made.shape[-1])
        factor = heads.factor if values else 1.0
        total = rows[..., heads.columns] * made.dtype.type(factor)
        for added in heads.added:
            constant = index.constant(added.name).reshape(-1)[added.positions]
            total = total + constant * made.dtype.type(added.factor * factor / heads.factor)
        return np.asarray(total)

    return make


# -- heads of neurons --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Neurons:
    index: HeadIndex
    name: str
    own: NeuronHeads
    z: str

    def hooks(self) -> Iterator[tuple[str, Hook]]:
        own = self.own
        read = (own.data, own.gate, own.own, *_sequences(self.index, own.data, self.z))
        tensors = tuple(dict.fromkeys(name for name in read if name))
        yield "hook_pre", Hook(tensors, self._pre)
        yield "hook_pattern", Hook(tensors, self._pattern)
        yield "hook_z", Hook(tensors, self._outputs)

    def _pre(self, values: Values) -> Array:
        return self._channels(values, self.own.gate, "Q")

    def _channels(self, values: Values, tensor: str, side: str) -> Array:
        """Pre-activations or values [batch, tokens, neurons]: tapped, or computed where the file has no such tensor."""
        data = _by_sequence(values[self.own.data], values.get(self.z))
        if tensor:
            return values[tensor].reshape(*data.shape[:-1], self.own.neurons)
        affine = self.index.affine(self.name, side)
        return np.asarray(data @ affine.weight() + affine.bias()).astype(data.dtype, copy=False)

    def _dtype(self, values: Values) -> np.dtype[Any]:
        """The model's type; float64 where heads are small differences of large values."""
        return np.dtype(np.float64) if self.own.program.double else values[self.own.data].dtype

    def _logits(self, values: Values) -> Iterator[tuple[Group, Array]]:
        """[batch, tokens, neurons, 1 + m] of one group of heads after the other, in float64."""
        y = self._pre(values).astype(np.float64)
        for group in self.own.groups:
            head = group.head
            logits = np.full((*y.shape, 1 + self.own.bias_tokens), -np.inf)
            logits[..., 0] = head.beta * y + head.gamma
            for place, token in enumerate(head.bias_tokens, start=1):
                logits[..., place] = token.slope * y + token.offset
            yield group, logits

    def _pattern(self, values: Values) -> Array:
        """[batch, tokens, heads, 1 + m]."""
        dtype = self._dtype(values)
        return np.concatenate([_softmax(logits).astype(dtype) for _, logits in self._logits(values)], axis=-2)

    def _outputs(self, values: Values) -> Array:
        """[batch, tokens, heads, 1]."""
        dtype = self._dtype(values)
        source = self._channels(values, self.own.own, "V").astype(np.float64)
        parts = []
        for group, logits in self._logits(values):
            weights = _softmax(logits)
            total = weights[..., 0] * (group.head.c * source + group.head.d)
            for place, token in enumerate(group.head.bias_tokens, start=1):
                total = total + weights[..., place] * token.value
            parts.append(total[..., None].astype(dtype))
        return np.concatenate(parts, axis=-2)


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
