"""One node in each arithmetic, beside onnxruntime and onnx's reference evaluator."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper, parser

from rewriter.evaluate.arithmetic import Arithmetic, Field, Floats, Value, draw_prime, is_float
from rewriter.evaluate.evaluator import Evaluator, Program
from rewriter.files.load import load_model

KEY = b"tests of operators"


def single(
    operator: str,
    operands: Sequence[np.ndarray | None],
    *,
    outputs: int = 1,
    domain: str = "",
    opset: int = 21,
    attributes: Mapping[str, Any] | None = None,
    constants: Collection[int] = (),
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, with its feeds; None for an operand that is left out. Some operands may be constants."""
    names = ["" if each is None else f"x{place}" for place, each in enumerate(operands)]
    made = [f"y{place}" for place in range(outputs)]
    node = helper.make_node(operator, names, made, domain=domain, **(attributes or {}))
    feeds = {name: each for name, each in zip(names, operands, strict=True) if each is not None}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in feeds.items()
        if int(name[1:]) not in constants
    ]
    weights = [numpy_helper.from_array(feeds.pop(f"x{place}"), f"x{place}") for place in constants]
    graph = helper.make_graph([node], "single", inputs, [onnx.ValueInfoProto(name=name) for name in made], weights)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


class AtFeeds(Evaluator):
    """Takes the numbers that it is fed, instead of random residues; `quantised`: integers that are data."""

    quantised: Collection[str] = ()

    def _feed(self, name: str, x: np.ndarray) -> None:
        value: Any = x
        if name in self.quantised:
            value = Value(self.arithmetic.lift(x).entries, whole=True, grid=("q", x.dtype.name))
        elif is_float(x):
            value = Value(self.arithmetic.lift(x, scalar=False).entries)
        self.environment[name] = value
        self.record(name, value)


def values(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], arithmetic: Arithmetic, quantised: Collection[str] = ()
) -> list[Any]:
    evaluator = AtFeeds(Program(load_model(model)), arithmetic, feeds)
    evaluator.quantised = quantised
    return list(evaluator.run().values())


def evaluated(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], arithmetic: Arithmetic, quantised: Collection[str] = ()
) -> list[Any]:
    """The outputs: entries of what depends on floats, arrays of what does not."""
    outputs = values(model, feeds, arithmetic, quantised)
    return [each.entries if isinstance(each, Value) else each for each in outputs]


def in_floats(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], quantised: Collection[str] = ()) -> list[Any]:
    return evaluated(model, feeds, Floats(), quantised)


@functools.cache
def field(snaps: bool) -> Field:
    return Field(draw_prime(), KEY, snaps=snaps)


def in_field(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], quantised: Collection[str] = (), *, snaps: bool = False
) -> list[Any]:
    return evaluated(model, feeds, field(snaps), quantised)


def by_onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def by_onnx(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(model).run(None, dict(feeds)))


def assert_equal_in_both(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], quantised: Collection[str] = ()
) -> None:
    """Where every operation is rational and the feeds are small dyadic numbers: the field computes the same numbers."""
    both = zip(in_floats(model, feeds, quantised), in_field(model, feeds, quantised), strict=True)
    for exact, residues in both:
        lifted = residues.dtype == np.int64 and exact.dtype == np.float64
        wanted = field(False).lift(exact, scalar=False).entries if lifted else exact
        np.testing.assert_array_equal(residues, wanted)


SETTINGS = ("opset", "outputs", "without", "domain", "constants", "rtol", "atol")


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `assert_as_others` that a case of a table states, with its attributes apart."""
    stated = {name: each for name, each in given.items() if name in SETTINGS}
    return {**stated, "attributes": {name: each for name, each in given.items() if name not in SETTINGS}}


def name_of(part: Any) -> str:
    return part if isinstance(part, str) else ""


def drawn(shapes: Sequence[Any], seed: int, kind: Any = np.float32) -> list[np.ndarray | None]:
    """Operands: small dyadic numbers for a shape, anything else as it is."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(-40, 40, each) / 8).astype(kind) if isinstance(each, tuple) else each for each in shapes]


def ints(*each: Any) -> np.ndarray:
    return np.array(each, np.int64)


def widened(operands: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    return [each.astype(np.float64) if each is not None and each.dtype == np.float32 else each for each in operands]


def assert_as_others(
    operator: str, shapes: Sequence[Any], *, without: str = "", rtol: float = 2e-6, atol: float = 2e-6, **given: Any
) -> None:
    """In float64 as onnxruntime in float32, and to the last digits as onnx's evaluator in float64.

    `without`: which of them lacks it, or has it wrong: "onnx", "onnxruntime", "float64" (onnx's evaluator takes or
    computes float32 only). `shapes`: see `drawn`; `given`: see `single`; tolerances are for float32.
    """
    for seed in range(2):
        model, feeds = single(operator, drawn(shapes, seed), **given)
        made = in_floats(model, feeds)
        if "onnxruntime" not in without.split():
            assert_near(made, by_onnxruntime(model, feeds), rtol, atol)
        if "onnx" in without.split():
            continue
        if "float64" in without.split():
            assert_near(made, by_onnx(model, feeds), rtol, atol)
            continue
        model, feeds = single(operator, widened(drawn(shapes, seed)), **given)
        assert_near(in_floats(model, feeds), by_onnx(model, feeds), 1e-12, 1e-13)


def assert_near(made: Sequence[Any], right: Sequence[Any], rtol: float, atol: float) -> None:
    for one, other in zip(made, right, strict=True):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(one, other, rtol, atol)


def text_model(nodes: str, inputs: str, *, opset: int = 21) -> onnx.ModelProto:
    """A model of nodes as text, whose last node computes `y`."""
    header = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    return parser.parse_model(f"{header} laws ({inputs}) => (float y) {{ {nodes} }}")


def assert_same_law(one: onnx.ModelProto, other: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
    """Two models are the same function in the field, where constants are what they are rounded from, and in float64."""
    for left, right in zip(in_field(one, feeds, snaps=True), in_field(other, feeds, snaps=True), strict=True):
        np.testing.assert_array_equal(left, right)
    assert_near(in_floats(one, feeds), in_floats(other, feeds), 1e-6, 1e-7)
