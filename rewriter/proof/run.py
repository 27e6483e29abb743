"""Run a model on all cases and in every way, segment by segment; a model that is loaded as a whole is one segment.

Every way of running a segment loads it alone and continues with the values that it computed itself, so that weights are
read from disk once. onnxruntime fuses nodes within segments only, and only a whole model is evaluated in float64.

The unused tail of a cache is uninitialised. So the original runs twice in fresh sessions, the second time into memory
filled with a pattern; elements that differ by more than rounding are named, and excluded from every comparison.

A copy of the original with noise shows what rounding, or a certified error, does to its outputs. At an activation
x = f(y) the noise is s (eps max(|x|, |y|) + error max(1, |x|)), at a gate x = h(g) u it is
s (eps max(|x|, |g u|) + error max(|u|, |x|)), where eps is one unit in the last place, `error` the certified bound, and
s in [-1, 1]: sin(FREQUENCY x + phase), which is uncorrelated between values, or 1 everywhere, since errors of one sign
may add up. Phase and kind are inputs of the model, so that one session serves all draws.
"""

import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, parser

from rewriter.arrays import Array
from rewriter.errors import UsageError, ValidationError
from rewriter.evaluate.arithmetic import Floats, Unsupported, is_float
from rewriter.evaluate.evaluator import Evaluator, Program
from rewriter.files.load import LoadedModel
from rewriter.graph.attention import NORMED, norms_apart
from rewriter.graph.constants import elem_type_of
from rewriter.graph.edit import Cut, bytes_of, extract, inlined, rename_output, split, with_outputs
from rewriter.graph.fused import with_parts
from rewriter.graph.types import type_of
from rewriter.graph.view import Path, Place, graph_at, integer_of, label
from rewriter.graph.walk import iter_nodes, iter_tensors
from rewriter.inputs.cases import Case
from rewriter.ort import Session, fits, open_session, tensors_of
from rewriter.proof.rule import Results, magnitude
from rewriter.text import counted, first_of, quoted

SEGMENT = 2**26  # maximum size of the weights of a segment in bytes; a larger weight forms a segment by itself

_MAX_ROUNDING = 1e-3  # smaller relative differences between runs on a GPU are rounding, which the rule judges

Gaps = Sequence[Mapping[str, Array]]
"""Case by case, an output to a mask of uninitialised elements; outputs without such elements are missing."""

Progress = Callable[[str, int, int], None]
"""Called with a description of the current step, the number of steps done, and the number of all steps."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Way:
    """Session settings: a provider, with or without graph optimisation; `again` is a run to find unwritten outputs."""

    provider: str
    optimise: bool
    again: bool = False

    def __str__(self) -> str:
        level = "default optimisation" if self.optimise else "no optimisation"
        return f"{self.provider}, {level}{', again' if self.again else ''}"


@dataclass(eq=False)
class Ran:
    """The results of a model in one way, case by case, unless it was run for its gaps alone."""

    results: list[dict[str, Any]]
    cpu_nodes: tuple[str, ...] | None = ()
    defined: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ModelRuns:
    """All runs of one model."""

    cases: tuple[Case, ...]  # accepted by the model
    skipped: tuple[str, ...]  # the names of the others, with reasons
    ways: Mapping[Way, Ran]  # with zeros at the gaps
    truth: Results | None = None  # its float64 evaluation, likewise; None if there is none
    segments: int = 1  # number of parts that were loaded in turn
    gaps: Gaps = ()

    def largest(self) -> dict[str, float]:
        """The largest finite |entry| of each output over all cases, in the first way."""
        results = next(iter(self.ways.values())).results
        return {name: max(magnitude(case[name]) for case in results) for name in results[0]}


def run_model(
    model: LoadedModel,
    cases: Sequence[Case],
    ways: Sequence[Way],
    *,
    outputs: Sequence[str] = (),
    wide: bool = False,
    may_refuse: bool = False,
    by_blocks: bool = False,
    gaps: Gaps = (),
    progress: Progress = silent,
    what: str = "the model",
) -> ModelRuns:
    """Run a model on all cases in every way.

    `outputs` are by default the graph's; inner tensors keep onnxruntime from fusing nodes. `wide` evaluates it in
    float64 too, unless `by_blocks`. With `may_refuse`, cases that the first way cannot run are dropped. `gaps` are
    elements to exclude, by default the ones that differ between two runs in the same way; with more cases they repeat.

    Raises:
        ValidationError: onnxruntime cannot load it, or refuses a case although `may_refuse` is not set.
        UsageError: with `by_blocks`, a case feeds an input that has a default; the segments contain the default.
    """
    view = model.views[()]
    given = {name for case in cases for name in case.feeds} - set(view.inputs)
    if given and by_blocks:
        fault = f"input {quoted(min(given))} has a default, which a proof by blocks cannot override"
        raise UsageError(f"{fault}; leave it out, or prove with --option proof=whole")
    wanted = tuple(outputs) or view.outputs
    cuts: Sequence[Cut | None] = split(view, wanted, SEGMENT) if by_blocks else (None,)
    # Until all segments have run, the results are the values of the tensors that later ones read.
    runs = {way: Ran([dict(case.feeds) for case in cases]) for way in ways}
    kept, refused = dict(enumerate(cases)), dict[int, str]()
    for number, part in enumerate(cuts):
        later = {name for cut in cuts[number + 1 :] if cut is not None for name in cut.inputs} | {*wanted}
        proto = with_outputs(model.proto, view, wanted) if part is None else extract(model.proto, view, part)
        for place, (way, ran) in enumerate(runs.items()):
            progress(f"running {what}, {way}", number * len(ways) + place, len(cuts) * len(ways))
            over = runs[replace(way, again=False)].results if way.again else ()
            # Only the first way may refuse a case: one that another way refuses is an error, not an invalid input.
            how = {"prepack": part is None, "may_refuse": may_refuse and not place}
            refused |= _run_part(model.with_proto(proto), way, ran, over, kept, **how) if kept else {}
            kept = {index: case for index, case in kept.items() if index not in refused}
            for values in ran.results:
                for name in values.keys() - later:
                    del values[name]
    for ran in runs.values():
        ran.results = [tensors_of({name: ran.results[index][name] for name in wanted}) for index in kept]
    truth = _in_float64(model, [*kept.values()], progress) if wide and not by_blocks else None
    gaps = gaps or gaps_of(runs)
    for way, ran in runs.items():
        ran.results = [] if way.again else cleared(ran.results, gaps)
    skipped = tuple(f"{cases[index].name}: {reason}" for index, reason in refused.items())
    return ModelRuns(tuple(kept.values()), skipped, runs, truth and cleared(truth, gaps), len(cuts), gaps)


def _run_part(
    model: LoadedModel, way: Way, ran: Ran, over: Sequence[Any], kept: Iterable[int], *, prepack: bool, may_refuse: bool
) -> dict[int, str]:
    """Run one segment in one way, add its outputs to the values of each case; return refused cases with reasons."""
    refused, feeds = dict[int, str](), {index: fed(model, ran.results[index]) for index in kept}
    session = open_model(model, way.provider, optimise=way.optimise, prepack=prepack)
    ran.defined += session.defined
    known = ran.cpu_nodes is not None and session.cpu_nodes is not None
    ran.cpu_nodes = (*(ran.cpu_nodes or ()), *(session.cpu_nodes or ())) if known else None
    for index, given in feeds.items():
        try:
            ran.results[index].update(session.run(given, over=over[index] if over else None))
        except ValidationError as error:
            if not may_refuse:
                raise
            refused[index] = str(error)
    return refused


def _in_float64(model: LoadedModel, cases: Sequence[Case], progress: Progress) -> Results | None:
    with suppress(Unsupported):
        reference, exact = open_reference(model), list[Mapping[str, Array]]()
        for place, case in enumerate(cases):
            progress(f"evaluating in float64: {case.name}", place, len(cases))
            exact.append(reference(case.feeds))
        return exact
    return None


def fed(part: LoadedModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a part of a model, in the types that it declares; types that inference left open are declared."""
    given: dict[str, Any] = {}
    for declared in (each for each in part.proto.graph.input if each.name in values):
        array, kind = values[declared.name], declared.type.tensor_type
        if isinstance(array, list):  # a sequence
            given[declared.name] = array
            declared.type.sequence_type.elem_type.tensor_type.elem_type = elem_type_of(np.asarray(*array[:1]))
            continue
        if not kind.elem_type or not is_float(array):
            kind.elem_type = elem_type_of(array)
        wanted = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) if is_float(array) else array.dtype
        given[declared.name] = np.asarray(array.astype(wanted, copy=False))
    return given


def open_model(model: LoadedModel, provider: str, *, optimise: bool, prepack: bool = True) -> Session:
    """Open a session on a model, or on a part of one, whose external weights are memory-mapped."""
    plain = with_parts(model.proto, norms_apart) if provider == "cpu" else model.proto
    if plain is model.proto and model.path is not None and not model.mapped:
        return open_session(model.path, provider, optimise=optimise, prepack=prepack)
    session = open_session(plain, provider, optimise=optimise, base_dir=model.base_dir, prepack=prepack)
    return session if plain is model.proto else replace(session, defined=(*session.defined, NORMED))


# -- elements that onnxruntime never writes ------------------------------------------------------------------------


def gaps_of(runs: Mapping[Way, Ran]) -> Gaps:
    """The elements that differ between two runs in the same way, on any provider."""
    found: list[dict[str, Array]] = []
    for way in (way for way in runs if way.again):
        once, again = runs[replace(way, again=False)].results, runs[way].results
        found = found or [{} for _ in once]
        for masks, first, second in zip(found, once, again, strict=True):
            for name, values in first.items():
                mask = _differing(values, second.get(name))
                if mask.any():
                    masks[name] = mask | masks.get(name, False)
    return found


def cleared(results: Results, gaps: Gaps) -> list[dict[str, Array]]:
    """The same results with zeros at the gaps; an array of another shape stays, and is refused later."""
    made = [dict(case) for case in results]
    for case, masks in zip(made, cycle(gaps or ({},))):
        for name in masks.keys() & case.keys():
            if masks[name].shape == case[name].shape:
                case[name] = np.where(masks[name], np.zeros((), case[name].dtype), case[name])
    return made


def remarks(outputs: Iterable[onnx.ValueInfoProto], runs: ModelRuns) -> Iterator[str]:
    """Outputs that have other shapes than the file declares, and elements that are excluded, in words."""
    results = next(iter(runs.ways.values())).results
    misdeclared, unwritten = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for value in outputs:
        declared = type_of(value.type)
        found = (case[value.name].shape for case in results if value.name in case)
        wrong = next((shape for shape in found if declared.shape is not None and not fits(shape, declared.shape)), None)
        if wrong is not None:
            misdeclared[f"shape {list(wrong)}, but the file declares {declared}: correct its types"].append(value.name)
    for text, each in misdeclared.items():
        yield f"{counted(len(each), 'output')} ({first_of(each)}) of the original, when run: {text}"
    for name in {name: None for masks in runs.gaps for name in masks}:
        count = sum(int(masks[name].sum()) for masks in runs.gaps if name in masks)
        unwritten[f"{count} of {sum(case[name].size for case in results if name in case)} elements"].append(name)
    why = "are unwritten memory or random: they are not the same in two runs of the original, and not compared"
    for text, each in unwritten.items():
        yield f"{text} of {', '.join(each)} {why}"


def _differing(one: Array, other: Array | None) -> Array:
    if other is not None and np.array_equal(one, other):
        return np.zeros(one.shape, np.bool_)
    if other is None or one.shape != other.shape:
        return np.ones(one.shape, np.bool_)
    if not is_float(one):
        return np.asarray(one != other, np.bool_)
    with np.errstate(all="ignore"):
        a, b = (each.astype(np.float64) for each in (one, other))
        apart = ~np.isclose(a, b, rtol=_MAX_ROUNDING, atol=0.0, equal_nan=True)
    # Entries that still hold the fill pattern; arithmetic produces NaN with other bits.
    bits = np.ascontiguousarray(other).view(f"u{other.itemsize}").reshape(other.shape)
    return np.asarray(apart | (bits == np.iinfo(bits.dtype).max), np.bool_)


# -- the truth: a model in float64, weights and constants included -----------------------------------------------------


MAX_REFERENCE_BYTES = 2**31  # maximum size of the weights, in bytes; in float64 they take two or four times as much

_REFUSED = re.compile("Quant|Integer|QLinear|Random|Multinomial|Bernoulli|Hardmax")


def _array(value: object) -> object:
    if isinstance(value, list):
        return [_array(each) for each in value]
    return Floats().lift(value).entries if is_float(value) else value


def open_reference(model: LoadedModel) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """The float64 evaluation of a model, as a function of its inputs. Both raise Unsupported where there is none."""
    if sum(bytes_of(tensor) for tensor in iter_tensors(model.proto)) > MAX_REFERENCE_BYTES:
        raise Unsupported(f"larger than {round(MAX_REFERENCE_BYTES / 1e9)} GB")
    for node in iter_nodes(model.proto.graph.node):
        if _REFUSED.search(node.op_type):
            raise Unsupported(f"{label(node)} has no known float64 form")
    program = Program(model)

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        made = Evaluator(program, Floats(), feeds, in_reals=True).run()
        return tensors_of({name: _array(each) for name, each in made.items()})

    return run


# -- noise at chosen tensors -------------------------------------------------------------------------------------------

_UNITS_WITH_BYTES = 2.0**10
"""Units of noise where operators round activations to 8 bits: one unit flips one such rounding in 1e5, which changes
the outputs by 1e-3 and more, and small models may need more draws to show it."""

FREQUENCY = 12345.678  # decorrelates the noise of values that differ by 1e-3 or more

_FLOAT = TensorProto.FLOAT
_WIDE: Mapping[int, int] = {_FLOAT: _FLOAT, TensorProto.FLOAT16: _FLOAT, TensorProto.DOUBLE: TensorProto.DOUBLE}
"""Types that get noise, and the type that it is computed in: onnxruntime has no float16 kernel of Sin."""

_DRAWS = {"phase": 0.0, "steady": 0.0}, {"phase": 1.0, "steady": 0.0}, {"phase": 0.0, "steady": 1.0}
"""The draws: two patterns of signs, and one sign."""


@dataclass(frozen=True)
class Point:
    """A tensor that gets noise."""

    tensor: str
    path: Path
    elem_type: int  # that it is computed in; it may be cast to another one
    error: float = 0.0  # certified bound, over max(1, |x|)
    argument: str = ""  # the tensor y, or g of a gate; empty if unknown
    value: str = ""  # u of a gate; empty for an activation

    @property
    def place(self) -> Place:
        return self.path, self.tensor


def nudged(model: LoadedModel, points: Sequence[Point]) -> tuple[onnx.ModelProto, Sequence[Mapping[str, Array]]]:
    """A copy with noise at the points that exist in it, and its further inputs, draw by draw; none without noise."""
    copy, prefix = inlined(model.proto), f"noise {secrets.token_hex(8)}/"  # with which no name of the model begins
    any_noise, units = False, _UNITS_WITH_BYTES if any(map(rounds_to_bytes, copy.graph.node)) else 1.0
    views = (model.with_proto(copy) if model.proto.functions else model).views
    # Bodies before the nodes that hold them: paths consist of names of nodes, which noise does not change.
    for point in sorted(points, key=lambda each: -len(each.path)):
        view = views.get(point.path)
        if view is None or point.tensor not in view.producer or point.elem_type not in _WIDE:
            continue
        outer = (views[point.path[:depth]] for depth in range(len(point.path) + 1))
        there = {name for each in outer for name in (*each.producer, *each.inputs, *each.initializers)}
        # A certificate expands fused operators, so that a model may lack tensors that it names.
        if not point.value or point.value in there:
            argument = point.argument if point.argument in there else ""
            made = view.type_of(point.tensor).elem_type or point.elem_type
            _inject(graph_at(copy, point.path), replace(point, argument=argument), made, prefix, units)
            any_noise = True
    if not any_noise:
        return copy, ()
    copy.graph.input.extend(helper.make_tensor_value_info(f"{prefix}{name}", _FLOAT, []) for name in _DRAWS[0])
    return copy, [{f"{prefix}{name}": np.asarray(each, np.float32) for name, each in draw.items()} for draw in _DRAWS]


def rounds_to_bytes(node: onnx.NodeProto) -> bool:
    """Whether an operator rounds its activations to 8 bits."""
    if node.op_type == "MatMulNBits":
        return integer_of(node, "accuracy_level", 0) == 4
    return node.op_type in {"DynamicQuantizeLinear", "DynamicQuantizeMatMul"}


def noisy(
    model: LoadedModel, cases: Sequence[Case], points: Sequence[Point], way: Way, **options: Any
) -> Sequence[Results]:
    """The results of a model with noise at its points, draw by draw; none if it fails."""
    proto, draws = nudged(model, points)
    drawn = [Case(case.name, {**case.feeds, **draw}) for draw in draws for case in cases]
    with suppress(ValidationError):
        runs = run_model(model.with_proto(proto), drawn, [way], what="the original with noise", **options)
        return [runs.ways[way].results[start : start + len(cases)] for start in range(0, len(drawn), len(cases))]
    return ()


_NOISE = """noise (float raw, float argument, float factor, float value, float phase, float steady) => (float noisy) {
    frequency = Constant<value = TYPE {FREQUENCY}>() one = Constant<value = TYPE {1}>()
    eps = Constant<value = TYPE {EPS}>() error = Constant<value = TYPE {ERROR}>()
    x = Cast<to = WIDE>(raw) y = Cast<to = WIDE>(argument) g = Cast<to = WIDE>(factor) u = Cast<to = WIDE>(value)
    p = Cast<to = WIDE>(phase) s = Cast<to = WIDE>(steady)
    turns = Mul(x, frequency) angle = Add(turns, p) sine = Sin(angle)
    mixed = Sub(one, s) part = Mul(sine, mixed) sign = Add(part, s)
    size = Abs(x) product = Mul(y, g) large = Abs(product) digits = Max(large, size) rounding = Mul(digits, eps)
    unit = Abs(u) scale = Max(unit, size) certified = Mul(scale, error)
    most = Add(rounding, certified) moved = Mul(most, sign) sum = Add(x, moved) noisy = Cast<to = MADE>(sum) }"""


def _inject(graph: onnx.GraphProto, point: Point, made: int, prefix: str, units: float) -> None:
    """Rename the producer's output and give its name to the noisy tensor, so that consumers stay unchanged."""
    own, wide = f"{prefix}{point.tensor}/", _WIDE[point.elem_type]
    place = rename_output(graph, point.tensor, f"{own}raw")
    numbers = {
        "FREQUENCY": FREQUENCY,
        "EPS": units * float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(point.elem_type)).eps),
        "ERROR": point.error,
        "TYPE": "double" if wide == TensorProto.DOUBLE else "float",
        "WIDE": wide,
        "MADE": made,
    }
    noise = parser.parse_graph(re.sub("|".join(numbers), lambda found: f"{numbers[found[0]]}", _NOISE))
    names = {
        "": "",
        "argument": point.argument or f"{own}raw",
        "factor": (point.argument and point.value) or f"{own}one",
        "value": point.value or f"{own}one",
        **{name: f"{prefix}{name}" for name in _DRAWS[0]},
        "noisy": point.tensor,
    }
    for each in noise.node:
        for field in (each.input, each.output):
            field[:] = [names.get(name, f"{own}{name}") for name in field]
        graph.node.insert(place := place + 1, each)
