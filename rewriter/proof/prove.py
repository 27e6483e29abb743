"""The proof that a model computes what another one does, by the values of all tensors at several sizes.

`rewriter.proof.values.compare` says whether the values are the same, and whether that holds at every size. This
module adds what values do not show: types in which arithmetic is less exact, and blocks that are claimed to be
replaced and are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import onnx

from rewriter.errors import UsageError
from rewriter.evaluate.arithmetic import Unsupported
from rewriter.files.load import LoadedModel
from rewriter.graph.edit import LOOSE_INITIALIZERS, inlined
from rewriter.graph.types import FLOATS, elem_name, type_of
from rewriter.graph.view import Place, all_views
from rewriter.graph.walk import iter_nodes, iter_tensors
from rewriter.proof.records import UNCLAIMED, Certificate, Claim, Claimed, Refusal
from rewriter.proof.values.compare import Pair


def prove(
    original: LoadedModel,
    rewritten: LoadedModel,
    *,
    claims: Mapping[Place, Claimed] | None = None,  # by tensor of the original, what its replacement is held to
    blocks: Sequence[Claim] = (),  # what was replaced. Each must have been, by heads
    limit: float = UNCLAIMED,  # of all other activations
    dims: Mapping[str, int] | None = None,  # sizes of symbolic dimensions, where they are not free
    longest: int | None = None,  # the longest sequence that the rewritten model takes; None for any
    isolate: bool = False,  # distinguish several differences of small models
) -> Certificate:
    """Prove that `rewritten`, which may have further outputs, computes those of `original`, or say where it differs."""
    start = time.perf_counter()
    try:
        pair = Pair(
            original, rewritten, claims=claims, blocks=blocks, limit=limit, dims=dims, longest=longest, isolate=isolate
        )
        values = pair.certificate()
    except (Unsupported, UsageError) as error:  # the run will say, too, that no inputs can be generated
        values = Certificate(certified=False, refusals=(Refusal(reason=str(error)),))
    refusals = (*_interface(original, rewritten), *_coarser(original, rewritten), *_unmet(original, rewritten, blocks))
    refusals = (*values.refusals, *refusals) if values.refuted else (*refusals, *values.refusals)
    return replace(values, certified=not refusals, refusals=refusals, seconds=time.perf_counter() - start)


def _interface(original: LoadedModel, rewritten: LoadedModel) -> Iterator[Refusal]:
    """Inputs and outputs of another type, or of a size that is fixed in one model only."""
    for what in ("input", "output"):
        theirs = {value.name: type_of(value.type) for value in getattr(rewritten.proto.graph, what)}
        for value in getattr(original.proto.graph, what):
            ours, other = type_of(value.type), theirs.get(value.name)
            if other is None or not ours.elem_type or not other.elem_type:
                continue
            # Some exporters write -1 or 0 for a dynamic dimension; of an unknown rank any axis is.
            shapes = (each.shape or () for each in (ours, other))
            fixed = ([dim if isinstance(dim, int) and dim > 0 else None for dim in shape] for shape in shapes)
            missing = None if None in (ours.rank, other.rank) else 0
            apart = what == "input" and any(one != two for one, two in zip_longest(*fixed, fillvalue=missing))
            if apart or ours.elem_type != other.elem_type:
                yield Refusal(value.name, value.name, "", f"{what} '{value.name}' is {other} instead of {ours}")


def _coarser(original: LoadedModel, rewritten: LoadedModel) -> Iterator[Refusal]:
    """Whether the rewritten model computes in a type that is less exact than all of the original's."""
    if rewritten.proto.ir_version < LOOSE_INITIALIZERS <= original.proto.ir_version:
        text = f"IR version is {rewritten.proto.ir_version} instead of {original.proto.ir_version}"
        yield Refusal("", "", "", f"{text}, without defaults of inputs")
    ours, theirs = (_types(each.proto) for each in (original, rewritten))
    if ours and theirs and min(theirs) < min(ours):
        kind = elem_name(FLOATS[min(theirs)])
        yield Refusal("", "", "", f"computes in {kind}, which is narrower than the original's types")


def _types(proto: onnx.ModelProto) -> set[int]:
    """The places in `FLOATS` of the types of a model's inputs, constants and casts."""
    casts = (each for node in iter_nodes(proto.graph.node) if node.op_type == "Cast" for each in node.attribute)
    found = {each.i for each in casts if each.name == "to"} | {each.data_type for each in iter_tensors(proto)}
    found |= {value.type.tensor_type.elem_type for value in proto.graph.input}
    return {place for place, elem_type in enumerate(FLOATS) if elem_type in found}


def _unmet(original: LoadedModel, rewritten: LoadedModel, blocks: Sequence[Claim]) -> Iterator[Refusal]:
    """Blocks that are said to be replaced, and whose first output is computed as before."""
    models = (inlined(each.proto) if each.proto.functions else each.proto for each in (original, rewritten))
    a, b = ({view.path: view for view in all_views(each)} for each in models) if blocks else ({}, {})
    for block in blocks:
        old, new = (each[block.path].made_by(block.makes[0]) if block.path in each else None for each in (a, b))
        if old is not None and new is not None and (old.op_type, *old.input) == (new.op_type, *new.input):
            text = "reported as converted, but the original's activation is still there"
            yield Refusal(block.output, block.output, block.name, text, path=block.path)
