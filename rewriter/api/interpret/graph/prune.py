"""Influence, pruning and scores of an attribution graph, as circuit-tracer defines them.

Ameisen et al., "Circuit Tracing", 2025. Rows of the adjacency matrix are targets; their absolute values divided by
their sums are A, and a node's influence is its entry of w (A + A^2 + ...), w being 1 at the logit. Shapes: N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rewriter.arrays import Array

Mask = NDArray[np.bool_]

_TINY = 1e-10
"""Smallest sum that a row is divided by."""


@dataclass(frozen=True)
class Scores:
    """How much of the logit a graph explains, from 0 to 1.

    Attributes:
        replacement: the share of influence on the logit that begins at tokens, and not at what is missing.
        completeness: the share of nodes' in-edges that is there, averaged with influence as weight.
    """

    replacement: float
    completeness: float


@dataclass(frozen=True, eq=False)
class Pruned:
    """What is left of a graph.

    Attributes:
        nodes: [N].
        edges: [N, N].
        cumulative: [N], the share of all influence that nodes of at least this influence have.
    """

    nodes: Mask
    edges: Mask
    cumulative: Array


def influence(weights: Array, start: Array) -> Array:
    """`start (A + A^2 + ...)`, [N], of rows [N, N] that have no cycles."""
    found, step = np.zeros(len(start)), start
    while (step := step @ weights).any():
        found += step
    return found


def normalised(adjacency: Array, missing: Array | None = None) -> Array:
    """A; what is `missing` of each row, [N], counts in its sum."""
    sizes = np.abs(adjacency)
    sums = sizes.sum(axis=1) + (0.0 if missing is None else missing)
    return np.asarray(sizes / np.maximum(sums, _TINY)[:, None])


def scores(adjacency: Array, missing: Array, tokens: Mask, logit: int) -> Scores:
    """The scores, with an error node for what is missing in each node's in-edges.

    Args:
        adjacency: [N, N].
        missing: [N], absolute.
        tokens: [N], which nodes are tokens.
        logit: the place of the logit.
    """
    weights, start = normalised(adjacency, missing), np.zeros(len(adjacency))
    start[logit] = 1.0
    found = influence(weights, start)
    passing = found + start
    lost = missing / np.maximum(np.abs(adjacency).sum(axis=1) + missing, _TINY)
    begun, erred = found[tokens].sum(), (passing * lost).sum()
    completeness = ((1.0 - lost) * passing).sum() / passing.sum()
    return Scores(float(begun / (begun + erred)) if begun + erred else 0.0, float(completeness))


def prune(
    adjacency: Array, kept: Mask, sources: Mask, logit: int, node_threshold: float, edge_threshold: float
) -> Pruned:
    """The nodes with the most influence that have `node_threshold` of it, then edges among them likewise.

    Args:
        adjacency: [N, N].
        kept: [N], nodes that stay: tokens and the logit.
        sources: [N], nodes that never have in-edges.
        logit: the place of the logit.
        node_threshold: 0 to 1.
        edge_threshold: 0 to 1.
    """
    start = np.zeros(len(adjacency))
    start[logit] = 1.0
    by_node = influence(normalised(adjacency), start)
    nodes = kept | ((by_node >= _threshold(by_node, node_threshold)) & (by_node > 0.0))
    weights = normalised(np.where(nodes[:, None] & nodes[None, :], adjacency, 0.0))
    by_edge = weights * (influence(weights, start) + start)[:, None]
    edges = (by_edge >= _threshold(by_edge[by_edge > 0.0], edge_threshold)) & (by_edge > 0.0)
    while True:
        left = nodes & (kept | (edges.any(axis=0) & (sources | edges.any(axis=1))))
        edges &= left[:, None] & left[None, :]
        if (left == nodes).all():
            break
        nodes = left
    order = np.argsort(-by_node, kind="stable")
    cumulative = np.zeros(len(by_node))
    cumulative[order] = np.cumsum(by_node[order]) / max(float(by_node.sum()), _TINY)
    return Pruned(nodes, edges, cumulative)


def _threshold(sizes: Array, share: float) -> float:
    """The smallest of the largest that together are `share` of the sum."""
    if not sizes.size:
        return 0.0
    falling = -np.sort(-sizes)
    sums = np.cumsum(falling)
    return float(falling[min(int(np.searchsorted(sums / max(float(sums[-1]), _TINY), share)), len(falling) - 1)])
