"""Accounting: the parameters and work of a model's MLP blocks, and the heads that replace them in each form."""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms import FORMS, convert
from passes.match.blocks import QUANTISING, Dataflow
from passes.match.linear import LINEAR_OPERATORS, routing
from passes.options import COMPACT, DEFAULT_MAX_TOKENS, LOCAL, FormOptions
from passes.plan import Plan, own_attention
from rewriter.evaluate.table import MICROSOFT, NCHWC
from rewriter.graph.view import PARTS, REARRANGED, GraphView, Miss, Path, attributes, key_of, operator_of
from rewriter.graph.walk import functions_with, reads

_PRODUCTS = "elementwise products"
_NAMES = {
    "attention": """
        Softmax Attention MultiHeadAttention GroupQueryAttention DecoderMaskedMultiHeadAttention BiasSoftmax
        DecoderMaskedSelfAttention PackedAttention PackedMultiHeadAttention PagedAttention QAttention QLinearSoftmax
        """,
    "linear": """
        ConvTranspose ConvInteger NhwcConv NhwcFusedConv CausalConvWithState Add Sub Sum Neg Mean BiasAdd QLinearAdd
        CumSum RotaryEmbedding GemmaRotaryEmbedding Sin Cos AveragePool GlobalAveragePool QLinearAveragePool
        QLinearGlobalAveragePool Resize Upsample
        """,
    _PRODUCTS: """
        Mul Div QLinearMul
        """,
    "normalisation": """
        Pow Sqrt Reciprocal ReduceMean ReduceSum ReduceSumSquare ReduceL2 LayerNormalization GroupNorm SkipGroupNorm
        SimplifiedLayerNormalization RMSNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization
        EmbedLayerNormalization LpNormalization InstanceNormalization GroupNormalization BatchNormalization
        MeanVarianceNormalization
        """,
    "data movement": """
        Constant ConstantOfShape Shape Size CastLike Concat QLinearConcat Expand Tile Pad Where ScatterND Trilu OneHot
        ScatterElements DepthToSpace SpaceToDepth GatherBlockQuantized ReorderInput ReorderOutput If Loop Scan
        Equal Greater GreaterOrEqual Less LessOrEqual And Or Not TensorScatter RelativePositionBias
        """,
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_KINDS |= dict.fromkeys((name for _, name in LINEAR_OPERATORS), "linear")
_KINDS |= dict.fromkeys(PARTS.union(REARRANGED, QUANTISING), "data movement")
"""The operators of ONNX and onnxruntime that do not count against purity, moves and masks among them. Every other one
outside heads counts if it reads data and makes no integers."""

PRODUCT = "elementwise products of gates"  # the purity line's name for what `--gate product` keeps
_INTEGER_TYPES = frozenset((onnx.TensorProto.BOOL, onnx.TensorProto.INT32, onnx.TensorProto.INT64))
DEFAULT_TOKENS = 128


@dataclass(frozen=True)
class FormCost:
    """One block in one form."""

    form: str
    heads: tuple[int, ...]  # of each sublayer
    keys: int
    pattern_bytes: int  # of all heads at once; most forms compute the pattern in chunks, `local` never stores it


@dataclass(frozen=True)
class BlockAccount:
    """One MLP block."""

    name: str
    d_model: int | None
    d_ff: int | None
    parameters: int  # elements of its weights, all experts included
    share: float  # of the multiply-adds of the model's linear operators for one token
    heads: int | None  # of the chosen form; None for a block that is left
    forms: tuple[FormCost, ...] = ()  # their costs; empty where a size is unknown or the block is left
    refused: tuple[tuple[str, str], ...] = ()  # the other forms, each with the reason


@dataclass(frozen=True)
class Accounting:
    """The whole model."""

    blocks: tuple[BlockAccount, ...]
    head_dimension: int | None
    attention_heads: int | None
    share: float
    remaining: dict[str, int]  # nonlinear operators that conversion leaves, and the products of `--gate product`
    operators: dict[str, int]  # how many of each kind compute numbers from data after conversion
    tokens: int

    @property
    def purity(self) -> str:
        """Which nonlinearities other than softmax and normalisation remain after conversion."""
        if not self.remaining:
            return "none: attention, linear maps and normalisation only"
        return ", ".join(f"{count} {name}" for name, count in self.remaining.items())


def account(plan: Plan, tokens: int = DEFAULT_TOKENS) -> Accounting:
    """The accounting of a plan; costs are for N = `tokens`."""
    heads, d_head = own_attention(plan.views, plan.recognised)
    total = sum(_elements(view, op.weight) for view in plan.views for op in Dataflow(view).operators.values()) or 1
    options = replace(plan.options, max_tokens=max(tokens, DEFAULT_MAX_TOKENS), d_head=d_head or FormOptions.d_head)
    entries = [(conversion.block, conversion.heads) for conversion in plan.conversions]
    entries += [(left.block, None) for left in plan.left if left.block is not None]
    blocks, works = [], dict[tuple[Path, str], int]()
    for block, count in entries:
        view = plan.view_of(block)
        weights = [op.weight for op in (*block.first, *block.second)]
        works.update(((block.path, weight), _elements(view, weight)) for weight in weights)
        work = sum(_elements(view, weight) for weight in weights)
        d_model, d_ff = next((op.in_features for op in block.first), None), block.neurons
        forms = FORMS if count is not None and d_model and d_ff else ()
        found = {form: convert(view, block, replace(options, form=form)) for form in forms}
        taken = ((form, each) for form, each in found.items() if isinstance(each, Conversion))
        costs = tuple(_cost(form, each, d_model or 0, tokens) for form, each in taken)
        refused = tuple((form, each.reason) for form, each in found.items() if isinstance(each, Miss))
        parameters = sum(_elements(view, view.picked.get(weight, weight)) for weight in dict.fromkeys(weights))
        blocks.append(BlockAccount(block.name, d_model, d_ff, parameters, work / total, count, costs, refused))
    # Activations that are parts of another read the same weights.
    return Accounting(tuple(blocks), d_head, heads, sum(works.values()) / total, *_counts(plan), tokens)


def _cost(form: str, conversion: Conversion, width: int, tokens: int) -> FormCost:
    """The cost of a block that reads `width` columns; in form `whole` its heads may be those of another form."""
    heads, m = FORMS[conversion.form].heads(conversion, width), conversion.program.bias_tokens
    queries, keys = (tokens, m + 1) if conversion.form in (LOCAL, COMPACT) else (tokens + m, tokens + m)
    return FormCost(form, heads, keys, max(heads) * queries * keys * np.dtype(conversion.dtype).itemsize)


def _elements(view: GraphView, weight: str) -> int:
    """Elements of a weight: its multiply-adds for one token (or position of a convolution)."""
    shape = view.type_of(weight).shape or ()
    return prod(dim for dim in shape if isinstance(dim, int)) if shape else 0


def _counts(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """The nonlinear operators that remain, and all operators by kind."""
    converted = {(each.block.path, index) for each in plan.conversions for index in each.block.region.nodes}
    converted |= {(view.path, index) for view in plan.views for index in plan.recognised.nodes(view)}
    local = {(each.domain, each.name) for each in plan.model.functions}
    pure = local - functions_with(plan.model, lambda node: key_of(node) not in local and not _is_pure(node))
    counts, kinds = Counter[str](), Counter[str]()
    counted: set[tuple[Path, int]] = set()
    for view in plan.views:
        data, routes = view.data, routing(view)
        derived: dict[str, set[str]] = {"normalisation": set(), "linear": set()}  # by means; cosines and sines
        for index, node in enumerate(view.nodes):
            if data.isdisjoint(node.output):  # positions, for example, are computed from shapes alone
                continue
            kind = _kind(node, [name for name in reads(node) if name in data], derived)
            if any(view.type_of(name).elem_type in _INTEGER_TYPES for name in node.output[:1]):
                continue
            if (view.path, index) in converted:
                kind = "heads of neurons"
            elif not (key_of(node) in pure or _is_pure(node)):
                counted.add((view.path, index))
                counts[operator_of(node)] += 1
                kind = "other"
            if index in routes and kind in ("attention", "other"):
                kind = "routers"
            kinds[kind] += 1
    for block in (each.block for each in plan.left if each.block is not None):
        # An activation may be spelled with operators that do not count.
        if counted.isdisjoint((block.path, index) for index in block.region.nodes):
            counts[f"activation {block.identified.label}"] += 1
    if products := sum(conversion.block.product for conversion in plan.conversions):
        counts[PRODUCT] += products
    return dict(sorted(counts.items())), dict(kinds.most_common())


def _kind(node: onnx.NodeProto, data: list[str], derived: dict[str, set[str]]) -> str:
    """What a node that reads `data` is for, by its operator and by what its operands are computed from."""
    found = _KINDS.get(node.op_type, "data movement")
    two = len({*data}) == 2
    if two and key_of(node) in LINEAR_OPERATORS:
        found = "attention"
    elif found == _PRODUCTS and not two:
        found = "linear" if len(data) < 2 else "normalisation"  # or a square
    for kind, made in derived.items():
        begun = node.op_type.startswith("Reduce") if kind == "normalisation" else node.op_type in ("Sin", "Cos")
        if begun or (data and made.issuperset(data)):
            made.update(node.output)
            found = kind if found == _PRODUCTS else found
        elif not made.isdisjoint(data) and found in ("linear", _PRODUCTS):
            found = kind
    return found


def _is_pure(node: onnx.NodeProto) -> bool:
    plain = attributes(node).get("activation") in (None, 0, b"", b"none")
    return plain and node.op_type in _KINDS and key_of(node)[0] in ("", MICROSOFT, NCHWC)
