"""A network behind its embeddings in PyTorch, made of what `heads` reads from an ONNX file.

For measurements that need gradients, or other weights. A head is `softmax(scale q k^T + P) v W_O`, as in docs/heads.md;
P, the masks and position biases between tokens, the turning of queries and keys, and what normalisations add to the
mean square are read from one run of the file in float64: they may depend on positions alone. Nothing may be padded but
the end of a decoder's text. Shapes: B prompts, T tokens, D = d_model, H heads, K = d_head; a sublayer's C channels are
what its output projection reads, head by head or neuron by neuron.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rewriter.errors import UsageError
from rewriter.graph.constants import Constants
from rewriter.interpret.attribute import FrozenRun, ScoreTerms
from rewriter.interpret.index import AffineMap
from rewriter.interpret.stream import FrozenNorm, held_norm, writes
from rewriter.interpret.sublayers import Attention, HeadColumns, NeuronHeads
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
GATES: Mapping[str, float] = MappingProxyType({"gates": 0.5, ", gates to values": 0.0, ", gates to gates": 1.0})
"""How gates can be held, and the share of a gated product that then goes to what the gate reads."""

Array = NDArray[Any]
Change = Callable[[str, Tensor], Tensor]
"""What takes the place of a sublayer's channels [B, T, C]."""
Past = dict[str, tuple[Tensor, Tensor]]
"""Sublayer to keys and values [1 or B, H, T, K] of the tokens before; what it lacks is added by a run."""
_LEAST = -1e30
"""Of P: a mask may be infinite."""


@dataclass(frozen=True, eq=False)
class Normalisation:
    """A normalisation over `axes`.

    Attributes:
        scale, bias: as its input is laid out.
        epsilon: what is added to the mean square.
        centred: whether the mean is taken away first.
    """

    scale: Tensor
    bias: Tensor
    epsilon: float
    centred: bool
    axes: tuple[int, ...] = (-1,)

    @classmethod
    def of(cls, frozen: FrozenNorm, data: Array, **further: Any) -> "Normalisation":
        """That of a frozen one, whose denominators are those of `data` [T, entries]."""
        power = ((data - data.mean(-1, keepdims=True) * frozen.centred) ** 2).mean(-1)
        least = power.argmin()
        epsilon = max(float(frozen.factors[least] ** -2 - power[least]), 0.0)
        made = {"scale": _tensor(frozen.scale), "bias": _tensor(frozen.bias), **further}
        return cls(**made, epsilon=epsilon, centred=frozen.centred)

    def __call__(self, data: Tensor, *, held: bool) -> Tensor:
        """Its result of data laid out like `scale`, with the denominator held or not."""
        centred = data - data.mean(self.axes, keepdim=True) if self.centred else data
        deviation = (centred.pow(2).mean(self.axes, keepdim=True) + self.epsilon).sqrt()
        return centred / (deviation.detach() if held else deviation) * self.scale + self.bias


@dataclass(frozen=True, eq=False)
class Side:
    """What becomes of queries, or of keys.

    Attributes:
        norm: theirs, of [B, H, T, K].
        turned: cosines [T, K], sines and the channel [K] that these are for; None without rotary positions.
    """

    norm: Normalisation | None
    turned: tuple[Tensor, Tensor, Tensor] | None

    def __call__(self, data: Tensor, held: Collection[str], first: int) -> Tensor:
        """[B, H, T, K] of those at the tokens from `first` on."""
        data = data if self.norm is None else self.norm(data, held="norms" in held)
        if self.turned is None:
            return data
        cosines, sines, partner = self.turned
        tokens = slice(first, first + data.shape[2])
        return data * cosines[tokens] + data[..., partner] * sines[tokens]


@dataclass(frozen=True, eq=False)
class Sublayer:
    """Original heads, or neurons.

    Attributes:
        name: its name in the index.
        norm: the normalisation before it.
        after: that of what it writes.
        weights: name to tensor, as in the index; of neurons W_in, b_in, W_O and b_O, and of gated ones W_V and b_V.
        function: the activation; None for attention.
        width: channels of a head; 1 for a neuron.
        scale: of scores.
        sides: of queries and of keys.
        positions: P [H or 1, T, T].
    """

    name: str
    norm: Normalisation | None
    after: Normalisation | None
    weights: Mapping[str, Tensor]
    function: Callable[[Tensor], Tensor] | None = None
    width: int = 1
    scale: float = 1.0
    sides: Mapping[str, Side] = field(default_factory=dict)
    positions: Tensor | None = None

    def read(self, stream: Tensor, held: Collection[str]) -> Tensor:
        """What it reads of a stream, [B, T, D]."""
        return stream if self.norm is None else self.norm(stream, held="norms" in held)

    def channels(self, stream: Tensor, held: Collection[str] = (), past: Past | None = None) -> Tensor:
        """What it gives to its output projection, [B, T, C]; the stream has the tokens behind those of the past."""
        data, w = self.read(stream, held), self.weights
        if self.function is not None:
            return self._neurons(data @ w["W_in"] + w["b_in"], data, held)
        q, k, v = (
            torch.einsum("btd,hdk->bhtk", data, w[f"W_{side}"]) + w[f"b_{side}"][:, None] for side in ("Q", "K", "V")
        )
        before = () if past is None else past.get(self.name, ())
        first = before[0].shape[2] if before else 0
        q, k = (self.sides[side](each, held, first) for side, each in (("Q", q), ("K", k)))
        if before:
            k, v = (
                torch.cat((each.repeat(len(new) // len(each), 1, 1, 1), new), 2) for each, new in zip(before, (k, v))
            )
        elif past is not None:
            past[self.name] = k, v
        assert self.positions is not None
        scores = q @ k.mT * self.scale + self.positions[:, first : k.shape[2], : k.shape[2]]
        pattern = scores.softmax(-1)
        mixed = (pattern.detach() if "patterns" in held else pattern) @ v
        return mixed.transpose(1, 2).flatten(2)

    def _neurons(self, y: Tensor, data: Tensor, held: Collection[str]) -> Tensor:
        """[B, T, neurons] of pre-activations."""
        assert self.function is not None
        gated = "W_V" in self.weights
        value = data @ self.weights["W_V"] + self.weights["b_V"] if gated else None
        share = next((GATES[rule] for rule in held if rule in GATES), None)
        if share is None:
            return self.function(y) if value is None else self.function(y) * value
        with torch.no_grad():
            gate = torch.where(y == 0, 0.5, self.function(y) / y)
        if value is None:
            return y * gate
        # The same number by either of two terms: one lets the relevance of the gate through, one that of the value.
        return share * (y * gate * value.detach()) + (1 - share) * ((y * gate).detach() * value)

    def written(self, channels: Tensor, held: Collection[str] = ()) -> Tensor:
        """What that adds to the stream, [B, T, D]."""
        made = channels @ self.weights["W_O"] + self.weights["b_O"]
        return made if self.after is None else self.after(made, held="norms" in held)


class Replica:
    """The network.

    Attributes:
        stages: sublayers in order; those of one stage read the same stream.
        sublayers: the same in one list.
        unembedding: [D, vocabulary]; of an encoder the identity.
        causal: whether it is a decoder.
        tokens: the most that a text may have.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Array]) -> None:
        """Read the weights, and the rest from a run on one sequence, the longest that will be asked for.

        Raises:
            UsageError: the network has something that is not known here.
        """
        run = FrozenRun(path, inputs)
        chain, output = run.chain, run.index.view.outputs[0]
        if chain.token is not None or chain.logits != output:
            raise UsageError(f"{path.name} is not a decoder whose logits are a linear map of its normalised stream")
        self._run, self.causal = run, chain.unembedding is not None
        self._writes = writes(run.index.view, Constants(run.index.view), run.index.sublayers)
        run.start(len(chain.stages), chain.norm.output)
        self.stages = [
            tuple(self._sublayer(named, stage.before) for named in stage.sublayers) for stage in chain.stages
        ]
        self.sublayers = [each for stage in self.stages for each in stage]
        self._between = [self._norm(stage.norm, stage.after, stage.after) for stage in chain.stages]
        self._end = self._norm(chain.norm, chain.stages[-1].after, output)
        start = run.stream(chain.stages[0].before)
        self.tokens, width = start.shape
        self.unembedding, self._bias = torch.eye(width), torch.zeros(width)
        if chain.unembedding is not None:
            affine = AffineMap(chain.unembedding, run.index.value_of)
            self.unembedding, self._bias = _tensor(affine.weight() * chain.factor), _tensor(affine.bias())
        run.values = {}

    def _norm(self, norm: Norm | None, before: str, where: str) -> Normalisation | None:
        frozen = None if norm is None else self._run.freeze(norm, before, where)
        return None if frozen is None else Normalisation.of(frozen, self._run.stream(before))

    def _sublayer(self, own: Attention | NeuronHeads, before: str) -> Sublayer:
        run, name = self._run, own.name
        data = own.value.operator.data if isinstance(own, Attention) else own.query.data
        norm = self._norm(run.norm_of(name, data), before, name)
        write = self._writes[name].norm
        after = None if write is None else self._norm(write, write.data, name)
        if isinstance(own, Attention):
            if own.cross:
                raise UsageError(f"{name} reads other tokens than its own")
            scores = ScoreTerms(run, name)
            weights = {each: _tensor(run.index[f"{name}.{each}"]) for each in _WEIGHTS}
            weights["W_O"] = weights["W_O"].flatten(0, 1)
            sides = {
                each: self._side(scores, name, columns, each) for each, columns in (("Q", own.query), ("K", own.key))
            }
            positions = scores.run.hooked(f"{name}.hook_attn_scores")
            product = scores.run.values[own.product].reshape(-1, *positions.shape)[0] * own.factor
            positions = np.maximum(positions - product, _LEAST)
            width = weights["W_V"].shape[2]
            return Sublayer(name, norm, after, weights, None, width, own.scale, sides, _tensor(positions))
        function = own.activation.removesuffix("(gate) * value")
        if function not in ACTIVATIONS:
            raise UsageError(f"{name} has {own.activation} neurons; known are {', '.join(ACTIVATIONS)}")
        maps = {"in": own.query, "O": own.output, **({"V": own.value} if own.gated else {})}
        read = {part: AffineMap(each, run.index.value_of) for part, each in maps.items()}
        weights = {
            f"{kind}_{part}": _tensor(made)
            for part, each in read.items()
            for kind, made in (("W", each.weight()), ("b", each.bias()))
        }
        return Sublayer(name, norm, after, weights, ACTIVATIONS[function])

    def _side(self, scores: ScoreTerms, name: str, columns: HeadColumns, side: str) -> Side:
        run, norm, turned = scores.run, None, None
        if columns.norm is not None:
            before, result = (run.hooked(f"{name}.hook_{side.lower()}{each}") for each in ("", "_normed"))  # [T, H, K]
            constants = {part: run.index[f"{name}.{side.lower()}_norm.{part}"] for part in columns.norm.norm.constants}
            frozen = held_norm(before[:, 0], result[:, 0], {part: each[0] for part, each in constants.items()}, name)
            joint = columns.norm.shape[-1] != before.shape[-1]  # one denominator for all heads
            shaped = {part: _tensor(each)[:, None] for part, each in constants.items()}
            scale = shaped.get("w", torch.ones(1))
            norm = Normalisation.of(
                frozen,
                before.reshape(len(before), -1) if joint else before[:, 0],
                scale=scale,
                bias=shaped.get("b", torch.zeros(1)),
                axes=(1, 3) if joint else (-1,),
            )
        if columns.rotary:
            every = np.array([scores.rotation_at(side, token) for token in range(len(run.hooked(f"{name}.hook_v")))])
            cosines = np.diagonal(every, axis1=1, axis2=2)
            others = every - cosines[:, None] * np.eye(every.shape[1])
            partner = np.abs(others).sum(axis=0).argmax(axis=0)
            turned = _tensor(cosines), _tensor(others.sum(axis=1)), torch.from_numpy(partner)
        return Side(norm, turned)

    def run(
        self,
        stream: Tensor,
        held: Collection[str] = (),
        change: Change | None = None,
        past: Past | None = None,
        first: int = 0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the stream after the last sublayer, normalised, [B, T, D]; sublayer to channels [B, T, C]).

        `stream` is that before the stage `first`.
        """
        found = {}
        for stage, between in zip(self.stages[first:], self._between[first:], strict=True):
            for each in stage:
                made = each.channels(stream, held, past)
                found[each.name] = made if change is None else change(each.name, made)
            stream = stream + sum(each.written(found[each.name], held) for each in stage)
            stream = stream if between is None else between(stream, held="norms" in held)
        return self.normalised(stream, held), found

    def reached(self, stream: Tensor, channels: Mapping[str, Tensor], place: int) -> Tensor:
        """The stream before a stage, of that before the first and the channels in between."""
        for stage, between in zip(self.stages[:place], self._between, strict=False):
            stream = stream + sum(each.written(channels[each.name]) for each in stage)
            stream = stream if between is None else between(stream, held=False)
        return stream

    def normalised(self, stream: Tensor, held: Collection[str] = ()) -> Tensor:
        """What the unembedding reads of the stream after the last sublayer."""
        return stream if self._end is None else self._end(stream, held="norms" in held)

    def logits(self, end: Tensor) -> Tensor:
        """[..., vocabulary] of a normalised stream [..., D]."""
        return end @ self.unembedding + self._bias


_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


def _tensor(array: Any) -> Tensor:
    return torch.tensor(np.asarray(array), dtype=torch.float32)
