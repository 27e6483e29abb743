"""Where the original itself is unsteady: elements that onnxruntime never writes, choices that rounding makes.

A cache may be larger than what is in it, and its rest is whatever the memory held. The original runs twice in fresh
sessions, the second time into memory filled with a pattern; elements that differ by more than rounding are left out of
every comparison, and named. What is the same in both runs is compared as ever.

In a model that rounds its activations to 8 bits, one unit in the last place flips a rounding here and there, which
moves logits by up to percents: any change of a model, or another processor, may choose another token. The same tokens
are promised only where the original's choices are stable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
from onnx import numpy_helper

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.types import FLOATS
from rewriter.proof.inputs.specs import is_float
from rewriter.proof.nudge import rounds_to_bytes
from rewriter.proof.rule import Results
from rewriter.proof.run import ModelRuns

_CLOSE = 1e-3
"""Runs on a GPU may differ by rounding, relative to the element; that is the rule's affair."""

Gaps = Sequence[Mapping[str, Array]]
"""Case by case, an output to a mask of the elements that say nothing; outputs without such elements are missing."""


def gaps(runs: ModelRuns) -> Gaps:
    """The elements that differ between two runs in the same way, on any provider."""
    found: list[dict[str, Array]] = [{} for _ in runs.cases]
    for way in runs.ways:
        once = runs.ways.get(replace(way, again=False)) if way.again else None
        for masks, first, second in zip(found, once.results, runs.ways[way].results, strict=True) if once else ():
            for name, values in first.items():
                mask = _apart(values, second[name])
                if mask.any():
                    masks[name] = mask | masks.get(name, False)
    return found


def without(runs: ModelRuns, left_out: Gaps) -> ModelRuns:
    """The same runs with zeros at the gaps."""
    ways = {way: replace(ran, results=cleared(ran.results, left_out)) for way, ran in runs.ways.items()}
    return replace(runs, ways=ways, truth=None if runs.truth is None else cleared(runs.truth, left_out))


def cleared(results: Results, left_out: Gaps) -> Results:
    """The same results with zeros at the gaps; an array of another shape stays, and will be refused."""
    return [
        {name: _cleared(values, masks[name]) if name in masks else values for name, values in case.items()}
        for case, masks in zip(results, left_out, strict=True)
    ]


def told(runs: ModelRuns, left_out: Gaps) -> Iterator[str]:
    """Which elements are left out, in words."""
    counts: dict[str, int] = defaultdict(int)
    for masks in left_out:
        for name, mask in masks.items():
            counts[name] += int(mask.sum())
    results = next(iter(runs.ways.values())).results if counts else ()
    whole = [name for name in counts if counts[name] == sum(case[name].size for case in results)]
    for count in sorted({counts[name] for name in counts if name not in whole}):
        names = ", ".join(name for name in counts if counts[name] == count and name not in whole)
        yield f"onnxruntime leaves {count} elements of {names} unwritten; they are not compared"
    if whole:
        yield f"the run proves nothing about {', '.join(whole)}: no element is the same in two runs of the original"


def _apart(one: Array, other: Array) -> Array:
    if one.shape != other.shape:
        return np.ones(one.shape, np.bool_)
    if not is_float(one.dtype):
        return np.asarray(one != other, np.bool_)
    with np.errstate(all="ignore"):
        a, b = (each.astype(np.float64) for each in (one, other))
        apart = ~np.isclose(a, b, rtol=_CLOSE, atol=0.0, equal_nan=True)
    # What still is the NaN that memory was filled with; arithmetic makes NaN of other bits.
    bits = np.ascontiguousarray(other).view(f"u{other.itemsize}").reshape(other.shape)
    return np.asarray(apart | (bits == np.iinfo(bits.dtype).max), np.bool_)


def _cleared(values: Array, mask: Array) -> Array:
    if values.shape != mask.shape:
        return values
    kept = values.copy()
    kept[mask] = 0
    return kept


# -- choices of tokens -----------------------------------------------------------------------------------------------


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
