"""The nodes of an attribution graph, and which heads get one of their own.

A neuron is a node at each token: the heads of one neuron share what they read and, up to factors, what they write, so
that one number says what they do, the neuron's activation. An original head writes a vector; its node stands for the
part of it that the logit reads, along all paths. Heads and neurons beyond the largest are one node per sublayer and
token, `rest`, in the same sense: nothing is left out. Shapes: T tokens, D = d_model, of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from passes.heads.neurons import NeuronHeads
from rewriter.api.interpret.frozen import AttentionStep, Linear, NeuronStep
from rewriter.api.interpret.index import HeadIndex
from rewriter.arrays import Array


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        kind: `embedding`, `neuron`, `head`, `rest`, `bias` or `logit`.
        name: `embed`, the sublayer, the constant as in `Attribution.paths`, or `logit`.
        index: the neuron or head in its sublayer, the entry of a logit, 0 for other kinds.
        token: the token that it is at.
        activation: what its in-edges sum to: a neuron's activation, the logit, what the logit reads of others; 0 for
            embeddings and biases, which have none.
        gradient: how much the logit changes with the activation, along all paths; 0 where there is none.
    """

    kind: str
    name: str
    index: int
    token: int
    activation: float = 0.0
    gradient: float = 0.0


@dataclass(frozen=True, eq=False)
class Neurons:
    """The neurons of a sublayer, the heads of each added up.

    Attributes:
        step: their heads.
        factors: [groups], what W_O of each group of heads is multiplied with.
    """

    step: NeuronStep
    factors: Array

    @property
    def activations(self) -> Array:
        """[T, neurons]."""
        return self._summed(self.step.z[..., 0])

    @property
    def directions(self) -> Array:
        """[neurons, D], what they write per activation."""
        rows = self.step.tensors["W_O"][:, 0]
        return np.asarray(rows[: len(rows) // len(self.factors)] / self.factors[0])

    def read(self, token: int) -> Array:
        """[neurons, D], what they read of their data at the token per activation."""
        own = self.step.pattern[token, :, 0]
        return self._summed((own[:, None] * self.step.tensors["W_V"][..., 0]).T).T

    def constants(self, token: int) -> dict[str, Array]:
        """What the bias tokens and b_V add to the activations, [neurons] each."""
        tensors, pattern = self.step.tensors, self.step.pattern[token]
        return {
            "bias_tokens": self._summed((pattern[:, 1:] * tensors["bias_V"][..., 0]).sum(axis=-1)),
            "b_V": self._summed(pattern[:, 0] * tensors["b_V"][:, 0]),
        }

    def _summed(self, heads: Array) -> Array:
        """[..., neurons] of [..., heads]."""
        by_group = heads.reshape(*heads.shape[:-1], len(self.factors), -1)
        return np.asarray(np.einsum("...gn,g->...n", by_group, self.factors))


@dataclass(frozen=True, eq=False)
class Members:
    """The heads or neurons of a sublayer, each at every token.

    Attributes:
        step: the original heads, or the neurons.
        effects: [T, members], what each contributes to the logit along all paths.
        at: [T, members], the place of the node that each belongs to, in the list of all nodes.
        weights: [T, members], what each counts in its node: 1, or the logit's gradient.
        gradient: [T, D], the logit's at the stream with what they write, along all paths.
    """

    step: AttentionStep | Neurons
    effects: Array
    at: Array
    weights: Array
    gradient: Array


@dataclass(eq=False)
class Table:
    """All nodes; constants are added when they are met."""

    nodes: list[Node] = field(default_factory=list)
    _constants: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """The node's place."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def constant(self, name: str, token: int) -> int:
        """The place of a constant's node at a token."""
        key = (name, token)
        if key not in self._constants:
            self._constants[key] = self.add(Node("bias", name, 0, token))
        return self._constants[key]


def members_of(index: HeadIndex, linear: Linear, table: Table, most: int) -> Mapping[str, Members]:
    """Sublayer to its heads or neurons; of all of them the `most` with the largest effects get nodes of their own."""
    found: dict[str, Members] = {}
    own = {named.name: named.sublayer for named in index.sublayers}
    for link in linear.links:
        for name, heads in link.steps.items():
            sublayer = own[name]
            step: AttentionStep | Neurons
            if isinstance(heads, NeuronStep) and isinstance(sublayer, NeuronHeads):
                step = Neurons(heads, np.array([group.factor for group in sublayer.groups], dtype=np.float64))
                weights = link.after @ step.directions.T
                effects = weights * step.activations
            elif isinstance(heads, AttentionStep):
                step, effects = heads, heads.written(link.after)
                weights = np.ones(effects.shape)
            found[name] = Members(step, effects, np.zeros(effects.shape, np.int64), weights, link.after)
    sizes = np.concatenate([np.abs(each.effects).reshape(-1) for each in found.values()])
    chosen = np.zeros(sizes.size, bool)
    chosen[np.argsort(-sizes, kind="stable")[:most]] = True
    start = 0
    for name, each in found.items():
        stop = start + each.effects.size
        _add(table, name, each, chosen[start:stop].reshape(each.effects.shape))
        start = stop
    return found


def _add(table: Table, name: str, members: Members, chosen: Array) -> None:
    """Nodes of a sublayer: `at` and `weights` of the members are filled in."""
    neurons = members.step if isinstance(members.step, Neurons) else None
    activations = members.effects if neurons is None else neurons.activations
    for token, row in enumerate(chosen):
        if not row.all():
            effect = float(members.effects[token, ~row].sum())
            members.at[token] = table.add(Node("rest", f"{name}.rest", 0, token, effect, 1.0))
        for place in np.flatnonzero(row):
            gradient = 1.0 if neurons is None else float(members.weights[token, place])
            kind = "head" if neurons is None else "neuron"
            node = Node(kind, name, int(place), token, float(activations[token, place]), gradient)
            members.at[token, place] = table.add(node)
        if neurons is not None:
            members.weights[token, row] = 1.0
