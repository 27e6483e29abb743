"""How stable the choices of tokens are in a model that rounds its activations to 8 bits.

There one unit in the last place flips a rounding here and there, which moves logits by up to percents: any change of a
model, or another processor, may choose another token. The same tokens are promised only where the original is stable.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import numpy as np
from onnx import numpy_helper

from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.types import FLOATS
from rewriter.proof.nudge import rounds_to_bytes
from rewriter.proof.rule import Results


def moved(model: LoadedModel) -> LoadedModel | None:
    """The model with the weights of its normalisations moved by one unit in the last place.

    None where it does not round activations to 8 bits.
    """
    nodes = model.proto.graph.node
    norms = {name for node in nodes if "Norm" in node.op_type for name in node.input[1:]}
    if not norms or not any(map(rounds_to_bytes, nodes)):
        return None
    proto = deepcopy(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in norms and tensor.data_type in FLOATS:
            values = read_tensor(model, tensor)
            # Up and down in turn: a common factor would move the scales of the roundings along.
            towards = np.where(np.arange(values.size).reshape(values.shape) % 2, np.inf, -np.inf)
            values = np.nextafter(values, towards.astype(values.dtype))
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return replace(model, proto=proto, path=None)


def stability(original: Results, again: Results, rewritten: Results) -> Iterator[str]:
    """What is to be expected of tokens, if the model has logits; `again` are the results of what `moved` makes."""
    for name in (name for name, values in original[0].items() if "logits" in name.lower() and values.ndim):
        best, *others = ([case[name].argmax(-1) for case in runs] for runs in (original, again, rewritten))
        own, heads = (sum(int(np.sum(a != b)) for a, b in zip(best, each, strict=True)) for each in others)
        promise = "other tokens may come out" if own or heads else "the same tokens are to be expected"
        yield (
            "activations are rounded to 8 bits: one unit in the last place of normalisations' weights changes "
            f"{own} of {sum(each.size for each in best)} choices by {name} in the original, the heads change {heads}; "
            f"{promise}"
        )
