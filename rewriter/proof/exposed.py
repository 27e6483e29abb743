"""Test the tensors of a block's heads that are further outputs of the rewritten model.

In float64, on the block's inputs: queries are the original's pre-activations, and patterns the softmax weights of the
plan at these. A pattern is [batch, tokens, heads, 1 + m], or square: [batch, heads, rows, rows], with no other weight.
z is the heads' output, which the test of the block judges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.reference.float64 import NoReference, open_reference

_SLACK = 1e-12
"""Allowance for the rounding of pre-activations in float64, relative; and of sums of weights, absolute."""

_SQUARE_AXES = 4


def exposed_failures(original: Side, rewritten: Side, claim: Claim, cases: Sequence[Case]) -> list[str]:
    """What is wrong with the exposed tensors of a block; empty without a reference.

    Args:
        original: the original.
        rewritten: the model that has them.
        claim: the block.
        cases: inputs of the block that the original accepts.
    """
    names = tuple(cases[0].feeds)
    parts = original.part(claim, names, [claim.gate]), rewritten.part(claim, names, claim.exposed)
    failures: list[str] = []
    try:
        before, after = (open_reference(part.proto, part.base_dir) for part in parts)
        for case in cases:
            y = before.run(wanted(case.feeds, parts[0]))[claim.gate].astype(np.float64)
            y = np.moveaxis(y, claim.axis, -1).reshape(-1, y.shape[claim.axis])
            made = after.run(wanted(case.feeds, parts[1]))
            failures += [text for name in claim.exposed for text in _wrong(name, made[name], y, claim)]
    except NoReference:
        return []
    return list(dict.fromkeys(failures))


def wanted(feeds: Mapping[str, Array], part: LoadedModel) -> dict[str, Array]:
    """Those of the values that a part reads."""
    names = {value.name for value in part.proto.graph.input}
    return {name: value for name, value in feeds.items() if name in names}


def _wrong(name: str, values: Array, y: Array, claim: Claim) -> Iterator[str]:
    """Differences of one tensor from the plan at y [tokens of all sequences, heads]."""
    kind, _, number = name.rpartition("/")[2].partition("_")
    if kind == "q":
        off = float(np.max(np.abs(_by_token(values, y)[..., 0] - y) / max(1.0, np.max(np.abs(y), initial=0.0))))
        if not off <= _SLACK:
            yield f"{claim.name}: the exposed queries '{name}' are not the pre-activations, error {off:.3g}"
    elif kind in ("scores", "pattern"):
        if claim.weights is None:
            raise ValueError(f"the claim about {claim.name} exposes tensors and does not say what their weights are")
        head = int(number) if number.isdigit() else 0
        own, *ends = (claim.weights(head, y * (1.0 + by)) for by in (0.0, -_SLACK, _SLACK))
        found = _neighbourhood(values if kind == "pattern" else _softmax(values), y, own.shape[-1])
        # Steep keys make more of the rounding of y.
        if found is None:
            yield f"{claim.name}: the exposed '{name}' has weight on other tokens, or the wrong shape"
        elif not (np.abs(found - own) <= _SLACK + np.abs(ends[1] - ends[0])).all():
            off = float(np.max(np.abs(found - own)))
            yield f"{claim.name}: the exposed '{name}' differs from the weights of its program by {off:.3g}"


def _by_token(values: Array, y: Array) -> Array:
    """[batch, tokens, heads, n] or [batch, heads, rows, n] as [tokens of all sequences, heads, n]."""
    tokens, heads = y.shape
    if values.shape[2] == heads and values.shape[0] * values.shape[1] == tokens:
        return values.reshape(tokens, heads, -1)
    count = tokens // max(values.shape[0], 1)
    return np.swapaxes(values[:, :, :count], 1, 2).reshape(tokens, heads, -1)


def _neighbourhood(weights: Array, y: Array, keys: int) -> Array | None:
    """The weights of every token's own key and of the bias tokens [tokens of all sequences, heads, 1 + m].

    None where a square pattern has weight elsewhere, or the shape is neither of the two.
    """
    tokens, heads = y.shape
    if weights.ndim != _SQUARE_AXES:
        return None
    batch, found, rows, columns = weights.shape
    if columns == keys and batch * found == tokens and rows == heads:
        return weights.reshape(tokens, heads, keys)
    count = tokens // max(batch, 1)
    if found != heads or rows != columns or count + keys - 1 > rows:
        return None
    here = weights[:, :, :count]
    own = np.diagonal(here, axis1=2, axis2=3)[..., None]
    kept = np.concatenate([own, here[..., count : count + keys - 1]], axis=-1)
    rest = np.abs(here).sum(axis=-1) - np.abs(kept).sum(axis=-1)
    return _by_token(kept, y) if (np.abs(rest) <= _SLACK).all() else None


def _softmax(scores: Array) -> Array:
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True))
