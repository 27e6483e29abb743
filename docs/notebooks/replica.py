"""A network behind its embeddings in PyTorch, made of the weights that `heads` reads from an ONNX file.

For measurements that need gradients, or other weights. It knows decoders like GPT-2, and encoders like BERT whose
output is the stream: heads without rotations, neurons without gates, LayerNorm before the sublayers or after them.
Nothing may be padded but the end of a decoder's text. Shapes: B prompts, T tokens, D = d_model; a sublayer's C channels
are what its output projection reads, head by head or neuron by neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rewriter.errors import UsageError
from rewriter.graph.constants import Constants
from rewriter.graph.view import attributes
from rewriter.interpret.index import AffineMap, heads
from rewriter.interpret.original import Attention
from rewriter.interpret.stream import chain_to, norm_of, writes
from rewriter.interpret.sublayers import Named
from rewriter.interpret.trace import Norm

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
        "relu": functional.relu,
    }
)
RULES = ("norms", "gates", "patterns")
"""What can be held, so that no gradient flows through it."""

Change = Callable[[str, Tensor], Tensor]
"""What takes the place of a sublayer's channels [B, T, C]."""


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """A normalisation.

    Attributes:
        scale: [D].
        bias: [D].
        epsilon: what is added to the variance.
    """

    scale: Tensor
    bias: Tensor
    epsilon: float = 1e-5

    def __call__(self, stream: Tensor, *, held: bool) -> Tensor:
        """[B, T, D], with its denominator held or not."""
        centred = stream - stream.mean(-1, keepdim=True)
        deviation = (centred.pow(2).mean(-1, keepdim=True) + self.epsilon).sqrt()
        return centred / (deviation.detach() if held else deviation) * self.scale + self.bias


@dataclass(frozen=True, eq=False)
class Sublayer:
    """Original heads, or neurons.

    Attributes:
        name: its name in the index.
        norm: the normalisation before it.
        weights: name to tensor, as in the index; of neurons W_in, b_in, W_O and b_O.
        function: the activation; None for attention.
        width: channels of a head; 1 for a neuron.
        scale: of scores.
        causal: whether heads attend to earlier tokens only.
    """

    name: str
    norm: LayerNorm | None
    weights: Mapping[str, Tensor]
    function: Callable[[Tensor], Tensor] | None
    width: int
    scale: float
    causal: bool

    def read(self, stream: Tensor, held: Collection[str]) -> Tensor:
        """What it reads of a stream, [B, T, D]."""
        return stream if self.norm is None else self.norm(stream, held="norms" in held)

    def channels(self, stream: Tensor, held: Collection[str] = ()) -> Tensor:
        """What it gives to its output projection, [B, T, C]."""
        data, w = self.read(stream, held), self.weights
        if self.function is not None:
            y = data @ w["W_in"] + w["b_in"]
            if "gates" not in held:
                return self.function(y)
            with torch.no_grad():
                gate = torch.where(y == 0, 0.5, self.function(y) / y)
            return y * gate
        q, k, v = (
            torch.einsum("btd,hdk->bhtk", data, w[f"W_{side}"]) + w[f"b_{side}"][:, None] for side in ("Q", "K", "V")
        )
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1) & self.causal
        pattern = (q @ k.mT * self.scale).masked_fill(later, -torch.inf).softmax(-1)
        mixed = (pattern.detach() if "patterns" in held else pattern) @ v
        return mixed.transpose(1, 2).flatten(2)

    def written(self, channels: Tensor) -> Tensor:
        """What that adds to the stream, [B, T, D]."""
        return channels @ self.weights["W_O"] + self.weights["b_O"]


class Replica:
    """The network.

    Attributes:
        sublayers: in order; those of one stage read the same stream.
        unembedding: [D, vocabulary]; of an encoder the identity.
        causal: whether it is a decoder.
    """

    def __init__(self, path: Path) -> None:
        """Read the weights.

        Raises:
            UsageError: the network has something that is not known here.
        """
        index = heads(path)
        chain = chain_to(index.view, index.sublayers, index.view.outputs[0])
        self._index, self.causal = index, chain.unembedding is not None
        if chain.token is not None:
            raise UsageError(f"{path.name} is not a decoder whose logits are a linear map of its normalised stream")
        self._stages = [
            tuple(self._sublayer(named, stage.before) for named in stage.sublayers) for stage in chain.stages
        ]
        self.sublayers = [each for stage in self._stages for each in stage]
        written = writes(index.view, Constants(index.view), index.sublayers).values()
        if chain.logits != index.view.outputs[0] or any(write.norm for write in written):
            raise UsageError(f"{path.name} caps its logits, or normalises what sublayers write")
        width = self.sublayers[0].weights["W_O"].shape[1]
        self._between = [self._norm(stage.norm, width) for stage in chain.stages]
        self.unembedding, self._bias = torch.eye(width), torch.zeros(width)
        if chain.unembedding is not None:
            affine = AffineMap(chain.unembedding, index.value_of)
            self.unembedding, self._bias = _tensor(affine.weight() * chain.factor), _tensor(affine.bias())
        self._end = self._norm(chain.norm, width)

    def _norm(self, norm: Norm | None, width: int) -> LayerNorm | None:
        if norm is None:
            return None
        node = self._index.view.made_by(norm.output)
        epsilon = 1e-5 if node is None else attributes(node).get("epsilon", 1e-5)
        held = {part: self._index.value_of(name).reshape(-1) for part, name in norm.constants.items()}
        return LayerNorm(_tensor(held.get("w", np.ones(width))), _tensor(held.get("b", np.zeros(width))), epsilon)

    def _sublayer(self, named: Named, before: str) -> Sublayer:
        own, index, name = named.sublayer, self._index, named.name
        if isinstance(own, Attention):
            if own.cross or own.query.rotary or own.query.norm:
                raise UsageError(f"{name} turns or normalises queries, or has other keys: no head of one like GPT-2")
            weights = {side: _tensor(index[f"{name}.{side}"]) for side in _SIDES}
            weights["W_O"] = weights["W_O"].flatten(0, 1)
            norm = norm_of(index.view, name, own.value.operator.data, before)
            made = self._norm(norm, weights["W_O"].shape[1])
            return Sublayer(name, made, weights, None, weights["W_V"].shape[2], own.scale, self.causal)
        if own.gated or own.activation not in ACTIVATIONS:
            raise UsageError(f"{name} has {own.activation} neurons; known are {', '.join(ACTIVATIONS)}, without gates")
        read, write = AffineMap(own.query, index.value_of), AffineMap(own.output, index.value_of)
        weights = {"W_in": read.weight(), "b_in": read.bias(), "W_O": write.weight(), "b_O": write.bias()}
        norm = norm_of(index.view, name, own.query.data, before)
        made = self._norm(norm, own.output.out_features)
        tensors = {each: _tensor(array) for each, array in weights.items()}
        return Sublayer(name, made, tensors, ACTIVATIONS[own.activation], 1, 1.0, self.causal)

    def run(
        self, stream: Tensor, held: Collection[str] = (), change: Change | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the stream after the last sublayer, normalised, [B, T, D]; sublayer to channels [B, T, C])."""
        found = {}
        for stage, between in zip(self._stages, self._between, strict=True):
            if between is not None:
                stream = between(stream, held="norms" in held)
            for each in stage:
                made = each.channels(stream, held)
                found[each.name] = made if change is None else change(each.name, made)
            stream = stream + sum(each.written(found[each.name]) for each in stage)
        return self.normalised(stream, held), found

    def normalised(self, stream: Tensor, held: Collection[str] = ()) -> Tensor:
        """What the unembedding reads of the stream after the last sublayer."""
        return stream if self._end is None else self._end(stream, held="norms" in held)

    def logits(self, end: Tensor) -> Tensor:
        """[..., vocabulary] of a normalised stream [..., D]."""
        return end @ self.unembedding + self._bias


_SIDES = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


def _tensor(array: Any) -> Tensor:
    return torch.tensor(array, dtype=torch.float32)
