"""Models with interventions on named heads.

`ablate` sets a head's output, before the output projection, to 0 or its mean, `patch` to its value in another run.
`freeze` sets the pattern of an original head to that of another run; values follow the input as before.

The results are models in memory that onnxruntime runs and `validate` compares. They can be changed again, in any order
of calls: recordings always come from the model without interventions. The node that computed a tensor T then computes
`T/computed`, and marked nodes compute T from that: readers, names and outputs stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ModelError, UsageError
from rewriter.files.load import Source, like, load_model, self_contained
from rewriter.graph.edit import set_nodes
from rewriter.interpret.index import HeadIndex, Names, chosen_heads, heads
from rewriter.interpret.run import values_of
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.interpret.text import InputsOrText, cases_of
from rewriter.text import quoted

HOW = ("zero", "mean")
MARK = "attnonly.intervention"  # metadata key of added nodes; the value is the tensor that they change
Places = Sequence[tuple[str, Array]]  # changed tensors, with the replaced entries: booleans that broadcast


def ablate(model: Source, names: Names, how: str = "zero", *, inputs: InputsOrText | None = None) -> Any:
    """The model without the outputs of some heads, by names or globs; for a path it is an onnx.ModelProto.

    Outputs are set to `zero`, or to their `mean` over all tokens of all `inputs`: an npz file, arrays by input name, or
    a list of those. Errors are those of `run_with_cache`; a model of 2 GiB or more is a UsageError too.
    """
    if how not in HOW:
        raise UsageError(f"unknown ablation '{how}'; known are: {', '.join(HOW)}")
    if (inputs is None) != (how == "zero"):
        raise UsageError(f"ablation by {how} takes {'no ' if how == 'zero' else ''}inputs")
    index, proto = _opened(model)
    places = list(_outputs(index, names))
    tensors = [tensor for tensor, _ in places]
    values = dict.fromkeys(tensors, np.zeros(())) if inputs is None else _means(index, tensors, inputs)
    return like(model, replaced(index, proto, places, values))


def patch(model: Source, names: Names, inputs: InputsOrText) -> Any:
    """The model in which some heads write their outputs on `inputs`, which are one case; the rest is as in `ablate`.

    The result runs on as many sequences and tokens as `inputs` have; one sequence broadcasts to any number.
    """
    index, proto = _opened(model)
    return like(model, _recorded(index, proto, list(_outputs(index, names)), inputs))


def freeze(model: Source, names: Names, inputs: InputsOrText) -> Any:
    """The model in which original heads, not neurons, have their patterns on `inputs`; the rest is as in `patch`."""
    index, proto = _opened(model)
    places = []
    for named, numbers in chosen_heads(index, names):
        own = named.sublayer
        if isinstance(own, NeuronHeads):
            raise UsageError(f"{named.name} are neurons, whose patterns cannot be frozen; name heads, as '*.attn.*'")
        where = np.zeros((own.heads, 1, 1), np.bool_)
        where[numbers] = True
        places.append((own.pattern, where))
    return like(model, _recorded(index, proto, places, inputs))


def _opened(model: Source) -> tuple[HeadIndex, onnx.ModelProto]:
    """(the heads of the model without interventions, the model with earlier ones)."""
    source = load_model(model, mapped=True)
    if any(_mark(node) for node in source.proto.graph.node):
        proto = self_contained(source)
        return heads(unedited(proto)), proto
    index = heads(model)
    index.require_tokens_only("an intervention")
    return index, self_contained(replace(index.source, proto=index.proto))


def _outputs(index: HeadIndex, names: Names) -> Iterator[tuple[str, Array]]:
    """The chosen heads' outputs, [..., channels]. Raises UsageError."""
    for named, numbers in chosen_heads(index, names):
        own = named.sublayer
        where = np.zeros(own.neurons if isinstance(own, NeuronHeads) else own.channels.size, np.bool_)
        where[numbers if isinstance(own, NeuronHeads) else own.channels[numbers]] = True
        yield written_by(named), where


def written_by(named: Named) -> str:
    """The input of the output projection, [..., channels]. Raises UsageError."""
    if isinstance(named.sublayer, NeuronHeads) and not named.sublayer.gate:
        raise UsageError(f"{named.name} has no tensor of what its neurons write; use the original or form local")
    return named.sublayer.output.data


def _means(index: HeadIndex, tensors: Sequence[str], inputs: InputsOrText) -> dict[str, Array]:
    totals: dict[str, Array] = {}
    for case in cases_of(index.proto, inputs).cases:
        for tensor, array in values_of(index, case, tensors).items():
            flat = array.reshape(-1, array.shape[-1])
            totals[tensor] = totals.get(tensor, 0.0) + np.append(flat.sum(axis=0, dtype=np.float64), len(flat))
    return {tensor: total[:-1] / total[-1] for tensor, total in totals.items()}


def _recorded(index: HeadIndex, model: onnx.ModelProto, places: Places, inputs: InputsOrText) -> onnx.ModelProto:
    values = values_of(index, cases_of(index.proto, inputs).only, [tensor for tensor, _ in places])
    made = []
    for tensor, where in places:
        array = values[tensor]
        merged = where.ndim == array.ndim  # patterns that have batch and heads as one axis
        made.append((tensor, np.tile(where, (len(array) // len(where), 1, 1)) if merged else where))
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
        place = _rename(model.graph, tensor, computed)
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


def _rename(graph: onnx.GraphProto, tensor: str, name: str) -> int:
    """Rename a node's output and return its index. Raises KeyError."""
    for index, node in enumerate(graph.node):
        if tensor in node.output:
            node.output[list(node.output).index(tensor)] = name
            return index
    raise KeyError(tensor)


def unedited(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without interventions. Raises ModelError if marks do not fit the graph, as after other tools' changes."""
    result = deepcopy(model)
    set_nodes(result.graph, [node for node in model.graph.node if not _mark(node)])
    for tensor in sorted({_mark(node) for node in model.graph.node} - {""}):
        try:
            _rename(result.graph, f"{tensor}/computed", tensor)
        except KeyError:
            what = "the model has nodes that are marked as interventions at"
            raise ModelError(f"{what} {quoted(tensor)}, which they do not fit; use the model before them") from None
    return result


def _mark(node: onnx.NodeProto) -> str:
    return next((str(entry.value) for entry in node.metadata_props if entry.key == MARK), "")
