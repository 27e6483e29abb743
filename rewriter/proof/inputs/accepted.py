"""Inputs that the original accepts: given ones, or generated ones, whose sizes are found by trying.

A model may accept a single size of a dimension that it declares open, because a constant is added to what follows from
it: positions in a table, of an image or of sound; or because an exporter kept the size that it traced. Graphs hide this
behind any number of operators, but onnxruntime's refusals name both sizes: where a number in a refusal moves with a
dimension, and another does not, the dimension is changed until they are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from rewriter.arrays import Array
from rewriter.errors import RewriteError, UsageError, ValidationError
from rewriter.files.load import load_model
from rewriter.files.tokenizer import sample_tokens
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case, Maker, States, Texts, make_cases
from rewriter.proof.inputs.read import load_cases
from rewriter.proof.inputs.specs import Kind
from rewriter.proof.run import ModelRuns, Way, open_model, run_model
from rewriter.proof.settings import LARGE, Settings, spelled

_ROUNDS, _AT_ONCE = 6, 12
"""How often sizes are tried, and how many in one session."""
_LARGEST, _ROWS = 2**22, 4
"""Number of elements of all inputs, and of rows, that are tried at most."""
_SETTING = (1, 17, 0)
_SIDES = (Kind.HEIGHT, Kind.WIDTH)

Refusals = Callable[[Sequence[Case]], Sequence[str]]
"""Why the original refuses each of some cases; empty for one that it accepts."""


def run_accepted(
    side: Side,
    ways: Sequence[Way],
    settings: Settings,
    *,
    most: int | None = None,
    full: bool = False,
    few: bool = False,
    beside: Path | None = None,
    **options: Any,
) -> ModelRuns:
    """The runs of the original on the cases that it accepts: given ones, or those of `make_cases`.

    `beside` is the file that a tokenizer may lie beside, by default the original's; `options` are those of `run_model`.

    Raises UsageError for inputs that do not fit the model, ValidationError where it does not load or accepts none.
    """

    def run(cases: Sequence[Case], ways: Sequence[Way] = ways, **changed: Any) -> ModelRuns:
        try:
            return run_model(side, cases, ways, may_refuse=True, **{**options, **changed})
        except ValidationError as error:
            what = "the original model does not run, so nothing can be tested; --certificate-only proves without a run"
            raise ValidationError(f"{what}: {error}") from error

    if settings.inputs is not None:
        runs = run(load_cases(settings.inputs, side.model.proto))
        if not runs.cases:
            what = f"{spelled(settings.inputs)}: the original model runs on none of these inputs"
            raise UsageError(f"{what}: {runs.skipped[0]}")
        return runs
    beside = beside or side.model.path
    texts = sample_tokens(beside)
    making: dict[str, Any] = {"seed": settings.seed, "dims": settings.dims, "most": most, "texts": texts}
    making["states"] = _encoder(beside, texts) if beside is not None and texts else None
    make = partial(make_cases, side.model.proto, full=full, **making)
    runs = run(make(few=few))
    if few and runs.skipped:
        runs = run(make())
    if not runs.skipped:
        return runs
    maker, accepted = Maker(side.model.proto, **making), {case.name: case for case in runs.cases}
    shapes = {name: values.shape for name, values in maker.case(_SETTING).feeds.items()}
    if any(shapes == {name: values.shape for name, values in case.feeds.items()} for case in runs.cases):
        return runs  # otherwise what it accepts may be a single token, which fits any length

    def refusals(cases: Sequence[Case]) -> list[str]:
        named = [Case(str(number), case.feeds) for number, case in enumerate(cases)]
        reasons = dict(each.split(": ", 1) for each in run(named, ways[:1], wide=False).skipped)
        return [reasons.get(case.name, "") for case in named]

    for sizes in _SizeSearch(maker, refusals).found():
        accepted |= {case.name: case for case in make_cases(side.model.proto, kinds=sizes, **making)}
    if not accepted:
        raise ValidationError(
            f"the original model runs on none of the {len(runs.skipped)} inputs tried, nor at other sizes; give some "
            f"with --inputs, or sizes with --dim ({runs.skipped[0]})"
        )
    return runs if len(accepted) == len(runs.cases) else run(tuple(accepted.values()))


_DECODER = re.compile(r"decoder(?:_with_past)?(_model)?(?:_merged)?")


def _encoder(decoder: Path, texts: Texts) -> States | None:
    """The encoder that lies beside a decoder, in a file or a folder, run on texts; None without."""
    named = _DECODER.sub(r"encoder\1", decoder.name)
    folder = decoder.parent if named != decoder.name else decoder.parent.with_name("encoder")
    if named == decoder.name and decoder.parent.name != "decoder":
        return None
    try:
        model = load_model(folder / named)
        maker = Maker(model.proto, texts=texts)
        session = open_model(model, "cpu", optimise=False) if maker.texts and model.size <= LARGE else None
    except RewriteError:
        return None

    def run(shape: tuple[int, ...], number: int) -> Array | None:
        feeds = maker.case((shape[0], shape[1], 0), number).feeds
        with suppress(ValidationError):
            made = session.run(feeds) if session else {}
            return next((values for values in made.values() if values.shape == shape), None)
        return None

    return run if session else None


Point = tuple[int, ...]
"""The size of each group of kinds of dimensions."""


class _SizeSearch:
    """Tries sizes, with one row and without a past."""

    def __init__(self, maker: Maker, refusals: Refusals) -> None:
        self._maker, self._refusals = maker, refusals
        self._groups: list[tuple[Kind, ...]] = [
            (kind,) for kind in Kind if kind in maker.free - {Kind.PAST, Kind.TOTAL, *_SIDES}
        ]
        sides = tuple(kind for kind in _SIDES if kind in maker.free)
        self._groups += [sides] if sides else []
        _, usual = maker.sizes(_SETTING)
        self._start: Point = tuple(usual[kinds[0]] for kinds in self._groups)
        self._tried: dict[Point, str] = {}

    def found(self) -> list[Mapping[Kind, int]]:
        """Sizes that the original accepts, where they differ from the usual ones: two of them, if there are."""
        bases, trials = [self._start], [self._start, *self._next(self._start)]
        for _ in range(_ROUNDS):
            point = max(self._accepted(trials), key=math.prod, default=None)
            if point is not None:
                changed = {kind for kind, size in self._sizes(point).items() if size != self._sizes(self._start)[kind]}
                others = [self._scaled(point, share) for share in (0.5, 2, 4, 8)]
                smaller = [each for each in others if each not in self._tried and min(each) > 0]
                found = sorted((point, *self._accepted(smaller)), reverse=True)
                return [{kind: self._sizes(each)[kind] for kind in changed} for each in found[:2]]
            # Another node refuses these: one size may be right by now, and the next one is wrong.
            known = {_read(self._tried[base])[0] for base in bases}
            bases += [each for each in trials if _read(self._tried[each])[0] not in known][:1]
            trials = self._beside(reversed(bases)) or self._beside(self._tried)
        return []

    def _scaled(self, point: Point, share: float) -> Point:
        """The sizes that were found times a share, up to the usual ones."""
        pairs = zip(point, self._start, strict=True)
        return tuple(size if size == usual else min(int(size * share), max(size, usual)) for size, usual in pairs)

    def _accepted(self, points: Sequence[Point]) -> Iterator[Point]:
        cases = [self._at(point).case(_SETTING) for point in points]
        self._tried.update(zip(points, self._refusals(cases), strict=True))
        yield from (point for point in points if not self._tried[point])

    def _beside(self, bases: Iterable[Point]) -> list[Point]:
        return list(dict.fromkeys(each for base in list(bases) for each in self._next(base)))[:_AT_ONCE]

    def _next(self, base: Point) -> Iterator[Point]:
        for place, kinds in enumerate(self._groups):
            sizes = [1 << base[place].bit_length()]  # a power of two is rarely too odd
            line = {p[place]: _read(told) for p, told in self._tried.items() if _but(p, place) == _but(base, place)}
            sizes += _crossings(line, len(kinds))
            for size in sizes:
                point = (*base[:place], size, *base[place + 1 :])
                if point not in self._tried and self._fits(point):
                    yield point

    def _fits(self, point: Point) -> bool:
        elements, usual = (
            sum(map(math.prod, self._at(each).sizes(_SETTING)[0].values())) for each in (point, self._start)
        )
        rows = dict(zip(self._groups, point, strict=True)).get((Kind.BATCH,), 1)
        return min(point) > 0 and elements <= max(_LARGEST, usual) and rows <= _ROWS

    def _at(self, point: Point) -> Maker:
        return self._maker.at(self._sizes(point))

    def _sizes(self, point: Point) -> dict[Kind, int]:
        return {kind: size for kinds, size in zip(self._groups, point, strict=True) for kind in kinds}


def _but(point: Point, place: int) -> Point:
    return (*point[:place], *point[place + 1 :])


def _read(refusal: str) -> tuple[str, tuple[int, ...]]:
    """A refusal without its numbers; and these, with the product of each shape."""
    text = re.sub(r"'[^']*'", "", refusal)  # names have numbers too
    numbers = [int(each) for each in re.findall(r"-?\d+", text)]
    shapes = [[int(each) for each in re.findall(r"-?\d+", shape)] for shape in re.findall(r"\{([-\d, ]+)\}", text)]
    return re.sub(r"-?\d+", "#", refusal), (*numbers, *map(math.prod, shapes))


def _crossings(line: Mapping[int, tuple[str, tuple[int, ...]]], power: int) -> list[int]:
    """Where two numbers of a refusal are the same, if they go on as they do along a line of sizes.

    Numbers that follow from `power` sizes that are the same, such as the area of an image, are lines over its power.
    """
    found: dict[int, tuple[bool, float]] = {}
    for place in {text for text, _ in line.values()}:
        points = sorted((size, numbers) for size, (text, numbers) in line.items() if text == place)
        # One is the size of what fits anything, and of the row that is tried.
        large = [i for i in range(len(points[0][1])) if any(numbers[i] > 1 for _, numbers in points)]
        for i, j in combinations(large, 2):
            both = all(len({numbers[each] for _, numbers in points}) > 1 for each in (i, j))
            nearest = sorted(points, key=lambda point: abs(point[1][i] - point[1][j]))
            for (one, p), (other, q) in pairwise(nearest[:3]):
                swapped = p[i] == q[j] or p[j] == q[i]  # the smaller number is first in some refusals
                a, b = p[i] - p[j], q[j] - q[i] if swapped else q[i] - q[j]
                if a != b:
                    x = one**power - a * (other**power - one**power) / (b - a)
                    size = round(x ** (1 / power)) if x > 0 else 0
                    # Sizes are rounded on their way: beside one that was tried is the next one.
                    size += (size in line) * (1 if size > min(one, other) or one < other else -1)
                    if size > 0:
                        found.setdefault(size, (both and not swapped, abs(math.log(size / one))))
    return sorted(found, key=found.__getitem__)[: _AT_ONCE // 2]
