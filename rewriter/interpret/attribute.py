"""`attribute`: which heads, tokens and biases a logit is made of.

Two sums, each with its residual:

    direct  the logit as what every head, bias and the embedding write to the stream along the logit's direction, the
            last normalisation's denominator being held;
    paths   the logit as a sum over tokens, bias tokens and biases, along all paths, all patterns and denominators being
            held (`rewriter.interpret.attribute`). There is no error term: heads of neurons are linear as well.

Both are identities up to the certified errors of head programs. They say what the logit is made of on this input. What
it depends on is another question: with `patching` the model is run again without what each MLP writes at each token,
and the correlation of the changes with the attributions is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.index import HeadIndex, heads
from rewriter.interpret.interventions import replaced
from rewriter.interpret.original import Attention
from rewriter.interpret.run import Hook, Recording, hooks_of, values_in_float64
from rewriter.interpret.stream import (
    Chain,
    FrozenNorm,
    Norm,
    Stage,
    Write,
    chain_to,
    held_norm,
    known_output,
    norm_of,
    unchanged,
)
from rewriter.interpret.sublayers import Named
from rewriter.proof.inputs.given import InputsOrText

# -- parts ----------------------------------------


@dataclass(frozen=True, eq=False)
class Attribution:
    """A logit, or a difference of two, in parts.

    Attributes:
        logit: the model's value.
        direct: part to its contributions: a number, or one per head of a sublayer.
        paths: part to its contributions: `embed` [tokens], a sublayer's `bias_tokens` and `b_V` [heads], biases.
        effects: sublayer to [tokens, heads]: what a head's output at a token contributes along all paths.
        written: sublayer to [tokens]: the same for all that it writes, its bias included.
        predicted: MLP to [tokens]: what `patched` is on the frozen network, where a write counts what it contributes.
        patched: MLP to [tokens]: how much lower the logit is if it writes nothing there, or what it writes on
            `against`; empty without `patching`.
        index: the heads of the model.
        tokens: the tokens of the text; empty where inputs are arrays.
        entries: how the tokenizer spells the entries that were attributed: the logit, and `minus`.
    """

    logit: float
    direct: Mapping[str, Array]
    paths: Mapping[str, Array]
    effects: Mapping[str, Array]
    written: Mapping[str, Array]
    predicted: Mapping[str, Array]
    patched: Mapping[str, Array]
    index: HeadIndex
    tokens: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()

    @property
    def correlation(self) -> float | None:
        """Of `predicted` and `patched` over all MLPs and tokens; None without `patching`, or if nothing varies."""
        if not self.patched:
            return None
        made, changed = (
            np.concatenate([each[name] for name in self.patched]) for each in (self.predicted, self.patched)
        )
        return None if np.ptp(made) == 0.0 or np.ptp(changed) == 0.0 else float(np.corrcoef(made, changed)[0, 1])

    def by_neuron(self, parts: Mapping[str, Array]) -> dict[str, Array]:
        """`direct` or `paths` with the heads of each neuron added up.

        In gates they are large and nearly cancel (docs/decisions/0008), so that single heads say little.
        """
        found = dict(parts)
        for each in self.index.sublayers:
            if isinstance(each.sublayer, Attention):
                continue
            for name in (each.name, f"{each.name}.bias_tokens", f"{each.name}.b_V"):
                if name in found:
                    found[name] = found[name].reshape(-1, each.sublayer.neurons).sum(axis=0)
        return found

    @property
    def residuals(self) -> dict[str, float]:
        """The logit minus each of the two sums."""
        return {name: self.logit - total(parts) for name, parts in (("direct", self.direct), ("paths", self.paths))}


def total(parts: Mapping[str, Array]) -> float:
    """The sum of all contributions."""
    return float(sum(float(np.sum(part)) for part in parts.values()))


# -- frozen ----------------------------------------


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


# -- attribution ----------------------------------------


def attribute(
    model: Source,
    inputs: InputsOrText,
    logit: int,
    *,
    minus: int | None = None,
    output: str | None = None,
    position: int = -1,
    sequence: int = 0,
    program: str = "fewest",
    patching: bool = False,
    against: InputsOrText | None = None,
) -> Attribution:
    """Attribute a logit, evaluated in float64, to heads, tokens and biases.

    Args:
        model: path of an ONNX file, original or rewritten, or a model in memory.
        inputs: maps inputs to arrays; an npz file with one case; or a `Text`.
        logit: which entry of the output's last axis.
        minus: attribute the difference from this entry instead.
        output: the output [batch, tokens, entries]; default: the first one.
        position: the token.
        sequence: the sequence in the batch.
        program: as for `heads`.
        patching: also run the model without what each MLP writes at each token: MLPs times tokens runs.
        against: inputs of the same shape; `patching` then replaces what an MLP writes by what it writes on these.

    Raises:
        UsageError: an index is out of range, `against` has another shape, or the output does not read the residual
            stream through a normalisation.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: the model cannot be evaluated in float64.
    """
    reader = Reader.of(model, inputs, output=output, sequence=sequence, program=program)
    others = {} if against is None else reader.writes_on(against)
    return reader.attribution(logit, minus, position, patching=patching or against is not None, others=others)


class Reader:
    """One sequence of a run in float64."""

    @classmethod
    def of(cls, model: Source, inputs: InputsOrText, *, output: str | None, sequence: int, program: str) -> Reader:
        """Run the model; arguments and errors are those of `attribute`."""
        index = heads(model, program=program, wide=True)
        index.require_tokens_only("attribution")
        recording = Recording.of(index, inputs, ("*",), "cpu")
        if len(recording.cases) != 1:
            raise UsageError(f"attribution takes one case, and there are {len(recording.cases)}")
        output = known_output(index.view, output)
        return cls(index, chain_to(index.view, index.sublayers, output), recording, output, sequence)

    def __init__(self, index: HeadIndex, chain: Chain, recording: Recording, output: str, sequence: int) -> None:
        self.index, self._chain, self._output, self.sequence = index, chain, output, sequence
        self.case = recording.cases[0]
        self.tokens = recording.tokens
        self._hooks = hooks_of(index)
        self._norms = {
            named.name: norm_of(index.view, named, stage) for stage in chain.stages for named, _ in stage.sublayers
        }
        names = {output, chain.norm.output, chain.stream, *(stage.before for stage in chain.stages)}
        names |= {norm.output for norm in self._norms.values() if norm is not None}
        names |= {stage.after for stage in chain.stages} | {write.out for _, write in self._mlps}
        names |= {tensor for hook in self._used() for tensor in hook.tensors}
        self.values = values_in_float64(index, recording.cases[0], sorted(names))
        shape = self.values[output].shape
        if len(shape) != (_RANK if chain.token is None else _RANK - 1):
            raise UsageError(f"output {output} has shape {list(shape)}, not [batch, tokens, entries]")
        if not -shape[0] <= sequence < shape[0]:
            raise UsageError(f"there is no sequence {sequence}: output {output} has shape {list(shape)}")

    @property
    def _mlps(self) -> list[tuple[Named, Write]]:
        """The MLPs on the way to the output, with what they write."""
        pairs = [pair for stage in self._chain.stages for pair in stage.sublayers]
        return [(named, write) for named, write in pairs if not isinstance(named.sublayer, Attention)]

    def writes_on(self, inputs: InputsOrText) -> dict[str, Array]:
        """MLP to the tensor that it writes on other inputs. Raises UsageError if that has another shape."""
        cases = Recording.of(self.index, inputs, (), "cpu").cases
        if len(cases) != 1:
            raise UsageError(f"attribution takes one case, and there are {len(cases)} to compare with")
        values = values_in_float64(self.index, cases[0], [write.out for _, write in self._mlps])
        for named, write in self._mlps:
            given, other = self.values[write.out].shape, values[write.out].shape
            if given != other:
                raise UsageError(f"{named.name} writes {list(given)}, and {list(other)} on the inputs to compare with")
        return {named.name: values[write.out] for named, write in self._mlps}

    def _used(self) -> list[Hook]:
        names = [named.name for stage in self._chain.stages for named, _ in stage.sublayers]
        wanted = [f"{name}.hook_{part}" for name in names for part in ("pattern", "z", "v")]
        missing = next((f"{name}.hook_pattern" for name in names if f"{name}.hook_pattern" not in self._hooks), None)
        if missing is not None:
            raise UsageError(f"{missing} is inside an operator: this model cannot be attributed")
        return [self._hooks[name] for name in wanted if name in self._hooks]

    def attribution(
        self, logit: int, minus: int | None, position: int, *, patching: bool, others: Mapping[str, Array]
    ) -> Attribution:
        """Attribute one entry, or the difference of two; `others` are what `patching` replaces writes by."""
        linear = self.linear(logit, minus, position)
        direct, straight = dict(linear.constants), linear.end.back(linear.read)
        paths, effects, written = dict(linear.constants), dict[str, Array](), dict[str, Array]()
        for place, link in reversed(list(enumerate(linear.links))):
            direct.update(_direct(link.steps, straight))
            for name, step in link.steps.items():
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
        predicted = self._predicted(linear, written, others)
        patched = self._patched(linear.value, self._chosen(logit, minus), position, others) if patching else {}
        spelled = () if self.tokens is None else self.tokens.spelled[0]
        entries = self.spelled((logit,) if minus is None else (logit, minus))
        return Attribution(
            linear.value, direct, paths, effects, written, predicted, patched, self.index, spelled, entries
        )

    def _predicted(self, linear: Linear, written: Mapping[str, Array], others: Mapping[str, Array]) -> dict[str, Array]:
        """What the frozen network says about replacing each write: MLP to [tokens]."""
        after = {name: link.after for link in linear.links for name in link.steps}
        found: dict[str, Array] = {}
        for named, write in self._mlps:
            found[named.name] = written[named.name]
            if others:
                change = self._stream(write.out) - self._of_sequence(others[named.name])
                found[named.name] = (after[named.name] * change).sum(axis=-1)
        return found

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
        made = self.values[self._output][self.sequence]
        if self._chain.token is not None:  # [entries]: the output has one token only
            made, position = made[None], 0
        for entry, size, what in ((position, len(made), "token"), (logit, made.shape[-1], "logit")):
            if not -size <= entry < size:
                raise UsageError(f"there is no {what} {entry}: output {self._output} has shape {list(made.shape)}")
        if minus is not None and not -made.shape[-1] <= minus < made.shape[-1]:
            raise UsageError(f"there is no logit {minus}: output {self._output} has shape {list(made.shape)}")
        chosen = self._chosen(logit, minus)
        value = float(made[position, logit] - (0.0 if minus is None else made[position, minus]))
        read, constants = self._unembedded(chosen, position)
        end = self._freeze(self._chain.norm, self._chain.stream, self._output)
        constants["final.ln.b"] = np.asarray(end.constant(read))
        steps, after, links = self._steps(), end.back(read), list[Link]()
        for place, stage in reversed(list(enumerate(self._chain.stages))):
            own = {named.name: steps[named.name] for named, _ in stage.sublayers}
            before = after + sum((step.back(after) for step in own.values()), np.zeros_like(after))
            between = None
            if stage.norm is not None:
                between = self._freeze(stage.norm, self._chain.stages[place - 1].after, stage.sublayers[0][0].name)
            links.insert(0, Link(own, between, before, after))
            after = before if between is None else between.back(before)
        token = position if self._chain.token is None else self._chain.token
        start = self._stream(self._chain.stages[0].before)
        return Linear(value, start, tuple(links), end, read, constants, token % len(start))

    def _chosen(self, logit: int, minus: int | None) -> Array:
        chosen = np.zeros(self.values[self._output].shape[-1])
        chosen[logit] += 1.0
        if minus is not None:
            chosen[minus] -= 1.0
        return chosen

    def _patched(self, value: float, chosen: Array, position: int, others: Mapping[str, Array]) -> dict[str, Array]:
        """How much lower the value is without what each MLP writes at each token, or with what `others` have there."""
        found: dict[str, Array] = {}
        for named, write in self._mlps:
            other = others.get(named.name)
            results = replaced(self.index, self.case, write.out, self._output, self.sequence, other)
            at_token = results if self._chain.token is not None else results[:, position]
            found[named.name] = value - at_token @ chosen
        return found

    def _unembedded(self, chosen: Array, position: int) -> tuple[Array, dict[str, Array]]:
        """(the gradient at the normalised stream [T, D], what biases after it contribute)."""
        found: dict[str, Array] = {}
        if self._chain.bias:
            found["output.b"] = np.asarray(float(self.index.constant(self._chain.bias).reshape(-1) @ chosen))
        unembedding = self._chain.unembedding
        direction = chosen
        if unembedding is not None:
            affine = self.index.affine_of(unembedding)
            direction = affine.weight() @ chosen * self._chain.factor
            found["unembed.b"] = np.asarray(float(affine.bias() @ chosen))
        gradient = np.zeros((len(self._stream(self._chain.stream)), len(direction)))
        gradient[position if self._chain.token is None else self._chain.token] = direction
        return gradient, found

    # -- the pieces of one sequence ------------------------------------------------------------------------------

    def _steps(self) -> dict[str, Step]:
        return {named.name: self._step(stage, named) for stage in self._chain.stages for named, _ in stage.sublayers}

    def _step(self, stage: Stage, named: Named) -> Step:
        tensors = {
            part: self.index[f"{named.name}.{part}"]
            for part in ("W_V", "b_V", "W_O", "b_O", "bias_V")
            if f"{named.name}.{part}" in self.index
        }
        pattern, z = self._hooked(f"{named.name}.hook_pattern"), self._hooked(f"{named.name}.hook_z")
        norm = self._norms[named.name]
        stream = self._stream(stage.before)
        frozen = unchanged(stream) if norm is None else self._freeze(norm, stage.before, named.name)
        if isinstance(named.sublayer, Attention):
            within = None if named.sublayer.cross else frozen
            return AttentionStep(within, pattern, self._hooked(f"{named.name}.hook_v"), z, tensors)
        return NeuronStep(frozen, pattern, z, tensors)

    def _freeze(self, norm: Norm, before: str, where: str) -> FrozenNorm:
        stream = self._stream(before)
        return held_norm(stream, self._stream(norm.output), *self.index.scale_and_bias(norm, stream.shape[-1]), where)

    def _stream(self, tensor: str) -> Array:
        """[T, D] of the sequence."""
        return self._of_sequence(self.values[tensor])

    def _of_sequence(self, array: Array) -> Array:
        """[T, D] of the sequence; some exports have batch and tokens as one axis."""
        batch = self.values[self._output].shape[0]
        return np.asarray(array.reshape(batch, -1, array.shape[-1])[self.sequence], dtype=np.float64)

    def _hooked(self, name: str) -> Array:
        return np.asarray(self._hooks[name].make(self.values)[self.sequence], dtype=np.float64)


def _direct(steps: Mapping[str, Step], gradient: Array) -> dict[str, Array]:
    """What every head and every bias writes to the stream along the gradient."""
    found: dict[str, Array] = {}
    for name, step in steps.items():
        found[name] = step.written(gradient).sum(axis=0)
        found[f"{name}.b_O"] = np.asarray((gradient * step.tensors["b_O"]).sum())
    return found


_RANK = 3
