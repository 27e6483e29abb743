"""The edges of an attribution graph: direct effects in the frozen network, through the residual stream only.

An edge is what the source adds to the target's activation by what it writes to the stream, without passing through
another sublayer; patterns and the denominators of normalisations are held. A node's in-edges sum to its activation.
Shapes: K targets or S sources of one token, D = d_model, of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rewriter.api.interpret.frozen import AttentionStep, FrozenNorm, Linear
from rewriter.api.interpret.graph.nodes import Members, Neurons, Table
from rewriter.arrays import Array
from rewriter.errors import UsageError

Places = NDArray[np.int64]

_MOST = 10_000
"""Nodes of which all edges fit into a gigabyte."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Parts of the adjacency matrix, to be added up."""

    blocks: list[tuple[Places, Places, Array]] = field(default_factory=list)

    def add(self, targets: Places, sources: Places, weights: Array) -> None:
        """Weights [K, S]."""
        self.blocks.append((targets, sources, weights))

    def matrix(self, size: int) -> Array:
        """[size, size]: rows are targets."""
        if size > _MOST:
            raise UsageError(f"the graph would have {size:,} nodes, more than {_MOST:,}: take fewer of them, or tokens")
        found = np.zeros((size, size))
        for targets, sources, weights in self.blocks:
            np.add.at(found, (targets[:, None], sources[None, :]), weights)
        return found


@dataclass(frozen=True, eq=False)
class Read:
    """What nodes read at one token.

    Attributes:
        targets: [K], their places.
        rows: [K, D], the gradients of their activations at the stream.
        constants: constant to what it adds to each of them, [K].
    """

    targets: Places
    rows: Array
    constants: Mapping[str, Array]


def adjacency(linear: Linear, members: Mapping[str, Members], embedded: Places, table: Table, logit: int) -> Array:
    """All edges, [nodes, nodes]: what the column's node adds to the activation of the row's.

    Args:
        linear: the frozen network.
        members: sublayer to heads or neurons.
        embedded: [T], the places of the embeddings.
        table: all nodes; those of constants are added to it.
        logit: the place of the logit.

    Raises:
        UsageError: there are too many nodes.
    """
    tracer = _Tracer(linear, members, embedded, table, Entries())
    for stage, link in enumerate(linear.links):
        for name in link.steps:
            for token, read in _reads(members[name]):
                tracer.trace(stage, token, read, f"{name}.")
    for token, row in enumerate(linear.end.back(linear.read)):
        constants = linear.constants if token == linear.position else {}
        added = {name: np.asarray(number).reshape(1) for name, number in constants.items()}
        tracer.trace(len(linear.links), token, Read(np.array([logit]), row[None], added))
    return tracer.entries.matrix(len(table.nodes))


@dataclass(frozen=True, eq=False)
class _Tracer:
    """Goes from what nodes read back to all that was written there."""

    linear: Linear
    members: Mapping[str, Members]
    embedded: Places
    table: Table
    entries: Entries

    def trace(self, stage: int, token: int, read: Read, prefix: str = "") -> None:
        """The in-edges of nodes of a stage by way of what they read at one token."""
        for name, added in read.constants.items():
            self._constant(read, f"{prefix}{name}", token, added)
        rows = read.rows
        if not rows.any():
            return
        for place in range(stage, 0, -1):
            between = self.linear.links[place].between if place < len(self.linear.links) else None
            link = self.linear.links[place - 1]
            if between is not None:
                self._constant(read, f"{next(iter(link.steps))}.after.ln.b", token, rows @ between.bias)
                rows = _at(between, token, len(rows)).back(rows)
            for name, step in link.steps.items():
                places, written = _written(self.members[name], token)
                self.entries.add(read.targets, places, rows @ written.T)
                self._constant(read, f"{name}.b_O", token, rows @ step.tensors["b_O"])
        self.entries.add(read.targets, self.embedded[token : token + 1], (rows @ self.linear.start[token])[:, None])

    def _constant(self, read: Read, name: str, token: int, added: Array) -> None:
        if added.any():
            self.entries.add(read.targets, np.array([self.table.constant(name, token)]), added[:, None])


def _written(members: Members, token: int) -> tuple[Places, Array]:
    """(places [S], what the nodes of a sublayer write at a token [S, D])."""
    if isinstance(members.step, AttentionStep):
        written = np.einsum("hk,hkd->hd", members.step.z[token], members.step.tensors["W_O"])
    else:
        written = members.step.activations[token][:, None] * members.step.directions
    places, back = np.unique(members.at[token], return_inverse=True)
    return places, _gathered(written, back, len(places))


def _reads(members: Members) -> Iterator[tuple[int, Read]]:
    """What the nodes of a sublayer read, by token."""
    if isinstance(members.step, AttentionStep):
        return _attention(members, members.step)
    return _neurons(members, members.step)


def _neurons(members: Members, neurons: Neurons) -> Iterator[tuple[int, Read]]:
    """What neurons read, token by token: each at its own."""
    for token in range(len(members.at)):
        places, back = np.unique(members.at[token], return_inverse=True)
        weights, norm = members.weights[token], neurons.step.norm
        rows = _gathered(weights[:, None] * neurons.read(token), back, len(places))
        parts = {
            name: _gathered(weights * added, back, len(places)) for name, added in neurons.constants(token).items()
        }
        parts["ln.b"] = rows @ norm.bias
        yield token, Read(places, _at(norm, token, len(rows)).back(rows), parts)


def _attention(members: Members, step: AttentionStep) -> Iterator[tuple[int, Read]]:
    """What original heads of all tokens read at one token after the other."""
    places, back = np.unique(members.at.reshape(-1), return_inverse=True)
    # [T, heads, d_head]: what the logit reads of each head's z.
    at_z = np.einsum("td,hkd->thk", members.gradient, step.tensors["W_O"])
    if step.norm is None:
        values = np.einsum("thk,hts,shk->th", at_z, step.pattern, step.value)
        for token in range(len(members.at)):
            own, among = np.unique(members.at[token], return_inverse=True)
            empty = np.zeros((len(own), step.tensors["W_O"].shape[-1]))
            yield token, Read(own, empty, {"other_sequence": _gathered(values[token], among, len(own))})
        return
    for token in range(step.pattern.shape[-1]):
        at_values = step.pattern[:, :, token].T[..., None] * at_z
        rows = np.einsum("thk,hdk->thd", at_values, step.tensors["W_V"], optimize=True)
        rows = _gathered(rows.reshape(-1, rows.shape[-1]), back, len(places))
        biased = np.einsum("thk,hk->th", at_values, step.tensors["b_V"])
        parts = {"b_V": _gathered(biased.reshape(-1), back, len(places)), "ln.b": rows @ step.norm.bias}
        yield token, Read(places, _at(step.norm, token, len(rows)).back(rows), parts)


def _gathered(rows: Array, places: Array, size: int) -> Array:
    """[size, ...]: the rows of each place added up."""
    found = np.zeros((size, *rows.shape[1:]))
    np.add.at(found, places.reshape(-1), rows)
    return found


def _at(norm: FrozenNorm, token: int, rows: int) -> FrozenNorm:
    """The normalisation of one token for several rows."""
    return replace(norm, factors=np.full(rows, norm.factors[token]))
