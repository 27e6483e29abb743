"""A copy of a model with noise at chosen tensors: the effect of rounding, or of a certified error, on its outputs.

At an activation x = f(y) the noise is s (eps max(|x|, |y|) + error max(1, |x|)), at a gate x = h(g) u it is
s (eps max(|x|, |g u|) + error max(|u|, |x|)), where eps is one unit in the last place, `error` the certified bound, and
s in [-1, 1]: sin(FREQUENCY x + phase), which is uncorrelated between values, or 1 everywhere, since errors of one sign
may add up. Phase and kind are inputs of the model, so that one session serves all draws.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, parser

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.edit import inlined
from rewriter.graph.view import Path, Place, all_views, graph_at, integer_of
from rewriter.inputs.cases import Case
from rewriter.proof.rule import Results
from rewriter.proof.run import Side, Way, run_model

_UNITS_WITH_BYTES = 2.0**10
"""Units of noise where operators round activations to 8 bits: one unit flips one such rounding in 1e5, which changes
the outputs by 1e-3 and more, and small models may need more draws to show it."""

FREQUENCY = 12345.678  # decorrelates the noise of values that differ by 1e-3 or more

_FLOAT, _DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
_WIDE: Mapping[int, int] = {_FLOAT: _FLOAT, TensorProto.FLOAT16: _FLOAT, _DOUBLE: _DOUBLE}
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


def nudged(model: onnx.ModelProto, points: Sequence[Point]) -> tuple[onnx.ModelProto, Sequence[Mapping[str, Array]]]:
    """A copy with noise at the points that exist in it, and its further inputs, draw by draw; none without noise."""
    copy = inlined(model)
    taken = {name for node in copy.graph.node for name in (*node.input, *node.output)}
    prefix = "noise/"
    while any(name.startswith(prefix) for name in taken):
        prefix = f"_{prefix}"
    any_noise, units = False, _UNITS_WITH_BYTES if any(map(rounds_to_bytes, copy.graph.node)) else 1.0
    views = {view.path: view for view in all_views(copy)}
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
    model: LoadedModel, cases: Sequence[Case], points: Sequence[Point], ways: Sequence[Way], **options: Any
) -> Mapping[Way, Sequence[Results]]:
    """The results of a model with noise at its points, by way and draw; empty if it fails."""
    proto, draws = nudged(model.proto, points)
    drawn = [Case(case.name, {**case.feeds, **draw}) for draw in draws for case in cases]
    starts = range(0, len(drawn), len(cases) or 1)
    with suppress(ValidationError):
        side = Side.of(replace(model, proto=proto, path=None))
        runs = run_model(side, drawn, ways if drawn else (), what="the original with noise", **options)
        return {way: [ran.results[start : start + len(cases)] for start in starts] for way, ran in runs.ways.items()}
    return {}


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
    place, node = next((place, node) for place, node in enumerate(graph.node) if point.tensor in node.output)
    output = list(node.output).index(point.tensor)
    own, wide = f"{prefix}{point.tensor}/", _WIDE[point.elem_type]
    node.output[output] = f"{own}raw"
    numbers = {
        "FREQUENCY": FREQUENCY,
        "EPS": units * float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(point.elem_type)).eps),
        "ERROR": point.error,
        "TYPE": "double" if wide == _DOUBLE else "float",
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
