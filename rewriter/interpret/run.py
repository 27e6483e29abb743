"""`run_with_cache`: run a model on given inputs and record the tensors of its heads.

Inputs are arrays, or text as token ids: each text is a separate case, so masks are ones, positions count from 0, caches
are empty. Names are those of TransformerLens' hooks; docs/heads.md has all of them, with their shapes. Tensors inside
the model become outputs of a run without graph optimisation, so that the arithmetic is that of the file.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter
from typing import Any

import numpy as np

from passes.match.projections import Projection
from passes.programs.program import Head
from rewriter.arrays import Array
from rewriter.errors import UsageError, ValidationError
from rewriter.evaluate.arithmetic import Unsupported
from rewriter.files.load import Source
from rewriter.files.tokenizer import open_tokenizer, refusing, spelling
from rewriter.graph.edit import extract, split
from rewriter.inputs import Inputs, as_given
from rewriter.inputs.cases import Case, InputSpec, Kind, Maker, Role, load_cases
from rewriter.interpret.index import AffineMap, HeadIndex, indexed, matching
from rewriter.interpret.stream import Write
from rewriter.interpret.sublayers import Attention, NeuronHeads, Sublayer
from rewriter.proof.run import fed, open_model, open_reference
from rewriter.text import quoted

Values = Mapping[str, Array]
_BYTES_AT_ONCE = 2**30  # of weights, evaluated in float64


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

    tensors: tuple[str, ...]  # where an entry of the hook is one of a tensor, that is the first
    make: Callable[[Values], Array]


def run_with_cache(
    model: Source | HeadIndex, inputs: "InputsOrText", *, names: str | Sequence[str] = "*", program: str = "fewest"
) -> Cached:
    """Run a model, or the result of `heads`, and record the tensors of its heads.

    Inputs are an npz file, arrays by input name, a list of those, or a `Text`; the names or numbers of several cases
    become prefixes, as in `case/hook`. `names` are globs of the hooks to record, `program` is as for `heads`.

    Raises UsageError if no hook matches, or the inputs do not fit the model, ModelError as `heads`, and ValidationError
    if onnxruntime does not run the model on these inputs.
    """
    index = indexed(model, program=program)
    given = cases_of(index, inputs)
    hooks = hooks_of(index)
    wanted = matching(names, hooks, "hook", ", ".join([*hooks][:8]))
    outputs, cache, ends = index.view.outputs, dict[str, Array](), dict[str, Array]()
    for case in given.cases:
        prefix = f"{case.name}/" * (len(given.cases) > 1)
        values = values_of(index, case, [*outputs, *tensors_of(hooks[name] for name in wanted)])
        cache |= {f"{prefix}{name}": hook.make(values) for name, hook in hooks.items() if name in wanted}
        ends |= {f"{prefix}{name}": values[name] for name in outputs}
    return Cached(ends, cache, index, given.spelled)


def tensors_of(hooks: Iterable[Hook]) -> list[str]:
    """The tensors that hooks read."""
    return [name for hook in hooks for name in hook.tensors]


def values_of(index: HeadIndex, case: Case, names: Sequence[str], *, wide: bool = False) -> dict[str, Array]:
    """Values of tensors by onnxruntime, or if `wide` in float64; a case may hold tensors inside the model.

    Raises ValidationError if onnxruntime does not run the model, or an operator cannot be evaluated in float64.
    """
    proto, view = (index.proto, index.view) if wide else (index.runs, index.view_of_runs)
    found = dict(case.feeds)
    inside = [name for name in dict.fromkeys(names) if name not in found]
    try:
        for part in split(view, inside, _BYTES_AT_ONCE if wide else inf, frozenset(found)):
            model = index.source.with_proto(extract(proto, view, part))
            if wide:
                found |= open_reference(model)(found)
            else:
                found |= open_model(model, "cpu", optimise=False, prepack=False).run(fed(model, found))
    except Unsupported as reason:
        raise ValidationError(f"the model cannot be evaluated in float64: {reason}") from reason
    return {name: found[name] for name in names}


def hooks_of(index: HeadIndex, neurons: Mapping[str, Sequence[int]] | None = None) -> dict[str, Hook]:
    """All hooks of a model, layer by layer; those of neurons record all, or some of each sublayer."""
    found: dict[str, Hook] = {}
    for layer, sublayers in index.layers.items():
        z = next((each.z for each in sublayers if isinstance(each, Attention)), "")
        written = [(each, index.writes[each.name]) for each in sublayers if each.name in index.writes]
        found.update({name: _by_sequence(index, tensor, z) for name, tensor in _streams(layer, written)})
        for own in sublayers:
            members = slice(None) if neurons is None else neurons[own.name]
            hooks = _attention(own) if isinstance(own, Attention) else _neurons(index, own, z, members)
            found.update({f"{own.name}.{name}": hook for name, hook in hooks})
    return found


def _streams(layer: str, own: list[tuple[Sublayer, Write]]) -> Iterator[tuple[str, str]]:
    """(hook, tensor) of the residual stream around a layer's sublayers, and of their outputs."""
    if not own:
        return
    known, last = list[str](), own[-1][1].after
    yield f"{layer}.hook_resid_pre", own[0][1].before
    for named, write in own:
        kind = named.name.removeprefix(f"{layer}.").replace("mlp_heads", "mlp_out").replace("attn", "attn_out")
        yield f"{layer}.hook_{kind}", write.out
        if write.after not in (last, *known):
            suffix = "" if not known else "_cross" if "cross" in named.name else f"_{len(known) + 1}"
            yield f"{layer}.hook_resid_mid{suffix}", write.after
            known.append(write.after)
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
    def by_head(array: Array) -> Array:
        """[batch, heads, ...]: some arrays have both as one axis."""
        return array.reshape(-1, own.heads, *array.shape[-2:])

    def by_sequence(output: str, made: Callable[[Array, int], Array]) -> Hook:
        """What `made` makes of an output and the number of sequences."""
        return Hook((output, own.z), lambda tapped: made(tapped[output], len(by_head(tapped[own.z]))))

    for side, columns in (("q", own.query), ("k", own.key)):
        yield f"hook_{side}", by_sequence(columns.operator.output, columns.by_head)
        if columns.norm:
            yield f"hook_{side}_normed", by_sequence(columns.norm.norm.output, columns.norm.by_head)
    yield "hook_v", by_sequence(own.value.operator.output, partial(own.value.by_head, scaled=True))
    yield "hook_z", Hook((own.z,), lambda values: by_head(values[own.z]).swapaxes(1, 2))
    yield "hook_attn_scores", Hook((own.scores,), lambda values: by_head(values[own.scores]))
    yield "hook_pattern", Hook((own.pattern,), lambda values: by_head(values[own.pattern]))


def _neurons(index: HeadIndex, own: NeuronHeads, z: str, members: Sequence[int] | slice) -> Iterator[tuple[str, Hook]]:
    data_of = _by_sequence(index, own.data, z)

    def channels(values: Values, tensor: str, projection: Projection) -> Array:
        """Pre-activations or values [batch, tokens, neurons], computed where the file has no such tensor."""
        data = data_of.make(values)
        if tensor:
            return values[tensor].reshape(*data.shape[:-1], own.count)[..., members]
        affine = AffineMap(projection, index.value_of)
        return np.asarray(data @ affine.weight()[:, members] + affine.bias()[members]).astype(data.dtype, copy=False)

    pre = partial(channels, tensor=own.gate, projection=own.query)
    linear = partial(channels, tensor=own.own, projection=own.value)

    def by_head(values: Values, of_head: Callable[[Head, Array], Array]) -> Array:
        """[batch, tokens, heads, ...] in the model's type; in float64 where heads are small differences."""
        dtype = np.dtype(np.float64) if own.program.double else values[own.data].dtype
        y = pre(values).astype(np.float64)
        return np.concatenate([of_head(group.head, y).astype(dtype) for group in own.groups], axis=-2)

    def weights(head: Head, y: Array) -> Array:
        lacking = [(0, own.program.bias_tokens - len(head.bias_tokens)), *[(0, 0)] * y.ndim]
        return np.moveaxis(np.pad(head.weights(y), lacking), 0, -1)

    def outputs(values: Values) -> Array:
        source = linear(values).astype(np.float64)
        return by_head(values, lambda head, y: head.evaluate(y, source)[..., None])

    tensors = tuple(dict.fromkeys(name for name in (own.gate, own.own, *data_of.tensors) if name))
    yield "hook_pre", Hook(tensors, pre)
    if own.gated:
        yield "hook_pre_linear", Hook((own.own, *tensors) if own.own else tensors, linear)
    yield "hook_pattern", Hook(tensors, lambda values: by_head(values, weights))
    yield "hook_z", Hook(tensors, outputs)


# -- given inputs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Text:
    """Text as the input of a model, or arrays whose tokens a tokenizer spells."""

    text: str | Sequence[str]  # one, or several, each a separate case
    tokenizer: str | os.PathLike[str] | Any  # path of a `tokenizer.json` or its folder, or a `tokenizers.Tokenizer`
    arrays: Inputs | None = None


InputsOrText = Inputs | Text


@dataclass(frozen=True, eq=False)
class GivenCases:
    """Given inputs as cases; of texts also their tokens."""

    cases: tuple[Case, ...]
    index: HeadIndex
    spelled: tuple[tuple[str, ...], ...] = ()
    texts: tuple[str, ...] = ()
    tokenizer: Any = None

    def token_ids(self, length: int) -> tuple[int, ...] | None:
        """The token ids of the first sequence of the only case; None where no input has ids for that many tokens."""
        return next((ids for ids in _ids(self.index.maker().specs, self.only.feeds) if len(ids) == length), None)

    @property
    def only(self) -> Case:
        if len(self.cases) != 1:
            raise UsageError(f"this takes one case, and there are {len(self.cases)}")
        return self.cases[0]

    def entries(self, numbers: Sequence[int], count: int) -> tuple[str, ...]:
        """The tokenizer's text of entries of an output with `count` entries; empty if these are not its tokens."""
        known = 0 if self.tokenizer is None else self.tokenizer.get_vocab_size()
        tokens = [number % count for number in numbers if number % count < known <= count]
        words = tuple(spelling(self.tokenizer, token) for token in tokens)
        return words if len(words) == len(numbers) and all(words) else ()


def cases_of(index: HeadIndex, inputs: InputsOrText | GivenCases) -> GivenCases:
    """The cases of given inputs. Raises UsageError where they, or the tokenizer, do not fit the model."""
    if isinstance(inputs, GivenCases):
        return inputs
    if not isinstance(inputs, Text):
        return GivenCases(load_cases(as_given(inputs), index.proto), index)
    if inputs.arrays is None:
        return _tokenized(index, inputs)
    cases, opened = load_cases(as_given(inputs.arrays), index.proto), open_tokenizer(inputs.tokenizer)
    every = [next(iter(_ids(index.maker().specs, case.feeds)), ()) for case in cases]
    known = all(opened.id_to_token(number) is not None for ids in every for number in ids)
    spellings = tuple(tuple(spelling(opened, number) for number in ids) for ids in every) if known else ()
    return GivenCases(cases, index, spellings, tokenizer=opened)


def _tokenized(index: HeadIndex, given: Text) -> GivenCases:
    tokenizer = open_tokenizer(given.tokenizer)
    texts = (given.text,) if isinstance(given.text, str) else tuple(given.text)
    if not texts:
        raise UsageError("there is no text")
    maker = index.maker()
    rows, longest, cases, spellings = ids_input(maker, "text").rows, maker.longest, [], []
    for number, text in enumerate(texts):
        with refusing(f"the tokenizer cannot encode {quoted(text)}"):
            encoding = tokenizer.encode(text)
        ids = encoding.ids
        if not ids:
            raise UsageError(f"the tokenizer makes no tokens of {quoted(text)}")
        if rows is not None and max(ids) >= rows:
            what = f"the tokenizer gives token {max(ids)}, and the model knows {rows}"
            raise UsageError(f"{what}: the tokenizer belongs to another model")
        if len(ids) > longest:
            raise UsageError(f"the text has {len(ids)} tokens, and the model takes at most {longest}")
        feeds = dict(maker.case((1, len(ids), 0), number=1).feeds)
        for spec in maker.specs:
            if spec.role in {Role.IDS, Role.TOKEN_TYPES}:
                own = ids if spec.role is Role.IDS else encoding.type_ids
                shape = feeds[spec.name].shape
                if int(np.prod(shape)) != len(own):
                    raise UsageError(f"input {quoted(spec.name)} has shape {list(shape)}, which one text does not fill")
                feeds[spec.name] = np.asarray(own, dtype=spec.dtype).reshape(shape)
        cases.append(Case(str(number), feeds))
        with refusing(f"the tokenizer cannot decode {quoted(text)}"):
            spellings.append(tuple(spelling(tokenizer, each) for each in ids))
    return GivenCases(tuple(cases), index, tuple(spellings), texts, tokenizer)


def ids_input(maker: Maker, given: str) -> InputSpec:
    """The only input of token ids, on which all others depend. Raises UsageError."""
    if unknown := next((spec for spec in maker.specs if spec.role in (Role.FLOATS, Role.INTEGERS)), None):
        raise UsageError(f"{given} does not say what input {quoted(unknown.name)} is: give all inputs as arrays")
    found = [spec for spec in maker.specs if spec.role is Role.IDS]
    if len(found) != 1:
        raise UsageError(f"{given} fills one input of token ids, and there are {len(found)}: give all inputs as arrays")
    return found[0]


def batch_of(index: HeadIndex, ids: Array, further: Mapping[str, Array]) -> Case:
    """Token ids [batch, tokens] as a case without padding and past, except as `further` inputs by name say.

    Raises UsageError where they do not fit the model, or do not determine its inputs.
    """
    maker, tokens = index.maker(), ids.shape[-1]
    spec = ids_input(maker, "a batch of token ids")
    if tokens > maker.longest:
        raise UsageError(f"there are {tokens} tokens, and the model takes at most {maker.longest}")
    feeds = dict(maker.case((1, tokens, 0), number=1).feeds)
    for each in maker.specs:
        if Kind.BATCH in each.kinds:
            feeds[each.name] = feeds[each.name].repeat(len(ids), each.kinds.index(Kind.BATCH))
    return load_cases({**feeds, spec.name: ids, **further}, index.proto)[0]


def _ids(specs: Sequence[InputSpec], feeds: Mapping[str, Array]) -> Iterator[tuple[int, ...]]:
    """The token ids of the first sequence in each input that has ids."""
    for spec in specs:
        if spec.role is Role.IDS and (array := feeds.get(spec.name)) is not None and array.ndim > 1 and array.size:
            yield tuple(int(number) for number in array.reshape(-1, array.shape[-1])[0])
