"""`attribution_graph`: how a logit is made, as a graph of direct effects.

Nodes are tokens, biases, original heads, neurons and the logit; edges are exact in the network whose patterns and
normalisation denominators are held (`rewriter.api.interpret.frozen`). There are no transcoders and no error nodes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from rewriter.api.interpret.attribution import Reader
from rewriter.api.interpret.graph.edges import adjacency
from rewriter.api.interpret.graph.nodes import Node, Table, members_of
from rewriter.api.interpret.graph.prune import Scores, prune, scores
from rewriter.api.interpret.graph.published import Target, Traced, document, vocabulary_of
from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.proof.inputs.given import InputsOrText


class AttributionGraph(Traced):
    """A graph with what follows from it."""

    @property
    def logit(self) -> float:
        """The model's value."""
        return self.target.value

    @cached_property
    def effects(self) -> Array:
        """[nodes]: what each contributes to the logit along all paths, as its out-edges say."""
        gradients = np.array([node.gradient for node in self.nodes])
        return np.asarray(gradients @ self.adjacency)

    @cached_property
    def residuals(self) -> Array:
        """[nodes]: activation minus the sum of the in-edges; 0 for embeddings and biases, which have none."""
        return np.asarray([node.activation for node in self.nodes] - self.adjacency.sum(axis=1))

    @cached_property
    def scores(self) -> Scores:
        """Of the whole graph; the residuals count as error nodes."""
        return self._scores(self.adjacency, np.abs(self.residuals))

    @cached_property
    def pruned_scores(self) -> Scores:
        """Of what pruning leaves; what it takes away counts as error nodes."""
        left = np.where(self.pruned.edges, self.adjacency, 0.0)
        return self._scores(left, np.abs(self.residuals) + np.abs(self.adjacency - left).sum(axis=1))

    def to_json(self) -> dict[str, Any]:
        """The pruned graph in the schema of circuit-tracer and Neuronpedia."""
        facts = {
            "logit": self.logit,
            "largest_residual": float(np.abs(self.residuals).max()),
            "replacement_score": self.scores.replacement,
            "completeness_score": self.scores.completeness,
            "pruned_replacement_score": self.pruned_scores.replacement,
            "pruned_completeness_score": self.pruned_scores.completeness,
            "error_nodes": 0,
        }
        return document(self, facts)

    def _scores(self, edges: Array, missing: Array) -> Scores:
        tokens = np.array([node.kind == "embedding" for node in self.nodes])
        return scores(edges, missing, tokens, self._place_of_logit)

    @property
    def _place_of_logit(self) -> int:
        return next(place for place, node in enumerate(self.nodes) if node.kind == "logit")


def attribution_graph(
    model: Source,
    inputs: InputsOrText,
    logit: int,
    *,
    minus: int | None = None,
    output: str | None = None,
    position: int = -1,
    sequence: int = 0,
    program: str = "fewest",
    node_threshold: float = 0.8,
    edge_threshold: float = 0.98,
    max_nodes: int = 2000,
) -> AttributionGraph:
    """The attribution graph of a logit, evaluated in float64.

    Args:
        model: path of an ONNX file, original or rewritten, or a model in memory.
        inputs: maps inputs to arrays; an npz file with one case; or a `Text`, whose tokens the graph then shows.
        logit: which entry of the output's last axis.
        minus: the graph of the difference from this entry instead.
        output: the output [batch, tokens, entries]; default: the first one.
        position: the token.
        sequence: the sequence in the batch.
        program: as for `heads`.
        node_threshold: pruning keeps the nodes with the most influence that have this share of it.
        edge_threshold: the same for edges, among those nodes.
        max_nodes: how many heads and neurons, each at one token, get nodes of their own: those with the largest effects
            on the logit. Others are one node per sublayer and token.

    Raises:
        UsageError: an argument is out of range, there are more than 10,000 nodes, or the output does not read the
            residual stream through a normalisation.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: the model cannot be evaluated in float64.
    """
    thresholds = (node_threshold, edge_threshold)
    for what, share in (("node", node_threshold), ("edge", edge_threshold)):
        if not 0.0 <= share <= 1.0:
            raise UsageError(f"the {what} threshold is {share:g}, which is not between 0 and 1")
    if max_nodes < 0:
        raise UsageError(f"there cannot be {max_nodes} nodes")
    reader = Reader.of(model, inputs, output=output, sequence=sequence, program=program)
    linear = reader.linear(logit, minus, position)
    table = Table()
    embedded = np.array([table.add(Node("embedding", "embed", 0, token)) for token in range(len(linear.start))])
    members = members_of(reader.index, linear, table, max_nodes)
    entries = reader.entries(position)
    last = table.add(Node("logit", "logit", logit % len(entries), linear.position, linear.value, 1.0))
    edges = adjacency(linear, members, embedded, table, last)
    kinds = np.array([node.kind for node in table.nodes])
    kept = (kinds == "embedding") | (kinds == "logit")
    pruned = prune(edges, kept, (kinds == "bias") | (kinds == "embedding"), last, *thresholds)
    other = None if minus is None else minus % len(entries)
    chosen = (logit % len(entries),) if other is None else (logit % len(entries), other)
    target = Target(linear.value, reader.spelled(chosen) or tuple(map(str, chosen)), _probability(entries, logit))
    tokens = vocabulary_of(reader.index, reader.case.feeds, sequence, len(linear.start))
    shown = tuple(map(str, tokens)) if reader.tokens is None else reader.tokens.spelled[0]
    prompt = " ".join(shown) if reader.tokens is None else reader.tokens.texts[0]
    traced = (tuple(table.nodes), edges, pruned, target, thresholds, tokens, shown, prompt, reader.index)
    return AttributionGraph(*traced)


def _probability(entries: Array, logit: int) -> float:
    """The softmax of the output's entries at the logit."""
    shifted = np.exp(entries - entries.max())
    return float(shifted[logit] / shifted.sum())
