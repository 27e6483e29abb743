"""One original and six models that are wrong in one way each, for tools to judge; needs onnx and numpy only.

`python -m benchmarks.tools.wrong ORIGINAL FOLDER` writes them. Works on any decoder whose last MatMul makes the logits
and that reads `input_ids`; GPT-2's names of the weights are assumed.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

TOKEN = 77
"""The token number that becomes NaN."""

LONGEST_RIGHT = 32
"""The number of tokens up to which the last variant is right."""

_WEIGHT = "h.1.mlp.c_proj.weight"


def sign(model: onnx.ModelProto) -> None:
    """The largest weight of an MLP's second matrix has the wrong sign."""
    _edit(model, lambda values, place: -values[place])


def weight(model: onnx.ModelProto) -> None:
    """The largest weight of an MLP's second matrix is off by 1e-3."""
    _edit(model, lambda values, place: values[place] + 1e-3)


def leak(model: onnx.ModelProto) -> None:
    """Every token sees one hundredth of the last one: x + 0.01 (x_last - x)."""
    _into_logits(
        model,
        [
            helper.make_node("Slice", ["X", "wrong_from", "wrong_to", "wrong_axis"], ["wrong_last"]),
            helper.make_node("Sub", ["wrong_last", "X"], ["wrong_step"]),
            helper.make_node("Mul", ["wrong_step", "wrong_share"], ["wrong_part"]),
            helper.make_node("Add", ["X", "wrong_part"], ["Y"]),
        ],
        wrong_from=np.array([-1]),
        wrong_to=np.array([np.iinfo(np.int64).max]),
        wrong_axis=np.array([1]),
        wrong_share=np.float32(0.01),
    )


def swapped(model: onnx.ModelProto) -> None:
    """The logits of tokens 5 and 6 have changed places."""
    product = _last_product(model)
    name = product.output[0]
    product.output[0] = "wrong_logits"
    columns = np.arange(_columns(model, product))
    columns[[5, 6]] = 6, 5
    model.graph.initializer.append(numpy_helper.from_array(columns, "wrong_columns"))
    after = list(model.graph.node).index(product) + 1
    model.graph.node.insert(after, helper.make_node("Gather", ["wrong_logits", "wrong_columns"], [name], axis=-1))


def not_a_number(model: onnx.ModelProto) -> None:
    """One token number of the vocabulary, 77, makes NaN."""
    _into_logits(
        model,
        [
            helper.make_node("Equal", ["input_ids", "wrong_token"], ["wrong_here"]),
            helper.make_node("Unsqueeze", ["wrong_here", "wrong_axis"], ["wrong_mask"]),
            helper.make_node("Where", ["wrong_mask", "wrong_nan", "X"], ["Y"]),
        ],
        wrong_token=np.int64(TOKEN),
        wrong_axis=np.array([-1]),
        wrong_nan=np.float32(np.nan),
    )


def long(model: onnx.ModelProto) -> None:
    """Tokens after the 32nd are off by 0.01 in every channel of the residual stream."""
    _into_logits(
        model,
        [
            helper.make_node("Mul", ["input_ids", "wrong_none"], ["wrong_zeros"]),
            helper.make_node("Add", ["wrong_zeros", "wrong_one"], ["wrong_ones"]),
            helper.make_node("CumSum", ["wrong_ones", "wrong_tokens"], ["wrong_places"]),
            helper.make_node("Greater", ["wrong_places", "wrong_longest"], ["wrong_late"]),
            helper.make_node("Cast", ["wrong_late"], ["wrong_float"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Mul", ["wrong_float", "wrong_share"], ["wrong_step"]),
            helper.make_node("Unsqueeze", ["wrong_step", "wrong_axis"], ["wrong_part"]),
            helper.make_node("Add", ["X", "wrong_part"], ["Y"]),
        ],
        wrong_none=np.int64(0),
        wrong_one=np.int64(1),
        wrong_tokens=np.int64(1),
        wrong_longest=np.int64(LONGEST_RIGHT),
        wrong_share=np.float32(0.01),
        wrong_axis=np.array([-1]),
    )


VARIANTS: dict[str, tuple[str, Callable[[onnx.ModelProto], None]]] = {
    "sign": ("one weight with the wrong sign", sign),
    "weight": ("one weight off by 1e-3", weight),
    "leak": ("tokens leak into each other", leak),
    "swapped": ("two logits swapped", swapped),
    "nan": ("NaN for one token number of 128", not_a_number),
    "long": ("wrong beyond 32 tokens only", long),
}
"""File stem to what the table says, and the change."""


def write(original: Path, folder: Path) -> dict[str, Path]:
    """Write every variant of `original` to `folder`.

    Returns:
        File stem to path.
    """
    paths = {}
    for name, (_, change) in VARIANTS.items():
        model = onnx.load(original)
        change(model)
        onnx.checker.check_model(model)
        paths[name] = folder / f"{name}.onnx"
        onnx.save(model, paths[name])
    return paths


def _edit(model: onnx.ModelProto, made: Callable[[np.ndarray, tuple[np.intp, ...]], float]) -> None:
    tensor = next(each for each in model.graph.initializer if each.name.endswith(_WEIGHT))
    values = numpy_helper.to_array(tensor).copy()
    place = np.unravel_index(np.abs(values).argmax(), values.shape)
    values[place] = made(values, place)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _last_product(model: onnx.ModelProto) -> onnx.NodeProto:
    found: onnx.NodeProto = next(node for node in reversed(model.graph.node) if node.op_type == "MatMul")
    return found


def _columns(model: onnx.ModelProto, product: onnx.NodeProto) -> int:
    shapes = {each.name: list(each.dims) for each in model.graph.initializer}
    return int(shapes[product.input[1]][1])


def _into_logits(model: onnx.ModelProto, nodes: list[onnx.NodeProto], **constants: np.ndarray | np.generic) -> None:
    """Insert nodes from X to Y before the product that makes the logits."""
    product = _last_product(model)
    before = product.input[0]
    for node in nodes:
        node.input[:] = [before if name == "X" else name for name in node.input]
        node.output[:] = ["wrong_input" if name == "Y" else name for name in node.output]
    product.input[0] = "wrong_input"
    at = list(model.graph.node).index(product)
    for offset, node in enumerate(nodes):
        model.graph.node.insert(at + offset, node)
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
