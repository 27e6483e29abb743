"""The portrait of one activation for the page on head programs: its program, its errors, a drawing.

Every number comes from the program itself: `Program.evaluate` in float64, and the program's own nodes in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx

from benchmarks.figures import Array, Curve, Panel, drawing
from passes.conversion import Conversion
from passes.forms.local import emit_local, function_of, line_of
from passes.match.blocks import Block
from passes.match.identify import ActivationRegion, Identified
from passes.programs.activations import ACTIVATIONS, Activation
from passes.programs.program import ARITHMETIC, Line, Program, fitted_programs, lines
from rewriter.graph.view import all_views

FLOAT, DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE

REACH = 8.0
"""Largest |y| in drawings."""

_FLOOR = 1e-18
_LEAST = 1e-12
"""Lower end of the errors of programs in powers."""

_SINGLE = 1e-12
"""Lines with smaller errors than this are for float64."""

_LINES = tuple(line for arithmetic in ("half", "single", "double") for line in lines(arithmetic))
_MOST_NAMES = 4

EXAMPLES: dict[str, tuple[float, ...]] = {
    "relu": (1.0, 0.0),
    "leaky_relu": (1.0, 0.01),
    "silu": (1.0, 1.0),
    "gelu": (1.0, 1.0),
    "sigmoid": (1.0, 1.0, 0.0),
    "tanh": (2.0, 2.0, -1.0),
    "relu6": (1.0, 0.0, 0.0, 6.0),
    "hard_sigmoid": (1.0 / 6.0, 0.5, 0.0, 1.0),
    "clip": (1.0, 0.0, -1.0, 1.0),
    "elu": (1.0, 1.0, 1.0),
    "selu": (1.0507009873554805, 1.7580993408473766, 1.0),
    "celu": (1.0, 2.0, 0.5),
    "silu_clipped": (1.0, 1.0, -4.0, 4.0),
    "gelu_clipped": (1.0, 1.0, -2.0, 2.0),
    "softplus": (1.0, 1.0),
    "softsign": (1.0, 1.0),
    "exp": (1.0, 1.0),
}
"""The parameters with which an entry is shown; entries with one parameter (a factor) are shown with 1."""


@dataclass(frozen=True)
class Portrait:
    """One activation that has a program.

    Attributes:
        entry: its entry in the table.
        parameters: the parameters with which it is shown.
        program: its program in form `local` of a float32 model, coefficients not rounded.
        fewest: the program with the fewest heads, which the other forms take.
    """

    entry: Activation
    parameters: tuple[float, ...]
    program: Program
    fewest: Program

    @property
    def double(self) -> bool:
        """Whether the heads are computed in float64 even in a float32 model."""
        return self.program.double


@cache
def portraits() -> dict[str, Portrait]:
    """The entries of the table that have programs, by name, in the order of the table."""
    found = [(entry.name, portrait(entry)) for entry in ACTIVATIONS]
    return {name: one for name, one in found if one is not None}


def portrait(entry: Activation) -> Portrait | None:
    """One entry; None where the table has no program for it."""
    parameters = example(entry)
    program = entry.program_for(parameters, ARITHMETIC[FLOAT], quick=True)
    fewest = entry.program_for(parameters, ARITHMETIC[FLOAT])
    if program is None or fewest is None:
        return None
    return Portrait(entry, parameters, program, fewest)


def example(entry: Activation) -> tuple[float, ...]:
    """The parameters with which an entry is shown."""
    chosen = EXAMPLES.get(entry.name, ())
    return chosen if len(chosen) == len(entry.parameters) else (1.0,) * len(entry.parameters)


def points(program: Program, reach: float, count: int) -> Array:
    """Points up to `reach`, or to the program's domain; all are exact in float32."""
    reach = min(reach, program.domain)
    return np.linspace(-reach, reach, count).astype(np.float32).astype(np.float64)


def error(portrait: Portrait, y: Array) -> Array:
    """|program - f| over max(1, |f|), both in float64."""
    truth = portrait.entry.function(y, portrait.parameters)
    return np.asarray(np.abs(portrait.program.evaluate(y) - truth) / np.maximum(1.0, np.abs(truth)))


def error32(portrait: Portrait, y: Array) -> Array:
    """The same for the nodes that form `local` writes into a float32 model, evaluated with numpy."""
    truth = portrait.entry.function(y, portrait.parameters)
    computed = run_nodes(portrait, y.astype(np.float32)).astype(np.float64)
    return np.asarray(np.abs(computed - truth) / np.maximum(1.0, np.abs(truth)))


def run_nodes(portrait: Portrait, y: Any) -> Any:
    """The values of the program's nodes in a float32 model."""
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        return ReferenceEvaluator(_model(portrait)).run(None, {"y": y})[0]


def _model(portrait: Portrait) -> onnx.ModelProto:
    given = onnx.helper.make_tensor_value_info("y", FLOAT, ["n"])
    made = onnx.helper.make_tensor_value_info("f", FLOAT, ["n"])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["y"], ["f"])], "program", [given], [made])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    block = Block(
        name="program",
        where="",
        path=(),
        region=ActivationRegion("f", ("y",), (0,)),
        gate="y",
        value="y",
        first=(),
        second=(),
        identified=Identified(portrait.entry, portrait.parameters, 0.0),
        elem_type=FLOAT,
        gate_type=FLOAT,
        value_type=FLOAT,
    )
    program = portrait.program.rounded(np.float64 if portrait.double else np.float32)
    conversion = Conversion(block=block, program=program, form="local", inline=True, double=portrait.double)
    replacement = emit_local(all_views(model)[0], conversion)
    del model.graph.node[:]
    model.graph.node.extend(replacement.nodes)
    model.graph.initializer.extend(replacement.initializers)
    return model


# -- drawings --------------------------------------------------------------------------------------------------


def figure(portrait: Portrait) -> str:
    """The drawing of one activation: values, softmax weights, errors."""
    y = points(portrait.program, REACH, 321)
    truth = portrait.entry.function(y, portrait.parameters)
    values = Panel(
        f"{portrait.entry.name}(y) and its program",
        (Curve(y, truth, "activation"), Curve(y, portrait.program.evaluate(y), "program, float64", dashed=True)),
    )
    weights = Panel("softmax weights of the keys", tuple(_weights(portrait.program, y)), low=0.0, high=1.0)
    fine = points(portrait.program, REACH, 321 * 8)
    errors = Panel(
        "error over max(1, |f|)",
        (
            _highest(fine, error(portrait, fine), "float64"),
            _highest(fine, error32(portrait, fine), "float32"),
        ),
        low=_FLOOR,
        logarithmic="y",
    )
    return drawing(
        [values, weights, errors], f"{portrait.entry.name}: values, softmax weights and errors of its program"
    )


def _weights(program: Program, y: Array) -> Iterator[Curve]:
    """The weights of each key; heads over the same keys are drawn once."""
    drawn: set[tuple[tuple[float, ...], ...]] = set()
    # A program with a line is drawn without it; one that is nothing else is the line.
    heads = program.heads or program.as_heads.heads
    for head in heads:
        keys = head.logits
        if tuple(sorted(keys)) in drawn:
            continue
        drawn.add(tuple(sorted(keys)))
        keys = keys if program.powers is None else sorted(keys)
        logits = np.array([slope * y + offset for slope, offset in keys])
        weights = np.exp(logits - logits.max(axis=0))
        weights /= weights.sum(axis=0)
        names = _names(len(keys), shared=len(heads) > 1)
        group = f", group {len(drawn)}" if len(drawn) > 1 else ""
        for place, (row, name) in enumerate(zip(weights, names, strict=True)):
            yield Curve(y, row, name and f"{name}{group}", dashed=place > 0)


def line_figure() -> str:
    """The error of every line against |g|: of the formula in float64, and of its nodes in float32."""
    exact, single = [], []
    for entry in _LINES:
        g = np.geomspace(1e-3, entry.domain, 6000).astype(np.float32).astype(np.float64)
        both = np.stack([g, np.where(g <= abs(entry.lowest), -g, g)])
        name = f"{len(entry.head.logits)} keys, step 1/{1.0 / entry.step:.0f}"
        exact.append(_highest(g, _over_one(entry.evaluate(both), both), name))
        if entry.max_error > _SINGLE:
            single.append(_highest(g, _over_one(run_line(entry, both.astype(np.float32)), both), name))
    panels = (("the formula, evaluated in float64", exact), ("the nodes, evaluated in float32", single))
    label = ("|g|", "error over max(1, |g|)")
    return drawing(
        [Panel(title, tuple(curves), logarithmic="xy", labels=label) for title, curves in panels],
        "Error of the line against |g|",
    )


def powers_figure() -> str:
    """The error of every program in powers against y: of the program in float64, and of the closest one in float32."""
    panels = []
    for name, title in (("gelu", "GELU by erf"), ("gelu_tanh", "GELU by tanh")):
        (entry,) = (entry for entry in ACTIVATIONS if entry.name == name)
        curves = []
        for activation, program in fitted_programs("powers"):
            if activation == name:
                one = Portrait(entry, example(entry), program, program)
                y = points(program, REACH, 321 * 8)
                curves.append(_highest(y, error(one, y), f"{len(program.heads) + 1} keys"))
        curves.append(_highest(y, error32(one, y), f"{len(program.heads) + 1} keys, float32"))
        panels.append(Panel(title, tuple(curves), low=_LEAST, logarithmic="y", labels=("y", "error over max(1, |f|)")))
    return drawing(panels, "Error of GELU in powers of one exponential against y")


def run_line(entry: Line, g: Any) -> Any:
    """The values of a line's nodes in float32."""
    from onnx.reference import ReferenceEvaluator

    middle = [entry.middle] if entry.middle else []
    rates = [0.0, *(rate for rate, _ in entry.pairs), *[0.5 for _ in middle]]
    weights = [entry.end, *(weight for _, weight in entry.pairs), *middle]
    inputs = {"query": g, "step": np.float32(-entry.step), "rates": np.asarray(rates, np.float32)}
    inputs["weights"] = np.asarray([entry.step * weight for weight in weights], np.float32)
    function = function_of(line_of, "NeuronLine", tuple(inputs), 17, pairs=len(entry.pairs), middle=bool(entry.middle))
    return ReferenceEvaluator(function).run(None, inputs, attributes={})[0]


def _over_one(values: Any, g: Array) -> Array:
    """The larger error over max(1, |g|) of the two rows."""
    return np.asarray((np.abs(values - g) / np.maximum(1.0, np.abs(g))).max(axis=0))


def _names(keys: int, *, shared: bool) -> list[str]:
    """The legend of a head's keys; of shared keys, each is the self key of one head."""
    if shared:
        return [f"key {place + 1}" for place in range(keys)]
    if keys > _MOST_NAMES:
        return ["self", "bias tokens", *[""] * (keys - 2)]
    return ["self", *(f"token {place}" for place in range(1, keys))]


def _highest(y: Array, values: Array, name: str, group: int = 16) -> Curve:
    """The largest of each group of neighbouring points, as the envelope of an error curve."""
    whole = len(y) // group * group
    return Curve(y[:whole].reshape(-1, group).mean(axis=1), values[:whole].reshape(-1, group).max(axis=1), name)
