"""A model as a linear network: attention patterns and the denominators of normalisations held at their values.

Then every sublayer is affine in the residual stream, heads of neurons included, so a logit is a sum over the paths from
tokens, bias tokens and biases. `Step`s carry the gradient of the logit from the end of the stream to its beginning, and
give what each constant on the way contributes. Shapes: T tokens, D = d_model, of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError

_FIT = 1e-4
"""Largest relative distance between a normalisation and its frozen form; float32 leaves about 1e-6."""


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """`(x - mean) / denominator * scale + bias`, the mean being 0 in RMS normalisation.

    Attributes:
        factors: [T], scale of each token: one over its denominator.
        scale: [D].
        bias: [D].
        centred: whether the mean is subtracted.
    """

    factors: Array
    scale: Array
    bias: Array
    centred: bool

    def back(self, gradient: Array) -> Array:
        """[T, D] at the result to [T, D] at the stream."""
        inner = gradient * self.scale * self.factors[:, None]
        return inner - inner.mean(axis=-1, keepdims=True) if self.centred else inner

    def constant(self, gradient: Array) -> float:
        """What the bias contributes."""
        return float((gradient * self.bias).sum())


def unchanged(stream: Array) -> FrozenNorm:
    """What reads the stream [T, D] as it is."""
    tokens, width = stream.shape
    return FrozenNorm(np.ones(tokens), np.ones(width), np.zeros(width), centred=False)


def freeze(stream: Array, result: Array, scale: Array, bias: Array, where: str) -> FrozenNorm:
    """The normalisation that takes `stream` [T, D] to `result` [T, D].

    Raises:
        UsageError: no factor per token does that, with or without the mean.
    """
    for centred in (False, True):
        data = stream - stream.mean(axis=-1, keepdims=True) if centred else stream
        shaped = data * scale
        power = (shaped * shaped).sum(axis=-1)
        factors = (shaped * (result - bias)).sum(axis=-1) / np.where(power == 0.0, 1.0, power)
        miss = np.abs(shaped * factors[:, None] + bias - result).max()
        if miss <= _FIT * max(1e-30, np.abs(result).max()):
            return FrozenNorm(factors, scale, bias, centred)
    raise UsageError(f"{where} does not read the residual stream through a normalisation; it cannot be attributed")


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """An attention sublayer with a frozen pattern.

    Attributes:
        norm: the normalisation before its values; None if they are of another sequence.
        pattern: [heads, T, sources].
        value: [sources, heads, d_head], with b_V.
        z: [T, heads, d_head].
        tensors: W_V, b_V, W_O and b_O.
    """

    norm: FrozenNorm | None
    pattern: Array
    value: Array
    z: Array
    tensors: Mapping[str, Array]

    def written(self, gradient: Array) -> Array:
        """[T, heads]: what each head's output contributes, along `gradient` [T, D]."""
        return np.asarray(np.einsum("td,hkd,thk->th", gradient, self.tensors["W_O"], self.z, optimize=True))

    def constants(self, gradient: Array) -> dict[str, Array]:
        """What constants contribute; values of another sequence count as constants, [sources]."""
        found = {"b_O": np.asarray((gradient * self.tensors["b_O"]).sum())}
        at_values = self._at_values(gradient)
        if self.norm is None:
            return {**found, "other_sequence": np.asarray((at_values * self.value).sum(axis=(1, 2)))}
        found["b_V"] = np.asarray((at_values * self.tensors["b_V"]).sum(axis=(0, 2)))
        found["ln.b"] = np.asarray(self.norm.constant(self._at_norm(at_values)))
        return found

    def back(self, gradient: Array) -> Array:
        """[T, D] at the stream before it, by way of this sublayer."""
        if self.norm is None:
            return np.zeros_like(gradient)
        return self.norm.back(self._at_norm(self._at_values(gradient)))

    def _at_values(self, gradient: Array) -> Array:
        """[sources, heads, d_head]."""
        at_z = np.einsum("td,hkd->thk", gradient, self.tensors["W_O"])
        return np.asarray(np.einsum("hts,thk->shk", self.pattern, at_z))

    def _at_norm(self, at_values: Array) -> Array:
        return np.asarray(np.einsum("shk,hdk->sd", at_values, self.tensors["W_V"]))


@dataclass(frozen=True, eq=False)
class NeuronStep:
    """The heads of neurons with frozen patterns.

    Attributes:
        norm: the normalisation before them.
        pattern: [T, heads, 1 + m].
        z: [T, heads, 1].
        tensors: W_V, b_V, bias_V, W_O and b_O.
    """

    norm: FrozenNorm
    pattern: Array
    z: Array
    tensors: Mapping[str, Array]

    def written(self, gradient: Array) -> Array:
        """[T, heads]: what each head's output contributes, along `gradient` [T, D]."""
        return self._at_z(gradient) * self.z[..., 0]

    def constants(self, gradient: Array) -> dict[str, Array]:
        """What constants contribute: b_O, and per head the bias tokens and b_V."""
        at_z = self._at_z(gradient)
        own = at_z * self.pattern[..., 0]
        others = (self.pattern[..., 1:] * self.tensors["bias_V"][..., 0]).sum(axis=-1)
        return {
            "b_O": np.asarray((gradient * self.tensors["b_O"]).sum()),
            "bias_tokens": np.asarray((at_z * others).sum(axis=0)),
            "b_V": np.asarray((own * self.tensors["b_V"][:, 0]).sum(axis=0)),
            "ln.b": np.asarray(self.norm.constant(own @ self.tensors["W_V"][..., 0])),
        }

    def back(self, gradient: Array) -> Array:
        """[T, D] at the stream before it, by way of these heads."""
        own = self._at_z(gradient) * self.pattern[..., 0]
        return self.norm.back(own @ self.tensors["W_V"][..., 0])

    def _at_z(self, gradient: Array) -> Array:
        return np.asarray(gradient @ self.tensors["W_O"][:, 0].T)


Step = AttentionStep | NeuronStep


@dataclass(frozen=True, eq=False)
class Link:
    """Sublayers that read one value of the stream.

    Attributes:
        steps: sublayer to step.
        between: the normalisation that makes what they read of the stage before, where there is one.
        before: [T, D], the logit's gradient at what they read, along all paths.
        after: [T, D], the same at the stream with what they write.
    """

    steps: Mapping[str, Step]
    between: FrozenNorm | None
    before: Array
    after: Array


@dataclass(frozen=True, eq=False)
class Linear:
    """The frozen network up to a logit.

    Attributes:
        value: the logit.
        start: [T, D], the embeddings.
        links: the stages, first to last.
        end: the normalisation after the last one.
        read: [T, D], the logit's gradient at its result.
        constants: what constants after the last stage contribute.
        position: the token that is read.
    """

    value: float
    start: Array
    links: tuple[Link, ...]
    end: FrozenNorm
    read: Array
    constants: Mapping[str, Array]
    position: int
