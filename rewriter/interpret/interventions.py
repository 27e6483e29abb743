"""`ablate`, `patch`, `freeze`: models in which named heads do something else.

    ablate  what a head writes, before the output projection, is 0, its mean, or that of another sequence
    patch   it is what it was in another run
    freeze  the pattern is what it was in another run; values follow the input as before

The results are models in memory that onnxruntime runs and `validate` compares. They can be changed again, in any order
of calls: what is recorded always comes from the model without interventions. Names: `rewriter.interpret.index`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ModelError, UsageError
from rewriter.files.external import read_external
from rewriter.files.load import MAX_FILE, LoadedModel, Source, like, load_model
from rewriter.files.walk import is_external, iter_tensors
from rewriter.graph.edit import forget_types
from rewriter.graph.extract import with_outputs
from rewriter.interpret.index import HeadIndex, Names, chosen_heads, heads
from rewriter.interpret.original import Attention
from rewriter.interpret.run import Recording, hooks_of, side_of, values_of
from rewriter.interpret.stream import chain_to, held_norm, known_output, norm_of
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.ort.sessions import open_session
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import InputsOrText
from rewriter.text import quoted

# -- edits ----------------------------------------


MARK = "attnonly.intervention"
"""Metadata key of the nodes made here; the value is the tensor that they change."""

_COMPUTED = "computed"


class Replacement(Protocol):
    """What takes a tensor's place."""

    def emit(self, nodes: Nodes) -> str:
        """Add nodes, and return the tensor that they make; it must broadcast to the one that it replaces."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One change.

    Attributes:
        tensor: the tensor.
        replacement: what takes its place.
        where: which entries are replaced, a boolean array that broadcasts; None for all.
    """

    tensor: str
    replacement: Replacement
    where: Array | None


@dataclass(frozen=True, eq=False)
class Constant:
    """Stored values."""

    values: Array

    def emit(self, nodes: Nodes) -> str:
        """One constant."""
        return nodes.constant("values", self.values)


@dataclass(frozen=True, eq=False)
class Frozen:
    """`source * factor + offset`, entry by entry.

    Attributes:
        source: a tensor of the graph.
        factor: broadcasts with it.
        offset: likewise.
    """

    source: str
    factor: Array
    offset: Array

    def emit(self, nodes: Nodes) -> str:
        """In the shape of what is replaced."""
        product = nodes.node("Mul", [self.source, nodes.constant("factor", self.factor)])
        total = nodes.node("Add", [product, nodes.constant("offset", self.offset)])
        return nodes.node("Reshape", [total, nodes.shape()])


@dataclass(frozen=True, eq=False)
class Normalised:
    """`(source - mean) * factors * scale + bias`, a normalisation with given factors.

    Attributes:
        source: a tensor of the graph, [..., channels].
        factors: [..., 1], one over the denominators.
        scale: [channels].
        bias: [channels].
        centred: whether the mean is subtracted.
    """

    source: str
    factors: Array
    scale: Array
    bias: Array
    centred: bool

    def emit(self, nodes: Nodes) -> str:
        """In the shape of what is replaced. The mean is a product, since ReduceMean differs from opset to opset."""
        data, width = self.source, len(self.scale)
        if self.centred:
            average = nodes.constant("average", np.full((width, 1), 1.0 / width, self.scale.dtype))
            data = nodes.node("Sub", [data, nodes.node("MatMul", [data, average])])
        data = nodes.node("Mul", [data, nodes.constant("factors", self.factors)])
        data = nodes.node("Mul", [data, nodes.constant("scale", self.scale)])
        data = nodes.node("Add", [data, nodes.constant("bias", self.bias)])
        return nodes.node("Reshape", [data, nodes.shape()])


@dataclass
class Nodes:
    """The marked nodes of one edit.

    Attributes:
        tensor: the tensor that they change.
        computed: what the model computes there.
        made: the nodes so far.
    """

    tensor: str
    computed: str
    made: list[onnx.NodeProto] = field(default_factory=list)

    def constant(self, name: str, values: Array) -> str:
        """A Constant node: in old IR versions an initializer would change the model's signature."""
        output = f"{self.computed}/{name}"
        tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), output)
        self.made.append(onnx.helper.make_node("Constant", [], [output], output, value=tensor))
        return output

    def shape(self) -> str:
        """The shape of what is replaced."""
        return self.node("Shape", [self.computed])

    def node(self, op_type: str, inputs: Sequence[str], output: str = "") -> str:
        """One node."""
        name = output or f"{self.computed}/{op_type}_{len(self.made)}"
        self.made.append(onnx.helper.make_node(op_type, inputs, [name], f"{self.computed}/{op_type}_{len(self.made)}"))
        return name

    def marked(self) -> list[onnx.NodeProto]:
        """The nodes, with their mark."""
        for node in self.made:
            node.metadata_props.add(key=MARK, value=self.tensor)
        return self.made


def edit(model: onnx.ModelProto, edits: Sequence[Edit]) -> None:
    """Apply edits to the main graph of a model, in place."""
    for each in edits:
        names = {name for node in model.graph.node for name in node.output}
        computed = f"{each.tensor}/{_COMPUTED}"
        while computed in names:
            computed += "'"
        place = rename(model.graph, each.tensor, computed)
        nodes = Nodes(each.tensor, computed)
        made = each.replacement.emit(nodes)
        if each.where is not None:
            made = nodes.node("Where", [nodes.constant("where", each.where), made, computed])
        # A replacement of other sizes must not broadcast the model to these: Reshape then fails.
        nodes.node("Reshape", [made, nodes.shape()], each.tensor)
        for offset, node in enumerate(nodes.marked(), start=1):
            model.graph.node.insert(place + offset, node)


def rename(graph: onnx.GraphProto, tensor: str, name: str) -> int:
    """Let the node that makes `tensor` make `name` instead; its readers are left. Returns the node's index.

    Raises:
        KeyError: no node makes it.
    """
    for index, node in enumerate(graph.node):
        for place, output in enumerate(node.output):
            if output == tensor:
                node.output[place] = name
                return index
    raise KeyError(tensor)


def is_edited(model: onnx.ModelProto) -> bool:
    """Whether a model has marked nodes."""
    return any(_mark(node) for node in model.graph.node)


def unedited(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the changes that were made here.

    Raises:
        ModelError: the marks do not fit the graph, as where another tool changed it.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    changed = {tensor for node in result.graph.node if (tensor := _mark(node))}
    for position in reversed(range(len(result.graph.node))):
        if _mark(result.graph.node[position]):
            del result.graph.node[position]
    for tensor in sorted(changed):
        try:
            rename(result.graph, f"{tensor}/{_COMPUTED}", tensor)
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


# -- targets ----------------------------------------


_AXES = {"compact": -2, "masked": -3, "maskless": -3}
"""Form to the axis of heads in what they write."""


@dataclass(frozen=True, eq=False)
class Site:
    """Where the outputs of a sublayer's heads are replaced.

    Attributes:
        named: the sublayer.
        tensor: the heads' outputs.
        where: the chosen ones, a boolean array that broadcasts with it.
        dtype: its element type.
        axis: the axis of heads or channels.
    """

    named: Named
    tensor: str
    where: Array
    dtype: np.dtype[Any]
    axis: int = -1


@dataclass(frozen=True, eq=False)
class Target:
    """A model to be changed.

    Attributes:
        index: the heads of the model without interventions.
        proto: the model, with earlier ones.
    """

    index: HeadIndex
    proto: onnx.ModelProto

    @classmethod
    def of(cls, model: Source) -> Target:
        """Load a model. Raises UsageError and ModelError."""
        source = load_model(model, mapped=True)
        if is_edited(source.proto):
            proto = self_contained(source)
            return cls(heads(unedited(proto)), proto)
        index = heads(model)
        index.require_tokens_only("an intervention")
        return cls(index, self_contained(replace(index.source, proto=index.proto)))

    def changed(self, edits: Sequence[Edit]) -> onnx.ModelProto:
        """The model with these edits, too."""
        edit(self.proto, edits)
        return self.proto

    # -- outputs of heads --------------------------------------------------------------------------------------------

    def sites(self, names: Names) -> Iterator[Site]:
        """The places of the chosen heads' outputs. Raises UsageError."""
        for named, numbers in chosen_heads(self.index, names):
            own = named.sublayer
            if isinstance(own, Attention):
                where = np.zeros(own.channels.size, np.bool_)
                where[own.channels[numbers]] = True
                yield Site(named, own.output.data, where, self.dtype(own.output.data))
            else:
                yield self._of_neurons(named, own, numbers)

    def _of_neurons(self, named: Named, own: NeuronHeads, numbers: list[int]) -> Site:
        tensor = own.output.data
        where = np.zeros(own.neurons, np.bool_)
        where[numbers] = True
        if own.gate:
            return Site(named, tensor, where, self.dtype(tensor))
        # The heads' own sublayer: [batch, tokens, heads, 1] in form compact, [batch, heads, rows, 1] in the others.
        # Form staged has heads of several channels; gates have several heads per neuron, and no such tensor.
        if own.form not in _AXES or len(own.groups) != 1:
            raise UsageError(f"{named.name} has no tensor of what its neurons write; use the original or form local")
        axis = _AXES[own.form]
        return Site(named, tensor, where.reshape(-1, *[1] * (-1 - axis)), self.dtype(tensor), axis)

    def dtype(self, tensor: str) -> np.dtype[Any]:
        """The element type of a tensor; float32 where it is not known."""
        known = self.index.view.type_of(tensor).elem_type or onnx.TensorProto.FLOAT
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(known))

    def means(self, sites: Sequence[Site], inputs: InputsOrText) -> list[Edit]:
        """The mean of every channel over the tokens of all cases."""
        totals: dict[str, Array] = {}
        counts: dict[str, int] = {}
        for case in Recording.of(self.index, inputs, (), "cpu").cases:
            values = self.run(case, [site.tensor for site in sites])
            for site in sites:
                array = np.moveaxis(self._of_tokens(site, case, values[site.tensor]), site.axis, -1)
                rows = array.reshape(-1, array.shape[-1]).astype(np.float64)
                totals[site.tensor] = totals.get(site.tensor, np.zeros(rows.shape[1])) + rows.sum(axis=0)
                counts[site.tensor] = counts.get(site.tensor, 0) + len(rows)
        return [
            Edit(
                site.tensor,
                Constant((totals[site.tensor] / counts[site.tensor]).astype(site.dtype).reshape(site.where.shape)),
                site.where,
            )
            for site in sites
        ]

    def _of_tokens(self, site: Site, case: Case, array: Array) -> Array:
        """The rows of tokens: where bias tokens are in the sequence, they come after them."""
        if site.axis != -3:
            return array
        pre = hooks_of(self.index)[f"{site.named.name}.hook_pre"]
        tokens = pre.make(self.run(case, pre.tensors)).shape[1]
        return np.asarray(array[:, :, :tokens])

    def recorded(self, sites: Sequence[Site], inputs: InputsOrText, order_of: Callable[[int], Array]) -> list[Edit]:
        """What the heads write on the inputs, with the sequences in some order."""
        case = self.case(inputs)
        values = self.run(case, [site.tensor for site in sites])
        count = _sequences(case)
        order = order_of(count)
        edits = []
        for site in sites:
            array = values[site.tensor]
            if array.shape[0] % count:
                raise UsageError(f"{site.named.name} does not have the inputs' {count} sequences in its first axis")
            ordered = array.reshape(count, -1)[order].reshape(array.shape)
            edits.append(Edit(site.tensor, Constant(ordered.astype(site.dtype)), site.where))
        return edits

    # -- running -----------------------------------------------------------------------------------------------------

    def case(self, inputs: InputsOrText) -> Case:
        """The only case of the inputs. Raises UsageError."""
        cases = Recording.of(self.index, inputs, (), "cpu").cases
        if len(cases) != 1:
            raise UsageError(f"this takes one case, and the file has {len(cases)}")
        return cases[0]

    def run(self, case: Case, tensors: Sequence[str]) -> Mapping[str, Array]:
        """The values of tensors in the model without interventions. Raises ValidationError."""
        return values_of(side_of(self.index), case, tensors, "cpu")


def _sequences(case: Case) -> int:
    """The number of sequences: inputs have them as their first axis."""
    return next((len(array) for array in case.feeds.values() if array.ndim), 1)


# -- freezing ----------------------------------------


def patterns_on(target: Target, names: Names, inputs: InputsOrText) -> list[Edit]:
    """Patterns as they are on the inputs. Raises UsageError."""
    case = target.case(inputs)
    return [
        _pattern(target, named, named.sublayer, numbers, case)
        if isinstance(named.sublayer, Attention)
        else _affine(target, named, named.sublayer, numbers, case)
        for named, numbers in chosen_heads(target.index, names)
    ]


def _pattern(target: Target, named: Named, own: Attention, numbers: list[int], case: Case) -> Edit:
    if not own.pattern:
        raise UsageError(f"{named.name} is inside an operator, which keeps its pattern; it cannot be frozen")
    pattern = target.run(case, [own.pattern])[own.pattern]
    where = np.zeros((*pattern.shape[:-2], 1, 1), np.bool_)
    where.reshape(-1, own.heads)[:, numbers] = True
    return Edit(own.pattern, Constant(pattern.astype(target.dtype(own.pattern))), where)


def _affine(target: Target, named: Named, own: NeuronHeads, numbers: list[int], case: Case) -> Edit:
    """`factor v + offset`, v being what the values read: frozen patterns, summed over the heads of each neuron."""
    if not own.gate:
        raise UsageError(f"{named.name} has no tensor of its pre-activations; held_norm the original or form local")
    hook = hooks_of(target.index)[f"{named.name}.hook_pattern"]
    weights = hook.make(target.run(case, hook.tensors)).astype(np.float64)
    factor = np.zeros((*weights.shape[:2], own.neurons))
    offset = np.zeros_like(factor)
    for place, group in enumerate(own.groups):
        part = weights[..., place * own.neurons : (place + 1) * own.neurons, :]
        factor += group.factor * group.head.c * part[..., 0]
        offset += group.factor * group.head.d * part[..., 0]
        for slot, token in enumerate(group.head.bias_tokens, start=1):
            offset += group.factor * token.value * part[..., slot]
    tensor = own.output.data
    where = np.zeros(own.neurons, np.bool_)
    where[numbers] = True
    source = own.own or own.gate
    rank = target.run(case, [source])[source].ndim
    dtype = target.dtype(tensor)
    shaped = [array.reshape(*([-1] if rank == 2 else array.shape[:2]), own.neurons) for array in (factor, offset)]
    return Edit(tensor, Frozen(source, *(array.astype(dtype) for array in shaped)), where)


def norms_on(target: Target, inputs: InputsOrText, output: str | None) -> list[Edit]:
    """The normalisations on the stream with the denominators that they have on the inputs. Raises UsageError."""
    case = target.case(inputs)
    chain = chain_to(target.index.view, target.index.sublayers, known_output(target.index.view, output))
    found = {chain.norm.output: (chain.norm, chain.stream, "the last normalisation")}
    for place, stage in enumerate(chain.stages):
        if stage.norm is not None:
            found[stage.norm.output] = (stage.norm, chain.stages[place - 1].after, stage.sublayers[0][0].name)
        for named, _ in stage.sublayers:
            norm = norm_of(target.index.view, named, stage)
            if norm is not None:
                found[norm.output] = (norm, stage.before, named.name)
    edits = []
    for norm, before, name in found.values():
        values = target.run(case, [before, norm.output])
        stream = values[before].astype(np.float64)
        width = stream.shape[-1]
        scale, bias = target.index.scale_and_bias(norm, width)
        made = held_norm(
            stream.reshape(-1, width), values[norm.output].astype(np.float64).reshape(-1, width), scale, bias, name
        )
        dtype = target.dtype(norm.output)
        factors = made.factors.reshape(*stream.shape[:-1], 1)
        factors, scale, bias = (each.astype(dtype) for each in (factors, made.scale, made.bias))
        edits.append(Edit(norm.output, Normalised(before, factors, scale, bias, made.centred), None))
    return edits


# -- patching ----------------------------------------


def open_at(index: HeadIndex, tensor: str) -> onnx.ModelProto:
    """The model with a tensor as a further input, which its readers get instead of what the model computes."""
    view = side_of(index).main
    result = with_outputs(index.proto, view, ())
    rename(result.graph, tensor, f"{tensor}/computed")
    elem_type = view.type_of(tensor).elem_type or onnx.TensorProto.FLOAT
    result.graph.input.append(onnx.helper.make_tensor_value_info(tensor, elem_type, None))
    forget_types(result.graph, {tensor})
    return result


def replaced(
    index: HeadIndex, case: Case, tensor: str, output: str, sequence: int, other: Array | None = None
) -> Array:
    """The output of one sequence with `tensor` replaced at one token after the other: [tokens, tokens, entries].

    It is 0 there, or what `other`, of the same shape, has there. The first axis is that token. Sequences of a batch do
    not see each other, so one run changes one token of all of them.

    Raises:
        ValidationError: onnxruntime does not run the changed model.
    """
    model = with_outputs(index.proto, side_of(index).main, (tensor,))
    session = open_session(model, optimise=False, base_dir=index.source.base_dir)
    found = session.run(case.feeds, (tensor, output))
    value, batch = found[tensor], found[output].shape[0]
    by_sequence = value.reshape(batch, -1, value.shape[-1])
    instead = np.zeros_like(by_sequence) if other is None else other.astype(value.dtype).reshape(by_sequence.shape)
    patched = open_session(open_at(index, tensor), optimise=False, base_dir=index.source.base_dir)
    results = []
    for token in range(by_sequence.shape[1]):
        changed = by_sequence.copy()
        changed[:, token] = instead[:, token]
        feeds = {**case.feeds, tensor: changed.reshape(value.shape)}
        results.append(patched.run(feeds, (output,))[output][sequence])
    return np.array(results, dtype=np.float64)


# -- interventions ----------------------------------------


HOW = ("zero", "mean", "resample")


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
    target = Target.of(model)
    sites = list(target.sites(names))
    if inputs is None:
        edits = [Edit(site.tensor, Constant(np.zeros((), site.dtype)), site.where) for site in sites]
    elif how == "mean":
        edits = target.means(sites, inputs)
    else:
        rng = np.random.default_rng(seed)
        edits = target.recorded(sites, inputs, lambda count: _cycle(rng, count))
    return like(model, target.changed(edits))


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
    target = Target.of(model)
    return like(model, target.changed(target.recorded(list(target.sites(names)), inputs, np.arange)))


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
    target = Target.of(model)
    edits = patterns_on(target, names, inputs) + (norms_on(target, inputs, output) if norms else [])
    return like(model, target.changed(edits))


def _cycle(rng: np.random.Generator, count: int) -> Array:
    """A random permutation that leaves nothing in its place, if there is more than one."""
    order = rng.permutation(count)
    found = np.empty(count, np.int64)
    found[order] = np.roll(order, 1)
    return found
