"""`run_with_cache`: run a model on given inputs and record the tensors of its heads.

Names are those of TransformerLens' hooks; docs/heads.md has all of them, with their shapes. Tensors inside the model
become outputs of a run without graph optimisation, so that the arithmetic is that of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import numpy as np
import onnx

from passes.match.projections import Projection
from passes.programs.program import Head
from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.evaluate.arithmetic import Unsupported
from rewriter.files.load import Source
from rewriter.graph.constants import Constants
from rewriter.graph.extract import extract, upstream
from rewriter.interpret.index import AffineMap, HeadIndex, indexed, matching, with_biases
from rewriter.interpret.original import Attention, HeadColumns, HeadNorm
from rewriter.interpret.stream import Write, writes
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.interpret.text import InputsOrText, cases_of
from rewriter.proof.inputs.cases import Case
from rewriter.proof.run import Side, open_model, open_reference

Values = Mapping[str, Array]
_TENSORS_AT_ONCE = 16  # evaluated in float64


@dataclass(frozen=True, eq=False)
class Cached:
    """The results of a run."""

    outputs: Mapping[str, Array]
    cache: Mapping[str, Array]
    index: HeadIndex
    tokens: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Hook:
    """A tensor to record."""

    tensors: tuple[str, ...]
    make: Callable[[Values], Array]


def run_with_cache(
    model: Source | HeadIndex, inputs: InputsOrText, *, names: str | Sequence[str] = "*", program: str = "fewest"
) -> Cached:
    """Run a model, or the result of `heads`, and record the tensors of its heads.

    Inputs are an npz file, arrays by input name, a list of those, or a `Text`; the names or numbers of several cases
    become prefixes, as in `case/hook`. `names` are globs of the hooks to record, `program` is as for `heads`.

    Raises:
        UsageError: no hook matches, or the inputs do not fit the model.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: onnxruntime does not run the model on these inputs.
    """
    index = indexed(model, program=program)
    given = cases_of(index.proto, inputs)
    hooks = hooks_of(index)
    wanted = matching((names,) if isinstance(names, str) else names, hooks, "hook", ", ".join([*hooks][:8]))
    cache = dict(recorded(index, given.cases, {name: hook for name, hook in hooks.items() if name in wanted}))
    outputs = {name: Hook((name,), itemgetter(name)) for name in index.view.outputs}
    return Cached(dict(recorded(index, given.cases, outputs)), cache, index, given.spelled)


def recorded(index: HeadIndex, cases: Sequence[Case], hooks: Mapping[str, Hook]) -> Iterator[tuple[str, Array]]:
    """Hook to the recorded array, as `case/hook` for several cases."""
    tensors = [name for hook in hooks.values() for name in hook.tensors]
    for case in cases:
        values = values_of(index, case, tensors)
        for name, hook in hooks.items():
            yield f"{case.name}/{name}" if len(cases) > 1 else name, hook.make(values)


def values_of(index: HeadIndex, case: Case, names: Sequence[str]) -> dict[str, Array]:
    """Values of tensors by onnxruntime; a case may hold tensors inside the model. Raises ValidationError."""
    side, found = Side.of(replace(index.source, proto=index.runs, path=None)), dict(case.feeds)
    inside = [name for name in dict.fromkeys(names) if name not in found]
    if inside:
        part = upstream(side.main, frozenset(found), inside)
        kinds = {name: side.main.type_of(name).elem_type for name in part.inputs}
        types = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in kinds.items() if kind}
        feeds = {name: found[name].astype(types.get(name, found[name].dtype), copy=False) for name in part.inputs}
        found |= open_model(side.extracted(part), "cpu", optimise=False).run(feeds, inside)
    return {name: found[name] for name in names}


def values_in_float64(index: HeadIndex, case: Case, names: Sequence[str]) -> dict[str, Array]:
    """Values of tensors, the model evaluated in float64. Raises ValidationError if an operator has no such form."""
    view, found = index.view, dict(case.feeds)
    wanted = sorted((name for name in names if name not in found), key=lambda name: view.producer.get(name, -1))
    try:
        for start in range(0, len(wanted), _TENSORS_AT_ONCE):
            # Part by part: all weights in float64 may not fit into memory.
            part = upstream(view, frozenset(found), wanted[start : start + _TENSORS_AT_ONCE])
            proto = extract(index.proto, view, part)
            found |= open_reference(replace(index.source, proto=proto))(found)
    except Unsupported as reason:
        raise ValidationError(f"the model cannot be evaluated in float64: {reason}") from reason
    return {name: np.asarray(found[name]) for name in names}


def hooks_of(index: HeadIndex) -> dict[str, Hook]:
    """All hooks of a model, layer by layer."""
    added = writes(index.view, Constants(index.view), index.sublayers)
    found: dict[str, Hook] = {}
    for layer, sublayers in index.layers.items():
        z = next((each.sublayer.z for each in sublayers if isinstance(each.sublayer, Attention)), "")
        written = [(each, added[each.name]) for each in sublayers if each.name in added]
        found.update({name: _by_sequence(index, tensor, z) for name, tensor in _streams(layer, written)})
        for each in sublayers:
            own = each.sublayer
            hooks = _attention(own) if isinstance(own, Attention) else _neurons(index, own, z)
            found.update({f"{each.name}.{name}": hook for name, hook in hooks})
    return found


def _streams(layer: str, own: list[tuple[Named, Write]]) -> Iterator[tuple[str, str]]:
    """(hook, tensor) of the residual stream around a layer's sublayers, and of their outputs."""
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


def _by_sequence(index: HeadIndex, tensor: str, z: str) -> Hook:
    """[batch, tokens, channels], where batch and tokens are one axis by `z` [..., tokens, channels] of attention."""
    if not z or index.view.type_of(tensor).rank not in (2, None):
        return Hook((tensor,), itemgetter(tensor))

    def make(values: Values) -> Array:
        array = values[tensor]
        return array if array.ndim != 2 else array.reshape(-1, values[z].shape[-2], array.shape[-1])

    return Hook((tensor, z), make)


def _attention(own: Attention) -> Iterator[tuple[str, Hook]]:
    def by_token(z: Array) -> Array:
        return z.reshape(-1, own.heads, *z.shape[-2:]).swapaxes(1, 2)

    def projected(side: HeadColumns, *, values: bool) -> Hook:
        def make(tapped: Values) -> Array:
            made = tapped[side.operator.output]
            rows = made.reshape(len(by_token(tapped[own.z])), -1, made.shape[-1])
            return with_biases(side, rows, values=values)

        return Hook((side.operator.output, own.z), make)

    def by_head(tensor: str) -> Hook:
        return Hook((tensor,), lambda values: values[tensor].reshape(-1, own.heads, *values[tensor].shape[-2:]))

    def normed(norm: HeadNorm) -> Hook:
        output = norm.norm.output
        return Hook((output, own.z), lambda tapped: norm.by_head(tapped[output], len(by_token(tapped[own.z]))))

    for side, columns in (("q", own.query), ("k", own.key)):
        yield f"hook_{side}", projected(columns, values=False)
        if columns.norm:
            yield f"hook_{side}_normed", normed(columns.norm)
    yield "hook_v", projected(own.value, values=True)
    yield "hook_z", Hook((own.z,), lambda values: by_token(values[own.z]))
    yield "hook_attn_scores", by_head(own.scores)
    yield "hook_pattern", by_head(own.pattern)


def _neurons(index: HeadIndex, own: NeuronHeads, z: str) -> Iterator[tuple[str, Hook]]:
    data_of = _by_sequence(index, own.data, z)

    def channels(values: Values, tensor: str, projection: Projection) -> Array:
        """Pre-activations or values [batch, tokens, neurons], computed where the file has no such tensor."""
        data = data_of.make(values)
        if tensor:
            return values[tensor].reshape(*data.shape[:-1], own.neurons)
        affine = AffineMap(projection, index.value_of)
        return np.asarray(data @ affine.weight() + affine.bias()).astype(data.dtype, copy=False)

    pre = partial(channels, tensor=own.gate, projection=own.query)
    linear = partial(channels, tensor=own.own, projection=own.value)

    def by_head(values: Values, of_head: Callable[[Head, Array], Array]) -> Array:
        """[batch, tokens, heads, ...] in the model's type; in float64 where heads are small differences."""
        dtype = np.dtype(np.float64) if own.program.double else values[own.data].dtype
        y = pre(values).astype(np.float64)
        return np.concatenate([of_head(group.head, y).astype(dtype) for group in own.groups], axis=-2)

    def weights(head: Head, y: Array) -> Array:
        lacking = [(0, own.bias_tokens - len(head.bias_tokens)), *[(0, 0)] * y.ndim]
        return np.moveaxis(np.pad(head.weights(y), lacking), 0, -1)

    def outputs(values: Values) -> Array:
        source = linear(values).astype(np.float64)
        return by_head(values, lambda head, y: head.evaluate(y, source)[..., None])

    tensors = tuple(dict.fromkeys(name for name in (*data_of.tensors, own.gate, own.own) if name))
    yield "hook_pre", Hook(tensors, pre)
    if own.gated:
        yield "hook_pre_linear", Hook(tensors, linear)
    yield "hook_pattern", Hook(tensors, lambda values: by_head(values, weights))
    yield "hook_z", Hook(tensors, outputs)
