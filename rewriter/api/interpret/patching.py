"""What happens to a logit if a sublayer writes nothing, or something else, at a token: the model is run again.

Attributions say what a logit is made of. This says what it depends on: patterns and normalisations follow the change.
"""

from __future__ import annotations

import numpy as np
import onnx

from rewriter.api.interpret.cache import side_of
from rewriter.api.interpret.edits import rename
from rewriter.api.interpret.index import HeadIndex
from rewriter.arrays import Array
from rewriter.graph.edit import forget_types
from rewriter.graph.extract import with_outputs
from rewriter.ort.sessions import open_session
from rewriter.proof.inputs.cases import Case


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
