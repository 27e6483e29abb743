"""Tables of single nodes, and what judges them: onnxruntime's kernels and onnx's reference evaluator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx

from tests.rewriter.evaluate import single

MICROSOFT = "com.microsoft"
JUDGES = {"onnxruntime": single.by_onnxruntime, "onnx": single.by_onnx}
BOTH = tuple(JUDGES)


def dyadic(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Small multiples of 1/8: sums of their products are exact in float32."""
    return np.asarray(rng.integers(-16, 17, shape) / 8, np.float32)


def any_of(rng: np.random.Generator, *values: Any) -> Any:
    return values[rng.integers(len(values))]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@dataclass
class Case:
    """One node; `judges` compute it, and `data` are the operands of integers that depend on data."""

    operator: str
    operands: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    domain: str = ""
    opset: int = 21
    judges: Sequence[str] = BOTH
    data: Sequence[int] = ()
    constants: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.operands = [None if each is None else np.asarray(each) for each in self.operands]

    @property
    def quantised(self) -> list[str]:
        return [f"x{place}" for place in self.data]

    @property
    def made(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        return single.single(
            *(self.operator, self.operands), outputs=self.outputs, domain=self.domain, opset=self.opset,
            attributes=self.attributes, constants=self.constants,
        )  # fmt: skip

    def __str__(self) -> str:
        shapes = [None if each is None else each.shape for each in self.operands]
        return f"{self.operator} {shapes} {dict(self.attributes)}"


contrib = partial(Case, domain=MICROSOFT, judges=("onnxruntime",))
"""A case of one of onnxruntime's own operators, which no other judge knows."""


def assert_judged(case: Case, tolerance: float = 1e-5) -> None:
    """In floats, it computes what each of its judges does."""
    model, feeds = case.made
    found = single.in_floats(model, feeds, case.quantised)
    narrow = [name for name, each in feeds.items() if each.dtype.name in ("int4", "uint4")]
    for name in narrow:  # onnxruntime takes these as constants only
        model.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop(name), name))
    for judge in case.judges:
        for mine, made in zip(found, JUDGES[judge](model, feeds), strict=True):
            wanted, message = np.asarray(made).astype(np.float64), f"{judge}: {case}"
            assert mine.shape == wanted.shape, message
            allowed = tolerance * np.abs(wanted).max(initial=1e-30)
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=allowed, err_msg=message)


def assert_same_in_field(first: Case, second: onnx.ModelProto) -> None:
    """Two models of the same inputs compute the same residues."""
    model, feeds = first.made
    both = (single.in_field(each, feeds, first.quantised) for each in (model, second))
    for one, two in zip(*both, strict=True):
        np.testing.assert_array_equal(one, two, err_msg=str(first))


def written(case: Case, text: str, *, opset: int = 21) -> onnx.ModelProto:
    """A model of the same inputs x0, x1, ... and outputs y0, ..., as nodes in text."""
    model, _ = case.made
    names = {onnx.TensorProto.FLOAT: "float", onnx.TensorProto.BOOL: "bool"}
    kinds = {value: name.lower() for name, value in onnx.TensorProto.DataType.items()} | names
    inputs = ", ".join(
        f"{kinds[value.type.tensor_type.elem_type]}"
        f"[{','.join(str(each.dim_value) for each in value.type.tensor_type.shape.dim)}] {value.name}"
        for value in model.graph.input
    )
    outputs = ", ".join(f"float[] {value.name}" for value in model.graph.output)
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "{MICROSOFT}" : 1]>'
    made = onnx.parser.parse_model(f"{header} written ({inputs}) => ({outputs}) {{ {text} }}")
    made.graph.initializer.extend(model.graph.initializer)
    return made
