"""Spread inputs for a block: more batches and tokens than the model's own, every row different.

Rows that the block receives in the model are sampled and scaled at random, so that a mix-up of tokens, batches or
neurons shows at every position. If the block has position slots, one sequence fills them all; if its attention works in
chunks, several chunks are needed and the last one is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Claim
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.run import open_part

# Prime numbers of tokens, so that chunks hardly ever divide them evenly.
_BATCH, _TOKENS, _MANY, _LONG = 2, 67, 6, 131
_SMALL = 19
_MOST_SLOTS = 4096  # attention patterns grow with the square of the sequence

Feeds = Mapping[str, Array]


def spread(claim: Claim, inputs: Sequence[Feeds]) -> list[Case]:
    """Inputs of other sizes than the real ones; none if the block also reads shapes or has no token axis."""
    first = next(iter(inputs), {})
    if set(first) != set(claim.block_inputs):
        return []
    if any(not is_float(value.dtype) or value.ndim < max(2, -claim.axis) for value in first.values()):
        return []
    if not all(sum(feeds[name].size for feeds in inputs) for name in first):
        return []
    limit = claim.longest or _LONG
    sizes = [(_BATCH, min(_TOKENS, limit)), (_MANY, min(_SMALL, limit)), (1, min(_LONG, limit))]
    return [_case(claim, inputs, *size) for size in dict.fromkeys(sizes)]


def variants(claim: Claim, part: LoadedModel, cases: Sequence[Case]) -> Iterator[tuple[Case, LoadedModel, str]]:
    """Variants of the block that take its rarer paths, each with a case that does so and a description.

    Lowering the bound on the size of its attention patterns forces several chunks of heads, then of queries; or of
    tokens, where each has keys of its own. One sequence is as long as the block has position slots.
    """
    if not cases or set(cases[0].feeds) != set(claim.block_inputs):
        return
    if claim.longest is not None and claim.longest <= _MOST_SLOTS:
        yield _case(claim, [case.feeds for case in cases], 1, claim.longest), part, f"on {claim.longest} tokens"
    small = next((case for case in cases if _shape(claim, case)[1] == min(_SMALL, claim.longest or _SMALL)), None)
    if small is None or not claim.chunk_size or claim.neurons is None:
        return
    for size, what in _chunks(claim, *_shape(claim, small)):
        smaller = _with_constant(part.proto, claim.chunk_size, size)
        if smaller is not None:
            yield small, replace(part, proto=smaller, path=None), what


def _chunks(claim: Claim, batch: int, tokens: int) -> tuple[tuple[int, str], ...]:
    """Bounds on the size of patterns that lead to several chunks, the last one smaller; each with a description."""
    neurons = claim.neurons or 1
    if claim.row_size:
        few = next(few for few in (5, 7, 11, 13, 4) if batch * tokens % few)
        return (few * claim.row_size, f"in chunks of {few} tokens"), (1, "one token at a time")
    keys = tokens + claim.bias_tokens
    # A number of chunks that does not divide the neurons, so that the last chunk is uneven.
    steps = next((steps for steps in (3, 5, 7, 11, 13) if neurons % steps), 2)
    heads = -(-neurons // steps)
    return (
        (batch * keys * keys * heads, f"in chunks of {heads} heads"),
        (batch * keys * (keys // 2 + 1), f"in chunks of {keys // 2 + 1} queries"),
    )


def accepted(before: LoadedModel, cases: Sequence[Case]) -> list[Case]:
    """The cases that a part of the original accepts: a static shape inside it may fix the sizes."""
    kept = []
    if cases:
        session = open_part(before, "cpu", optimise=False, prepack=False)
        for case in cases:
            with suppress(ValidationError):
                session.run(wanted(case.feeds, before))
                kept.append(case)
    return kept


def wanted(feeds: Feeds, part: LoadedModel) -> dict[str, Array]:
    """Those of the values that a part reads."""
    names = {value.name for value in part.proto.graph.input}
    return {name: value for name, value in feeds.items() if name in names}


def _case(claim: Claim, inputs: Sequence[Feeds], batch: int, tokens: int) -> Case:
    return Case(f"batch {batch}, {tokens} tokens", _drawn(claim, inputs, batch, tokens))


def _drawn(claim: Claim, inputs: Sequence[Feeds], batch: int, tokens: int) -> Feeds:
    rng = np.random.default_rng(batch * tokens)
    drawn = {}
    for name, like in next(iter(inputs)).items():
        width = like.shape[claim.axis]
        rows = np.concatenate([np.moveaxis(feeds[name], claim.axis, -1).reshape(-1, width) for feeds in inputs])
        lead = (batch, *(1,) * (like.ndim - 3), tokens) if like.ndim > 2 else (tokens,)
        chosen = rows[rng.integers(0, len(rows), int(np.prod(lead)))].astype(np.float64)
        scaled = chosen * rng.uniform(0.5, 1.5, (len(chosen), 1))
        drawn[name] = np.moveaxis(scaled.astype(rows.dtype).reshape(*lead, width), -1, claim.axis)
    return drawn


def sizes_of(claim: Claim, case: Case) -> tuple[int, ...]:
    """The sizes of a case but for the channels: batch and tokens, or batch, height and width."""
    shape = list(case.feeds[claim.block_inputs[0]].shape)
    if len(shape) >= -claim.axis:
        del shape[claim.axis]
    return tuple(shape)


def _shape(claim: Claim, case: Case) -> tuple[int, int]:
    """Batch and tokens of a case; -1 tokens if its block input has no such axes."""
    sizes = sizes_of(claim, case)
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (1, sizes[0]) if len(sizes) == 1 else (1, -1)


def _with_constant(model: onnx.ModelProto, name: str, value: int) -> onnx.ModelProto | None:
    """A copy with another value of an integer constant; None if the model has no such constant."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    tensor = onnx.numpy_helper.from_array(np.asarray([value], dtype=np.int64), name)
    for initializer in result.graph.initializer:
        if initializer.name == name:
            initializer.CopyFrom(tensor)
            return result
    for node in result.graph.node:
        if node.op_type == "Constant" and list(node.output) == [name]:
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("value", tensor))
            return result
    return None
