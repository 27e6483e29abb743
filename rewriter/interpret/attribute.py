"""`attribute`: which heads, neurons, tokens and biases a logit is made of.

Two sums, each with its residual:

    direct  the logit as what every head, neuron, bias and the embedding write to the stream along the logit's
            direction, the last normalisation's denominator being held;
    paths   the logit as a sum over tokens and constants, along all paths, with the patterns of original heads, the
            denominators and the gates of neurons being held. There is no error term.

The gate of a neuron f(y) is (f(y) - f(0)) / y, as SiLU's is sigma(y): what the neuron computes is its gate times y, and
f(0), which is 0 for most activations and else the part of the bias tokens. So the answer depends on the function, not
on the head program that spells it. Of h(g) u, the product of h's gate, g and u, half goes to what g reads and half to
what u reads (RelP's rule for products, Jafari et al., 2025); of h(0) u all goes to u.

Everything held, every sublayer is affine in the residual stream. `Step`s carry the gradient of the logit from the end
of the stream to its beginning, and give what each constant on the way contributes. Both sums say what the logit is made
of on this input, not what it depends on, which `ablate` and `patch` measure. Shapes: T tokens, D = d_model, of one
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.index import AffineMap, HeadIndex, heads
from rewriter.interpret.original import Attention
from rewriter.interpret.run import hooks_of, only_case, values_in_float64
from rewriter.interpret.stream import FrozenNorm, Norm, Stage, chain_to, held_norm, known_output, norm_of, unchanged
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.proof.inputs.given import InputsOrText

_RANK = 3
_NEAR, _STEP = 1e-8, 1e-4
"""Where |y| is smaller, a difference from f(0) says nothing about the gate; a step that says more."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """A logit, or a difference of two, in parts.

    Attributes:
        logit: the model's value.
        direct: part to its contributions: a number, or one per head or neuron of a sublayer.
        paths: part to its contributions: `embed` [tokens], a sublayer's `b_V` [heads], of neurons `b_in` and, where
            f(0) is not 0, `bias_tokens` [neurons], biases.
        effects: sublayer to [tokens, heads or neurons]: what its output at a token contributes along all paths.
        written: sublayer to [tokens]: the same for all that it writes, its bias included.
        index: the heads of the model.
        tokens: the tokens of the text; empty where inputs are arrays.
        entries: how the tokenizer spells the entries that were attributed: the logit, and `minus`.
    """

    logit: float
    direct: Mapping[str, Array]
    paths: Mapping[str, Array]
    effects: Mapping[str, Array]
    written: Mapping[str, Array]
    index: HeadIndex
    tokens: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()

    @property
    def residuals(self) -> dict[str, float]:
        """The logit minus each of the two sums."""
        return {name: self.logit - total(parts) for name, parts in (("direct", self.direct), ("paths", self.paths))}


def total(parts: Mapping[str, Array]) -> float:
    """The sum of all contributions."""
    return float(sum(float(np.sum(part)) for part in parts.values()))


def attribute(
    model: Source,
    inputs: InputsOrText,
    logit: int,
    *,
    minus: int | None = None,
    output: str | None = None,
    position: int = -1,
    sequence: int = 0,
) -> Attribution:
    """Attribute a logit, evaluated in float64, to heads, neurons, tokens and biases.

    Args:
        model: path of an ONNX file, original or rewritten, or a model in memory.
        inputs: maps inputs to arrays; an npz file with one case; or a `Text`.
        logit: which entry of the output's last axis.
        minus: attribute the difference from this entry instead.
        output: the output [batch, tokens, entries]; default: the first one.
        position: the token.
        sequence: the sequence in the batch.

    Raises:
        UsageError: an index is out of range, or the output does not read the residual stream through a normalisation.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: the model cannot be evaluated in float64.
    """
    reader = FrozenRun(model, inputs, output=output, sequence=sequence)
    linear = reader.linear(logit, minus, position)
    direct, straight = dict(linear.constants), linear.end.back(linear.read)
    paths, effects, written = dict(linear.constants), dict[str, Array](), dict[str, Array]()
    for place, link in reversed(list(enumerate(linear.links))):
        for name, step in link.steps.items():
            direct[name] = step.written(straight).sum(axis=0)
            direct[f"{name}.b_O"] = np.asarray((straight * step.tensors["b_O"]).sum())
            paths.update({f"{name}.{part}": array for part, array in step.constants(link.after).items()})
            effects[name] = step.written(link.after)
            written[name] = effects[name].sum(axis=-1) + link.after @ step.tensors["b_O"]
        if link.between is not None:
            name = f"{next(iter(linear.links[place - 1].steps))}.after.ln.b"
            direct[name] = np.asarray(link.between.constant(straight))
            paths[name] = np.asarray(link.between.constant(link.before))
            straight = link.between.back(straight)
    direct["embed"] = np.asarray((straight * linear.start).sum())
    paths["embed"] = (linear.links[0].before * linear.start).sum(axis=-1)
    order = [name for link in linear.links for name in link.steps]
    effects, written = ({name: each[name] for name in order} for each in (effects, written))
    tokens = () if reader.tokens is None else reader.tokens.spelled[0]
    entries = reader.spelled((logit,) if minus is None else (logit, minus))
    return Attribution(linear.value, direct, paths, effects, written, reader.index, tokens, entries)


# -- the frozen network --------------------------------------------------------------------------------------------


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
    """Neurons with held gates.

    Attributes:
        norm: the normalisation before them.
        reads: of the pre-activation, and of the value of a gate: its factor [T, neurons], W [D, neurons], b [neurons].
        constant: f(0); 0 where there is a gate.
        activations: [T, neurons].
        tensors: W_O [neurons, D] and b_O.
    """

    norm: FrozenNorm
    reads: tuple[tuple[Array, Array, Array], ...]
    constant: float
    activations: Array
    tensors: Mapping[str, Array]

    @classmethod
    def of(cls, own: NeuronHeads, norm: FrozenNorm, index: HeadIndex, pre: Array, linear: Array | None) -> NeuronStep:
        """Neurons with the gates that they have at pre-activations and, of a gate, values [T, neurons]."""
        query, value, output = (AffineMap(each, index.value_of) for each in (own.query, own.value, own.output))
        tensors = {"W_O": _wide(output.weight()), "b_O": _wide(output.bias())}
        start, reads = _wide(query.weight()), _wide(query.bias())
        zero, rate = held(own.function, pre)
        if linear is None:
            return cls(norm, ((rate, start, reads),), zero, zero + rate * pre, tensors)
        shares = (
            (rate * linear / 2.0, start, reads),
            (zero + rate * pre / 2.0, _wide(value.weight()), _wide(value.bias())),
        )
        return cls(norm, shares, 0.0, (zero + rate * pre) * linear, tensors)

    def written(self, gradient: Array) -> Array:
        """[T, neurons]: what each neuron's output contributes, along `gradient` [T, D]."""
        return self._at_activations(gradient) * self.activations

    def constants(self, gradient: Array) -> dict[str, Array]:
        """What constants contribute: b_O, and per neuron f(0) and the biases of what it reads."""
        found, rows = {"b_O": np.asarray((gradient * self.tensors["b_O"]).sum())}, self._at_norm(gradient)
        at = self._at_activations(gradient)
        if self.constant:
            found["bias_tokens"] = at.sum(axis=0) * self.constant
        return {
            **found,
            "b_in": np.asarray(sum((at * rate * bias).sum(axis=0) for rate, _, bias in self.reads)),
            "ln.b": np.asarray(self.norm.constant(rows)),
        }

    def back(self, gradient: Array) -> Array:
        """[T, D] at the stream before it, by way of these neurons."""
        return self.norm.back(self._at_norm(gradient))

    def read(self, token: int) -> Array:
        """[neurons, D], what they read of their data at the token per activation."""
        return np.asarray(sum(rate[token][:, None] * weight.T for rate, weight, _ in self.reads))

    def added(self, token: int) -> dict[str, Array]:
        """What constants add to the activations, [neurons] each."""
        biases = np.asarray(sum(rate[token] * bias for rate, _, bias in self.reads))
        return {"b_in": biases, "bias_tokens": np.full(len(biases), self.constant)}

    def _at_activations(self, gradient: Array) -> Array:
        return np.asarray(gradient @ self.tensors["W_O"].T)

    def _at_norm(self, gradient: Array) -> Array:
        at = self._at_activations(gradient)
        return np.asarray(sum((at * rate) @ weight.T for rate, weight, _ in self.reads))


def held(function: Callable[[Array], Array], y: Array) -> tuple[float, Array]:
    """f(0), and the gate (f(y) - f(0)) / y; next to 0 the slope there."""
    zero, below, above = (float(each) for each in function(np.array([0.0, -_STEP, _STEP])))
    near = (y == 0.0) | ((np.abs(y) < _NEAR) & (zero != 0.0))
    return zero, np.where(near, (above - below) / (2 * _STEP), (function(y) - zero) / np.where(near, 1.0, y))


def _wide(array: Array) -> Array:
    return np.asarray(array, dtype=np.float64)


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


_PARTS: Mapping[type, tuple[str, ...]] = {Attention: ("pattern", "v", "z"), NeuronHeads: ("pre", "pre_linear")}
"""The hooks of which a step is made."""


class FrozenRun:
    """One sequence of a run in float64."""

    def __init__(self, model: Source, inputs: InputsOrText, *, output: str | None, sequence: int) -> None:
        """Run the model; arguments and errors are those of `attribute`."""
        index = heads(model, wide=True)
        index.require_tokens_only("attribution")
        self.index, self.sequence = index, sequence
        self.case, self.tokens = only_case(index, inputs)
        self._output = output = known_output(index.view, output)
        self._chain = chain = chain_to(index.view, index.sublayers, output)
        self._hooks = hooks_of(index)
        own = [(stage, named) for stage in chain.stages for named, _ in stage.sublayers]
        self._norms = {named.name: norm_of(index.view, named, stage) for stage, named in own}
        for _, named in own:
            if isinstance(named.sublayer, Attention) and not named.sublayer.pattern:
                reason = "is inside an operator: this model cannot be attributed"
                raise UsageError(f"{named.name}.hook_pattern {reason}")
        used = [f"{named.name}.hook_{part}" for _, named in own for part in _PARTS[type(named.sublayer)]]
        names = {
            output,
            chain.norm.output,
            *(tensor for stage in chain.stages for tensor in (stage.before, stage.after)),
        }
        names |= {norm.output for norm in self._norms.values() if norm is not None}
        names |= {tensor for name in used if name in self._hooks for tensor in self._hooks[name].tensors}
        self.values = values_in_float64(index, self.case, sorted(names))
        shape = self.values[output].shape
        if len(shape) != (_RANK if chain.token is None else _RANK - 1):
            raise UsageError(f"output {output} has shape {list(shape)}, not [batch, tokens, entries]")
        if not -shape[0] <= sequence < shape[0]:
            raise UsageError(f"there is no sequence {sequence}: output {output} has shape {list(shape)}")

    def spelled(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """How the tokenizer spells entries of the output; nothing where they are no tokens of its."""
        count = self.values[self._output].shape[-1]
        words = () if self.tokens is None else tuple(self.tokens.entry(number, count) for number in numbers)
        return words if all(words) else ()

    def entries(self, position: int) -> Array:
        """The output's entries at a token."""
        made = self.values[self._output][self.sequence]
        return np.asarray(made if self._chain.token is not None else made[position])

    def linear(self, logit: int, minus: int | None, position: int) -> Linear:
        """The frozen network up to one entry, or the difference of two. Raises UsageError: there is no such entry."""
        chain, made = self._chain, self.values[self._output][self.sequence]
        if chain.token is not None:  # [entries]: the output has one token only
            made, position = made[None], 0
        wanted = [
            (position, len(made), "token"),
            (logit, made.shape[-1], "logit"),
            (minus or 0, made.shape[-1], "logit"),
        ]
        for entry, size, what in wanted:
            if not -size <= entry < size:
                raise UsageError(f"there is no {what} {entry}: output {self._output} has shape {list(made.shape)}")
        chosen = np.zeros(made.shape[-1])
        chosen[logit] += 1.0
        if minus is not None:
            chosen[minus] -= 1.0
        value = float(made[position, logit] - (0.0 if minus is None else made[position, minus]))
        start = self._stream(chain.stages[0].before)
        token = (position if chain.token is None else chain.token) % len(start)
        read, constants = self._unembedded(chosen, token)
        end = self._freeze(chain.norm, chain.stream, self._output)
        constants["final.ln.b"] = np.asarray(end.constant(read))
        after, links = end.back(read), list[Link]()
        for place, stage in reversed(list(enumerate(chain.stages))):
            own = {named.name: self._step(stage, named) for named, _ in stage.sublayers}
            before = after + sum((step.back(after) for step in own.values()), np.zeros_like(after))
            between = None
            if stage.norm is not None:
                between = self._freeze(stage.norm, chain.stages[place - 1].after, stage.sublayers[0][0].name)
            links.insert(0, Link(own, between, before, after))
            after = before if between is None else between.back(before)
        return Linear(value, start, tuple(links), end, read, constants, token)

    def _unembedded(self, chosen: Array, token: int) -> tuple[Array, dict[str, Array]]:
        """(the gradient at the normalised stream [T, D], what biases after it contribute)."""
        found: dict[str, Array] = {}
        if self._chain.bias:
            found["output.b"] = np.asarray(float(self.index.value_of(self._chain.bias).reshape(-1) @ chosen))
        direction = chosen
        if self._chain.unembedding is not None:
            affine = AffineMap(self._chain.unembedding, self.index.value_of)
            direction = affine.weight() @ chosen * self._chain.factor
            found["unembed.b"] = np.asarray(float(affine.bias() @ chosen))
        gradient = np.zeros((len(self._stream(self._chain.stream)), len(direction)))
        gradient[token] = direction
        return gradient, found

    def _step(self, stage: Stage, named: Named) -> Step:
        norm, own = self._norms[named.name], named.sublayer
        frozen = unchanged(self._stream(stage.before)) if norm is None else self._freeze(norm, stage.before, named.name)
        hooks = {part: f"{named.name}.hook_{part}" for part in _PARTS[type(own)]}
        hooked = {part: self._hooked(hook) for part, hook in hooks.items() if hook in self._hooks}
        if isinstance(own, NeuronHeads):
            return NeuronStep.of(own, frozen, self.index, hooked["pre"], hooked.get("pre_linear"))
        tensors = {part: self.index[f"{named.name}.{part}"] for part in ("W_V", "b_V", "W_O", "b_O")}
        return AttentionStep(None if own.cross else frozen, hooked["pattern"], hooked["v"], hooked["z"], tensors)

    def _freeze(self, norm: Norm, before: str, where: str) -> FrozenNorm:
        stream = self._stream(before)
        return held_norm(stream, self._stream(norm.output), *self.index.scale_and_bias(norm, stream.shape[-1]), where)

    def _stream(self, tensor: str) -> Array:
        """[T, D] of the sequence; some exports have batch and tokens as one axis."""
        array, batch = self.values[tensor], self.values[self._output].shape[0]
        return np.asarray(array.reshape(batch, -1, array.shape[-1])[self.sequence], dtype=np.float64)

    def _hooked(self, name: str) -> Array:
        return np.asarray(self._hooks[name].make(self.values)[self.sequence], dtype=np.float64)
