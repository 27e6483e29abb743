"""What form `local` could do with each kind of block, as small models to be timed.

A sample holds the activation of one block between linear operators of the block's widths, as it is and in every way of
`passes.options.WAYS`. Blocks of one kind have the same activation, types and width, and so the same cost. Weights are
random: they cost as much as the model's own, which are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.match.blocks import Block
from passes.options import WAYS, Options
from passes.plan import Plan, apply, make_plan
from rewriter.graph.extract import ReadTensor, cut, extract

ORIGINAL = "original"
"""The name of the block as it is, among the ways."""

_TIMED = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)

INPUT = "tuned/x"
"""The input of a sample."""


@dataclass(frozen=True)
class Sample:
    """One kind of block.

    Attributes:
        kind: what its blocks have in common, in words.
        blocks: how many blocks are of that kind.
        width: channels of the input, `INPUT` [batch, tokens, width].
        elem_type: its element type.
        models: the block as it is (`ORIGINAL`), then a model per way; ways that write the same nodes share one entry,
            under the name of the first.
    """

    kind: str
    blocks: int
    width: int
    elem_type: int
    models: Mapping[str, onnx.ModelProto] = field(repr=False)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy type of the input."""
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.elem_type))


def samples(plan: Plan, options: Options, read: ReadTensor) -> tuple[Sample, ...]:
    """The kinds of blocks of which there is more than one way to write the heads.

    Args:
        plan: a plan in form `local`.
        options: the options of that plan.
        read: gives a copy of an initializer with its values inline.
    """
    by_kind: dict[str, list[Conversion]] = {}
    for conversion in plan.conversions:
        by_kind.setdefault(conversion.block.kind, []).append(conversion)
    made = (_sample(plan, kind, members, options, read) for kind, members in by_kind.items())
    return tuple(each for each in made if each is not None and len(each.models) > 2)


def _sample(plan: Plan, kind: str, members: list[Conversion], options: Options, read: ReadTensor) -> Sample | None:
    """A sample of the first of these blocks whose sizes are known."""
    for conversion in members:
        block, view = conversion.block, plan.view_of(conversion.block)
        part = cut(view, block.region.leaves, [block.output])
        width = next((each.in_features for each in block.first if each.in_features), None)
        if width is None or block.neurons is None or not {*_types(block)} <= {*_TIMED}:
            continue
        if set(part.inputs) == set(block.region.leaves):
            original = _between_projections(extract(plan.model, view, part, read), block, width)
            models = {ORIGINAL: original}
            for way, model in _written(original, options).items():
                if model not in models.values():
                    models[way] = model
            return Sample(kind, len(members), width, block.gate_type, models)
    return None


def _types(block: Block) -> tuple[int, int, int]:
    return block.gate_type, block.value_type, block.elem_type


def _between_projections(activation: onnx.ModelProto, block: Block, width: int) -> onnx.ModelProto:
    """The activation between linear operators of the block's widths, with random weights: from `INPUT` to `out`."""
    graph, random = activation.graph, np.random.default_rng(0)
    made = list(graph.node)
    del graph.node[:], graph.input[:], graph.output[:]

    def project(data: str, output: str, rows: int, columns: int, elem_type: int) -> None:
        weight = random.normal(size=(rows, columns)) / np.sqrt(rows)
        array = weight.astype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"W/{output}"))
        graph.node.append(onnx.helper.make_node("MatMul", [data, f"W/{output}"], [output], f"project/{output}"))

    for leaf, elem_type in {block.gate: block.gate_type, block.value: block.value_type}.items():
        data = INPUT
        if elem_type != block.gate_type:
            data = f"{INPUT}/{leaf}"
            graph.node.append(onnx.helper.make_node("Cast", [INPUT], [data], f"cast/{leaf}", to=elem_type))
        project(data, leaf, width, block.neurons or 0, elem_type)
    graph.node.extend(made)
    project(block.output, "out", block.neurons or 0, width, block.elem_type)
    for values, name, elem_type in ((graph.input, INPUT, block.gate_type), (graph.output, "out", block.elem_type)):
        values.append(onnx.helper.make_tensor_value_info(name, elem_type, ["batch", "tokens", width]))
    return activation


def _written(original: onnx.ModelProto, options: Options) -> dict[str, onnx.ModelProto]:
    """The block in each way that needs no float64 where the first way needs none."""
    found: dict[str, onnx.ModelProto] = {}
    narrow = False
    for name, way in WAYS.items():
        forms = replace(options.forms, spelling=way.spelling)
        precision = "model" if way.quick else "double"
        plan = make_plan(original, replace(options, only=(), skip=(), ways={}, precision=precision, forms=forms))
        widened = any(each.widened for each in plan.conversions)
        if plan.conversions and not (narrow and widened):
            found[name] = apply(plan)
            narrow = narrow or not widened
    return found
