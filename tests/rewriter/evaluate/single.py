"""One node in each arithmetic, beside onnxruntime and onnx's reference evaluator."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

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
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, with its feeds; None for an operand that is left out."""
    names = ["" if each is None else f"x{place}" for place, each in enumerate(operands)]
    made = [f"y{place}" for place in range(outputs)]
    node = helper.make_node(operator, names, made, domain=domain, **(attributes or {}))
    feeds = {name: each for name, each in zip(names, operands, strict=True) if each is not None}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in feeds.items()
    ]
    graph = helper.make_graph([node], "single", inputs, [onnx.ValueInfoProto(name=name) for name in made])
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


def evaluated(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], arithmetic: Arithmetic, quantised: Collection[str] = ()
) -> list[Any]:
    """The outputs: entries of what depends on floats, arrays of what does not."""
    evaluator = AtFeeds(Program(load_model(model)), arithmetic, feeds, blend=False)
    evaluator.quantised = quantised
    return [each.entries if isinstance(each, Value) else each for each in evaluator.run().values()]


def in_floats(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], quantised: Collection[str] = ()
) -> list[Any]:
    return evaluated(model, feeds, Floats(), quantised)


@cache
def a_field() -> Field:
    return Field(draw_prime(), KEY)


def in_field(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], field: Field | None = None, quantised: Collection[str] = ()
) -> list[Any]:
    return evaluated(model, feeds, field or a_field(), quantised)


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
    exacts, both = in_floats(model, feeds, quantised), in_field(model, feeds, None, quantised)
    for exact, residues in zip(exacts, both, strict=True):
        if residues.dtype == np.int64 and exact.dtype == np.float64:
            exact = a_field().lift(exact, scalar=False).entries
        np.testing.assert_array_equal(residues, exact)
