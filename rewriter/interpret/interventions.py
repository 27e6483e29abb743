"""Models with interventions on named heads, and the heads that another model has changed.

The results are models in memory, and can be changed again: recordings always come from the model without interventions.
The node of a tensor T then computes `T/computed`, and marked nodes compute T from that: names and outputs stay.
A head's output is its operand of the output projection.

`changed_heads` evaluates the heads of a model and of another one, such as a quantised one, on the inputs of the other's
heads, so that they differ by their weights alone. Adding this difference to a sublayer's output restores a head.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ModelError, UsageError
from rewriter.files.load import Source, like, load_model, self_contained
from rewriter.graph.edit import rename_output, set_nodes
from rewriter.interpret.index import AffineMap, HeadIndex, Names, chosen_heads, heads
from rewriter.interpret.rank import read
from rewriter.interpret.run import InputsOrText, cases_of, values_of
from rewriter.interpret.sublayers import Attention, NeuronHeads, Sublayer
from rewriter.text import counted, quoted

HOW = ("zero", "mean")
MARK = "attnonly.intervention"  # metadata key of added nodes; the value is the tensor that they change
Places = Sequence[tuple[str, Array]]  # changed tensors, with the replaced entries: booleans that broadcast


def ablate(model: Source | HeadIndex, names: Names, how: str = "zero", *, inputs: InputsOrText | None = None) -> Any:
    """The model without the outputs of some heads, by names or globs; for a path it is an onnx.ModelProto.

    The result of `heads` gives one that `run_with_cache` runs: it has no copy of the weights, and is not indexed again.
    Outputs are set to `zero`, or to their `mean` over all tokens of all `inputs`: an npz file, arrays by input name, or
    a list of those. Errors are those of `run_with_cache`; a model of 2 GiB or more is a UsageError too.
    """
    if how not in HOW:
        raise UsageError(f"unknown ablation '{how}'; known are: {', '.join(HOW)}")
    if (inputs is None) != (how == "zero"):
        raise UsageError(f"ablation by {how} takes {'no ' if how == 'zero' else ''}inputs")
    index, proto = _opened(model)
    places = _outputs(index, names)
    tensors = [tensor for tensor, _ in places]
    totals: dict[str, Array] = {}
    for case in () if inputs is None else cases_of(index, inputs).cases:
        for tensor, array in values_of(index, case, tensors).items():
            flat = array.reshape(-1, array.shape[-1])
            totals[tensor] = totals.get(tensor, 0.0) + np.append(flat.sum(axis=0, dtype=np.float64), len(flat))
    means = {tensor: total[:-1] / total[-1] for tensor, total in totals.items()}
    return _like(model, replaced(index, proto, places, means or dict.fromkeys(tensors, np.zeros(()))))


def patch(model: Source | HeadIndex, names: Names, inputs: InputsOrText) -> Any:
    """The model in which some heads write their outputs on `inputs`, which are one case; the rest is as in `ablate`.

    The result runs on as many sequences and tokens as `inputs` have; one sequence broadcasts to any number.
    """
    index, proto = _opened(model)
    return _like(model, _recorded(index, proto, _outputs(index, names), inputs))


def freeze(model: Source | HeadIndex, names: Names, inputs: InputsOrText) -> Any:
    """The model in which original heads have their patterns on `inputs`; values follow, the rest is as in `patch`."""
    index, proto = _opened(model)
    places = []
    for own, numbers in chosen_heads(index, names):
        if isinstance(own, NeuronHeads):
            raise UsageError(f"{own.name} are neurons, whose patterns cannot be frozen; name heads, as '*.attn.*'")
        places.append((own.pattern, np.isin(np.arange(own.heads), numbers)[:, None, None]))
    return _like(model, _recorded(index, proto, places, inputs))


def _like(model: Source | HeadIndex, proto: onnx.ModelProto) -> Any:
    return replace(model, runs=proto) if isinstance(model, HeadIndex) else like(model, proto)


def _opened(model: Source | HeadIndex) -> tuple[HeadIndex, onnx.ModelProto]:
    """(the heads of the model without interventions, the model with earlier ones)."""
    if isinstance(model, HeadIndex):
        return replace(model, runs=unedited(model.runs)), deepcopy(model.runs)
    source = load_model(model, mapped=True)
    if any(_mark(node) for node in source.proto.graph.node):
        proto = self_contained(source)
        return heads(unedited(proto)), proto
    index = heads(model)
    return index, self_contained(replace(index.source, proto=index.proto))


def _outputs(index: HeadIndex, names: Names) -> Places:
    """The chosen heads' outputs, [..., channels]. Raises UsageError."""
    chosen = chosen_heads(index, names)
    return [(written_by(own), np.isin(np.arange(own.channels.size), own.channels[numbers])) for own, numbers in chosen]


def written_by(own: Sublayer) -> str:
    """The input of the output projection, [..., channels]. Raises UsageError."""
    if isinstance(own, NeuronHeads) and not own.gate:
        raise UsageError(f"{own.name} has no tensor of what its neurons write; use the original or form local")
    return own.output.data


def _recorded(index: HeadIndex, model: onnx.ModelProto, places: Places, inputs: InputsOrText) -> onnx.ModelProto:
    values = values_of(index, cases_of(index, inputs).only, [tensor for tensor, _ in places])
    made = [  # some patterns have batch and heads as one axis
        (tensor, np.resize(where, (len(values[tensor]), 1, 1)) if where.ndim == values[tensor].ndim else where)
        for tensor, where in places
    ]
    return replaced(index, model, made, values)


def replaced(index: HeadIndex, model: onnx.ModelProto, places: Places, values: dict[str, Array]) -> onnx.ModelProto:
    """The model itself, with the tensors at `places` as in `values`."""
    for tensor, where in places:
        kind = index.view.type_of(tensor).elem_type or onnx.TensorProto.FLOAT
        array = values[tensor].astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        names = {name for node in model.graph.node for name in node.output}
        computed = f"{tensor}/computed"
        while computed in names:
            computed += "'"
        place = rename_output(model.graph, tensor, computed)
        for offset, node in enumerate(_nodes(tensor, computed, where, array), start=1):
            node.metadata_props.add(key=MARK, value=tensor)
            model.graph.node.insert(place + offset, node)
    return model


def _nodes(tensor: str, computed: str, where: Array, values: Array) -> Iterator[onnx.NodeProto]:
    mask, held, chosen, shape = (f"{computed}/{name}" for name in ("where", "values", "chosen", "shape"))
    # Constant nodes: in old IR versions an initializer would change the model's signature.
    for name, array in ((mask, where), (held, values)):
        value = onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        yield onnx.helper.make_node("Constant", [], [name], name, value=value)
    yield onnx.helper.make_node("Where", [mask, held, computed], [chosen], chosen)
    # Values of other sizes must not broadcast the model to these: Reshape then fails.
    yield onnx.helper.make_node("Shape", [computed], [shape], shape)
    yield onnx.helper.make_node("Reshape", [chosen, shape], [tensor], f"{computed}/replaced")


def unedited(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without interventions. Raises ModelError if marks do not fit the graph, as after other tools' changes."""
    result = deepcopy(model)
    set_nodes(result.graph, [node for node in model.graph.node if not _mark(node)])
    for tensor in sorted({_mark(node) for node in model.graph.node} - {""}):
        try:
            rename_output(result.graph, f"{tensor}/computed", tensor)
        except KeyError:
            what = "the model has nodes that are marked as interventions at"
            raise ModelError(f"{what} {quoted(tensor)}, which they do not fit; use the model before them") from None
    return result


def _mark(node: onnx.NodeProto) -> str:
    return next((str(entry.value) for entry in node.metadata_props if entry.key == MARK), "")


# -- the heads that another model has changed --------------------------------------------------------------------------


@dataclass(frozen=True)
class ChangedHead:
    """One head or neuron."""

    head: str
    weights: float  # the norm of the change over the original's, as root mean square over W_Q, W_K, W_V and W_O
    written: float  # the norm of the change of its output on the inputs, over that of its sublayer's output
    restored: float | None = None  # share of the outputs' error removed by restoring this head alone; None if not run


@dataclass(frozen=True)
class ChangedHeads:
    """The differences between two models with the same heads."""

    error: float  # the norm of the change of all outputs, over that of the original's
    rows: tuple[ChangedHead, ...]  # of all heads and neurons, those with the largest changed output first


def changed_heads(model: Source, other: Source, inputs: InputsOrText, *, top: int = 10) -> ChangedHeads:
    """The heads and neurons that `other`, such as a quantised or fine-tuned model, has changed most.

    `top` of them are restored, one by one. Inputs are those of `attribute`, errors those of `run_with_cache`; a
    UsageError is also that the models have different heads, or no tensor of what neurons write.
    """
    index, changed = (heads(each, program="fast", wide=True) for each in (model, other))
    kinds, others = ({each.name: _described(found, each) for each in found.sublayers} for found in (index, changed))
    for name in {**kinds, **others}:
        if kinds.get(name) != others.get(name):
            told = f"{kinds.get(name, 'missing')} in one and {others.get(name, 'missing')} in the other"
            raise UsageError(f"the models do not have the same heads: {name} is {told}")
    pairs = list(zip(index.sublayers, changed.sublayers, strict=True))
    case, other_case = (cases_of(each, inputs).only for each in (index, changed))
    sides = [side for one, two in pairs for side in zip(read(index, one), read(changed, two), strict=True)]
    names = [side.data for _, side in sides]
    names += [name for _, two in pairs for name in (written_by(two), two.result)]
    theirs = values_of(changed, other_case, names)
    own = values_of(index, case, [*(side.data for side, _ in sides), *index.view.outputs])
    # Batch and tokens may be one axis in one of the two.
    given = {side.data: theirs[other.data].reshape(own[side.data].shape) for side, other in sides}
    ours = values_of(index, replace(case, feeds={**case.feeds, **given}), [written_by(one) for one, _ in pairs])
    rows, moved = list[ChangedHead](), dict[str, tuple[str, Array]]()
    for one, two in pairs:
        (z, out), (other_z, other_out) = _members(index, one, ours), _members(changed, two, theirs)
        # z W - z' W' as one product, whose norm has no small difference of large numbers.
        left = np.concatenate([z - other_z, other_z], axis=2)
        right = np.concatenate([out, out - other_out], axis=1)
        squares = (left.swapaxes(1, 2) @ left) * (right @ right.swapaxes(1, 2))
        size = np.linalg.norm(theirs[two.result].astype(np.float64)) or 1.0
        sizes = np.sqrt(np.maximum(squares.sum(axis=(1, 2)), 0.0)) / size
        rows += map(ChangedHead, one.members, _changes(index, changed, one, two), sizes.tolist())
        for number in np.argsort(-sizes, kind="stable")[:top].tolist():
            moved[one.members[number]] = two.result, left[number] @ right[number]
    rows.sort(key=lambda row: -row.written)
    outputs = [own[name] for name in index.view.outputs]
    error = _error([*values_of(changed, other_case, changed.view.outputs).values()], outputs)
    for place, row in enumerate(rows[:top]):
        tensor, change = moved[row.head]
        held = {**other_case.feeds, tensor: theirs[tensor] + change.reshape(theirs[tensor].shape)}
        still = _error([*values_of(changed, replace(other_case, feeds=held), changed.view.outputs).values()], outputs)
        rows[place] = replace(row, restored=1.0 - still / error if error else 0.0)
    return ChangedHeads(error, tuple(rows))


def _error(made: Sequence[Array], wanted: Sequence[Array]) -> float:
    """The norm of the difference of all outputs, over that of the wanted ones. Raises UsageError."""
    if [array.shape for array in made] != [array.shape for array in wanted]:
        raise UsageError("the models have different outputs, or outputs of different shapes")
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(made, wanted, strict=True)]
    off, size = np.sqrt(np.sum([[np.sum((a - b) ** 2), np.sum(b**2)] for a, b in pairs], axis=0))
    return float(off / (size or 1.0))


def _described(index: HeadIndex, own: Sublayer) -> str:
    *_, width, channels = index.tensors[f"{own.name}.W_O"].shape
    kind = f"heads of width {width}" if isinstance(own, Attention) else f"{'gated ' * own.gated}neurons"
    return f"{own.count} {kind} on {channels} channels, {counted(own.heads, 'head')} in all"


def _members(index: HeadIndex, own: Sublayer, values: Mapping[str, Array]) -> tuple[Array, Array]:
    """The members' input to the output projection, [members, tokens, K], and its rows, [members, K, D]."""
    z = values[written_by(own)].astype(np.float64)
    rows = index[f"{own.name}.W_O"] if isinstance(own, Attention) else AffineMap(own.output, index.value_of).weight()
    return z.reshape(-1, z.shape[-1])[:, own.channels].swapaxes(0, 1), rows.reshape(*own.channels.shape, -1)


def _changes(index: HeadIndex, changed: HeadIndex, one: Sublayer, two: Sublayer) -> list[float]:
    """The change of each member's weights, over their norm."""
    shares = []
    for part in ("W_Q", "W_K", "W_V", "W_O"):
        ours, theirs = index[f"{one.name}.{part}"], changed[f"{two.name}.{part}"]
        # A neuron has all heads g * members + n of its program.
        apart = [each.reshape(-1, one.count, each[0].size) for each in (ours - theirs, ours)]
        change, size = (np.linalg.norm(each, axis=(0, 2)) for each in apart)
        shares += [change / np.where(size == 0.0, 1.0, size)] if ours.any() else []
    return list(map(float, np.sqrt(np.mean(np.square(shares), axis=0))))
