"""Form `local`: every query is scored against exactly its own key and the bias keys (docs/forms.md).

The nodes replace the activation region: pre-activations are the queries. W1 and W2 stay in the graph as the heads'
stacked projections and are never read, so they may be anything linear.

The largest logit is subtracted first; where the self logit is 0 and each side has at most one, steep bias token, logits
relative to self are clipped instead (`centred`). No exponential of a steep key is denormal: onnxruntime's Exp takes ten
times as long for these. Operators are those of opset 7, and Gather.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import ArrayLike

from passes.conversion import DOMAIN, LARGEST_FLOAT32_QUERY, Builder, Conversion, replacement
from passes.programs.program import FACTORED, HIGHEST, LOWEST, REACH, BiasToken, Head, Line, Powers, Program, group_of
from rewriter.arrays import grouped
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Constant, Tensor, Variable
from rewriter.graph.view import GraphView

_HIGHEST_LOGIT = 80.0  # relative to a steep head's own: the largest self value is then 2^60 / e^80 = 2e-17
_STEEP_SLOPE = 8.0
LARGEST_PART = 2.0**12  # the largest weight or part whose product with e^80 is finite
Inputs = Mapping[str, Tensor]  # operands by the names of formal inputs, in order

Spelling = Callable[..., Variable]
"""Adds the nodes of a function and names the last `output`, of a builder, `Inputs` and the numbers that the name of the
function states; its docstring becomes that of the model-local function."""


@cache
def function_of(
    spelling: Spelling, name: str, inputs: tuple[str, ...], opset: int, *, double: bool = False, **given: Any
) -> onnx.FunctionProto:
    """The spelling as a model-local function of domain `attnonly`; cached, so callers must not change it."""
    body = Builder("", opset=opset, compute_type=onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT)
    spelling(body, {each: body.tensor(each) for each in inputs}, **given)
    return body.function(DOMAIN, name, inputs, opset=opset, doc=" ".join((spelling.__doc__ or "").split()))


def _named(name: str, **given: bool) -> str:
    return name + "".join(f"_{each}" for each, is_given in given.items() if is_given)


def zero_bias(b: Builder, inputs: Inputs, *, steep: bool) -> Variable:
    """Softmax attention of each neuron's head over {self, bias token}, fused with what follows.

    Self has the logit query * key and the value `value`; key and value of the bias token are zero: Theorem 3 of Huben
    and Morris 2023, arXiv 2309.08593. W1 and W2 are the stacked projections, the mask is structural, and as in
    FlashAttention the pattern is never stored. query, value: [..., heads]; key: a scalar.
    """
    # No maximum is subtracted: where exp(-logit) overflows, the quotient is 0, as it should be.
    logit = b.node("Neg", [b.mul(inputs["query"], inputs["key"], "logit")], "bias_logit")
    bias_weight = b.node("Exp", [_normal(b, logit, "bias") if steep else logit], "bias_weight")
    return b.div(inputs["value"], b.add(b.numbers("self_weight", 1.0), bias_weight, "total_weight"), "output")


def own_keys(b: Builder, inputs: Inputs, *, bias_tokens: int, silent: tuple[int, ...]) -> Variable:
    """Softmax attention of each neuron's head over its own key and m constant bias tokens.

    Self has the logit query * key (0 without `key`) and the value `value`. Bias token j has the logit query *
    bias_key[j] + log(bias_weight[j]), plus bias_offset[j] if there are any, and the value bias_part[j] /
    bias_weight[j]; that of a silent one is 0. query, value: [..., heads]; key: a scalar; all others: [m].
    """
    centred, steep = "key" not in inputs, "bias_offset" in inputs
    names = [f"bias_{j}" for j in range(bias_tokens)]
    shares: list[Tensor] = []
    weights: list[Tensor] = [b.numbers("self_share", 1.0)] if centred else []
    parts: list[Tensor] = [inputs["value"]] if centred else []
    if centred:
        # Infinite logits are clipped: unlike their differences, they are numbers.
        for j, name in enumerate(names):
            logit = _logit(b, inputs, ("bias_key", "bias_offset"), inputs["query"], j, name)
            near = b.clipped(logit, (_lowest(b), _HIGHEST_LOGIT), f"{name}_clipped")
            shares.append(b.node("Exp", [near], f"{name}_share"))
    else:
        query = b.bounded(inputs["query"], "finite_query")
        logits = {"self": b.mul(query, inputs["key"], "self_logit")}
        logits |= {name: _logit(b, inputs, ("bias_key", "bias_offset"), query, j, name) for j, name in enumerate(names)}
        # Without offsets the largest logit is that of the smallest key, the largest key, or self. Keys are sorted.
        ends = logits if steep or bias_tokens == 1 else ("self", names[0], names[-1])
        own, *shares = _shares(b, logits, [logits[end] for end in ends], steep=steep)
        weights, parts = [own], [b.mul(own, inputs["value"], "self_part")]
    for j, (name, share) in enumerate(zip(names, shares, strict=True)):
        weights.append(b.mul(share, b.entry(inputs, "bias_weight", j), f"{name}_weight"))
        if j not in silent:
            parts.append(b.mul(share, b.entry(inputs, "bias_part", j), f"{name}_part"))
    total = b.total(weights, "total_weight")
    return b.div(b.total(parts, "weighted_sum"), total, "output")


def shared_keys(b: Builder, inputs: Inputs, *, keys: int, heads: int) -> Variable:
    """Softmax attention of n heads of each neuron over the same k keys.

    Logits are query * keys[j] + log(weights[j]), plus offsets[j] if there are any. Key j is head j's own for j < n,
    with the value parts[j] / weights[j] * value, and a bias token's of value 0 otherwise; the sum of the heads is value
    times the mean of these multiples. query, value: [..., heads]; all others: [k].
    """
    names = [f"key_{j}" for j in range(keys)]
    query = b.bounded(inputs["query"], "finite_query")
    logits = {name: _logit(b, inputs, ("keys", "offsets"), query, j, name) for j, name in enumerate(names)}
    shares = _shares(b, logits, [*logits.values()], steep=False)
    weights, parts = list[Tensor](), list[Tensor]()
    for j, (name, share) in enumerate(zip(names, shares, strict=True)):
        weights.append(b.mul(share, b.entry(inputs, "weights", j), f"{name}_weight"))
        if j < heads:
            parts.append(b.mul(share, b.entry(inputs, "parts", j), f"{name}_part"))
    total = b.total(weights, "total_weight")
    return b.mul(inputs["value"], b.div(b.total(parts, "weighted_sum"), total, "mean"), "output")


def line_of(b: Builder, inputs: Inputs, *, pairs: int, middle: bool) -> Variable:
    """The line g = query as softmax attention.

    With x = -step * query, the shares are e^(-r x) times the weights, for r = 0, r = 1 and r = rates[1] ..., each with
    its mirror image 1 - r (none for 1/2). The keys r = 0 and r = 1 have opposite values, the others are bias tokens of
    value 0. query: [..., heads]; step: a scalar; rates, weights: of the mirrored pairs, that of 0 and 1 first.
    """
    one = b.numbers("self_share", 1.0)
    logit = b.clipped(b.mul(inputs["query"], inputs["step"], "score"), (-HIGHEST, -LOWEST), "logit")
    last = b.node("Exp", [logit], "last_share")
    total = b.mul(b.add(last, one, "ends_share"), b.entry(inputs, "weights", 0), "ends_weight")
    for j in range(1, pairs + middle + 1):
        near = b.node("Exp", [b.mul(logit, b.entry(inputs, "rates", j), f"logit_{j}")], f"share_{j}")
        if j <= pairs:
            near = b.add(near, b.div(last, near, f"mirrored_share_{j}"), f"shares_{j}")
        total = b.add(total, b.mul(near, b.entry(inputs, "weights", j), f"weight_{j}"), f"total_{j}")
    return b.div(b.sub(one, last, "values"), total, "output")


def powers_of(b: Builder, inputs: Inputs, *, singles: int, pairs: int) -> Variable:
    """Softmax attention of each neuron's heads over the same 2 m + 3 keys.

    Logits are j * step * query + log(w_j), so that the shares are powers of one exponential r. With z = r + 1/r and h =
    base + parts[j] / (z + shifts[j]) + ..., the weight of value is r + h and the total weight r + 1/r + 2 h. In the
    pairs, which come last, shifts[j] has parts[j + 1] / (z + shifts[j + 1]) beside it. step is 1 and base 0 unless
    given. query, value: [..., heads]; parts, shifts: [m]; step, base: scalars.
    """
    # On the other side nothing is clipped: where the inverse is infinite, the weight of value is 0.
    share = b.node("Exp", [b.clipped(_stepped(b, inputs), (-np.inf, REACH), "logit")], "share")
    inverse = b.node("Reciprocal", [share], "inverse_share")
    z = b.add(share, inverse, "z")

    def fraction(j: int, above: Tensor) -> Variable:
        return b.div(b.entry(inputs, "parts", j), above, f"fraction_{j}")

    def level(j: int) -> Variable:
        return b.add(z, b.entry(inputs, "shifts", j), f"level_{j}")

    terms: list[Tensor] = [inputs["base"]] if "base" in inputs else []
    terms += [fraction(j, level(j)) for j in range(singles)]
    for j in range(singles, singles + 2 * pairs, 2):
        terms.append(fraction(j, b.add(level(j), fraction(j + 1, level(j + 1)), f"pair_{j}")))
    shared = b.total(terms, "shared_weight", f"shared_weight_{len(terms) - 1}")
    own, other = b.add(share, shared, "own_weight"), b.add(inverse, shared, "other_weight")
    return b.mul(inputs["value"], b.div(own, b.add(own, other, "total_weight"), "mean"), "output")


def progression_over(b: Builder, inputs: Inputs, *, keys: int, steep: bool) -> Variable:
    """Softmax attention of each neuron's heads over the same k keys.

    Logits are j * step * query + log(weights[j]), j = 0 ... k - 1, so that the shares are powers of one exponential;
    the last weight is 1. The first key has the value part / weights[0] * value, the others have value. step is 1 and
    part 0 unless given. query, value: [..., heads]; weights: [k - 1]; step, part: scalars.
    """
    # The highest power is finite, and takes all the weight long before. Where the exponential is 0, key 0 has it.
    ends = _lowest(b) if steep else -np.inf, REACH / (keys - 1)
    share = b.node("Exp", [b.clipped(_stepped(b, inputs), ends, "logit")], "share")
    others = share
    for j in reversed(range(1, keys - 1)):
        others = b.mul(b.add(others, b.entry(inputs, "weights", j), f"weights_from_{j}"), share, f"shares_from_{j}")
    total = b.add(others, b.entry(inputs, "weights", 0), "total_weight")
    weighted = b.add(others, inputs["part"], "weighted_sum") if "part" in inputs else others
    return b.mul(inputs["value"], b.div(weighted, total, "mean"), "output")


def _logit(b: Builder, inputs: Inputs, arrays: tuple[str, str], query: Tensor, j: int, name: str) -> Variable:
    slope, offset = arrays
    score = b.mul(query, b.entry(inputs, slope, j), f"{name}_score")
    return b.add(score, b.entry(inputs, offset, j), f"{name}_logit") if offset in inputs else score


def _shares(b: Builder, logits: Mapping[str, Variable], largest: list[Variable], *, steep: bool) -> list[Variable]:
    top, shares = b.node("Max", largest, "largest_logit"), []
    for name, logit in logits.items():
        shifted = b.sub(logit, top, f"{name}_shifted")
        shares.append(b.node("Exp", [_normal(b, shifted, name) if steep else shifted], f"{name}_share"))
    return shares


def _stepped(b: Builder, inputs: Inputs) -> Tensor:
    return b.mul(inputs["query"], inputs["step"], "score") if "step" in inputs else inputs["query"]


def _lowest(b: Builder) -> float:
    """The smallest logit of steep keys: its exponential is a normal number, and negligible beside 1."""
    return -700.0 if b.dtype == np.float64 else -87.0


def _normal(b: Builder, logit: Tensor, name: str) -> Variable:
    return b.clipped(logit, (_lowest(b), LARGEST_FLOAT32_QUERY), f"{name}_clipped")


# -- keys that several heads share -------------------------------------------------------------------------------------
#
# Heads of a gate have the same set of keys. Their softmax is computed once, and their sum is a weighted mean of
# multiples of the value. Where slopes are an arithmetic progression, all weights are powers of one exponential.


class SharedKey(NamedTuple):
    """One key as a graph stores it: logit `slope y + offset`, factor `weight` of its exponential.

    The offset is 0 where it is in the weight; `part` is the weight times the value or multiple.
    """

    slope: float
    offset: float
    weight: float
    part: float

    @classmethod
    def of(cls, slope: float, offset: float, value: float, largest: float = FACTORED) -> "SharedKey":
        """A key with its logit's offset factored out of the exponential, unless it is above `largest`."""
        if abs(offset) > largest:
            return cls(slope, offset, 1.0, value)
        weight = math.exp(offset)
        return cls(slope, 0.0, weight, weight * value)


def progression_of(keys: Sequence[SharedKey], dtype: type[np.floating]) -> tuple[float, Sequence[float], float] | None:
    """(step, weights, part) of shared keys as a progression with exactly their numbers in a type, as for Mish.

    Weights are w_j e^(j step y), j = 0, 1, ...; the last w and all multiples except the first are 1. `weights` are the
    other w; `part` is the first weight times its multiple. None if the keys are not a progression.
    """
    ascending = sorted(keys, key=lambda key: key.slope)
    for ordered in (ascending, ascending[::-1]):
        slopes, _, weights, parts = np.array(ordered, dtype).T.astype(np.float64).tolist()
        step = slopes[1] - slopes[0]
        even = slopes == [slopes[0] + place * step for place in range(len(slopes))] and float(dtype(step)) == step
        if even and weights[-1] == 1.0 and parts[1:] == weights[1:] and not any(key.offset for key in keys):
            return step, weights[:-1], parts[0]
    return None


def by_keys(program: Program) -> tuple[tuple[Head | tuple[SharedKey, ...], ...], float]:
    """The heads, or keys that several share, nonzero multiples first; and the remaining linear term.

    A single group absorbs that term, since weights sum to one: a separate one loses digits (Mish at y = -15).
    """
    alike = grouped((head.multiples or number, head) for number, head in enumerate(program.heads))
    alone = len(alike) == 1 and program.heads[0].multiples is not None
    linear = program.linear if alone else 0.0
    groups = (_shared(each, linear) if len(each) > 1 or linear != 0.0 else each[0] for each in alike.values())
    return tuple(groups), program.linear - linear


def _shared(heads: list[Head], linear: float) -> tuple[SharedKey, ...]:
    multiples: dict[tuple[float, float], float] = {}
    for head in heads:
        own, *others = head.logits
        for other in others:
            multiples.setdefault(other, linear)
        multiples[own] = multiples.get(own, linear) + head.c
    keys = [SharedKey.of(slope, offset, multiple) for (slope, offset), multiple in multiples.items()]
    return tuple(sorted(keys, key=lambda key: key.part == 0.0))


# -- the nodes of one conversion --------------------------------------------------------------------------------------


def emit_local(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    return _Emitter(view, conversion).run()


class _Emitter:
    def __init__(self, view: GraphView, conversion: Conversion) -> None:
        self._conversion, self._double = conversion, conversion.double
        self._b = Builder.of(view, conversion)
        self._functions: list[onnx.FunctionProto] = []

    def run(self) -> Replacement:
        b, block, program = self._b, self._conversion.block, self._conversion.program
        query = b.read(block.gate, block.gate_type, "query")
        source = query if block.value == block.gate else b.read(block.value, block.value_type, "value")
        own = source if program.line is None else self._line(program.line, query)
        if program.powers is not None:
            result = self._powers(program.powers, query, own)
        elif program.heads:
            result = self._sum(program, query, own)
        else:
            result = b.mul(own, b.numbers("linear_factor", program.linear), "linear")
        if program.line is not None:
            if block.value == block.gate and len(program.heads) == 1:
                source = self._finite(program.heads[0], source, "gated_value", zeros=True)
            result = b.mul(source, b.renamed(result, "weight_of_value"), "gated")
        # Half precisions compute in float32, and some programs in float64; only the ends have the model's type.
        if block.elem_type != b.compute_type:
            result = b.node("Cast", [b.renamed(result, "wide_output")], "narrowed", to=int(block.elem_type))
        result.name = block.output
        return replacement(b, self._conversion, self._functions)

    def _line(self, line: Line, query: Tensor) -> Variable:
        nodes = [(0.0, line.end), *line.pairs, *([(0.5, line.middle)] if line.middle else [])]
        # The step divides the whole, so the sum of weights takes it as a factor, which is exact.
        weights = [line.step * weight for _, weight in nodes]
        given = self._constants("line_", step=-line.step, rates=[rate for rate, _ in nodes], weights=weights)
        inputs: dict[str, Tensor] = {"query": query, **given}
        name = f"NeuronLine_{2 * len(line.pairs) + 2 + bool(line.middle)}"
        made = self._attend("line/", line_of, name, inputs, pairs=len(line.pairs), middle=bool(line.middle))
        return self._b.renamed(made, "line")

    def _powers(self, powers: Powers, query: Tensor, own: Tensor) -> Variable:
        pairs, singles = powers.pairs, len(powers.parts) - 2 * powers.pairs
        step, base = powers.step if powers.step != 1.0 else None, powers.base or None
        given = self._constants("", parts=powers.parts, shifts=powers.shifts, step=step, base=base)
        inputs = {"query": query, "value": own, **given}
        name = f"NeuronPowers_{2 * singles + 4 * pairs + 3}"
        name = _named(name, **{str(pairs): pairs > 0}, step="step" in given, base="base" in given)
        return self._times(self._attend("", powers_of, name, inputs, singles=singles, pairs=pairs), powers.factor, "")

    def _sum(self, program: Program, query: Tensor, source: Tensor) -> Variable:
        groups, linear = by_keys(program)
        rest: list[Tensor] = [self._scaled(source, linear, 0.0, "linear")] if linear != 0.0 else []
        rest += [self._b.numbers("constant", program.constant)] if program.constant != 0.0 else []
        terms: list[Variable] = []
        for number, group in enumerate(groups):
            prefix = "" if len(groups) == 1 else f"{number}/"
            if isinstance(group, tuple):
                term = self._shared(prefix, group, query, source)
            else:
                plain = group_of(group)
                term = self._times(self._plain_head(prefix, plain.head, query, source), plain.factor, prefix)
            terms.append(self._b.renamed(term, f"{prefix}output"))
        return self._b.total([*terms, *rest], "sum", f"sum_{len(terms) + len(rest) - 1}")

    def _times(self, result: Variable, factor: float, prefix: str) -> Variable:
        if factor == 1.0:
            return result
        unscaled, number = self._b.renamed(result, f"{prefix}unscaled"), self._b.numbers(f"{prefix}factor", factor)
        return self._b.mul(unscaled, number, f"{prefix}scaled")

    def _plain_head(self, prefix: str, head: Head, query: Tensor, source: Tensor) -> Variable:
        plain = head.shifted(0.0, -head.gamma)  # softmax depends on differences only, so the self key needs no offset
        tokens = sorted(plain.bias_tokens, key=lambda token: token.slope)
        keys = [SharedKey.of(token.slope, token.offset, token.value, plain.largest_factored) for token in tokens]
        slopes, offsets, weights, parts = zip(*keys, strict=True)
        has_offsets = any(offsets)
        # In float64 a self value may be too large for a clipped logit to take all its weight.
        centred = has_offsets and not self._double and plain.beta == 0.0
        # Bias tokens compete only with self: clipped logits do not show which of two is larger.
        centred = centred and sorted(np.sign(slopes)) in ([-1], [1], [-1, 1])
        centred = centred and max(*weights, *map(abs, parts)) <= LARGEST_PART
        bounded = self._conversion.program.line is not None  # as every line is
        value = source if bounded else self._finite(plain, source, f"{prefix}finite_value")
        value = self._scaled(value, plain.c, plain.d, f"{prefix}self_value")
        inputs = {"query": query} | ({} if centred else {"key": self._b.numbers(f"{prefix}key", plain.beta)})
        inputs["value"] = value
        if plain.bias_tokens == (BiasToken(),):
            steep = abs(plain.beta) > _STEEP_SLOPE
            return self._attend(prefix, zero_bias, _named("NeuronAttention", steep=steep), inputs, steep=steep)
        silent = tuple(j for j in dict.fromkeys((0, len(keys) - 1)) if parts[j] == 0.0)
        valued, shifted = parts if len(silent) < len(keys) else None, offsets if has_offsets else None
        given = {"bias_key": slopes, "bias_weight": weights, "bias_part": valued, "bias_offset": shifted}
        inputs |= self._constants(prefix, **given)
        quiet = {"_".join(["silent", *map(str, silent)]): bool(silent)}
        name = _named(f"NeuronAttention_{len(keys)}", steep=has_offsets and not centred, centred=centred, **quiet)
        return self._attend(prefix, own_keys, name, inputs, bias_tokens=len(keys), silent=silent)

    def _finite(self, head: Head, source: Tensor, name: str, *, zeros: bool = False) -> Tensor:
        """Values, clipped where a steep bias token has all the weight, since other weights are not quite 0 there."""
        if not any(abs(token.offset) > FACTORED for token in head.bias_tokens):
            return source
        by_slope = sorted(head.bias_tokens, key=lambda token: token.slope)
        first, last = (token if token.value == 0.0 or not zeros else None for token in (by_slope[0], by_slope[-1]))
        low = -LARGEST_FLOAT32_QUERY if first is not None and first.slope < head.beta else -math.inf
        high = LARGEST_FLOAT32_QUERY if last is not None and last.slope > head.beta else math.inf
        return self._b.clipped(source, (low, high), name)

    def _shared(self, prefix: str, keys: Sequence[SharedKey], query: Tensor, source: Tensor) -> Variable:
        inputs: dict[str, Tensor] = {"query": query, "value": source}
        if (progression := progression_of(keys, self._b.dtype)) is not None:
            step, weights, part = progression
            inputs |= self._constants(prefix, weights=weights, step=step if step != 1.0 else None, part=part or None)
            count, steep = len(weights) + 1, abs(step) > _STEEP_SLOPE
            name = _named(f"NeuronProgression_{count}", step=step != 1.0, steep=steep, valued=part != 0.0)
            return self._attend(prefix, progression_over, name, inputs, keys=count, steep=steep)
        slopes, offsets, weights, parts = zip(*keys, strict=True)
        steep, own = any(offsets), sum(part != 0.0 for part in parts)
        inputs |= self._constants(prefix, keys=slopes, weights=weights, parts=parts, offsets=offsets if steep else None)
        name = _named(f"NeuronHeads_{own}_{len(keys)}", steep=steep)
        return self._attend(prefix, shared_keys, name, inputs, keys=len(keys), heads=own)

    def _constants(self, prefix: str, **given: ArrayLike | None) -> dict[str, Constant]:
        return {name: self._b.numbers(f"{prefix}{name}", each) for name, each in given.items() if each is not None}

    def _attend(self, prefix: str, spelling: Spelling, name: str, inputs: Inputs, **given: Any) -> Variable:
        if self._conversion.inline:
            # Several functions may follow one another, with the same names inside.
            return spelling(self._b.within(prefix.rstrip("/")), inputs, **given)
        name = _named(name, double=self._double)
        self._functions.append(function_of(spelling, name, tuple(inputs), self._b.opset, double=self._double, **given))
        return self._b.node(name, list(inputs.values()), f"{prefix}attention", domain=DOMAIN)

    def _scaled(self, tensor: Tensor, factor: float, offset: float, name: str) -> Tensor:
        b = self._b
        if factor == 0.0:
            return b.numbers(name, offset)
        scaled = tensor if factor == 1.0 else b.mul(tensor, b.numbers(f"{name}_factor", factor), name)
        return scaled if offset == 0.0 else b.add(scaled, b.numbers(f"{name}_offset", offset), f"{name}_shifted")
