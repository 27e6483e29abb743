"""The counts of a run, from its plan and the inputs of its proof. Nothing is run and no weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import onnx

from passes.conversion import Conversion
from passes.plan import Plan
from rewriter.errors import UsageError
from rewriter.estimate.counts import Counts
from rewriter.estimate.formula import Estimate, estimate
from rewriter.files.load import LoadedModel
from rewriter.files.tensors import byte_count
from rewriter.files.walk import iter_nodes
from rewriter.graph.types import forget_symbols, inferred_skeleton, shapes_in_numbers, skeleton_of
from rewriter.proof.blocks.adversarial_points import TOKENS
from rewriter.proof.inputs.cases import Case
from rewriter.proof.run.whole import TAPPED
from rewriter.proof.settings import Settings
from rewriter.proof.validate import cases_of, few_of

Shapes = Mapping[str, tuple[int, ...]]

_CONVOLUTIONS = ("Conv", "ConvTranspose", "FusedConv", "ConvInteger", "QLinearConv")
_PRODUCTS = (
    *("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "GemmFastGelu", "MatMulInteger", "QLinearMatMul", "QGemm"),
    *("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits"),
)
_STRING = onnx.TensorProto.STRING
_POSITIONED, _STAGES = ("maskless", "staged"), 3
"""The forms whose bias tokens have positions, and the number of sublayers that form `staged` makes of a block."""
_POINTS = 50_000
"""Adversarial points of a block, about (`rewriter.proof.blocks.adversarial_points`)."""


def estimate_of(source: LoadedModel, plan: Plan, settings: Settings, *, proved: bool = True) -> Estimate | None:
    """What converting `source` by `plan` takes, with the proof or without; None if no inputs can be made.

    Raises:
        UsageError: the inputs or sizes in `settings` do not fit the model.
    """
    try:
        return estimate(counts_for(source, plan, settings), proved=proved)
    except UsageError:
        if settings.inputs is not None or settings.dims:
            raise
        return None


def counts_for(source: LoadedModel, plan: Plan, settings: Settings) -> Counts:
    """The counts of converting `source` by `plan` and proving it.

    Raises:
        UsageError: the inputs or sizes in `settings` do not fit the model, or no inputs can be made for it.
    """
    # As the proof does: positions that all blocks share are proved end to end.
    longest = max((each.longest or 0 for each in plan.conversions), default=0) if plan.route is not None else 0
    cases = cases_of(source, settings, longest)
    cases = few_of(cases)
    runs = [_run_of(source.proto, plan, case) for case in cases]
    blocks = plan.conversions
    sizes = [byte_count(tensor) for tensor in source.proto.graph.initializer if tensor.data_type != _STRING]
    # Blocks are proved on the first inputs.
    first = [each for run in runs[:TAPPED] for each in zip(blocks, run.products_by_block, run.scores, strict=True)]
    points = [_POINTS * _keys(each, TOKENS) * len(each.program.attention) for each in blocks if not each.heads_tensor]
    return Counts(
        nodes=sum(1 for _ in iter_nodes(source.proto.graph.node)),
        bytes=source.size,
        file_bytes=source.file_size,
        largest_bytes=max(sizes, default=0),
        blocks=len(blocks),
        block_bytes=sum(4 * _products(each) for each in blocks),
        cases=len(cases),
        products=sum(run.products for run in runs),
        elements=sum(run.elements for run in runs),
        largest_elements=max((run.largest for run in runs), default=0),
        case_elements=max((run.elements for run in runs), default=0),
        scores=sum(sum(run.scores) for run in runs),
        largest_scores=max((_alive(*each) for run in runs for each in zip(blocks, run.scores, strict=True)), default=0),
        block_products=sum(products for _, products, _ in first),
        points_scores=sum(points),
        largest_points_scores=max(points, default=0),
        sublayers=sum(1 for each in blocks if each.heads_tensor),
        sublayer_products=sum(products for each, products, _ in first if each.heads_tensor),
        sublayer_scores=sum(scores for each, _, scores in first if each.heads_tensor),
        slots=sum(
            each.program.bias_tokens * len(each.program.attention) for each in blocks if each.form in _POSITIONED
        ),
        stages=sum(_STAGES for each in blocks if each.form == "staged"),
        by_blocks=settings.by_blocks(source.size),
    )


@dataclass(frozen=True)
class _Run:
    """One evaluation on one input."""

    products: int
    elements: int
    largest: int
    products_by_block: tuple[int, ...]
    scores: tuple[int, ...]


def _run_of(model: onnx.ModelProto, plan: Plan, case: Case) -> _Run:
    shapes = _shapes_of(model, {name: values.shape for name, values in case.feeds.items()})
    made = [prod(shapes[name]) for node in model.graph.node for name in node.output if name in shapes]
    sizes = [_size(each, shapes, case) for each in plan.conversions]
    by_block = tuple(rows * _products(each) for each, (rows, _) in zip(plan.conversions, sizes, strict=True))
    scores = tuple(
        rows * (each.block.neurons or 1) * _keys(each, tokens) * len(each.program.attention)
        for each, (rows, tokens) in zip(plan.conversions, sizes, strict=True)
    )
    products = sum(_work(node, shapes) for node in model.graph.node)
    return _Run(max(products, sum(by_block)), sum(made), max(made, default=0), by_block, scores)


def _size(conversion: Conversion, shapes: Shapes, case: Case) -> tuple[int, int]:
    """Rows that a block computes, and the length of one sequence of them."""
    gate, neurons = shapes.get(conversion.block.gate), conversion.block.neurons
    if gate is None or not neurons:
        # Tokens of the input, where no shape of a block's tensor is known.
        shape = max((values.shape for values in case.feeds.values()), key=lambda each: prod(each[:2]), default=())
        return max(prod(shape[:2]), 1), max(shape[1] if len(shape) > 1 else 1, 1)
    rows = max(prod(gate) // neurons, 1)
    return rows, max(rows // gate[0], 1) if len(gate) > 2 and gate[0] else rows


def _alive(conversion: Conversion, scores: int) -> int:
    """Entries of the patterns of one block that are alive at one time: they are computed in chunks."""
    if not conversion.heads_tensor:
        return 0
    entry = 8 if conversion.compute_type == onnx.TensorProto.DOUBLE else 4
    return min(scores, int(conversion.options.max_pattern_mb * 2**20) // entry)


def _shapes_of(model: onnx.ModelProto, given: Shapes) -> Shapes:
    """Shapes of the main graph's tensors for inputs of these shapes, as far as onnx infers them."""
    skeleton = skeleton_of(model)
    for value in skeleton.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, given.get(value.name, ()), strict=False):
            dim.dim_value = size
    forget_symbols(skeleton)
    return shapes_in_numbers(inferred_skeleton(skeleton).graph)


def _work(node: onnx.NodeProto, shapes: Shapes) -> int:
    """Multiplications of a linear operator or of two activations; 0 for others and where sizes are unknown."""
    if not node.output or node.output[0] not in shapes or not node.input:
        return 0
    out = prod(shapes[node.output[0]])
    if node.op_type in _CONVOLUTIONS:
        weight = next((shapes[name] for name in node.input[1:] if len(shapes.get(name, ())) > 2), ())
        return out * prod(weight[1:]) if weight else 0
    if node.op_type in _PRODUCTS and shapes.get(node.input[0]):
        return out * shapes[node.input[0]][-1]
    return 0


def _products(conversion: Conversion) -> int:
    """Multiplications of a block's linear operators for one row: the entries of their weights."""
    operators = (*conversion.block.first, *conversion.block.second)
    return sum((each.in_features or 0) * (each.out_features or 0) for each in operators)


def _keys(conversion: Conversion, tokens: int) -> int:
    """Keys against which a query is scored: in the forms with one sequence of tokens and bias tokens, all of them."""
    own = conversion.program.bias_tokens + 1
    return own if conversion.form in ("local", "compact") else own + tokens - 1
