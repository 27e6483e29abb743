"""How stable the choices of tokens are in a model that rounds its activations to 8 bits.

There one unit in the last place flips a rounding here and there, which moves logits by percents: any change of a model,
or of a processor, may choose another token. The original runs once more with the weights of its normalisations moved by
one unit in the last place, and what that changes is said beside what the heads change. The same tokens are promised
only where the original is that stable.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
from onnx import numpy_helper

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.types import FLOATS
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.nudge import rounds_to_bytes
from rewriter.proof.rule import Results, compared
from rewriter.text import counted


def moved(model: LoadedModel) -> LoadedModel | None:
    """The model with other weights of its normalisations; None where it does not round activations to 8 bits."""
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


def stability(original: Results, again: Results, rewritten: Results) -> str:
    """What is to be expected of generated tokens, in words; empty where the model has no logits.

    Args:
        original: the original's results, case by case.
        again: those of the model that `moved` makes.
        rewritten: those of the rewritten model.
    """
    name = next((each for each, values in original[0].items() if "logits" in each.lower() and _ranked(values)), "")
    if not name:
        return ""
    own, heads = ((_changed(name, original, each), compared(name, original, [], each)) for each in (again, rewritten))
    choices = counted(sum(case[name][..., 0].size for case in original), "choice")
    promise = (
        "other tokens may come out of any change, this one included"
        if own[0]
        else "tokens may be others than the original's"
        if heads[0]
        else "the same tokens are to be expected"
    )
    return (
        f"activations are rounded to 8 bits: one unit in the last place of normalisations' weights changes {own[0]} "
        f"of {choices} of a token in the original, and moves {name} by {own[1].error:.2g} of their norm; the heads "
        f"change {heads[0]}, and move them by {heads[1].error:.2g}: {promise}"
    )


def _ranked(values: Array) -> bool:
    return values.ndim > 1 and values.shape[-1] > 1 and is_float(values.dtype)


def _changed(name: str, one: Results, other: Results) -> int:
    return sum(int(np.sum(a[name].argmax(-1) != b[name].argmax(-1))) for a, b in zip(one, other, strict=True))
