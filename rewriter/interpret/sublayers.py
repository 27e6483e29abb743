"""Sublayers as heads: original attention, and MLP blocks with one head or more per neuron.

Original heads are a Softmax between two products of data, or an attention operator. Queries, keys, values and the
heads' outputs are followed to the linear operators at both ends (`rewriter.interpret.trace`). A rewritten file has the
heads of its original: its plan names the activation and the weights, which are still there.

Names are those of TransformerLens: `blocks.3.attn`, `blocks.3.mlp_heads`. The number of a layer is the first number in
the module path that the exporter left. A model with an encoder and a decoder has `encoder.3.attn` and
`decoder.3.cross_attn`.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, product
from math import prod
from typing import Any, ClassVar

import numpy as np
import onnx

from passes.conversion import decide
from passes.match.blocks import Block, Dataflow, Namer
from passes.match.linear import LinearOperator
from passes.match.projections import Projection, ProjectionReader, Projections
from passes.options import ALREADY, Options
from passes.plan import Plan, with_operators
from passes.programs.program import Group, Program, groups_of
from rewriter.arrays import Array, distinct, grouped
from rewriter.evaluate.scalar import NONLINEAR
from rewriter.graph.attention import definition, keys_alone
from rewriter.graph.view import GraphView, LostError, Miss, key_of, label
from rewriter.interpret.trace import Indices, Norm, Shape, Traced, Tracer, noting

PROGRAMS = {"fewest": "masked", "fast": "local"}  # heads, or operations, to the form with such programs


@dataclass(frozen=True, eq=False, kw_only=True)
class Named:
    """A sublayer: its names, and its members, which are heads or neurons."""

    name: str = ""
    layer: str = ""
    module: str = ""
    node: int  # index of its Softmax, or of what makes its activation or result, which orders sublayers
    data: str  # the tensor that queries or W1 read
    result: str  # the output of W_O or W2
    channels: Indices  # [members, d_head], rows of W_O; of a neuron one row of W2

    @property
    def count(self) -> int:
        return len(self.channels)

    @cached_property
    def members(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{number}" for number in range(self.count))


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """The normalisation of queries or keys."""

    norm: Norm
    axis: int  # of tokens in its output, 1 or 2
    shape: Shape  # of the output for each token
    columns: Indices  # [heads, d_head], entries of that, flattened

    def of_heads(self, constant: Array) -> Array:
        """[heads, d_head] of a scale or bias."""
        return np.asarray(np.broadcast_to(constant.reshape(-1), self.shape).reshape(-1)[self.columns])

    def by_head(self, output: Array, batch: int) -> Array:
        """[batch, tokens, heads, d_head] of the output."""
        return np.asarray(np.moveaxis(output, self.axis, 1).reshape(batch, -1, prod(self.shape))[..., self.columns])


@dataclass(frozen=True, eq=False)
class HeadColumns:
    """Queries, keys or values of all heads: columns of a linear operator's output, plus constants, times `factor`."""

    operator: LinearOperator
    columns: Indices  # [heads, d_head] of its output
    factor: float  # after a normalisation, if any
    added: Array  # [heads, d_head], constants such as a bias in a separate Add, before the factor
    rotary: bool
    norm: HeadNorm | None = None  # of each token's channels, before that

    def by_head(self, output: Array, batch: int, *, scaled: bool = False) -> Array:
        """[batch, tokens, heads, d_head] of the operator's output, with constants; values are `scaled`."""
        rows = output.reshape(batch, -1, output.shape[-1])[..., self.columns] + self.added.astype(output.dtype)
        return np.asarray(rows * output.dtype.type(self.factor if scaled else 1.0))


def heads_in(tracer: Tracer, tensor: str, shape: Callable[[Array], Array]) -> HeadColumns:
    """The heads in a tensor, which `shape` lays out as [..., heads, tokens, d_head]. Raises LostError."""
    traced = tracer.trace(tensor).moved(shape)
    norm, normed = tracer.norm(traced.source), traced
    if norm is not None:
        if traced.added.any():
            raise LostError("it adds something to what is normalised", norm.output)
        before = tracer.trace(norm.data)
        if before.rotary:
            raise LostError("what it normalises is rotated", norm.output)
        traced = before.moved(lambda array: np.where(normed.index < 0, -1, array.reshape(-1)[normed.index]))
    operator = tracer.operator(traced.source)
    if operator is None:
        raise LostError("no linear operator makes it", traced.source)
    where, width = label(tracer.view.nodes[operator.node]), operator.out_features
    if traced.index.ndim < 3 or operator.axis != -1 or not width:
        raise LostError("its channels are not on the last axis", where)
    traced = traced.moved(lambda array: array.reshape(-1, *array.shape[-2:]))
    kept = np.all(traced.index >= 0, axis=(0, 2))  # tokens of a key-value cache come from no operator
    traced = traced.moved(lambda array: array[:, kept])
    index = traced.index
    # Consecutive blocks that read the same rows are the heads of one sequence.
    rows, columns = index[:, :, 0] // width, index[:, 0] % width
    count = int(np.argmin([*(rows == rows[0]).all(axis=1), False]))
    own_rows = rows[::count].repeat(count, axis=0)[: len(rows), :, None]
    expected = own_rows * width + np.resize(columns[:count], columns.shape)[:, None]
    if len(rows) % count or len(distinct(rows)) * count != rows.size or (index != expected).any():
        raise LostError("its heads do not consist of columns", where)
    factor, added = _single_factor(traced, where), traced.added[:count, 0]
    if (traced.added != np.resize(added, (len(rows), 1, added.shape[1]))).any():
        raise LostError(f"the constant '{traced.constants[0]}' that is added differs from token to token", where)
    held = None
    if norm is not None:
        held = _norm_of(tracer, norm, normed.index.reshape(-1, count, *normed.index.shape[-2:])[:, :, kept])
        factor = _single_factor(normed, where)
    return HeadColumns(operator, columns[:count], factor, added / _single_factor(traced, where), normed.rotary, held)


def _norm_of(tracer: Tracer, norm: Norm, index: Indices) -> HeadNorm:
    """The normalisation of queries or keys [batch, heads, tokens, d_head]."""
    shape, wanted = tracer.shape(norm.output), index.swapaxes(1, 2)
    places = np.arange(prod(shape)).reshape(shape)
    for axis in range(1, len(shape) - 1):
        moved = np.moveaxis(places, axis, 1)
        rows = moved.reshape(*wanted.shape[:2], -1)
        order = np.argsort(rows[0, 0])
        columns = order[np.searchsorted(rows[0, 0], wanted[0, 0], sorter=order) % len(order)]
        if (rows[..., columns] == wanted).all():
            return HeadNorm(norm, axis, moved.shape[2:], columns)
    raise LostError("it is not made of one normalisation by token", norm.output)


def _single_factor(traced: Traced, where: str) -> float:
    factors = traced.factor[traced.index >= 0]
    if (factors != factors[0]).any():
        raise LostError("its channels have different factors", where)
    return float(factors[0])


def rows_of_output(traced: Traced, shape: Shape, heads: int, where: str) -> Indices:
    """The channel [heads, d_head] of each entry of z = [..., tokens, d_head] in [..., channels]. Raises LostError."""
    if (traced.index < 0).any() or traced.added.any():
        raise LostError("the output projection reads more than the heads", where)
    if (traced.factor != 1.0).any():
        raise LostError("the heads' outputs are scaled", where)
    index = traced.index.reshape(-1, traced.index.shape[-1])
    # A row per token with the entries of all heads, in rising order.
    rows = np.arange(prod(shape)).reshape(-1, heads, *shape[-2:]).swapaxes(1, 2).reshape(-1, heads * shape[-1])
    order = np.argsort(index[0])
    read = index[:, order]
    if read.shape[1] != rows.shape[1] or (read != rows[np.searchsorted(rows[:, 0], read[:, 0], "right") - 1]).any():
        raise LostError("the output projection does not read all heads of one token", where)
    return order.reshape(heads, -1)


# -- attention sublayers --------------------------------------------------------------------------------------------

# Between the product and the Softmax; a Tanh caps scores, and a Concat puts a sink beside them.
_MASKING = {"Add", "Where", "Cast", "Identity", "Reshape", "Mul", "Div", "Max", "Dropout", "Tanh", "Concat", "Sub"}
_WEIGHING = NONLINEAR | _MASKING | {"ReduceSum", "Abs"}  # between the product and the values, without a Softmax
_ROUNDING = ("QuantizeLinear", "DequantizeLinear")
_GUARDING = {"Cast", "Identity", "Dropout", "Where", "Mul", "Reshape", "Slice", *_ROUNDING}


@dataclass(frozen=True, eq=False)
class Attention(Named):
    """The heads of one attention sublayer."""

    kind: ClassVar = "head"  # of its members
    query: HeadColumns  # W_Q as a linear operator; `key` and `value` are per query head
    key: HeadColumns
    value: HeadColumns
    groups: int  # heads that share keys and values: 1, or more in grouped-query attention
    scale: float  # of the scores q k, q and k as computed by W_Q and W_K
    output: LinearOperator
    z: str  # the heads' outputs, [batch, heads, tokens, d_head], or the first two axes merged
    factor: float
    cross: bool
    pattern: str
    scores: str  # with masks and position biases, before Softmax
    product: str

    @property
    def heads(self) -> int:
        return self.count


def find_attention(tracer: Tracer, missed: list[Miss], made: Collection[int] = ()) -> list[Attention]:
    """All attention sublayers in order, except the nodes `made` by this tool; `missed` gets those not understood."""
    found: list[Attention] = []
    for index, node in enumerate(tracer.view.nodes):
        if index in made:
            continue
        with noting(missed, f"attention at {label(node)}", label(node), "attention"):
            if key_of(node) == ("", "Softmax") or node.op_type == "QLinearSoftmax":
                found += _around_softmax(tracer, index, node)
            elif _is_product(tracer, node):
                for maker in map(tracer.view.made_by, tracer.view.back(node.input[0], _WEIGHING)):
                    if maker is not None and _is_product(tracer, maker):
                        raise LostError("its weights are not the Softmax of its scores", label(maker))
            elif node.op_type.endswith("Attention"):
                definition(node, tracer.view.types, tracer.view.opsets.get("", 1))
    return found


def _around_softmax(tracer: Tracer, index: int, node: onnx.NodeProto) -> list[Attention]:
    after, products = _product_after(tracer, node.output[0]), list(_products_before(tracer, node.input[0]))
    if after is None:
        return []
    if not products:
        raise LostError("its scores are not a product of queries and keys", label(node))
    scores, *_ = keys_alone(tracer.view, node.input[0], lambda name: any(_products_before(tracer, name)))
    lost = list[LostError]()
    for before, factor in products:
        try:
            return [_between(tracer, before, after, node=index, factor=factor, scores=scores)]
        except LostError as error:
            lost.append(error)
    raise lost[0]


def _between(
    tracer: Tracer, before: onnx.NodeProto, after: onnx.NodeProto, *, factor: float, **further: Any
) -> Attention:
    z, where = after.output[0], label(after)
    names = *before.input, after.input[1]
    sizes = [tracer.shape(name) for name in names]
    leading = np.broadcast_shapes(*(size[:-2] for size in sizes))

    def spread(array: Array) -> Array:
        return np.broadcast_to(array, (*leading, *array.shape[-2:]))

    layouts = spread, lambda array: spread(array.swapaxes(-1, -2)), spread
    query, key, value = (heads_in(tracer, *each) for each in zip(names, layouts, strict=True))
    if not len(query.columns) == len(key.columns) == len(value.columns):
        raise LostError("queries, keys and values have different numbers of heads", where)
    output = tracer.readers.get(z)
    if output is None:
        raise LostError("no linear operator reads its heads", where)
    shape = *leading, sizes[0][-2], sizes[2][-1]
    return Attention(
        data=query.operator.data,
        result=output.output,
        query=query,
        key=key,
        value=value,
        groups=len(key.columns) // len(distinct(key.columns[:, 0])),
        scale=factor * query.factor * key.factor,
        output=output,
        channels=rows_of_output(tracer.trace(output.data, z), shape, len(query.columns), where),
        z=z,
        factor=factor,
        cross=query.operator.data != key.operator.data,
        pattern=after.input[0],
        product=before.output[0],
        **further,
    )


def _is_product(tracer: Tracer, node: onnx.NodeProto) -> bool:
    return node.op_type == "MatMul" and not any(each in tracer.constants for each in node.input)


def _products_before(tracer: Tracer, tensor: str) -> Iterator[tuple[onnx.NodeProto, float]]:
    """The products of two data tensors in a score, with their factors, nearest first."""

    def through(node: onnx.NodeProto, place: int) -> bool:
        if node.op_type in ("Mul", "Div"):
            scale = tracer.scale(node)
            return scale is not None and scale[0] == node.input[place] and scale[1].size == 1 and bool(scale[1].any())
        known = node.input[place] in tracer.constants or node.op_type not in _MASKING
        return not known and (node.op_type != "Sub" or not place)

    for index, steps in tracer.view.routes(tensor, partial(_is_product, tracer), through):
        scaling = (tracer.view.nodes[at] for at, _ in steps if tracer.view.nodes[at].op_type in ("Mul", "Div"))
        yield tracer.view.nodes[index], prod(scale[1].item() for node in scaling if (scale := tracer.scale(node)))


def _product_after(tracer: Tracer, pattern: str) -> onnx.NodeProto | None:
    """The product of a pattern with values."""
    nodes = tracer.view.nodes

    def is_product(node: onnx.NodeProto) -> bool:
        values = {"MatMul": 1, "QLinearMatMul": 3}.get(node.op_type)
        return values is not None and node.input[values] not in tracer.constants

    for index, steps in tracer.view.routes(pattern, is_product, lambda node, _: node.op_type in _GUARDING, onward=True):
        if rounded := [label(nodes[at]) for at, _ in steps if nodes[at].op_type in _ROUNDING]:
            raise LostError("its pattern is rounded to 8 bits: index the model before quantisation", rounded[-1])
        return nodes[index]
    return None


# -- neurons ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NeuronHeads(Named):
    """The heads of one block; head `g * count + n` is head g of the program, for neuron n."""

    kind: ClassVar = "neuron"
    query: Projection  # W1 of the pre-activation y; its data is the block's input
    value: Projection  # W1 of the values: the same, or the other projection of a gated block
    output: Projection
    activation: str
    program: Program
    gate: str  # the tensor y; empty where the file has none
    own: str  # the tensor that values read; empty where `gate` is
    bound: float  # of the heads' distance from the activation, over max(1, |f|)
    function: Callable[[Array], Array]  # the activation in float64; of h(g) u the h
    gated: bool

    @property
    def groups(self) -> tuple[Group, ...]:
        return groups_of(self.program)

    @property
    def heads(self) -> int:
        return self.count * len(self.groups)

    @property
    def dimension(self) -> int:
        """d_head of queries and keys: 1, or 2 for (y, 1), where logits have offsets or heads lack bias tokens."""
        lacking = len({group.bias_tokens for group in self.groups}) > 1
        return 2 if lacking else max(group.dimension for group in self.groups)


def find_neurons(plan: Plan, missed: list[Miss], program: str) -> list[NeuronHeads]:
    """The neuron heads of the main graph; `missed` gets blocks without heads, `program` is a key of `PROGRAMS`."""
    view = plan.views[0]
    for each in plan.left:
        done = each.miss.reason == ALREADY
        if not done or each.where:
            reason = f"it is in the body {each.where}" if done else each.miss.reason
            missed.append(Miss(f"block {each.name}: {reason}", each.miss.node))
    found: list[NeuronHeads] = []
    for block in (conversion.block for conversion in plan.conversions):
        if block.path:
            missed.append(Miss(f"block {block.name}: it is in the body {block.where}", block.output))
            continue
        with noting(missed, f"block {block.name}", block.output):
            found.append(_heads(view, block, ProjectionReader(view, packed=True).read(block), program, whole=False))
    known = [each for each in plan.recognised.blocks if not each.block.path]
    for made, flow in product(known, [Dataflow(view)] if known else ()):
        with noting(missed, f"block {made.block.name} is attention heads already", made.block.output):
            block, given = with_operators(view, flow, made), made.projections
            if block.identified.activation.program is None:
                raise LostError(f"its activation '{block.identified.activation.name}' is not in the table", block.name)
            if given is not None:
                z = f"{block.name}/heads/z"
                given = replace(given, output=replace(given.output, data=z if z in view.producer else ""))
            read = given or ProjectionReader(view, packed=True).read(block)
            heads = _heads(view, block, read, program, whole=given is not None)
            # The plan states the error of the file's own heads.
            found.append(replace(heads, bound=max(heads.bound, made.max_error)))
    return found


def _heads(view: GraphView, block: Block, projections: Projections, program: str, *, whole: bool) -> NeuronHeads:
    chosen = decide(view, block, Options(form=PROGRAMS[program]))
    return NeuronHeads(
        module=block.name,
        node=view.producer[projections.result if whole else block.output],
        data=projections.query.data,
        query=projections.query,
        value=projections.value,
        output=projections.output,
        channels=np.arange(projections.query.out_features)[:, None],
        result=projections.result,
        activation=block.identified.label,
        program=chosen.program.as_heads,
        gate="" if whole else block.gate,
        own="" if whole else block.value,
        bound=chosen.program.max_error + chosen.program.coefficient_error,
        function=lambda y: block.identified.activation.function(y, block.identified.parameters),
        gated=block.identified.gated is not None,
    )


# -- both -------------------------------------------------------------------------------------------------------------

Sublayer = Attention | NeuronHeads


def find_sublayers(tracer: Tracer, plan: Plan, missed: list[Miss], program: str) -> list[Sublayer]:
    """All sublayers of the main graph in order, with unique names; `missed` gets what is not understood."""
    attention = find_attention(tracer, missed, plan.recognised.nodes(tracer.view))
    namer, modules = Namer(), list[Sublayer](find_neurons(plan, missed, program))
    for each in attention:
        first = {side.operator.node: side.operator for side in (each.query, each.key, each.value)}
        modules.append(replace(each, module=namer.name(tracer.view, tuple(first.values()), (each.output,), ())))
    modules.sort(key=lambda each: each.node)
    paths = [re.match(r"(?:(.*?)\.)?(\d+)(?:\.|$)", each.module) for each in modules]
    numbered = [(path[1] or "", path[2]) for path in paths if path]
    layers = grouped(dict.fromkeys(numbered))
    places = [(stack, layers[stack].index(number)) for stack, number in numbered]
    if not all(paths):  # every self-attention begins a layer
        begun = accumulate(isinstance(each, Attention) and not each.cross for each in modules)
        layers, places = {"": []}, [("", max(layer - 1, 0)) for layer in begun]
    copies, found = Counter[str](), list[Sublayer]()
    for sublayer, (stack, number) in zip(modules, places, strict=True):
        # The distinguishing part of a stack's path: `encoder`, `decoder`.
        others = {part for other in layers if other != stack for part in other.split(".")}
        short = next((part for part in stack.split(".") if part not in others), stack or "blocks")
        layer = f"{short if len(layers) > 1 else 'blocks'}.{number}"
        kind = "mlp_heads" if isinstance(sublayer, NeuronHeads) else "cross_attn" if sublayer.cross else "attn"
        name = f"{layer}.{kind}"
        copies[name] += 1
        found.append(replace(sublayer, name=name if copies[name] == 1 else f"{name}_{copies[name]}", layer=layer))
    return found
