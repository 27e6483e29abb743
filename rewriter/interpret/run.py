"""`run_with_cache`: run a model on given inputs and record what its heads do.

Tensors inside the model become outputs, in groups whose values fit into bounded memory; each group is a run of its own,
without graph optimisation, so that the arithmetic is that of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from passes.programs.groups import Group
from rewriter.arrays import Array
from rewriter.compare.depth import GROUP_BYTES, groups, open_tapped
from rewriter.errors import UsageError, ValidationError
from rewriter.files.load import Source
from rewriter.graph.constants import Constants
from rewriter.graph.extract import with_outputs
from rewriter.interpret.index import HeadIndex, heads
from rewriter.interpret.original import Attention, Heads
from rewriter.interpret.stream import Write, writes
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import InputsOrText, Text, as_given
from rewriter.proof.inputs.read import Tokens, load_cases, tokenized
from rewriter.proof.reference.float64 import NoReference, open_reference

# -- hooks ----------------------------------------


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
    for name, side in (("hook_q", own.query), ("hook_k", own.key), ("hook_v", own.value)):
        yield name, Hook((side.operator.output, own.z), _projected(index, own, side, values=name == "hook_v"))
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


def _projected(index: HeadIndex, own: Attention, side: Heads, *, values: bool) -> Callable[[Values], Array]:
    """Queries, keys or values as W and b make them: those of values with the factor in the graph, which W_V has."""

    def make(tapped: Values) -> Array:
        made = tapped[side.operator.output]
        rows = made.reshape(len(_z(own, tapped[own.z])), -1, made.shape[-1])
        factor = side.factor if values else 1.0
        total = rows[..., side.columns] * made.dtype.type(factor)
        for added in side.added:
            constant = index.constant(added.name).reshape(-1)[added.positions]
            total = total + constant * made.dtype.type(added.factor * factor / side.factor)
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


# -- cache ----------------------------------------


@dataclass(frozen=True, eq=False)
class Cached:
    """The results of a run.

    Attributes:
        outputs: the model's outputs.
        cache: hook to what was recorded there.
        index: the heads of the model.
        tokens: the tokens of each text; empty where inputs are arrays.
    """

    outputs: Mapping[str, Array]
    cache: Mapping[str, Array]
    index: HeadIndex
    tokens: tuple[tuple[str, ...], ...] = ()


def run_with_cache(
    model: Source | HeadIndex,
    inputs: InputsOrText,
    *,
    names: str | Sequence[str] = "*",
    program: str = "fewest",
    provider: str = "cpu",
) -> Cached:
    """Run a model and record what its heads do; see `rewriter.interpret.run` for names and shapes.

    Args:
        model: path of an ONNX file, original or rewritten, a model in memory, or the result of `heads`.
        inputs: an npz file, arrays by input name, a list of those, or a `Text`; the names or numbers of several cases
            become prefixes, as in `case/hook`.
        names: globs of the hooks to record.
        program: as for `heads`.
        provider: execution provider.

    Raises:
        UsageError: no hook matches, or the inputs do not fit the model.
        ModelError: the model is unreadable, malformed or unsafe.
        ProviderError: the execution provider is not available.
        ValidationError: onnxruntime does not run the model on these inputs.
    """
    index = model if isinstance(model, HeadIndex) else heads(model, program=program)
    wanted = (names,) if isinstance(names, str) else tuple(names)
    recording = Recording.of(index, inputs, wanted, provider)
    cache = dict(recording.arrays())
    spelled = () if recording.tokens is None else recording.tokens.spelled
    return Cached(recording.outputs, cache, index, spelled)


def values_in_float64(index: HeadIndex, case: Case, names: Sequence[str]) -> dict[str, Array]:
    """The values of tensors, the model evaluated in float64.

    Raises:
        ValidationError: an operator has no float64 form.
    """
    side = side_of(index)
    inside = [name for name in names if name not in case.feeds]
    try:
        reference = open_reference(with_outputs(index.proto, side.main, inside), index.source.base_dir)
        found = reference.run(case.feeds)
    except NoReference as reason:
        raise ValidationError(f"the model cannot be evaluated in float64: {reason}") from reason
    return {name: np.asarray(case.feeds.get(name, found.get(name))) for name in names}


def values_of(side: Side, case: Case, names: Sequence[str], provider: str) -> dict[str, Array]:
    """The values of some tensors by onnxruntime; without names the model's outputs.

    Raises:
        ValidationError: onnxruntime does not run the model.
    """
    inside = [name for name in names if name not in case.feeds]
    session = open_tapped(side, inside, provider)
    found = session.run(case.feeds, inside or side.main.outputs) if inside or not names else {}
    return {**found, **{name: case.feeds[name] for name in names if name in case.feeds}}


def side_of(index: HeadIndex) -> Side:
    """The indexed model as what runs."""
    return Side.of(replace(index.source, proto=index.proto, path=None))


@dataclass(frozen=True, eq=False)
class Recording:
    """What will be recorded; `arrays` runs the model.

    Attributes:
        index: the heads of the model.
        cases: the inputs.
        hooks: what to record.
        provider: execution provider.
        outputs: the model's outputs, filled by `arrays`; with the case as a prefix if there are several.
        tokens: the texts that the cases are made of; None where inputs are arrays.
        group_bytes: largest size of the recorded tensors of one run.
    """

    index: HeadIndex
    cases: Sequence[Case]
    hooks: Mapping[str, Hook]
    provider: str
    outputs: dict[str, Array]
    tokens: Tokens | None = None
    group_bytes: int = GROUP_BYTES

    @classmethod
    def of(cls, index: HeadIndex, inputs: InputsOrText, names: Sequence[str], provider: str) -> Recording:
        """Check the inputs and the names. Raises UsageError."""
        tokens: Tokens | None = None
        if isinstance(inputs, Text):
            tokens = tokenized(inputs, index.proto)
            cases = tokens.cases
        else:
            cases = load_cases(as_given(inputs), index.proto)
        known = hooks_of(index)
        for glob in names:
            if not any(fnmatchcase(name, glob) for name in known):
                raise UsageError(f"no hook matches '{glob}'; there are, for example, {', '.join(list(known)[:8])}")
        chosen = {name: hook for name, hook in known.items() if any(fnmatchcase(name, glob) for glob in names)}
        return cls(index, cases, chosen, provider, {}, tokens)

    def noted(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Array]]:
        """The same arrays, then the outputs as `outputs/NAME`; their shapes are noted in `shapes`."""
        for name, array in self.arrays():
            shapes[name] = array.shape
            yield name, array
        for name, array in self.outputs.items():
            shapes[f"outputs/{name}"] = array.shape
            yield f"outputs/{name}", array

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Name to array, a group of tensors at a time."""
        side = side_of(self.index)
        for case in self.cases:
            prefix = f"{case.name}/" if len(self.cases) > 1 else ""
            self.outputs.update({f"{prefix}{name}": array for name, array in self._values(side, case, ()).items()})
            for hooks in self._groups(side, case):
                values = self._values(side, case, tuple({name for hook in hooks.values() for name in hook.tensors}))
                for name, hook in hooks.items():
                    yield f"{prefix}{name}", hook.make(values)

    def _groups(self, side: Side, case: Case) -> Iterator[dict[str, Hook]]:
        """Hooks that are recorded in one run: those whose tensors are in one group, or in all groups so far."""
        tensors = list(dict.fromkeys(name for hook in self.hooks.values() for name in hook.tensors))
        left = dict(self.hooks)
        for group in groups(side.main, tensors, (case,), self.group_bytes):
            own = {name: hook for name, hook in left.items() if set(hook.tensors) <= {*group}}
            left = {name: hook for name, hook in left.items() if name not in own}
            if own:
                yield own
        # Hooks whose tensors fell into different groups.
        for name, hook in left.items():
            yield {name: hook}

    def _values(self, side: Side, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """The values of some tensors; without names the model's outputs."""
        return values_of(side, case, names, self.provider)
