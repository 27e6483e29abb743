"""Heads in form `local` as model-local functions, or the nodes of their bodies where heads are written out.

    `NeuronAttention`    Theorem 3: one bias token with key and value zero. With logits (q k, 0) the weight of self is
                         1 / (1 + exp(-q k)), and the value is divided by that sum directly.
    `NeuronAttention_m`  one head with m bias tokens that have keys and values of their own.
    `NeuronHeads_n_k`    n heads over the same k keys, every head's own key one of them, whose values are multiples of
                         `value`: the multiples are averaged first. A linear term is a multiple at every key.
    `NeuronProgression_k` the same, where the shares of the k keys are successive powers of one exponential.
    `NeuronPowers_k`     the same for symmetric keys, from partial fractions.
    `NeuronLine_n`       the line g as attention over n keys, from which gates are made.

A small offset of a logit (`passes.programs.head.FACTORED`) becomes a factor of the key's weight, e^(a y + b) =
e^b e^(a y), since the rounding error of a logit is proportional to its magnitude. Steep keys keep theirs (`_steep`).
The largest logit is subtracted first; without offsets it belongs to the smallest or the largest key. Where the self
logit is 0 and each side has at most one bias token, which is steep, it is logits relative to self that are clipped
(`centred`). No exponential of a steep key is smaller than the smallest normal number: onnxruntime's Exp takes ten times
as long for denormal results.
Operators are those of opset 7 (Mul, Add, Sub, Exp, Neg, Div, Reciprocal, Max, Clip) and Gather.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import onnx
from numpy.typing import DTypeLike

from passes.programs.head import LARGEST_QUERY
from passes.programs.line import HIGHEST, LOWEST
from passes.programs.powers import REACH
from rewriter.graph.surgeon import Fragment, Tensor, Variable

# Marks on the nodes that this pass emits: the domain of a function, or an entry in the metadata of a node.
DOMAIN = "attnonly"
"""Operator domain of the model-local functions, and prefix of the metadata keys."""

BLOCK_KEY = f"{DOMAIN}.block"
PROGRAM_KEY = f"{DOMAIN}.program"
PROJECTIONS_KEY = f"{DOMAIN}.projections"

LARGEST_SINGLE = 2.0**60
"""Queries are clipped to this in float32: beyond it, every weight is 0 or 1."""
_HIGHEST_LOGIT = 80.0
"""The largest logit relative to a steep head's own: 2^60 / e^80, what is left of the largest self value, is 2e-17."""
LARGEST_PART = 2.0**12
"""The largest weight or part of a bias token with which its product with e^80 is finite."""

_DOC_ONE = (
    "The activation evaluated as fused softmax attention over {self, bias token}, with W1 and W2 as stacked "
    "projections; as in FlashAttention the pattern is never stored. Each neuron's head has two keys: the token itself "
    "(logit query * key, value `value`) and the bias token, whose key and value are zero. Theorem 3 of Huben and "
    "Morris 2023, arXiv 2309.08593; the mask is structural. query and value: [..., heads], head dimension 1; key: a "
    "scalar."
)
_DOC_MANY = (
    "Softmax attention of each neuron's head over {k} keys: the token itself (logit query * key, value `value`) and "
    "{m} constant bias tokens (logit query * bias_key[j] + log(bias_weight[j]){offset}, value {parts}), keys in "
    "ascending order; the largest logit is subtracted first. query, value: [..., heads]; {arrays}: [{m}]."
)
_DOC_CENTRED = (
    "Softmax attention of each neuron's head over {k} keys: the token itself (logit 0, value `value`) and {m} constant "
    "bias tokens (logit query * bias_key[j] + log(bias_weight[j]){offset}, value {parts}), whose logits are clipped "
    "where all weight is on one side. query, value: [..., heads]; {arrays}: [{m}]."
)
_DOC_LINE = (
    "The line g = query as softmax attention over {n} keys: with x = -step * query, the shares e^(-r x) for r = 0, "
    "r = 1 and r = rates[1] ... rates[{last}], each with its mirror image 1 - r (none for 1/2), times the weights. The "
    "keys r = 0 and r = 1 have opposite values, the others are bias tokens of value 0. query: [..., heads]; step: a "
    "scalar; rates, weights: of the mirrored pairs, the pair of 0 and 1 first."
)
_DOC_POWERS = (
    "Softmax attention of each neuron's heads over the same {k} keys, with logits j * {step}query + log(w_j): their "
    "shares are powers of one exponential r. With z = r + 1/r and h = {h}, the weight of value is r + h and the total "
    "weight r + 1/r + 2 h. query, value: [..., heads]; parts, shifts: [{m}]{scalars}."
)
_DOC_PROGRESSION = (
    "Softmax attention of {n} heads of each neuron over the same {k} keys with logits j * {step}query + "
    "log(weights[j]), j = 0 ... {last}: their shares are powers of one exponential, and the last weight is 1. The "
    "first key has the value {first}, the others have value. query, value: [..., heads]; weights: [{last}]{scalars}."
)
_DOC_SHARED = (
    "Softmax attention of {n} heads of each neuron over the same {k} keys with logits query * keys[j] + log(weights[j])"
    "{offset}; key j is head j's own for j < {n}, with value parts[j] / weights[j] * value, and a bias token's "
    "otherwise. The sum of the heads is value times the mean of these multiples; the largest logit is subtracted "
    "first. query, value: [..., heads]; keys, weights, parts: [{k}]."
)


class Spelling(Hashable, Protocol):
    """A function, as its nodes."""

    @property
    def name(self) -> str:
        """Name of the model-local function."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Formal inputs of the function."""

    @property
    def doc(self) -> str:
        """The function's doc string."""

    def emit(self, fragment: Fragment, inputs: dict[str, Tensor], output: str, opset: int) -> None:
        """Add the nodes to `fragment`; `output` is the full name of the result."""


@dataclass(frozen=True)
class AnyKeys:
    """Heads with any keys.

    Attributes:
        keys: number of keys that a head attends to, including its own.
        own: for heads over shared keys, the number of heads; 0 for a single head with values of its own.
        zero_bias: one bias token with key and value zero: the short spelling of Theorem 3.
        steep: whether logits have offsets, or the only slope is steep.
        centred: whether the self logit is 0, in a steep head whose bias tokens never compete with each other.
        silent: those of the first and the last bias token whose value is 0, by number; they only take weight.
        double: whether the arithmetic is float64 (else float32).
    """

    keys: int
    own: int = 0
    zero_bias: bool = False
    steep: bool = False
    centred: bool = False
    silent: tuple[int, ...] = ()
    double: bool = False

    @property
    def name(self) -> str:
        """Name of the model-local function."""
        if self.zero_bias:
            name = "NeuronAttention"
        else:
            name = f"NeuronHeads_{self.own}_{self.keys}" if self.own else f"NeuronAttention_{self.keys - 1}"
        steep = ("_centred" if self.centred else "_steep") if self.steep else ""
        silent = "".join(f"_{j}" for j in self.silent)
        return name + steep + (f"_silent{silent}" if silent else "") + ("_double" if self.double else "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Formal inputs of the function."""
        if self.zero_bias:
            return ("query", "key", "value")
        if self.own:
            return ("query", "value", "keys", "weights", "parts", *(["offsets"] if self.steep else []))
        offset = ["bias_offset"] if self.steep else []
        own = () if self.centred else ("key",)
        part = [] if len(self.silent) == self.keys - 1 else ["bias_part"]
        return ("query", *own, "value", "bias_key", "bias_weight", *part, *offset)

    @staticmethod
    def silences(tokens: int) -> list[tuple[int, ...]]:
        """What `silent` may be for a number of bias tokens."""
        return [(), (0,)] if tokens == 1 else [(), (0,), (tokens - 1,), (0, tokens - 1)]

    @property
    def dtype(self) -> DTypeLike:
        """The numpy type of the arithmetic."""
        return np.float64 if self.double else np.float32

    @property
    def doc(self) -> str:
        """The function's doc string."""
        if self.zero_bias:
            return _DOC_ONE
        if self.own:
            return _DOC_SHARED.format(n=self.own, k=self.keys, offset=" + offsets[j]" if self.steep else "")
        text = _DOC_CENTRED if self.centred else _DOC_MANY
        others = "0 for " + " and ".join(f"j = {j}" for j in self.silent)
        parts = "bias_part[j] / bias_weight[j]" if "bias_part" in self.inputs else ""
        return text.format(
            k=self.keys,
            m=self.keys - 1,
            offset=" + bias_offset[j]" if self.steep else "",
            parts=", ".join(filter(None, [parts, others if self.silent else ""])),
            arrays=", ".join(name for name in ("bias_key", "bias_weight", "bias_part") if name in self.inputs),
        )

    def emit(self, fragment: Fragment, inputs: dict[str, Tensor], output: str, opset: int) -> None:
        """Add the nodes of the heads to `fragment`; `output` is the full name of the result."""
        if self.zero_bias:
            _emit_one(fragment, self, inputs, output, opset)
        else:
            _emit_keys(fragment, self, inputs, output, opset)


@dataclass(frozen=True)
class LineOf:
    """The line g as attention (`passes.programs.line`).

    Attributes:
        pairs: number of mirrored pairs of nodes.
        middle: whether there is a node 1/2.
        double: whether the arithmetic is float64 (else float32).
    """

    pairs: int
    middle: bool = False
    double: bool = False

    @property
    def name(self) -> str:
        """Name of the model-local function."""
        return f"NeuronLine_{2 * self.pairs + 2 + self.middle}" + ("_double" if self.double else "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Formal inputs of the function."""
        return ("query", "step", "rates", "weights")

    @property
    def doc(self) -> str:
        """The function's doc string."""
        return _DOC_LINE.format(n=2 * self.pairs + 2 + self.middle, last=self.pairs + self.middle)

    def emit(self, fragment: Fragment, inputs: dict[str, Tensor], output: str, opset: int) -> None:
        """Add the nodes to `fragment`; `output` is the full name of the result."""
        node, dtype = fragment.node, np.float64 if self.double else np.float32
        one = fragment.constant("self_share", np.ones((), dtype=dtype))
        score = node("Mul", [inputs["query"], inputs["step"]], "score")
        logit = clipped(fragment, score, (-HIGHEST, -LOWEST), "logit", dtype, opset)
        last = node("Exp", [logit], "last_share")
        both = node("Add", [last, one], "ends_share")
        total = node("Mul", [both, _row(fragment, inputs, "weights", 0)], "ends_weight")
        for j in range(1, self.pairs + self.middle + 1):
            near = node("Exp", [node("Mul", [logit, _row(fragment, inputs, "rates", j)], f"logit_{j}")], f"share_{j}")
            if j <= self.pairs:
                mirrored = node("Div", [last, near], f"mirrored_share_{j}")
                near = node("Add", [near, mirrored], f"shares_{j}")
            weight = node("Mul", [near, _row(fragment, inputs, "weights", j)], f"weight_{j}")
            total = node("Add", [total, weight], f"total_{j}")
        node("Div", [node("Sub", [one, last], "values"), total], "output", output=output)


@dataclass(frozen=True)
class PowersOf:
    """Heads with equally spaced keys (`passes.programs.powers`).

    Attributes:
        singles: number of fractions of one level.
        pairs: number of fractions of two levels.
        stepped: whether the step differs from 1.
        based: whether there is a base.
        double: whether the arithmetic is float64 (else float32).
    """

    singles: int
    pairs: int
    stepped: bool = True
    based: bool = True
    double: bool = False

    @property
    def keys(self) -> int:
        """Number of keys."""
        return 2 * (self.singles + 2 * self.pairs) + 3

    @property
    def name(self) -> str:
        """Name of the model-local function."""
        options = (("_step", self.stepped), ("_base", self.based), ("_double", self.double))
        paired = f"_{self.pairs}" if self.pairs else ""
        return f"NeuronPowers_{self.keys}{paired}" + "".join(name for name, given in options if given)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Formal inputs of the function."""
        return ("query", "value", "parts", "shifts", *(["step"] * self.stepped), *(["base"] * self.based))

    @property
    def doc(self) -> str:
        """The function's doc string."""
        terms = [f"parts[{j}] / (z + shifts[{j}])" for j in range(self.singles)]
        terms += [
            f"parts[{j}] / (z + shifts[{j}] + parts[{j + 1}] / (z + shifts[{j + 1}]))"
            for j in range(self.singles, self.singles + 2 * self.pairs, 2)
        ]
        return _DOC_POWERS.format(
            k=self.keys,
            m=self.singles + 2 * self.pairs,
            step="step * " if self.stepped else "",
            h=" + ".join([*["base"] * self.based, *terms]),
            scalars="".join(f"; {name}: a scalar" for name in self.inputs[4:]),
        )

    def emit(self, fragment: Fragment, inputs: dict[str, Tensor], output: str, opset: int) -> None:
        """Add the nodes to `fragment`; `output` is the full name of the result."""
        node, dtype = fragment.node, np.float64 if self.double else np.float32
        logit = node("Mul", [inputs["query"], inputs["step"]], "score") if self.stepped else inputs["query"]
        # On the other side nothing is clipped: where the inverse is infinite, the weight of value is 0.
        share = node("Exp", [clipped(fragment, logit, (-np.inf, REACH), "logit", dtype, opset)], "share")
        inverse = node("Reciprocal", [share], "inverse_share")
        z = node("Add", [share, inverse], "z")

        def fraction(j: int, above: Tensor) -> Variable:
            return node("Div", [_row(fragment, inputs, "parts", j), above], f"fraction_{j}")

        def level(j: int) -> Variable:
            return node("Add", [z, _row(fragment, inputs, "shifts", j)], f"level_{j}")

        terms: list[Tensor] = [inputs["base"]] if self.based else []
        terms += [fraction(j, level(j)) for j in range(self.singles)]
        for j in range(self.singles, self.singles + 2 * self.pairs, 2):
            terms.append(fraction(j, node("Add", [level(j), fraction(j + 1, level(j + 1))], f"pair_{j}")))
        shared = terms[0]
        for j, term in enumerate(terms[1:], start=1):
            shared = node("Add", [shared, term], f"shared_weight_{j}")
        own, other = (
            node("Add", [part, shared], name) for part, name in ((share, "own_weight"), (inverse, "other_weight"))
        )
        mean = node("Div", [own, node("Add", [own, other], "total_weight")], "mean")
        node("Mul", [inputs["value"], mean], "output", output=output)


@dataclass(frozen=True)
class ProgressionOf:
    """Heads over keys in arithmetic progression (`passes.programs.groups.Progression`).

    Attributes:
        keys: number of keys.
        stepped: whether the step differs from 1.
        steep: whether the step is steep.
        valued: whether the first key has a value other than 0.
        double: whether the arithmetic is float64 (else float32).
    """

    keys: int
    stepped: bool = True
    steep: bool = False
    valued: bool = False
    double: bool = False

    @property
    def name(self) -> str:
        """Name of the model-local function."""
        options = (
            ("_step", self.stepped),
            ("_steep", self.steep),
            ("_valued", self.valued),
            ("_double", self.double),
        )
        return f"NeuronProgression_{self.keys}" + "".join(name for name, given in options if given)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Formal inputs of the function."""
        return ("query", "value", "weights", *(["step"] * self.stepped), *(["part"] * self.valued))

    @property
    def doc(self) -> str:
        """The function's doc string."""
        return _DOC_PROGRESSION.format(
            n=self.keys - 1 + self.valued,
            k=self.keys,
            last=self.keys - 1,
            step="step * " if self.stepped else "",
            first="part / weights[0] * value" if self.valued else "0",
            scalars="".join(f"; {name}: a scalar" for name in self.inputs[3:]),
        )

    def emit(self, fragment: Fragment, inputs: dict[str, Tensor], output: str, opset: int) -> None:
        """Add the nodes to `fragment`; `output` is the full name of the result."""
        node, dtype = fragment.node, np.float64 if self.double else np.float32
        logit = node("Mul", [inputs["query"], inputs["step"]], "score") if self.stepped else inputs["query"]
        # The highest power is finite, and takes all the weight long before. Where the exponential is 0, key 0 has it.
        ends = _lowest(dtype) if self.steep else -np.inf, REACH / (self.keys - 1)
        share = node("Exp", [clipped(fragment, logit, ends, "logit", dtype, opset)], "share")
        others = share
        for j in reversed(range(1, self.keys - 1)):
            inner = node("Add", [others, _row(fragment, inputs, "weights", j)], f"weights_from_{j}")
            others = node("Mul", [inner, share], f"shares_from_{j}")
        total = node("Add", [others, _row(fragment, inputs, "weights", 0)], "total_weight")
        weighted = node("Add", [others, inputs["part"]], "weighted_sum") if self.valued else others
        node("Mul", [inputs["value"], node("Div", [weighted, total], "mean")], "output", output=output)


@cache
def function_of(spelling: Spelling, opset: int) -> onnx.FunctionProto:
    """The spelling as a model-local function of domain `attnonly`; it is cached, so callers must not change it."""
    body = Fragment("")
    spelling.emit(body, {name: body.tensor(name) for name in spelling.inputs}, "output", opset)
    return body.function(DOMAIN, spelling.name, spelling.inputs, "output", opset=opset, doc=spelling.doc)


def _emit_one(fragment: Fragment, spelling: AnyKeys, inputs: dict[str, Tensor], output: str, opset: int) -> None:
    # No maximum is subtracted: where exp(-logit) overflows, the quotient is 0, as it should be.
    logit: Tensor = fragment.node("Mul", [inputs["query"], inputs["key"]], "logit")
    logit = fragment.node("Neg", [logit], "bias_logit")
    if spelling.steep:
        logit = _normal(fragment, logit, "bias", spelling.dtype, opset)
    bias_weight = fragment.node("Exp", [logit], "bias_weight")
    one = fragment.constant("self_weight", np.ones((), dtype=spelling.dtype))
    total = fragment.node("Add", [one, bias_weight], "total_weight")
    fragment.node("Div", [inputs["value"], total], "output", output=output)


def _emit_keys(fragment: Fragment, spelling: AnyKeys, inputs: dict[str, Tensor], output: str, opset: int) -> None:
    """A head's own key and its bias tokens; or, where `own` is not 0, keys that heads share, whose mean is taken."""
    dtype, shared, steep = spelling.dtype, spelling.own > 0, spelling.steep
    count = spelling.keys if shared else spelling.keys - 1
    names = [f"key_{j}" if shared else f"bias_{j}" for j in range(count)]
    slope, weight, part, offset = (
        ("keys", "weights", "parts", "offsets") if shared else ("bias_key", "bias_weight", "bias_part", "bias_offset")
    )

    def logit_of(query: Tensor, j: int) -> Variable:
        score = fragment.node("Mul", [query, _row(fragment, inputs, slope, j)], f"{names[j]}_score")
        return fragment.node("Add", [score, _row(fragment, inputs, offset, j)], f"{names[j]}_logit") if steep else score

    shares: list[Tensor] = []
    weights: list[Tensor] = []
    parts: list[Tensor] = []
    if spelling.centred:
        # Infinite logits are clipped: unlike their differences, they are numbers.
        weights, parts = [fragment.constant("self_share", np.ones((), dtype=dtype))], [inputs["value"]]
        for j, name in enumerate(names):
            ends = _lowest(dtype), _HIGHEST_LOGIT
            near = clipped(fragment, logit_of(inputs["query"], j), ends, f"{name}_clipped", dtype, opset)
            shares.append(fragment.node("Exp", [near], f"{name}_share"))
    else:
        query = bounded(fragment, inputs["query"], "finite_query", dtype, opset)
        own = [] if shared else [fragment.node("Mul", [query, inputs["key"]], "self_logit")]
        logits = [*own, *(logit_of(query, j) for j in range(count))]
        # Without offsets the largest logit is that of the smallest key, the largest key, or self. Keys are sorted.
        every = shared or steep or count == 1
        top = fragment.node("Max", logits if every else [logits[0], logits[1], logits[-1]], "largest_logit")
        for name, logit in zip([*(["self"] * len(own)), *names], logits, strict=True):
            shifted: Tensor = fragment.node("Sub", [logit, top], f"{name}_shifted")
            if steep and not shared:
                shifted = _normal(fragment, shifted, name, dtype, opset)
            shares.append(fragment.node("Exp", [shifted], f"{name}_share"))
        if not shared:
            weights = [shares.pop(0)]
            parts = [fragment.node("Mul", [weights[0], inputs["value"]], "self_part")]
    for j, (name, share) in enumerate(zip(names, shares, strict=True)):
        weights.append(fragment.node("Mul", [share, _row(fragment, inputs, weight, j)], f"{name}_weight"))
        if j < spelling.own if shared else j not in spelling.silent:
            parts.append(fragment.node("Mul", [share, _row(fragment, inputs, part, j)], f"{name}_part"))
    total = _sum(fragment, weights, "total_weight")
    weighted = _sum(fragment, parts, "weighted_sum")
    if shared:
        mean = fragment.node("Div", [weighted, total], "mean")
        fragment.node("Mul", [inputs["value"], mean], "output", output=output)
    else:
        fragment.node("Div", [weighted, total], "output", output=output)


def _sum(fragment: Fragment, terms: Sequence[Tensor], name: str) -> Tensor:
    # One addition after another: onnxruntime's CPU kernel of Sum runs on one thread and copies, so that a sum of three
    # takes three times as long as two additions.
    total = terms[0]
    for number, term in enumerate(terms[1:], start=1):
        total = fragment.node("Add", [total, term], f"{name}_{number}" if term is not terms[-1] else name)
    return total


def _row(fragment: Fragment, inputs: dict[str, Tensor], name: str, j: int) -> Variable:
    """Entry j of a constant input."""
    index = fragment.constant(f"{name}_index_{j}", np.asarray(j, dtype=np.int64))
    return fragment.node("Gather", [inputs[name], index], f"{name}_{j}", axis=0)


def _lowest(dtype: DTypeLike) -> float:
    """The smallest logit of steep keys: its exponential is a normal number, and negligible beside 1."""
    return -700.0 if np.dtype(dtype) == np.float64 else -87.0


def _normal(fragment: Fragment, logit: Tensor, name: str, dtype: DTypeLike, opset: int) -> Variable:
    """A logit whose exponential is a normal number."""
    return clipped(fragment, logit, (_lowest(dtype), LARGEST_SINGLE), f"{name}_clipped", dtype, opset)


def bounded(fragment: Fragment, query: Tensor, name: str, dtype: DTypeLike, opset: int) -> Variable:
    """A query clipped to +-2^60 (float64: 2^500), far beyond the point where weights are 0 or 1.

    No logit is infinite then: the difference of two infinite logits would be NaN.
    """
    limit = LARGEST_QUERY if np.dtype(dtype) == np.float64 else LARGEST_SINGLE
    return clipped(fragment, query, (-limit, limit), name, dtype, opset)


def clipped(
    fragment: Fragment, tensor: Tensor, ends: tuple[float, float], name: str, dtype: DTypeLike, opset: int
) -> Variable:
    """The tensor clipped to two numbers."""
    if opset < 11:  # the bounds of Clip were attributes
        return fragment.node("Clip", [tensor], name, min=ends[0], max=ends[1])
    bounds = [
        fragment.constant(f"{end}_{name}", np.asarray(value, dtype=dtype))
        for end, value in zip(("lowest", "highest"), ends, strict=True)
    ]
    return fragment.node("Clip", [tensor, *bounds], name)
