"""`ablate`, `patch`, `freeze`: models in which named heads do something else.

    ablate  what a head writes, before the output projection, is 0, its mean, or that of another sequence
    patch   it is what it was in another run
    freeze  the pattern is what it was in another run; values follow the input as before

The results are models in memory that onnxruntime runs and `validate` compares. They can be changed again, in any order
of calls: what is recorded always comes from the model without interventions. The node that computes a tensor T then
computes `T/computed`, and marked nodes make T from that: readers, names and outputs stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ModelError, UsageError
from rewriter.files.external import read_external
from rewriter.files.load import MAX_FILE, LoadedModel, Source, like, load_model
from rewriter.files.walk import is_external, iter_tensors
from rewriter.interpret.index import HeadIndex, Names, chosen_heads, heads
from rewriter.interpret.original import Attention
from rewriter.interpret.run import cases_of, hooks_of, only_case, values_of
from rewriter.interpret.stream import chain_to, held_norm, known_output, norm_of
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import InputsOrText
from rewriter.text import quoted

HOW = ("zero", "mean", "resample")

MARK = "attnonly.intervention"
"""Metadata key of the nodes made here; the value is the tensor that they change."""

_COMPUTED = "computed"


def ablate(model: Source, names: Names, how: str = "zero", *, inputs: InputsOrText | None = None, seed: int = 0) -> Any:
    """The model without what some heads write.

    Args:
        model: path of an ONNX file, original or rewritten, or a model in memory, such as a result of this function.
            The result is of the same kind; for a path it is an onnx.ModelProto.
        names: names or globs of heads.
        how: `zero`; `mean`, over all tokens of all `inputs`; or `resample`, what the head writes at the same token of
            another sequence of `inputs`, drawn at random. The result of `resample` runs on as many sequences and tokens
            as `inputs` has; one recorded sequence serves any number of them.
        inputs: an npz file, arrays by input name, or a list of those; not for `zero`.
        seed: of the random draw.

    Raises:
        UsageError: no head matches, `inputs` is missing or does not fit, or the model has 2 GiB or more.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: onnxruntime does not run the model on the inputs.
    """
    if how not in HOW:
        raise UsageError(f"unknown ablation '{how}'; known are: {', '.join(HOW)}")
    if (inputs is None) != (how == "zero"):
        raise UsageError(f"ablation by {how} takes {'no ' if how == 'zero' else ''}inputs")
    index, proto = _opened(model)
    sites = list(_sites(index, names))
    if inputs is None:
        edits = [Edit(site.tensor, _constant(np.zeros((), site.dtype)), site.where) for site in sites]
    elif how == "mean":
        edits = _means(index, sites, inputs)
    else:
        rng = np.random.default_rng(seed)
        edits = _recorded(index, sites, inputs, lambda count: _cycle(rng, count))
    return like(model, edit(proto, edits))


def patch(model: Source, names: Names, inputs: InputsOrText) -> Any:
    """The model in which some heads write what they write on `inputs`.

    Args:
        model: as for `ablate`.
        names: names or globs of heads.
        inputs: arrays by input name, or an npz file with one case. The result runs on as many sequences and tokens as
            they have; one sequence serves any number of them.

    Raises:
        As `ablate`.
    """
    index, proto = _opened(model)
    return like(model, edit(proto, _recorded(index, list(_sites(index, names)), inputs, np.arange)))


def freeze(model: Source, names: Names, inputs: InputsOrText, *, norms: bool = False, output: str | None = None) -> Any:
    """The model in which some heads have the patterns that they have on `inputs`.

    A neuron whose pattern is frozen is affine in what its value reads. With all heads and `norms`, the model is the
    linear network of `attribute`.

    Args:
        model: as for `ablate`.
        names: names or globs of heads.
        inputs: as for `patch`.
        norms: hold the denominators of the normalisations on the residual stream, too.
        output: the output to which that stream leads; default: the first one.

    Raises:
        UsageError: also where a pattern is inside an operator, or the file has no tensor of a neuron's pre-activation.
        ModelError, ValidationError: as `ablate`.
    """
    index, proto = _opened(model)
    case, _ = only_case(index, inputs)
    edits = [
        _pattern(index, named, named.sublayer, numbers, case)
        if isinstance(named.sublayer, Attention)
        else _affine(index, named, named.sublayer, numbers, case)
        for named, numbers in chosen_heads(index, names)
    ]
    if norms:
        edits += _norms(index, case, known_output(index.view, output))
    return like(model, edit(proto, edits))


def _opened(model: Source) -> tuple[HeadIndex, onnx.ModelProto]:
    """(the heads of the model without interventions, the model with earlier ones)."""
    source = load_model(model, mapped=True)
    if any(_mark(node) for node in source.proto.graph.node):
        proto = self_contained(source)
        return heads(unedited(proto)), proto
    index = heads(model)
    index.require_tokens_only("an intervention")
    return index, self_contained(replace(index.source, proto=index.proto))


# -- what takes a tensor's place -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Site:
    """Where the outputs of a sublayer's heads are replaced.

    Attributes:
        named: the sublayer.
        tensor: the heads' outputs, [..., channels].
        where: the chosen channels.
        dtype: its element type.
    """

    named: Named
    tensor: str
    where: Array
    dtype: np.dtype[Any]


def _sites(index: HeadIndex, names: Names) -> Iterator[Site]:
    """The places of the chosen heads' outputs. Raises UsageError."""
    for named, numbers in chosen_heads(index, names):
        own = named.sublayer
        if isinstance(own, NeuronHeads) and not own.gate:
            raise UsageError(f"{named.name} has no tensor of what its neurons write; use the original or form local")
        where = np.zeros(own.neurons if isinstance(own, NeuronHeads) else own.channels.size, np.bool_)
        where[numbers if isinstance(own, NeuronHeads) else own.channels[numbers]] = True
        yield Site(named, own.output.data, where, _dtype(index, own.output.data))


def _dtype(index: HeadIndex, tensor: str) -> np.dtype[Any]:
    """The element type of a tensor; float32 where it is not known."""
    known = index.view.type_of(tensor).elem_type or onnx.TensorProto.FLOAT
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(known))


def _means(index: HeadIndex, sites: Sequence[Site], inputs: InputsOrText) -> list[Edit]:
    """The mean of every channel over the tokens of all cases."""
    rows: dict[str, list[Array]] = {site.tensor: [] for site in sites}
    for case in cases_of(index, inputs)[0]:
        for tensor, array in values_of(index, case, [*rows]).items():
            flat = array.reshape(-1, array.shape[-1])
            rows[tensor].append(np.append(flat.sum(axis=0, dtype=np.float64), len(flat)))
    totals = {tensor: np.sum(each, axis=0) for tensor, each in rows.items()}
    means = {tensor: total[:-1] / total[-1] for tensor, total in totals.items()}
    return [Edit(site.tensor, _constant(means[site.tensor].astype(site.dtype)), site.where) for site in sites]


def _recorded(
    index: HeadIndex, sites: Sequence[Site], inputs: InputsOrText, order_of: Callable[[int], Array]
) -> list[Edit]:
    """What the heads write on the inputs, with the sequences in some order."""
    case, _ = only_case(index, inputs)
    values = values_of(index, case, [site.tensor for site in sites])
    count = next((len(array) for array in case.feeds.values() if array.ndim), 1)  # sequences are the first axis
    order = order_of(count)
    edits = []
    for site in sites:
        array = values[site.tensor]
        if array.shape[0] % count:
            raise UsageError(f"{site.named.name} does not have the inputs' {count} sequences in its first axis")
        ordered = array.reshape(count, -1)[order].reshape(array.shape)
        edits.append(Edit(site.tensor, _constant(ordered.astype(site.dtype)), site.where))
    return edits


def _cycle(rng: np.random.Generator, count: int) -> Array:
    """A random permutation that leaves nothing in its place, if there is more than one."""
    order = rng.permutation(count)
    found = np.empty(count, np.int64)
    found[order] = np.roll(order, 1)
    return found


def _pattern(index: HeadIndex, named: Named, own: Attention, numbers: list[int], case: Case) -> Edit:
    if not own.pattern:
        raise UsageError(f"{named.name} is inside an operator, which keeps its pattern; it cannot be frozen")
    pattern = values_of(index, case, [own.pattern])[own.pattern]
    where = np.zeros((*pattern.shape[:-2], 1, 1), np.bool_)
    where.reshape(-1, own.heads)[:, numbers] = True
    return Edit(own.pattern, _constant(pattern.astype(_dtype(index, own.pattern))), where)


def _affine(index: HeadIndex, named: Named, own: NeuronHeads, numbers: list[int], case: Case) -> Edit:
    """`factor v + offset`, v being what the values read: frozen patterns, summed over the heads of each neuron."""
    if not own.gate:
        raise UsageError(f"{named.name} has no tensor of its pre-activations; freeze the original or form local")
    tensor, source = own.output.data, own.own or own.gate
    hook = hooks_of(index)[f"{named.name}.hook_pre"]
    values = values_of(index, case, (*hook.tensors, source))
    y = hook.make(values).astype(np.float64)
    means = [(group.factor, *group.head.mean(y)) for group in own.groups]
    factor = np.asarray(sum(scale * multiple for scale, multiple, _ in means))
    offset = np.asarray(sum(scale * constant for scale, _, constant in means))
    where = np.zeros(own.neurons, np.bool_)
    where[numbers] = True
    shape = values[source].shape
    shaped = [np.broadcast_to(each, y.shape).reshape(shape).astype(_dtype(index, tensor)) for each in (factor, offset)]

    def emit(nodes: Nodes) -> str:
        product = nodes.node("Mul", [source, nodes.constant("factor", shaped[0])])
        total = nodes.node("Add", [product, nodes.constant("offset", shaped[1])])
        return nodes.node("Reshape", [total, nodes.shape()])

    return Edit(tensor, emit, where)


def _norms(index: HeadIndex, case: Case, output: str) -> Iterator[Edit]:
    """The normalisations on the stream with the denominators that they have on the inputs. Raises UsageError."""
    chain = chain_to(index.view, index.sublayers, output)
    found = {chain.norm.output: (chain.norm, chain.stream, "the last normalisation")}
    for place, stage in enumerate(chain.stages):
        if stage.norm is not None:
            found[stage.norm.output] = (stage.norm, chain.stages[place - 1].after, stage.sublayers[0][0].name)
        for named, _ in stage.sublayers:
            norm = norm_of(index.view, named, stage)
            if norm is not None:
                found[norm.output] = (norm, stage.before, named.name)
    for norm, before, name in found.values():
        values = values_of(index, case, [before, norm.output])
        stream, result = (values[each].astype(np.float64) for each in (before, norm.output))
        width = stream.shape[-1]
        made = held_norm(
            stream.reshape(-1, width), result.reshape(-1, width), *index.scale_and_bias(norm, width), where=name
        )
        held = made.factors.reshape(*stream.shape[:-1], 1), made.scale, made.bias
        arrays = [each.astype(_dtype(index, norm.output)) for each in held]
        yield Edit(norm.output, _normalised(before, *arrays, centred=made.centred), None)


def _normalised(source: str, factors: Array, scale: Array, bias: Array, *, centred: bool) -> Emit:
    """`(source - mean) * factors * scale + bias`, a normalisation with given factors [..., 1]."""

    def emit(nodes: Nodes) -> str:
        data, width = source, len(scale)
        if centred:  # by a product, since ReduceMean differs from opset to opset
            average = nodes.constant("average", np.full((width, 1), 1.0 / width, scale.dtype))
            data = nodes.node("Sub", [data, nodes.node("MatMul", [data, average])])
        data = nodes.node("Mul", [data, nodes.constant("factors", factors)])
        data = nodes.node("Mul", [data, nodes.constant("scale", scale)])
        data = nodes.node("Add", [data, nodes.constant("bias", bias)])
        return nodes.node("Reshape", [data, nodes.shape()])

    return emit


def _constant(values: Array) -> Emit:
    return lambda nodes: nodes.constant("values", values)


# -- the marked nodes ----------------------------------------------------------------------------------------------


class Nodes:
    """The marked nodes of one edit of `tensor`; `computed` is what the model computes there."""

    def __init__(self, tensor: str, computed: str) -> None:
        self.tensor, self.computed = tensor, computed
        self.made: list[onnx.NodeProto] = []

    def constant(self, name: str, values: Array) -> str:
        """A Constant node: in old IR versions an initializer would change the model's signature."""
        output = f"{self.computed}/{name}"
        tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), output)
        return self._add(onnx.helper.make_node("Constant", [], [output], output, value=tensor))

    def shape(self) -> str:
        """The shape of what is replaced."""
        return self.node("Shape", [self.computed])

    def node(self, op_type: str, inputs: Sequence[str], output: str = "") -> str:
        """One node."""
        name = f"{self.computed}/{op_type}_{len(self.made)}"
        return self._add(onnx.helper.make_node(op_type, inputs, [output or name], name))

    def _add(self, node: onnx.NodeProto) -> str:
        node.metadata_props.add(key=MARK, value=self.tensor)
        self.made.append(node)
        return str(node.output[0])


Emit = Callable[[Nodes], str]
"""Adds nodes, and returns the tensor that they make; it must broadcast to the one whose place it takes."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One change.

    Attributes:
        tensor: the tensor.
        emit: makes what takes its place.
        where: which entries are replaced, a boolean array that broadcasts; None for all.
    """

    tensor: str
    emit: Emit
    where: Array | None


def edit(model: onnx.ModelProto, edits: Sequence[Edit]) -> onnx.ModelProto:
    """The model itself, with its main graph changed."""
    for each in edits:
        names = {name for node in model.graph.node for name in node.output}
        computed = f"{each.tensor}/{_COMPUTED}"
        while computed in names:
            computed += "'"
        place = _rename(model.graph, each.tensor, computed)
        nodes = Nodes(each.tensor, computed)
        made = each.emit(nodes)
        if each.where is not None:
            made = nodes.node("Where", [nodes.constant("where", each.where), made, computed])
        # A replacement of other sizes must not broadcast the model to these: Reshape then fails.
        nodes.node("Reshape", [made, nodes.shape()], each.tensor)
        for offset, node in enumerate(nodes.made, start=1):
            model.graph.node.insert(place + offset, node)
    return model


def _rename(graph: onnx.GraphProto, tensor: str, name: str) -> int:
    """Let the node that makes `tensor` make `name` instead; returns its index. Raises KeyError if there is none."""
    for index, node in enumerate(graph.node):
        for place, output in enumerate(node.output):
            if output == tensor:
                node.output[place] = name
                return index
    raise KeyError(tensor)


def unedited(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the changes that were made here.

    Raises:
        ModelError: the marks do not fit the graph, as where another tool changed it.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    changed = {tensor for node in model.graph.node if (tensor := _mark(node))}
    kept = [node for node in model.graph.node if not _mark(node)]
    del result.graph.node[:]
    result.graph.node.extend(kept)
    for tensor in sorted(changed):
        try:
            _rename(result.graph, f"{tensor}/{_COMPUTED}", tensor)
        except KeyError:
            what = "the model has nodes that are marked as interventions at"
            raise ModelError(f"{what} {quoted(tensor)}, which they do not fit; use the model before them") from None
    return result


def _mark(node: onnx.NodeProto) -> str:
    return next((str(entry.value) for entry in node.metadata_props if entry.key == MARK), "")


def self_contained(source: LoadedModel) -> onnx.ModelProto:
    """A copy of a model with all weights inline.

    Raises:
        UsageError: the model has 2 GiB or more, which no model in memory can have.
        ModelError: weights cannot be read.
    """
    if source.size > MAX_FILE:
        raise UsageError(f"the model has {source.size / 2**30:.1f} GiB; a model in memory can have less than 2")
    result = onnx.ModelProto()
    result.CopyFrom(source.proto)
    for tensor in iter_tensors(result):
        if is_external(tensor) and source.base_dir is not None:
            raw = read_external(tensor, source.base_dir).tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = raw
    return result
