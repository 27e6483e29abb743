"""`attribute`: a logit as a sum over heads, neurons, tokens and biases; `why`: a pre-activation or a score likewise.

docs/heads.md#what-contributes-to-a-logit defines the sums and the gates of neurons. Half of h(g) u is attributed to
the inputs of g and half to those of u (RelP's rule for products, Jafari et al., 2025); h(0) u goes to u alone. With
patterns, denominators and gates frozen, every sublayer is affine in the residual stream: `Step`s carry the gradient of
the logit from its end to its beginning. A pre-activation y = x w + b is a sum over all terms of the stream at its
token, and a score scale (q k) a sum over pairs of these, at the query's and the key's token. Rotations of q and k are
linear too, and frozen. Shapes: T tokens, D = d_model, K = d_head, or 1 for a neuron, of one sequence.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from glob import escape
from typing import Any, NamedTuple

import numpy as np

from rewriter.arrays import Array, largest_places
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.graph.constants import Constants
from rewriter.interpret.index import AffineMap, HeadIndex, ValueOf, chosen_heads, heads
from rewriter.interpret.run import GivenCases, InputsOrText, cases_of, hooks_of, tensors_of, values_of
from rewriter.interpret.stream import FrozenNorm, Stage, chain_to, embedded, held_norm
from rewriter.interpret.sublayers import Attention, NeuronHeads, Sublayer
from rewriter.interpret.trace import Norm, norm_before

_SMALL_Y, _SLOPE_STEP = 1e-8, 1e-4  # below the first, f(y) - f(0) does not show the gate


@dataclass(frozen=True, eq=False)
class Attribution:
    """A logit, or a difference of two, in parts."""

    logit: float  # the model's value, before a cap
    direct: Mapping[str, Array]  # part to its contributions: a number, or one per head or neuron of a sublayer
    # `embed` [tokens], a sublayer's `b_V` [heads], of neurons `b_in` and, where f(0) is not 0, `bias_tokens` [neurons]
    paths: Mapping[str, Array]
    effects: Mapping[str, Array]  # [tokens, heads or neurons], of a sublayer's outputs at a token along all paths
    index: HeadIndex
    tokens: tuple[str, ...] = ()  # of a text
    entries: tuple[str, ...] = ()  # as the tokenizer spells them: the logit, and `minus`
    capped: bool = False

    @property
    def residuals(self) -> dict[str, float]:
        """The logit minus each of the two sums."""
        sums = {"direct": self.direct, "paths": self.paths}
        return {name: self.logit - sum(float(np.sum(part)) for part in parts.values()) for name, parts in sums.items()}


def attribute(
    model: Source, inputs: InputsOrText, logit: int, *, minus: int | None = None, position: int = -1
) -> Attribution:
    """Attribute a logit, evaluated in float64, to heads, neurons, tokens and biases.

    The logit is an entry of the first output's last axis, less the entry `minus`, at the token `position`. Inputs are
    arrays by input name, an npz file with one case, or a `Text`; of a batch the first sequence counts.

    Raises UsageError for an index out of range, or an output that does not read the residual stream through a
    normalisation, ModelError as `heads`, and ValidationError if the model cannot be evaluated in float64.
    """
    run = FrozenRun(model, inputs)
    linear = run.linear(logit, minus, position)
    direct, paths, effects = dict(linear.constants), dict(linear.constants), linear.effects
    for name, inside in linear.inside.items():
        paths.update({f"{name}.{part}": array for part, array in inside.constants.items()})
    paths["embed"] = linear.embed
    token, written = linear.position, Written(linear.stages, {"embed": linear.start}, None)
    for name, given in written.along(len(linear.stages), token, linear.last[[token]]):
        direct[name] = given[:, 0] if name in effects else given[0, 0]
    capped = run.chain.logits != run.index.view.outputs[0]
    entries = run.given.entries((logit,) if minus is None else (logit, minus), len(linear.entries))
    return Attribution(linear.value, direct, paths, effects, run.index, run.words, entries, capped)


@dataclass(frozen=True, eq=False)
class Why:
    """A pre-activation or a score as a sum."""

    head: str
    query: int
    key: int | None  # the token with the score; None for a neuron
    total: float  # the neuron's pre-activation, or the score before the softmax, as in the model
    product: float  # the model's `scale (q k)` in it, or the pre-activation
    # `embed`, `blocks.0.attn[2]`, `b_Q`, ...; neurons are one row each for a neuron, and one per sublayer for a score
    sources: tuple[str, ...]
    keys: tuple[str, ...]  # likewise; an empty one for a neuron
    table: Array  # [sources, keys], contributions
    tokens: tuple[str, ...] = ()  # of a text

    @property
    def added(self) -> float:
        """Masks and position biases on top of `scale (q k)`; 0 for a neuron."""
        return self.total - self.product

    @property
    def residual(self) -> float:
        """The product minus the sum of the table."""
        return self.product - float(self.table.sum())

    def top(self, count: int) -> list[tuple[str, str, float]]:
        """(source, source at the key or empty, contribution), the largest first."""
        places = (divmod(place, len(self.keys)) for place in largest_places(np.abs(self.table).reshape(-1), count))
        return [(self.sources[row], self.keys[column], float(self.table[row, column])) for row, column in places]

    def largest(self, axis: int, count: int) -> list[tuple[str, float]]:
        """(source, total), the largest first; `axis` is 0 at the query, 1 at the key."""
        sums = self.table.sum(axis=1 - axis)
        return [((self.sources, self.keys)[axis][at], float(sums[at])) for at in largest_places(np.abs(sums), count)]

    def to_json(self) -> dict[str, Any]:
        names = ("head", "query", "key", "total", "added", "residual", "sources", "keys", "table", "tokens")
        return {**{name: getattr(self, name) for name in names}, "table": self.table.tolist()}


def why(model: Source, inputs: InputsOrText, head: str, *, query: int = -1, key: int | None = None) -> Why:
    """Explain a neuron's pre-activation, or an original head's score, as a sum, evaluated in float64.

    Inputs and errors are those of `attribute`; a UsageError is also a product of queries and keys that is not followed.
    `head` is as `blocks.1.attn[3]` or `blocks.1.attn.3`; of a gated neuron it is the pre-activation of its gate.
    `query` is the token of the neuron or the query, `key` by default the one that the head attends to most.
    """
    run = FrozenRun(model, inputs)
    # One name matches one head or, as chosen_heads says, none.
    ((named, (number,)),) = chosen_heads(run.index, escape(re.sub(r"\[(\d+)\]$", r".\1", head)))
    place = run.places.get(named.name)
    if place is None:
        raise UsageError(f"{named.name} is not on the way to the output")
    run.start(place + 1)
    if isinstance(named, Attention):
        scores = ScoreTerms(run, named.name)
        t, s = scores.tokens(number, query, key)
        written = Written(run.stages(place), run.beginning, by_head(sorted({t, t if named.cross else s})))
        return scores.whys(written, [(number, t, s)])(number, t, s)
    if key is not None:
        raise UsageError(f"{head} is a neuron, which reads one token: it has no key")
    values, affine = run.hooked(f"{named.name}.hook_pre"), AffineMap(named.query, run.index.value_of)
    t = _at(query, len(values))
    total = float(values[t, number])
    weight, bias = affine.weight([number]), affine.bias()[[number]]
    written = Written(run.stages(place), run.beginning, None)
    norm, names = run.frozen(named.name, named.query.data), (f"{named.name}.b_in", f"{named.name}.ln.b")
    rows, table = listed(run.index, named.name, written.read(place, t, norm, weight, bias, names))
    return Why(f"{named.name}[{number}]", t, None, total, total, rows, ("",), table, run.words)


# -- the frozen network ------------------------------------------------------------------------------------------------


class Inside(NamedTuple):
    """The gradient of a logit inside a sublayer."""

    at: Array  # at what members write, [T, members, K]
    read: Array  # at the stream, [T, D]; 0 if values are of another sequence
    constants: dict[str, Array]  # the contributions of constants


@dataclass(frozen=True, eq=False)
class Step:
    """A sublayer that is affine in its input. Members are heads, or neurons, for which K is 1."""

    norm: FrozenNorm | None  # before its values; None if they are of another sequence
    written: Array  # [T, members, K], before the output projection
    bias: Array  # b_O, [D]
    weight: Callable[[], Array]  # reads W_O, [members * K, D]: all weights in float64 may not fit into memory
    after: FrozenNorm | None = field(default=None, kw_only=True)  # the normalisation of the sublayer's output

    def through(self, gradient: Array) -> Inside:
        """The gradients inside, of a gradient [T, D] at the stream with the sublayer's output."""
        outer = gradient if self.after is None else self.after.back(gradient)
        at = (outer @ self.weight().T).reshape(self.written.shape)
        constants = {"b_O": np.asarray((outer * self.bias).sum())}
        if self.after is not None:
            constants["after.ln.b"] = np.asarray((gradient * self.after.bias).sum())
        normed, own = self.inside(at)
        if self.norm is None:
            return Inside(at, np.zeros_like(gradient), constants | own)
        own["ln.b"] = np.asarray((normed * self.norm.bias).sum())
        return Inside(at, self.norm.back(normed), constants | own)

    def parts(self, token: int, rows: Array) -> Array:
        """What each head and neuron writes at a token along rows [R, D] at the output projection, [members, R]."""
        at = (rows @ self.weight().T).reshape(len(rows), *self.written.shape[1:])
        return np.asarray((at * self.written[token]).sum(axis=-1).T)

    def inside(self, at: Array) -> tuple[Array, dict[str, Array]]:
        """[T, D] at the normalised stream, if any, of a gradient at the members' outputs; and constants before them."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class AttentionStep(Step):
    """An attention sublayer with a frozen pattern."""

    pattern: Array  # [heads, T, sources]
    value: Array  # [sources, heads, d_head], with b_V
    value_bias: Array  # b_V, [heads, d_head]
    value_weight: Callable[[], Array]  # reads W_V, [heads, D, d_head]

    def inside(self, at: Array) -> tuple[Array, dict[str, Array]]:
        values = (self.pattern.swapaxes(1, 2) @ at.swapaxes(0, 1)).swapaxes(0, 1)  # [sources, heads, d_head]
        if self.norm is None:
            return values, {"other_sequence": np.asarray((values * self.value).sum(axis=(1, 2)))}
        weight = self.value_weight().swapaxes(1, 2)
        normed = values.reshape(len(values), -1) @ weight.reshape(-1, weight.shape[-1])
        return normed, {"b_V": np.asarray((values * self.value_bias).sum(axis=(0, 2)))}


@dataclass(frozen=True, eq=False)
class NeuronStep(Step):
    """Neurons with frozen gates."""

    norm: FrozenNorm
    own: NeuronHeads
    value_of: ValueOf
    pre: Array  # [T, neurons], pre-activations
    linear: Array | None  # [T, neurons], the values of gates

    @property
    def constant(self) -> float:
        """f(0), which counts as bias tokens."""
        return float(self.own.function(np.zeros(1))[0]) if self.linear is None else 0.0

    @property
    def reads(self) -> list[tuple[Array, AffineMap]]:
        """(factor [T, neurons], affine map) of the pre-activation, and of a gate's value; not kept, as it is large."""
        query, value = (AffineMap(each, self.value_of) for each in (self.own.query, self.own.value))
        zero, rate = held(self.own.function, self.pre)
        if self.linear is None:
            return [(rate, query)]
        return [(rate * self.linear / 2.0, query), (zero + rate * self.pre / 2.0, value)]

    def inside(self, at: Array) -> tuple[Array, dict[str, Array]]:
        own, reads = at[..., 0], self.reads
        constants = {"bias_tokens": own.sum(axis=0) * self.constant} if self.constant else {}
        constants["b_in"] = np.asarray(sum((own * rate).sum(axis=0) * affine.bias() for rate, affine in reads))
        return np.asarray(sum((own * rate) @ affine.weight().T for rate, affine in reads)), constants


def held(function: Callable[[Array], Array], y: Array) -> tuple[float, Array]:
    """f(0), and the gate (f(y) - f(0)) / y; next to 0 the slope there."""
    zero, below, above = (float(each) for each in function(np.array([0.0, -_SLOPE_STEP, _SLOPE_STEP])))
    near = (y == 0.0) | ((np.abs(y) < _SMALL_Y) & (zero != 0.0))
    return zero, np.where(near, (above - below) / (2 * _SLOPE_STEP), (function(y) - zero) / np.where(near, 1.0, y))


@dataclass(frozen=True, eq=False)
class FrozenStage:
    """Sublayers that read one value of the stream."""

    steps: Mapping[str, AttentionStep | NeuronStep]
    norm: FrozenNorm | None  # behind them


# Terms of a sum, [terms, ...] for each source: one, or those of a sublayer's members.
Terms = Sequence[tuple[str, Array]]


@dataclass(frozen=True, eq=False)
class Written:
    """The terms of the stream."""

    stages: Sequence[FrozenStage]  # first to last
    start: Mapping[str, Array]  # the beginning of the stream, [T, D] each
    # what a sublayer's members write at a token, [members, D]; None for each head and neuron, which are not kept
    vectors: Callable[[str, Step, int], Array] | None

    def along(self, before: int, token: int, rows: Array) -> Iterator[tuple[str, Array]]:
        """The parts [terms, R], last first, of the stream that stage `before` reads, along rows [R, D]."""
        for stage in reversed(self.stages[:before]):
            if stage.norm is not None:
                yield f"{next(iter(stage.steps))}.after.ln.b", stage.norm.bias[None] @ rows.T
                rows = stage.norm.back(rows, token)
            for name, step in stage.steps.items():
                inner = rows if step.after is None else step.after.back(rows, token)
                vectors = None if self.vectors is None else self.vectors(name, step, token)
                yield name, step.parts(token, inner) if vectors is None else vectors @ inner.T
                if vectors is None or step.bias.any():  # for many rows, without biases that are 0
                    yield f"{name}.b_O", step.bias[None] @ inner.T
                if step.after is not None:
                    yield f"{name}.after.ln.b", step.after.bias[None] @ rows.T
        for name, array in self.start.items():
            yield name, array[[token]] @ rows.T

    def read(
        self, before: int, token: int, norm: FrozenNorm, weight: Array, bias: Array, constants: tuple[str, str]
    ) -> Terms:
        """The terms [terms, K] of `norm(stream) weight + bias`, [D, K] and [K]; `constants` name both biases."""
        own = [(name, part[None]) for name, part in zip(constants, (bias, weight.T @ norm.bias), strict=True)]
        found = (*own, *self.along(before, token, norm.back(weight.T, token)))
        return [(name, part) for name, part in found if part.any()] or own[:1]


def by_head(tokens: Sequence[int]) -> Callable[[str, Step, int], Array]:
    """What heads write at some tokens, a sublayer's neurons as one."""

    @cache  # weights are read once
    def all_of(step: Step) -> Mapping[int, Array]:
        own = step.written[tokens].swapaxes(0, 1)
        if isinstance(step, NeuronStep):
            own = own.transpose(2, 1, 0)
        made = own @ step.weight().reshape(len(own), own.shape[-1], -1)
        return dict(zip(tokens, made.swapaxes(0, 1), strict=True))

    return lambda _, step, token: all_of(step)[token]


@dataclass(frozen=True, eq=False)
class Linear:
    """The frozen network up to a logit."""

    value: float
    entries: Array  # of the output at the position
    start: Array
    stages: Sequence[FrozenStage]
    first: Array  # the gradient of the logit along all paths at the beginning of the stream, [T, D]
    last: Array  # at its end
    inside: Mapping[str, Inside]  # of each sublayer, in order
    constants: Mapping[str, Array]
    position: int

    @property
    def effects(self) -> dict[str, Array]:
        """As `Attribution.effects`."""
        steps = [pair for stage in self.stages for pair in stage.steps.items()]
        return {name: (self.inside[name].at * step.written).sum(axis=-1) for name, step in steps}

    @property
    def embed(self) -> Array:
        """What each token contributes, [T]."""
        return np.asarray((self.first * self.start).sum(axis=-1))


class FrozenRun:
    """The first sequence of a run in float64."""

    def __init__(self, model: Source | HeadIndex, inputs: InputsOrText | GivenCases) -> None:
        self.index = index = model.wide() if isinstance(model, HeadIndex) else heads(model, wide=True)
        self.given = cases_of(index, inputs)
        self.case = self.given.only
        self.words = next(iter(self.given.spelled), ())
        self._output = index.view.outputs[0]
        self.chain = chain_to(index.view, index.sublayers, index.writes, self._output)
        self.places = {named.name: place for place, stage in enumerate(self.chain.stages) for named in stage.sublayers}
        self.attention = {each.name: each for each in index.attention if each.name in self.places}
        self.hooks = hooks_of(index)
        self.values = dict[str, Array]()

    def start(self, count: int, *further: str) -> None:
        """Run the model, and keep `further` tensors and those of the first stages. Raises UsageError."""
        needed = {self.chain.stages[0].before, *further}
        for stage in self.chain.stages[:count]:
            needed |= {stage.before, stage.after, stage.norm.output if stage.norm else ""}
            for own in stage.sublayers:
                before, after = self._norm(own), self.index.writes[own.name].norm
                needed |= {before.output} if before else set()
                needed |= {after.data, after.output} if after else set()
                needed.add(own.output.data if isinstance(own, NeuronHeads) and own.gate else "")
                needed.update(tensors_of(self.hooks[hook] for hook in self._hooks(own).values()))
        self.values = values_of(self.index, self.case, sorted(needed - {""}), wide=True)

    def extended(self, tensors: Collection[str]) -> "FrozenRun":
        """The run with further tensors, computed from the tensors it keeps."""
        made = copy(self)
        known = replace(self.case, feeds={**self.case.feeds, **self.values})
        made.values = {**self.values, **values_of(self.index, known, sorted(tensors), wide=True)}
        return made

    def _hooks(self, own: Sublayer) -> dict[str, str]:
        parts = ("pattern", "v", "z") if isinstance(own, Attention) else ("pre", "pre_linear")[: 1 + own.gated]
        return {part: f"{own.name}.hook_{part}" for part in parts}

    def norm_of(self, name: str, data: str) -> Norm | None:
        """The normalisation from the stream to what a sublayer reads; None if they are equal. Raises UsageError."""
        view = self.index.view
        if view.before(data) == view.before(self.chain.stages[self.places[name]].before):
            return None
        norm = norm_before(view, Constants(view), data)
        if norm is None:
            raise UsageError(f"{name} does not read a normalised residual stream; it cannot be attributed")
        return norm

    def frozen(self, name: str, data: str) -> FrozenNorm:
        """Likewise, or the identity."""
        return self.freeze(self.norm_of(name, data), self.chain.stages[self.places[name]].before, name)

    def _norm(self, own: Sublayer) -> Norm | None:
        """The normalisation before a sublayer's values; None without one, or for values of another sequence."""
        if isinstance(own, Attention) and own.cross:
            return None
        return self.norm_of(own.name, own.value.operator.data if isinstance(own, Attention) else own.data)

    @property
    def beginning(self) -> dict[str, Array]:
        """The stream's first terms, [T, D] each: `embed` and, where more is added to tokens, `pos_embed`."""
        view, name = self.index.view, self.chain.stages[0].before
        start, table = self.stream(name), embedded(view, Constants(view), name).get("embed.W_E")
        ids = self.given.token_ids(len(start))
        if table is None or ids is None:
            return {"embed": start}
        rows = (self.index.value_of(table.name, [*ids]) - table.zero) * table.factor
        added = start - rows
        return {"embed": rows, "pos_embed": added} if added.any() else {"embed": start}

    @cached_property
    def batch(self) -> int:
        """The number of sequences: some exports have batch and tokens as one axis."""
        hooks = [hook for name, hook in self.hooks.items() if name.endswith((".hook_q", ".hook_v", ".hook_pre"))]
        return len(next(hook for hook in hooks if {*hook.tensors} <= {*self.values}).make(self.values))

    def linear(self, logit: int, minus: int | None, position: int) -> Linear:
        """The frozen network up to an entry, or a difference of two. Raises UsageError."""
        chain = self.chain
        self.start(len(chain.stages), self._output, chain.logits, chain.norm.output)
        output, logits = (self.values[name] for name in (self._output, chain.logits))
        for name in {self._output, chain.logits} - {chain.norm.output}:  # they are large, and nothing else reads them
            del self.values[name]
        if output.ndim != (3 if chain.token is None else 2):
            raise UsageError(f"output {self._output} has shape {[*output.shape]}, not [batch, tokens, entries]")
        # [tokens, entries]; where the output is [entries], it has one token only.
        made, shown = (each[0] if chain.token is None else each[:1] for each in (logits, output))
        position = position if chain.token is None else 0
        for what, entry, axis in (("token", position, 0), ("logit", logit, 1), ("logit", minus or 0, 1)):
            if not -made.shape[axis] <= entry < made.shape[axis]:
                raise UsageError(f"there is no {what} {entry}: output {self._output} has shape {list(made.shape)}")
        chosen, constants = [logit, logit if minus is None else minus], dict[str, Array]()
        signs = np.array([1.0, 0.0 if minus is None else -1.0])
        value = float(made[position, chosen] @ signs)
        if chain.unembedding is None:
            direction = signs @ np.eye(made.shape[-1])[chosen]
        else:
            affine = AffineMap(chain.unembedding, self.index.value_of)
            constants["unembed.b"] = np.asarray(float(affine.bias()[chosen] @ signs))
            direction = affine.weight(chosen) @ signs * chain.factor
        start, end = self.stream(chain.stages[0].before), self.freeze(chain.norm, chain.stages[-1].after, self._output)
        token = (position if chain.token is None else chain.token) % len(start)
        read = np.zeros((len(start), len(direction)))
        read[token] = direction
        constants["final.ln.b"] = np.asarray((read * end.bias).sum())
        gradient = last = end.back(read)
        stages, inside = self.stages(len(chain.stages)), dict[str, Inside]()
        for stage in reversed(stages):
            after = gradient if stage.norm is None else stage.norm.back(gradient)
            made = {name: step.through(after) for name, step in stage.steps.items()}
            if stage.norm is not None:
                next(iter(made.values())).constants["after.ln.b"] = np.asarray((gradient * stage.norm.bias).sum())
            inside, gradient = made | inside, after + sum(each.read for each in made.values())
        return Linear(value, shown[position].copy(), start, stages, gradient, last, inside, constants, token)

    def stages(self, count: int) -> list[FrozenStage]:
        """The first stages, which must have been started."""
        found = list[FrozenStage]()
        for place, stage in enumerate(self.chain.stages[:count], start=1):
            steps, norm = {named.name: self._step(stage, named) for named in stage.sublayers}, None
            if stage.norm is not None:
                norm = self.freeze(stage.norm, stage.after, self.chain.stages[place].sublayers[0].name)
            found.append(FrozenStage(steps, norm))
        return found

    def _step(self, stage: Stage, own: Sublayer) -> AttentionStep | NeuronStep:
        frozen = self.freeze(self._norm(own), stage.before, own.name)
        hooked = {part: self.hooked(hook) for part, hook in self._hooks(own).items()}
        norm = self.index.writes[own.name].norm
        after = None if norm is None else self.freeze(norm, norm.data, own.name)
        if isinstance(own, NeuronHeads):
            output, pre, linear = AffineMap(own.output, self.index.value_of), hooked["pre"], hooked.get("pre_linear")
            # The file's own output: with its rounded constants, a computed one would differ in the last digits.
            made = self.stream(own.output.data) if own.gate else own.function(pre) * (1.0 if linear is None else linear)
            further = own, self.index.value_of, pre, linear
            return NeuronStep(frozen, made[..., None], output.bias(), output.weight, *further, after=after)

        def weight(part: str) -> Array:
            return self.index[f"{own.name}.{part}"]

        pattern, value = hooked["pattern"], hooked["v"]
        # New keys are the last ones; in an empty cache of fixed size the first.
        count, keys = len(value), pattern.shape[-1]
        apart = (slice(keys - count, None), slice(keys - count)), (slice(count), slice(count, None))
        places = next((new for new, held in apart if not pattern[..., held].any()), None)
        if places is None:
            what = f"{own.name} attends to tokens of a cache, whose parts are not known"
            raise UsageError(f"{what}; give it an empty one")
        sizes = own.channels.size, -1
        of_step = None if own.cross else frozen, hooked["z"], weight("b_O"), lambda: weight("W_O").reshape(sizes)
        return AttentionStep(*of_step, pattern[..., places], value, weight("b_V"), partial(weight, "W_V"), after=after)

    def freeze(self, norm: Norm | None, before: str, where: str) -> FrozenNorm:
        """The normalisation, or none, through which a sublayer or output `where` reads the stream `before`."""
        stream = self.stream(before)
        if norm is None:
            tokens, width = stream.shape
            return FrozenNorm(np.ones(tokens), np.ones(width), np.zeros(width), centred=False)
        constants = {part: self.index.value_of(name).reshape(-1) for part, name in norm.constants.items()}
        return held_norm(stream, self.stream(norm.output), constants, where)

    def stream(self, tensor: str) -> Array:
        """[T, D] of the sequence."""
        array = self.values[tensor]
        return np.asarray(array.reshape(self.batch, -1, array.shape[-1])[0])

    def hooked(self, name: str) -> Array:
        return np.asarray(self.hooks[name].make(self.values)[0])


# -- scores ------------------------------------------------------------------------------------------------------------


class ScoreTerms:
    """The scores of an attention sublayer before the softmax; keys of another sequence are one source."""

    def __init__(self, run: FrozenRun, name: str) -> None:
        """Further tensors are computed from those of a run that has started."""
        self._name, self._own, view = name, run.attention[name], run.index.view
        self._sides = sides = {"Q": self._own.query, "K": self._own.key}
        self._operands: Sequence[str] = view.nodes[view.producer[self._own.product]].input
        self._turning = {side: f"{side.lower()}_normed" if each.norm else side.lower() for side, each in sides.items()}
        parts = ("pattern", "attn_scores", "q", "k", *self._turning.values())
        hooked = tensors_of(run.hooks[f"{name}.hook_{part}"] for part in parts)
        norms = (run.norm_of(name, sides[side].operator.data) for side in ("Q" if self._own.cross else "QK"))
        read = {norm.output for norm in norms if norm is not None}
        self.run = made = run.extended({*read, self._own.product, *self._operands, *hooked})
        # Without a cycle, which would keep all arrays.
        self._frozen = cache(lambda side: made.frozen(name, sides[side].operator.data))
        self._hooked = cache(lambda part: made.hooked(f"{name}.hook_{part}"))
        # [heads, K, D] and [heads, K], of which some heads are read in one copy
        self._weights = cache(lambda part: np.ascontiguousarray(run.index[f"{name}.{part}"].swapaxes(1, -1)))

    def tokens(self, head: int, query: int, key: int | None = None) -> tuple[int, int]:
        """The query and a token that it may attend to, by default that with the largest weight. Raises UsageError."""
        pattern = self._hooked("pattern")  # [heads, T, sources]
        query = _at(query, pattern.shape[1])
        key = int(pattern[head, query].argmax()) if key is None else key
        return query, _at(key, pattern.shape[2 if self._own.cross else 1])  # a cache may have places without tokens

    def at(self, head: int, query: int, key: int) -> tuple[float, float]:
        """The model's score, and the `scale (q k)` in it."""
        scores = self._hooked("attn_scores")
        product = self.run.values[self._own.product].reshape(-1, *scores.shape)[0]
        return float(scores[head, query, key]), float(product[head, query, key] * self._own.factor)

    def whys(self, written: Written, places: Sequence[tuple[int, int, int]]) -> Callable[[int, int, int], Why]:
        """A function of one of the `places`, (head, query, key), to its score as a sum. Raises UsageError."""

        @cache
        def side(kind: str, token: int) -> tuple[tuple[str, ...], Mapping[int, Array]]:
            at = "HQK".index(kind)
            heads = sorted({place[0] for place in places if place[at] == token})
            words, table = listed(self.run.index, self._name, self.side(written, kind, token, heads))
            return words, dict(zip(heads, table.swapaxes(0, 1), strict=True))

        def why(head: int, query: int, key: int) -> Why:
            (asked, first), (told, second) = side("Q", query), side("K", key)
            sums = *self.at(head, query, key), asked, told, first[head] @ second[head].T
            return Why(f"{self._name}[{head}]", query, key, *sums, self.run.words)

        return why

    def side(self, written: Written, side: str, token: int, heads: Sequence[int]) -> Terms:
        """The terms [terms, heads, K] of queries or keys at a token: tables are their products."""
        given = self._hooked(self._turning[side])[token, heads]
        if side == "K" and self._own.cross:
            terms: Terms = [(f"{self._name}.other_sequence", given[None])]
        else:
            weight, bias = (self._weights(f"{part}_{side}")[heads] for part in "Wb")
            weight = weight.reshape(-1, weight.shape[-1]).T
            names, place = (f"{self._name}.b_{side}", f"{self._name}.ln.b"), self.run.places[self._name]
            read = written.read(place, token, self._frozen(side), weight, bias.reshape(-1), names)
            terms = [(name, part.reshape(-1, *given.shape)) for name, part in read]
            terms = self._normed(terms, side, token, heads) if self._turning[side] != side.lower() else terms
        turned = self.rotation_at(side, token) if self._own.query.rotary else np.eye(given.shape[-1])
        turned = turned * (self._own.scale if side == "Q" else 1.0)
        return [(name, part @ turned) for name, part in terms]

    def _normed(self, terms: Terms, side: str, token: int, heads: Sequence[int]) -> Terms:
        before, after = (self._hooked(part)[token] for part in (side.lower(), self._turning[side]))
        name = f"{self._name}.{side.lower()}_norm"
        names = {part: f"{name}.{part}" for part in "wb" if f"{name}.{part}" in self.run.index}
        constants = {part: self.run.index[each][heads] for part, each in names.items()}
        norm = held_norm(before[heads], after[heads], constants, name)
        found = [(source, norm.linear(part)) for source, part in terms]
        return [*found, (names["b"], constants["b"][None])] if "b" in names else found

    def rotation_at(self, side: str, token: int) -> Array:
        """[K, K], as factor on the right."""
        after = self.run.values[self._operands["QK".index(side)]]
        after = after if side == "Q" else after.swapaxes(-1, -2)
        after = after.reshape(self.run.batch, -1, *after.shape[-2:])[0, :, token]
        after = np.repeat(after, self._own.heads // len(after), axis=0)
        return rotation(self._hooked(self._turning[side])[token] * self._sides[side].factor, after, self._name)


def _at(token: int, count: int) -> int:
    if not -count <= token < count:
        raise UsageError(f"there is no token {token}: the sequence has {count}")
    return token % count


def listed(index: HeadIndex, own: str, terms: Terms) -> tuple[tuple[str, ...], Array]:
    """The name of each term, and all terms; heads and neurons have their numbers, `own` constants no sublayer."""
    sublayers = {each.name for each in index.sublayers}
    names = tuple(
        f"{name}[{place}]" if name in sublayers and len(part) > 1 else name.removeprefix(f"{own}.")
        for name, part in terms
        for place in range(len(part))
    )
    return names, np.concatenate([part for _, part in terms])


_MAX_DISTANCE = 1e-9  # of rotated vectors from a rotation's result, relative
_MAX_LENGTH_DIFFERENCE = 1e-6  # of factors of pairs' lengths: cosines and sines may be float32 constants


def rotation(before: Array, after: Array, where: str) -> Array:
    """[K, K]: the rotation by pairs of channels from rows `before` [heads, K] to `after`, as right factor.

    Pairs are neighbours, or halves of the channels that turn; further channels stay. Raises UsageError.
    """
    width = before.shape[1]
    for size in range(width - width % 2, 0, -2):  # the largest first: the identity rotates all channels
        for first, second in (np.arange(size).reshape(2, -1), np.arange(size).reshape(-1, 2).T):
            (a, b), (c, d) = ((rows[:, first], rows[:, second]) for rows in (before, after))
            power = np.maximum((a * a + b * b).sum(axis=0), np.finfo(np.float64).tiny)
            cos, sin = (a * c + b * d).sum(axis=0) / power, (a * d - b * c).sum(axis=0) / power
            found = np.eye(width)
            found[first, first] = found[second, second] = cos
            found[first, second], found[second, first] = sin, -sin
            # A single head can be matched by any pairs, if they may be scaled.
            turns = np.ptp(np.hypot(cos, sin)) <= _MAX_LENGTH_DIFFERENCE
            if turns and np.abs(before @ found - after).max() <= _MAX_DISTANCE * np.abs(after).max():
                return found
    raise UsageError(f"{where} turns queries or keys in a way that is not understood: its scores cannot be taken apart")
