"""Whether two models compute the same function: both are evaluated in finite fields, at several sizes.

A's activations that became heads in B are replaced by what B computes there (`rewriter.proof.values.heads`); the rest
must have the same values, at every point: a size, a random prime, random inputs, and a random key of the oracles.

Constants are first what their bits say. Where that does not decide, they are read as what tools round: scalars as
sqrt(2) or 1/3 (`snaps`), arithmetic on constants as that of the reals, constants that a tool folded in float32 as the
exact product (`rewriter.proof.values.folds`). Each of these readings is reported.

What values do not show is looked at too: types in which arithmetic is less exact, and blocks that are claimed to be
replaced and are not.
"""

import math
import secrets
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array, grouped
from rewriter.errors import UsageError
from rewriter.evaluate.arithmetic import Field, Floats, Modulus, Product, Unsupported, Value, content, is_float
from rewriter.evaluate.evaluator import Choice, Evaluator, Program, in_step
from rewriter.evaluate.moves import SAME_NUMBERS
from rewriter.evaluate.scalar import CHOOSING, SMOOTH
from rewriter.evaluate.table import MOVES
from rewriter.files.load import LoadedModel
from rewriter.graph.edit import LOOSE_INITIALIZERS
from rewriter.graph.types import FLOATS, TensorType, elem_name, type_of
from rewriter.graph.view import SIZES, GraphView, Place
from rewriter.graph.walk import iter_nodes, iter_tensors, reached
from rewriter.inputs.cases import Case, Maker, Setting
from rewriter.proof.accepted import SizeSearch
from rewriter.proof.certificate.expressions import listing, ordered
from rewriter.proof.records import UNCLAIMED, Certificate, CertifiedRegion, Claim, Claimed, Refusal
from rewriter.proof.rule import magnitude, misplaced, norm, relative_error
from rewriter.proof.values.departure import Departure, departure, inputs_of, isolated
from rewriter.proof.values.folds import LAST_PLACES, Fold, folded, products
from rewriter.proof.values.heads import LAYERS, SMALL, Regions, distance, distance_up_to, linear_leaf, proposals
from rewriter.proof.values.prints import Fingerprints, Signs, same_value
from rewriter.proof.values.uniform import Anchors, EqualTensors
from rewriter.proof.values.walk import Kept, Region, wide

SETTINGS = ((2, 5, 3), (1, 7, 2), (1, 61, 0), (1, 1, 4), (1, 1, 0))
"""Batch, tokens and past tokens that are tried: all different, one token, a length beyond buckets of relative
positions."""
_BRIEF = ((10, 3, 4), (1, 4, 0)), ((2, 3, 4), (1, 4, 0))
"""What is tried of a model that this tool rewrote, with small inputs or large ones, unless sizes turn out to matter."""
_MOST_INPUTS, _LONGEST, _MOST_ENTRIES = 2**16, 61, 2**22
"""Entries of an input that is small; the longest of these sizes; and entries of the largest tensor at a longer one,
which reads a table whole."""
_ROUNDS, _MOST_ROUNDS, _SMALL_MODEL = 2, 40, 2**26
"""Primes that are drawn; at most, where signs decide; and the bytes of a model up to which all sizes are then tried."""
_MANY_ROUNDS = 16  # where both models take signs of multiples of each other: a sign is a coin, which may decide
_FEW_ENTRIES = 32  # of a mask, say, that may hide what differs; drawn in as many rounds
_COINS = 20  # signs with which each result of a decision must have been drawn, in all rounds
_MOST_APART = 4  # pairs of tensors that are taken apart one by one
_MOST_TURNED = 2**4  # sets of comparisons of integers that are given the result that they never had
_MIXED = 12  # how often each is: at first all of their entries, then random ones, of which few differ
_COIN = "one model decides by the sign of what the other does not"
_GROSS, _NEAR_ZERO, _COARSE = 0.1, 1e-3, 1e-3
"""The share of an output's norm that float64 may be off by, that of its largest number below which numbers are
measured on that, and the bound of an activation that may allow more."""
_DRAWS = 4  # how often real inputs of a small model are drawn, at all sizes and then at the first
_LOWEST = {False: -(2.0**59), True: -(2.0**98)}
"""Beyond it are masks, by whether the model is in float64; offsets of steep heads are less, 2^97 in float64."""
_TYPES_TO = ("to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision")
"""Attributes that name an element type."""
_BYTES = -4  # accuracy_level 4, which rounds to 8 bits, beside element types
_CHANCE = 2.0**-9.3  # of one prime: docs/proof.md derives it
_ISOLATED = 2**22  # entries of all tensors up to which differences are isolated, in many evaluations


@dataclass(frozen=True)
class Reading:
    """How constants are read."""

    snaps: bool = False  # scalars as the numbers that they are rounded from
    in_reals: bool = False  # arithmetic on constants as that of the reals, not of their type
    folds: bool = False  # constants that a tool folded as the exact product
    low: float = -200.0  # numbers down to this are numbers, beyond it masks; heads have offsets far below the default

    def field(self, modulus: Modulus, key: bytes, products: Sequence[Product] = ()) -> Field:
        return Field(modulus, key, snaps=self.snaps, products=products, low=self.low)


Point = tuple[Modulus, bytes, Mapping[str, Array]]  # a prime, a key and inputs


def at_random(cases: Sequence[Case]) -> list[Point]:
    """A prime for some inputs, and a key for each."""
    modulus = Modulus()
    return [(modulus, secrets.token_bytes(16), case.feeds) for case in cases]


def _readings(low: float) -> Sequence[Reading]:
    return (
        Reading(), Reading(snaps=True), Reading(in_reals=True), Reading(snaps=True, in_reals=True),
        Reading(snaps=True, folds=True), Reading(snaps=True, in_reals=True, folds=True),
        Reading(low=low), Reading(snaps=True, low=low), Reading(in_reals=True, low=low),
    )  # fmt: skip


def _unsettled(runs: Sequence[Kept], others: Sequence[Kept], *, sizes: bool = False) -> dict[str, frozenset[str]]:
    """Comparisons of inputs' integers that the drawn inputs do not settle, with the same ones of the other model.

    They always had the same result, their sides were never equal, or few were drawn. With `sizes`, those of sizes are
    included if they had one result.
    """

    def made(each: Sequence[Kept]) -> dict[str, list[Choice | None]]:
        return {name: [run.choices.get(name) for run in each] for one in each for name in one.choices}

    def key(choices: Sequence[Choice | None]) -> object:
        met = any(each and each.met for each in choices)  # then the results say what equal numbers are like
        return [each and (each.apart, 0 if met else each.equal) for each in choices]

    found, theirs = dict[str, frozenset[str]](), made(others)
    for name, own in made(runs).items():
        known = [each for each in own if each]
        decided, met = all(each.decided for each in known), any(each.met for each in known)
        few = decided and sum(each.compared for each in known) < _COINS
        one = len(frozenset().union(*(each.results for each in known))) < 2
        if (decided and not met) or few or ((decided or sizes) and one):
            found[name] = frozenset(other for other, each in theirs.items() if key(each) == key(own))
    return found


class Pair:
    """Two models, and what is known of them so far."""

    def __init__(
        self,
        a: LoadedModel,
        b: LoadedModel,
        *,
        claims: Mapping[Place, Claimed] | None = None,  # by tensor of A, what its replacement is held to
        blocks: Sequence[Claim] = (),  # what was replaced. Each must have been, by heads
        limit: float = UNCLAIMED,  # of all other activations
        dims: Mapping[str, int] | None = None,  # sizes of symbolic dimensions, where they are not free
        ranks: Mapping[str, int] | None = None,  # of inputs, where the file declares none
        longest: int | None = None,  # the longest sequence that B takes; None for any
        isolate: bool = False,  # distinguish several differences of small models
    ) -> None:
        """Raises Unsupported as `Program`, and where inputs or outputs of A are missing in B; UsageError as `Maker`."""
        self._original, self.a = a, Program(a, other=b.proto)
        self.b = Program(b, twin=self.a)
        self._any_length = Maker(a.proto, dims=dims, views=[*a.inlined.views.values()], ranks=ranks)
        self._most, self._isolate = longest, isolate
        self._maker = self._any_length.changed(most=longest)
        self._large = max(a.size, b.size) > _SMALL_MODEL
        self._usual: Sequence[Setting] = SETTINGS[::2] if self._large else SETTINGS
        shapes, _ = self._maker.sizes(_BRIEF[0][0])
        brief = _BRIEF[self._large or max(map(math.prod, shapes.values()), default=0) > _MOST_INPUTS]
        self._settings: Sequence[Setting] = brief if claims and not longest else self._usual
        self.points = self._maker.cases(self._settings)  # at which A can be evaluated
        self.outputs = [value.name for value in a.proto.graph.output]
        outputs = (value.type.tensor_type.elem_type for value in a.proto.graph.output)
        self._lowest = _LOWEST[onnx.TensorProto.DOUBLE in outputs]
        self._readings = _readings(self._lowest)
        self.cover: dict[bytes, Array] = {}  # which entries of constant tables were read
        self._claims, self._limit = claims or {}, limit
        self._heads: dict[Reading, Regions] = {}
        self._partly: dict[str, tuple[int, ...]] = {}
        self._reason, self._refuted = "", ""
        self._snapped = set[str]()  # constants of a reading that were not read by their bits
        self._unproved = ""  # why values that were the same at all points proved nothing
        self._signs: tuple[Signs, Signs]  # of a reading
        self._alike: EqualTensors | None
        self._scaled = False  # whether a sign was taken of another multiple, which is a coin of the prime
        self._replaced, self._about = blocks, ""  # an activation of A that the reason is about
        self.unable = False  # whether an evaluation could not be carried out
        self._loose = True  # whether A takes masks, positions and lengths that do not follow from sizes
        self._last: tuple[Sequence[Fingerprints], Sequence[Fingerprints]] = (), ()  # of the first round
        self._differ: list[tuple[Reading, Case]] = []
        theirs = {value.name for value in b.proto.graph.output}
        if (missing := next((each for each in self.outputs if each not in theirs), None)) is not None:
            raise Unsupported(f"the second model has no output '{missing}' (see --map)")
        inputs = [value.name for value in b.proto.graph.input]
        read = [{name for node in iter_nodes(each.graph.node) for name in node.input} for each in (self.a, self.b)]
        # What is a constant of A is one of B too, even if B's newer IR version lets callers replace it.
        self.b.overridable &= self.a.overridable
        defaults = [each.weights(each.graph) for each in (self.a, self.b)]
        self._others = dict[str, Array]()  # numbers for integers that have a default
        for default in sorted(self.a.overridable):
            x, y = (each.get(default) for each in defaults)
            if x is not None and x.dtype.kind in "biu":
                self._others[default] = ~x if x.dtype.kind == "b" else x + x.dtype.type(1)
            if x is not None and y is not None and (x.shape != y.shape or content(x) != content(y)):
                raise Unsupported(f"the input '{default}' has another default in the second model")
            if default not in inputs or (default in read[0] and default not in read[1]):
                raise Unsupported(f"the second model does not read the input '{default}', which has a default")
        alone = (name for name, x in self.points[0].feeds.items() if name in read[1] - read[0] and not is_float(x))
        if (used := next(alone, None)) is not None:  # which numbers it may be is not known
            raise Unsupported(f"the second model reads the integers '{used}', which the first does not")
        given = {*self.points[0].feeds, *(tensor.name for tensor in b.proto.graph.initializer)}
        if (new := next((each for each in inputs if each not in given), None)) is not None:
            raise Unsupported(f"the second model has an input '{new}' that the first has not (see --map)")

    def certificate(self) -> Certificate:
        """Whether B computes the outputs of A at the sizes tried, and at every size."""
        found = self.compared()
        if self.unable and not found.certified and self.resized():
            found = self.compared()
        same = self.unable and not found.certified and not Anchors(self.a, self.b).departs()
        return Certificate(certified=True) if same else found

    def resized(self) -> bool:
        """Whether A can be evaluated at sizes that it hides, such as those of its images; then take them."""

        def refusals(cases: Sequence[Case]) -> list[str]:
            return in_step([Fingerprints(self.a, Field(Modulus(), b"sizes"), case.feeds) for case in cases])

        found = SizeSearch(self._maker, refusals).found() if any(refusals(self.points)) else []
        for sizes in found[:1]:
            self._maker = self._maker.changed(kinds=sizes)
            self.points = self._maker.cases(self._settings[:2])
            self._heads, self.unable = {}, False
        return bool(found)

    def compared(self) -> Certificate:
        """Try the readings of constants in turn, each at one small size before all of them."""
        named = ""  # why an activation was not bounded
        fixed = self.points[0].feeds.values() if len(self.points) == 1 else ()  # one size
        few = any(np.ndim(x) > 1 and 1 < np.size(x) < _FEW_ENTRIES and not is_float(x) for x in fixed)
        for reading in self._readings:
            if reading.folds and not self.folds:
                continue
            if self._refuted and (reading.snaps or not reading.in_reals):
                continue  # claims take numbers that nodes compute for exact, and others as their bits say
            if reading != self._readings[0] and not self._round(reading, [self.points[:1]]):
                continue
            # One size would not show which axes vary.
            self._signs, self._alike, self._scaled = (Signs(self.a), Signs(self.b)), None, False
            rounds, at_once = 0, _ROUNDS if self._large else 1
            self._last, self._snapped = ((), ()), set()
            while (
                (more := rounds < (_MANY_ROUNDS if self._scaled or few else _ROUNDS) or self._few_signs())
                and rounds < _MOST_ROUNDS
                and self._next(reading, rounds, at_once)
            ):
                rounds += at_once
            if more and rounds >= _MOST_ROUNDS:
                if self._settings in _BRIEF:
                    return self._compared_at_all_sizes()
                self._reason = named = "signs of data decide together, in more ways than can be tried"
                break
            if not more and (regions := self._bounded(reading)) is not None:
                found = self._equal(reading, regions)
                if isinstance(found, Certificate):
                    return found
                named = found
                break
            if not more or (self._reason == _COIN and self._bounded(reading) is None):
                named = self._reason
        # Another reading's difference would mislead. Where a model departs may say what the reason is about.
        departing = self._departure() if not self._unproved else None
        path, original = self._found(self._refuted or self._about)[1]
        reason = named or self._unproved or self._reason
        why = Refusal(original=original, reason=reason, refuted=bool(self._refuted), path=path)
        return Certificate(certified=False, refusals=(why,), departure=departing)

    def _compared_at_all_sizes(self) -> Certificate:
        self._settings = self._usual
        self.points = self._maker.cases(self._settings)
        return self.compared()

    def _few_signs(self) -> bool:
        """Whether a result of a decision in either model was drawn with too few signs to have been seen."""
        if all(each.fewest() >= _COINS for each in self._signs):
            return False
        self._alike = self._alike or EqualTensors(self.a, self.b, self._last)
        return min(self._signs[0].fewest(*self._alike.of_a), self._signs[1].fewest(*self._alike.of_b)) < _COINS

    def _takes_more(self, reading: Reading) -> str:
        """Why B takes more tokens than it says; empty where it fails at more."""
        if self._most is None or self._most >= _LONGEST or self._maker.kinds:
            return ""
        further = self._any_length.case((1, self._most + 1, 0))
        if not self._is_new(further):
            return ""
        _, (failed,) = self._evaluated(self.b, at_random([further]), reading)
        return "" if failed else f"it takes more than {self._most} tokens, which it has positions for"

    def _next(self, reading: Reading, number: int, count: int) -> bool:
        """The next rounds, as `_round`: in every other one, integers are any valid ones, where A takes these."""
        draws = [self._drawn(number + k, loose=self._loose and (number + k) % 2 == 1) for k in range(count)]
        found = self._round(reading, draws)
        if not found and self._loose and self.unable:
            self._loose, self._others, self.unable = bool(self._others), {}, False
            return self._next(reading, number, count)
        return found

    def _drawn(self, number: int, *, loose: bool = False) -> list[Case]:
        """The sizes with other values of integers, unlike those of floats; one in further rounds of a large model."""
        maker = self._maker.changed(seed=secrets.randbelow(2**32), loose=loose)
        sizes = {each.name for each in self.points}
        drawn = maker.cases(self._settings, number)
        taken = [each for each in drawn if each.name in sizes]
        brief = 0 < number < _ROUNDS and self._settings == _BRIEF[0]  # further rounds are for signs
        most = 1 if brief or (self._large and number >= _ROUNDS) else None
        if loose:
            return [replace(each, feeds={**each.feeds, **self._others}) for each in taken[:most]]
        names = {each.name for each in drawn}
        self.points = taken + [each for each in self.points if each.name not in names]
        if len(self.points) == 1 and not number:
            return self.points * 2  # what is the same with two keys is a constant
        return self.points[:most]

    def _departure(self) -> Departure | None:
        """Where B departs, in the reading of constants in which the most tensors have partners."""
        failed = [each for each in self._differ if each[0].snaps] or self._differ
        return max((self._departing(*each) for each in failed), key=lambda each: each.matched, default=None)

    def _departing(self, reading: Reading, case: Case) -> Departure:
        point = at_random([case])

        def evaluate(program: Program, replaced: Mapping[str, Value], **options: Any) -> Kept:
            return self._evaluated(program, point, reading, printing=True, replaced=replaced, **options)[0][0]

        a, b = evaluate(self.a, {}), evaluate(self.b, {})

        def same(name: str) -> bool:
            return name not in a.prints or name not in b.prints or a.prints[name].exact == b.prints[name].exact

        wrong = (name for (name,), reads, makes in self._blocks if all(map(same, reads)) and not all(map(same, makes)))
        self._about = next(wrong, self._about)
        if not self._isolate or sum(map(math.prod, (*a.shapes.values(), *b.shapes.values()))) > _ISOLATED:
            return departure(a, b)
        return isolated(lambda values: evaluate(self.a, values), evaluate(self.b, {}, keep=None))

    def _equal(self, reading: Reading, regions: tuple[CertifiedRegion, ...]) -> Certificate | str:
        """The certificate, where both models had the same values in all rounds; or why these prove nothing."""
        coarse = any(each.bound.bound > _COARSE for each in regions)
        if far := self._takes_more(reading) or ("" if coarse else self._far_in_floats()):
            return far
        anchors = Anchors(self.a, self.b, self._last)
        departs = anchors.departs()
        while not departs and (apart := self._apart(reading, anchors)):
            first = 1 if len(anchors.apart) < _MOST_APART else len(apart)  # others may follow from it
            anchors = Anchors(self.a, self.b, self._last, [*anchors.apart, *apart[:first]])
            departs = anchors.departs()
        tried_only, drawn = self._one_size() or departs, anchors.drawn() if departs else {}
        if tried_only and self._settings in _BRIEF:
            return self._compared_at_all_sizes()
        if odd := next((name for name, kind in drawn.items() if kind not in SMOOTH.union(CHOOSING)), ""):
            return f"'{odd}' is computed from integers of inputs, and the other model has no such tensor"
        kept = {key: known for runs in self._last for each in runs for key, known in each.kept.items()}
        several = next((names for names in grouped(kept.values()).values() if len(names) > 1), [])
        if departs and several:
            return f"inputs choose what is read of '{several[0]}' and '{several[1]}', which may have changed places"
        partly = tuple(f"{name} {list(shape)}" for name, shape in self._partly.items())
        return Certificate(
            certified=True,
            sizes=tuple(each.name for each in self.points) if tried_only or partly else (),
            bits=math.floor(-math.log2(len(self._readings) * _CHANCE**_ROUNDS)),
            rounded=tuple(sorted(self._snapped)),
            folded=tuple(each.spelling for each in self.folds.values()) if reading.folds else (),
            tried_only=tried_only,
            partly=partly,
            drawn=tuple(drawn),
            regions=regions,
        )

    def _apart(self, reading: Reading, anchors: Anchors) -> list[tuple[str, str]]:
        """Pairs that are equal only for the values that their operands have at these sizes.

        At other sizes they may be any: `x` and `Where(tokens > 100, -x, x)`. Therefore they are drawn at random.
        """
        if not anchors.pairs:
            return []
        smallest = min(zip(*self._last, strict=True), key=lambda runs: runs[0].largest)
        points = [(Modulus(), secrets.token_bytes(16), smallest[0].feeds) for _ in range(_ROUNDS)]
        heads, made = self._heads.get(reading, Regions()), list[list[Kept]]()
        free = anchors.leaves.difference(anchors.a.ids.get(name) for name in heads.cones - heads.regions.keys())
        for place, (side, run) in enumerate(zip((anchors.a, anchors.b), smallest, strict=True)):
            leaves = {name: number for name, number in side.ids.items() if number in free}
            shapes = {name: run.shapes[name] for name in leaves if name in run.data and name not in run.marked}
            drawn = {name: (leaves[name], np.arange(math.prod(each)).reshape(each)) for name, each in shapes.items()}
            wanted = [str(pair[place]) for pair in anchors.pairs if place or not (pair[2] and pair[0] in drawn)]
            runs, failed = self._evaluated(side.program, points, reading, drawn=drawn, wanted=wanted)
            if any(failed):
                return [pair[:2] for pair in anchors.pairs]
            made.append(runs)

        def same(a: Kept, b: Kept, ours: str, theirs: str, behind: bool) -> bool:
            known = (a.replaced.get(ours) if behind else None) or a.wanted.get(ours)
            return known is not None and same_value(a.field, known, b.wanted[theirs])

        every = [*zip(*made, strict=True)]
        return [pair[:2] for pair in anchors.pairs if not all(same(a, b, *pair) for a, b in every)]

    def _same(self, reading: Reading, draws: Sequence[Sequence[Case]]) -> tuple[list[Kept], list[Kept]] | None:
        """Evaluations of both models at the points that A takes, a prime for each draw; None where outputs differ."""
        cases = [case for each in draws for case in each]
        every = [point for each in draws for point in at_random(each)]
        small, whole = list[Point](), range(0)
        if self._claims and reading not in self._heads:
            if self._maker.branches or (self._large and self._settings not in _BRIEF):
                small = at_random(self._maker.cases(SMALL[: 1 + self._maker.branches]))
            whole = range(len(every), len(every) + len(small)) if small else range(1)
        made, lost = self._evaluated(self.b, every + small, reading, whole=whole)
        if whole:
            self._read_heads(reading, [made[place] for place in whole])
            made = made[: len(every)]  # what the others keep is large
            made[0].values.maps[0].clear()
        while True:
            ours, failed = self._evaluated(self.a, every, reading)
            if all(failed):
                self.unable, self._reason = True, f"the first model cannot be evaluated: {failed[0]}"
                return None
            refused = [case for case, why in zip(cases, failed, strict=True) if why]
            if any(case not in self.points for case in refused):
                self.unable = True  # integers that are drawn apart from sizes
                return None
            self.points = [case for case in self.points if case not in refused]  # sizes that it takes
            kept = [place for place, why in enumerate(failed) if not why]
            ours, theirs = [ours[k] for k in kept], [made[k] for k in kept]
            if why := next((lost[k] for k in kept if lost[k]), ""):
                self.unable, self._reason = True, f"the second model cannot be evaluated: {why}"
                return None
            pairs = zip(kept, map(self._differing, ours, theirs), strict=True)
            case, differing = next(((cases[k], names) for k, names in pairs if names), (None, []))
            if case is None:
                return ours, theirs
            if reading in self._heads or not self._read_heads(reading).regions:
                self._differ.append((reading, case))
                # Claimed blocks first: what is scaled in front of a softmax counts as an activation too.
                unread = self._heads[reading].failures.items()
                failures = dict(sorted(unread, key=lambda named: self._found(named[0])[1] not in self._claims))
                self._about = self._about or next(iter(failures), "")
                told = [f"what became of '{name}' there was not read: {text}" for name, text in failures.items()]
                self._reason = "; ".join([f"output '{differing[0]}' has other values", *told[:1]])
                return None

    def _round(self, reading: Reading, draws: Sequence[Sequence[Case]]) -> bool:
        """Whether both models have the same values, and these prove it; constants that were snapped are noted."""
        if (same := self._same(reading, draws)) is None:
            return False
        ours, theirs = same
        near = next((node.output[0] for run in ours + theirs for node, noted in run.noted if noted.near), "")
        heads = self._read_heads(reading) if near and reading.low > self._lowest else None
        if heads is not None and not (heads.regions or heads.masks):
            found = self._round(replace(reading, low=self._lowest), draws)  # what may be exceeded is a number
            if not found and len(draws[0]) >= len(self.points):
                why = f"'{near}' masks by a number that scores may exceed, unlike the other model"
                self._unproved = self._unproved or why
            return found
        self._partly = self._read_in_part(ours, theirs)
        further = self._longer(theirs) if self._partly and len(ours) > 1 else None
        if further is not None:
            self.points.append(further)
            return self._round(reading, [[*each, further] for each in draws])
        if not self._last[0]:
            self._last = ours, theirs
        self._signs[0].add(ours)
        self._signs[1].add(theirs)
        # What integers decide is looked at where they are drawn apart from sizes, if they ever are.
        settling = not (self._loose and all(case in self.points for each in draws for case in each))
        unfit = (
            self._unfit(reading, ours, theirs)
            or self._decided_otherwise(reading, ours, theirs)
            or (self._never_compared(reading, ours, theirs) if settling else "")
        )
        self._reason = unfit or self._reason
        if len(draws[0]) >= len(self.points) or draws[0][0] not in self.points:
            self._unproved = self._unproved or unfit
        snapped = (each.field.snapped.items() for each in (*ours, *theirs))
        self._snapped.update(f"{value:.9g} = {text}" for each in snapped for value, text in each)
        return not unfit

    def _far_in_floats(self) -> str:
        """What is grossly different in float64, at real inputs: no prime divides it, and nothing is undefined there."""
        draws = 1 if self._settings == _BRIEF[0] else _DRAWS  # which has many sequences
        cases = self.points[:1] if self._large else self._drawn(0) + [self._drawn(k)[0] for k in range(1, draws)]
        runs = [[Evaluator(each, Floats(by_kernels=True), case.feeds) for case in cases] for each in (self.a, self.b)]
        if any(why for each in runs for why in in_step(each)):
            return ""  # an operator without a float64 form
        made = [[run.outputs() for run in each] for each in runs]
        for name in self.outputs:
            pairs = [(x[name], y[name]) for x, y in zip(*made, strict=True)]
            found = [(x.entries, y.entries) for x, y in pairs if isinstance(x, Value) and isinstance(y, Value)]
            least = _NEAR_ZERO * max((magnitude(x) for x, _ in found), default=0.0)
            if any(misplaced(x, y).any() or relative_error(x, y, max(norm(x), least)) > _GROSS for x, y in found):
                return f"output '{name}' has other numbers in float64"
        return ""

    # -- heads
    def _read_heads(self, reading: Reading, runs: Sequence[Kept] = ()) -> Regions:
        """Activations that became heads, which are looked for once, in small runs of B if these are given."""
        if reading not in self._heads:
            options = {"in_reals": reading.in_reals}
            self._heads[reading] = proposals(self.a, self.b, reading.field, self._maker, runs, **options)
        return self._heads[reading]

    def _bounded(self, reading: Reading) -> tuple[CertifiedRegion, ...] | None:
        """The activations that became heads, with their bounds; None where one is further off than is allowed."""
        found = self._heads.get(reading, Regions())
        if found.forgotten:
            self._reason = f"what masks the scores of '{found.forgotten[0]}' is smaller than a score may be"
            return None
        certified = [self._certified(region) for region in found.regions.values()]
        for region, bound in zip(found.regions.values(), (each.bound for each in certified), strict=True):
            if not bound.holds:
                known = distance_up_to(self._largest(region), region, bound) if bound.at_least > bound.limit else bound
                refuted = known.at_least > known.limit
                reason = (known if refuted else bound).reason
                self._reason, self._about = f"{reason} (the activation {region.output})", region.output
                self._refuted = region.output if refuted else ""
                return None
        return tuple(certified)

    def _largest(self, region: Region) -> float:
        """The largest number that a leaf may have: infinite if it is linear in inputs, else as large as at points."""
        name = leaf = region.leaves[int(linear_leaf(region) == 0)]
        while (node := self.a.makers.get(name)) is not None and node.op_type in (*MOVES, "Cast", *LAYERS):
            data = [each for each in node.input if each in self._last[0][0].data]
            name = data[0] if len(data) == 1 else ""
        if is_float(self.points[0].feeds.get(name)):
            return math.inf
        reals: Any = Floats(by_kernels=True)
        runs = [Kept(self.a, reals, each.feeds, printing=False, wanted=[leaf]) for each in self.points]
        found = [] if any(in_step(runs)) else [run.wanted[leaf] for run in runs]
        return max((magnitude(each.entries) for each in found if each is not None), default=0.0)

    @cached_property
    def _places(self) -> Mapping[str, tuple[GraphView, Place]]:
        """By tensor that a node of A computes: the graph that is evaluated, and its place in the model."""
        views = (self._original.with_proto(proto).views.values() for proto in (self.a.proto, self.a.named))
        return {
            name: (view, (own.path, known))
            for view, own in zip(*views, strict=True)
            for node, same in zip(view.nodes, own.nodes, strict=True)
            for name, known in zip(node.output, same.output, strict=True)
            if name
        }

    def _found(self, name: str) -> tuple[GraphView, Place]:
        return self._places.get(name) or (self._original.views[()], ((), name))

    @cached_property
    def _blocks(self) -> list[list[list[str]]]:
        """The activation of each replaced block, what it reads and what it makes, by the names of what is evaluated."""
        names = {place: name for name, (_, place) in self._places.items()}
        every = ((each.path, ((each.output,), each.reads, each.makes)) for each in self._replaced)
        return [[[names.get((path, name), name) for name in part] for part in parts] for path, parts in every]

    def _certified(self, region: Region) -> CertifiedRegion:
        """A region with its bound, which may not hold."""
        named = [region.output]  # and what only lays it out in another way
        for name in named:
            readers = self._found(name)[0].readers(name)
            named += [node.output[0] for node in readers if node.op_type in SAME_NUMBERS]
        claim = next((self._claims[place] for _, place in map(self._found, named) if place in self._claims), None)
        ends = [(name, *self._found(name)) for name in (region.output, *region.leaves)]
        elem_types = [view.type_of(name).elem_type or onnx.TensorProto.FLOAT for name, view, _ in ends]
        (path, output), *leaves = (place for *_, place in ends)
        value = linear_leaf(region)
        return CertifiedRegion(
            original=output,
            rewritten=output,
            path=path,
            leaves=tuple(name for place, (_, name) in enumerate(leaves) if place != value),
            linear_in=None if value is None else leaves[value][1],
            elem_type=elem_types[0],
            nodes=len(ordered(region.rewritten)),
            bound=distance(region, claim, self._limit, elem_types),
            functions=tuple(tuple(listing(wide(each))) for each in (region.original, region.rewritten)),
            tokens=self._most,
        )

    def _evaluated(
        self,
        program: Program,
        points: Sequence[Point],
        reading: Reading,
        zeroed: Sequence[set[int]] = (),
        whole: Container[int] = (),
        drawn: Mapping[str, tuple[str, Array]] | None = None,
        **further: Any,
    ) -> tuple[list[Kept], list[str]]:
        """One evaluation for each point, and why some failed.

        The first of a reading has fingerprints, and so have those of `whole`, which keep all tensors. Entries of
        tensors that are `drawn`, with an id and places, are random.
        """
        ours = program is self.a
        regions = self._heads.get(reading, Regions()).regions if ours else {}
        leaves = {name for each in regions.values() for name in each.leaves}
        options = {"cover": self.cover, "in_reals": reading.in_reals, "regions": regions}
        made = list[Kept]()
        for place, (modulus, key, feeds) in enumerate(points):
            f = reading.field(modulus, key, self._products if reading.snaps and not ours else ())
            f.watched, f.zeroed = not self._last[0], zeroed[place] if zeroed else set()
            options["keep"] = None if place in whole else leaves
            options["printing"] = place in whole or not (place or self._last[0])
            replaced = {name: Value(f.function(*each)) for name, each in (drawn or {}).items()}
            if reading.folds and not ours:
                replaced |= {name: Value(each.residues(f)) for name, each in self.folds.items()}
            made.append(Kept(program, f, feeds, **{"replaced": replaced, **options, **further}))
        return made, in_step(made)

    def _one_size(self) -> str:
        """Which sizes that vary were not varied independently; empty if all were."""
        named: dict[tuple[int, ...], set[str]] = {}
        for value in (each for each in self.a.proto.graph.input if each.name in self.points[0].feeds):
            if not value.type.tensor_type.HasField("shape"):
                return f"'{value.name}' had one rank"
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                sizes = tuple(case.feeds[value.name].shape[axis] for case in self.points if value.name in case.feeds)
                if not dim.HasField("dim_value") and len(set(sizes)) < 2:
                    return f"axis {axis} of '{value.name}' had one size"
                if dim.dim_param:
                    named.setdefault(sizes, set()).add(dim.dim_param)
        alike = next((sorted(each) for each in named.values() if len(each) > 1), None)
        return "" if alike is None else f"{alike[0]} and {alike[1]} always had the same size"

    @cached_property
    def _products(self) -> Sequence[Product]:
        return products(self.a)

    @cached_property
    def folds(self) -> Mapping[str, Fold]:
        """The constants of B that are roundings of products of A's."""
        run = Kept(self.a, Field(Modulus(), secrets.token_bytes(16)), self.points[0].feeds, printing=False)
        in_step([run])
        computed = {n: x for n, x in run.values.maps[0].items() if isinstance(x, np.ndarray)}
        found = folded(self.a, self.b, computed)  # a rewriting copies weights, with all of their bits
        return {n: fold for n, fold in found.items() if not (self._replaced and fold.spelling.endswith(LAST_PLACES))}

    def _differing(self, a: Fingerprints, b: Fingerprints) -> list[str]:
        """The outputs of A whose values B does not have."""
        ours, theirs = a.outputs(), b.outputs()
        return [name for name in self.outputs if not same_value(a.field, ours[name], theirs[name])]

    def _read_in_part(self, a: Sequence[Fingerprints], b: Sequence[Fingerprints]) -> dict[str, tuple[int, ...]]:
        """Constant tables of B, with their shapes, that A lacks and that were not read whole."""
        known = {key for each in a for key in each.partial}
        read = {key: table for each in b for key, table in each.partial.items() if key not in known}
        partly = (key for key in read if not (key in self.cover and self.cover[key].all()))
        return dict(read[key] for key in partly if key not in self._contents_of_a)

    @cached_property
    def _contents_of_a(self) -> set[bytes]:
        weights = self.a.weights(self.a.graph)
        return {weights.described(name)[-1] for name in weights}

    def _longer(self, b: Sequence[Fingerprints]) -> Case | None:
        """A size that may read the tables whole; None where that takes too much, or was tried."""
        # Tables of form `whole` also have columns for bias tokens.
        length = max(min(size, self._most or size) for shape in self._partly.values() for size in shape)
        entries = max(each.largest for each in b) * (length / _LONGEST) ** 2
        if length <= _LONGEST or entries > _MOST_ENTRIES:
            return None
        point = self._maker.case((1, length, 0))
        return point if self._is_new(point) else None

    def _is_new(self, case: Case) -> bool:
        """Whether no point has inputs of these sizes."""
        shapes = [[value.shape for value in each.feeds.values()] for each in (case, *self.points)]
        return shapes[0] not in shapes[1:]

    def _unfit(self, reading: Reading, a: Sequence[Kept], b: Sequence[Kept]) -> str:
        """Why equal values prove nothing; empty if they do."""
        outputs = a[0].outputs()
        known = (n for n in self.outputs if isinstance(outputs[n], np.ndarray) and is_float(outputs[n]))
        fixed = next((n for n in known if not (n in a[0].decided or (n in a[0].fixed and n in b[0].fixed))), None)
        if fixed is not None:
            return f"output '{fixed}' depends on no input that is a number or a token"
        chosen = {key: name for each in b for key, name in each.chosen.items()}
        if (new := next((name for key, name in chosen.items() if key not in self._contents_of_a), None)) is not None:
            return f"inputs choose what is read of the table '{new}', which the first model has not"
        for ours, theirs in zip(a, b, strict=True):
            loose = next(self._heads.get(reading, Regions()).unmasked(ours, theirs), "")
            loose = loose and next(self._read_heads(reading).unmasked(ours, theirs), "")
            if loose:
                return f"'{loose}' masks by a number that scores may exceed, unlike the other model"
        return ""

    def _block_with(self, tensors: set[str]) -> str:
        """The activation of the first replaced block whose heads compute or read one of these tensors of B."""

        def before(name: str, ends: Sequence[str]) -> list[str]:
            node = self.b.makers.get(name)
            read = [] if node is None or node.op_type in SIZES else inputs_of(node)
            return [each for each in read if each not in ends]

        inside = ((name, reached(makes, partial(before, ends=reads))) for (name,), reads, makes in self._blocks)
        return next((name for name, every in inside if not tensors.isdisjoint(every)), "")

    def coarser(self, reason: str, kind: int | None) -> Refusal:
        """A refusal by `_coarser`, about the first replaced block in which B has that kind."""
        tensors = {name for name, each in _kinds(self.b.proto) if each == kind}
        path, original = self._found(self._block_with(tensors))[1]
        return Refusal(original=original, reason=reason, path=path)

    def _never_compared(self, reading: Reading, ours: Sequence[Kept], theirs: Sequence[Kept]) -> str:
        """Why equal values prove nothing: integers of inputs may choose what no inputs chose; empty if they do not.

        Comparisons of both models that the drawn inputs do not settle are turned, all of their entries or at random, in
        every combination; so are comparisons in branches that are then taken.
        """
        # Sizes only matter in what a rewriting made of A: other tools' files are the same at the sizes tried.
        alone = ((_unsettled(ours, theirs), "second"), (_unsettled(theirs, ours, sizes=bool(self._claims)), "first"))
        for one_way, other in ((name, other) for found, other in alone for name, same in found.items() if not same):
            self._about = self._block_with({one_way})
            return f"'{one_way}' compares integers that the {other} model does not, and no drawn input settles it"
        pending, tried = [(frozenset[str](), frozenset[str](), ours, theirs)], set[frozenset[str]]()
        for in_a, in_b, a, b in pending:
            if in_a and (differing := [name for x, y in zip(a, b, strict=True) for name in self._differing(x, y)]):
                known = "compares integers, and no drawn input settles it"
                return f"'{min(in_a)}' {known}; with the other result, output '{differing[0]}' has other values"
            found, theirs_alike = _unsettled(a, b), _unsettled(b, a).keys()
            for name, same in found.items():
                both = in_a | {each for each, other in found.items() if other == same}, in_b | (same & theirs_alike)
                if both[0] in tried or not same:
                    continue
                if len(tried) == _MOST_TURNED:
                    return f"inputs may choose by '{name}' and others, in more ways than can be tried"
                tried.add(both[0])
                for mixed in range(2 if self._large else _MIXED):
                    points = [(run.field.modulus, secrets.token_bytes(16), run.feeds) for run in ours]
                    (mine, failed), (others, lost) = (
                        self._evaluated(program, points, reading, turned=turned, mixed=bool(mixed))
                        for program, turned in zip((self.a, self.b), both, strict=True)
                    )
                    if not any((*failed, *lost)):
                        pending.append((*both, mine, others))
                    elif Anchors(self.a, self.b, self._last).departs():
                        return f"'{name}' compares integers, and what follows from the other result is not known"
        return ""

    def _decided_otherwise(self, reading: Reading, ours: Sequence[Kept], theirs: Sequence[Kept]) -> str:
        """Why equal values prove nothing: masks, or that a number is 0, decide a sign that one model alone takes."""
        heads = self._heads.get(reading, Regions())
        points = [(run.field.modulus, run.field.key, run.feeds) for run in ours]
        cases = (self.a, ours, heads.cones, theirs, heads.inside), (self.b, theirs, heads.inside, ours, heads.cones)
        for program, own, inside, other, outside in cases:
            found = [(x.conditions(inside), y.conditions(outside)) for x, y in zip(own, other, strict=True)]
            apart = [{each for each, _ in x} - {each for each, _ in y} for x, y in found]
            for (x, y), alone in zip(found, apart, strict=True):
                self._scaled |= any(each[0] not in alone for each in x - y)
            if any(x.field.settled & each for x, each in zip(own, apart, strict=True)):
                return _COIN
            if any(apart):
                zeroed, failed = self._evaluated(program, points, reading, zeroed=apart)
                if any(failed) or any(map(self._differing, zeroed, other)):
                    return _COIN
        return ""


def prove(original: LoadedModel, rewritten: LoadedModel, **options: Any) -> Certificate:
    """Prove that `rewritten` computes all outputs of `original`, or say where it differs; `options` as for `Pair`."""
    start, pair = time.perf_counter(), None
    try:
        pair = Pair(original, rewritten, **options)
        values = pair.certificate()
    except (Unsupported, UsageError) as error:  # the run will say, too, that no inputs can be generated
        values = Certificate(certified=False, refusals=(Refusal(reason=str(error)),))
    coarse = [pair.coarser(*each) if pair else Refusal(reason=each[0]) for each in _coarser(original, rewritten)]
    refusals = *_interface(original, rewritten), *coarse, *_unmet(original, rewritten, options.get("blocks", ()))
    refusals = (*values.refusals, *refusals) if values.refuted else (*refusals, *values.refusals)
    return replace(values, certified=not refusals, refusals=refusals, seconds=time.perf_counter() - start)


def _interface(original: LoadedModel, rewritten: LoadedModel) -> Iterator[Refusal]:
    """Inputs and outputs of another type, or of a size that is fixed in one model only."""

    def stated(model: LoadedModel, value: onnx.ValueInfoProto) -> TensorType:
        declared = type_of(value.type)
        return declared if declared.elem_type else model.views[()].type_of(value.name)

    for what in ("input", "output"):
        theirs = {value.name: stated(rewritten, value) for value in getattr(rewritten.proto.graph, what)}
        for value in getattr(original.proto.graph, what):
            ours, other = stated(original, value), theirs.get(value.name)
            if other is None or not ours.elem_type or not other.elem_type:
                continue
            # Some exporters write -1 or 0 for a dynamic dimension; of an unknown rank any axis is.
            shapes = (each.shape or () for each in (ours, other))
            fixed = ([dim if isinstance(dim, int) and dim > 0 else None for dim in shape] for shape in shapes)
            missing = None if None in (ours.rank, other.rank) else 0
            apart = what == "input" and any(one != two for one, two in zip_longest(*fixed, fillvalue=missing))
            if apart or ours.elem_type != other.elem_type:
                yield Refusal(value.name, value.name, "", f"{what} '{value.name}' is {other} instead of {ours}")


def _coarser(original: LoadedModel, rewritten: LoadedModel) -> Iterator[tuple[str, int | None]]:
    """In what the rewritten model is less exact than the original, with the kind of tensor that is."""
    if rewritten.proto.ir_version < LOOSE_INITIALIZERS <= original.proto.ir_version:
        text = f"IR version is {rewritten.proto.ir_version} instead of {original.proto.ir_version}"
        yield f"{text}, without defaults of inputs", None
    before, after = ({kind for _, kind in _kinds(each.proto)} for each in (original, rewritten))
    if _BYTES in after - before:
        yield "accuracy_level 4 rounds what packed weights multiply to 8 bits", _BYTES
    ours, theirs = ([kind for kind in FLOATS if kind in known] for known in (before, after))
    if ours and theirs and FLOATS.index(theirs[0]) < FLOATS.index(ours[0]):
        yield f"computes in {elem_name(theirs[0])}, which is narrower than the original's types", theirs[0]


def _kinds(proto: onnx.ModelProto) -> Iterator[tuple[str, int]]:
    """The element types of inputs and constants, and what attributes of nodes say of them, by tensor."""
    yield from ((value.name, value.type.tensor_type.elem_type) for value in proto.graph.input)
    yield from ((tensor.name, tensor.data_type) for tensor in iter_tensors(proto))
    for node in (node for each in (proto.graph, *proto.functions) for node in iter_nodes(each.node)):
        for each in node.attribute:
            level = -each.i if each.name == "accuracy_level" else each.t.data_type
            kind = each.i if each.name in _TYPES_TO else level
            yield from ((name, kind) for name in node.output)


def _unmet(original: LoadedModel, rewritten: LoadedModel, blocks: Sequence[Claim]) -> Iterator[Refusal]:
    """Blocks that are said to be replaced, and whose first output is computed as before."""
    a, b = (each.inlined.views if blocks else {} for each in (original, rewritten))
    for block in blocks:
        old, new = (each[block.path].made_by(block.makes[0]) if block.path in each else None for each in (a, b))
        if old is not None and new is not None and (old.op_type, *old.input) == (new.op_type, *new.input):
            text = "reported as converted, but the original's activation is still there"
            yield Refusal(block.output, block.output, block.name, text, path=block.path)
