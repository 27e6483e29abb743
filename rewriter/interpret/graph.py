"""`attribution_graph`: how a logit is made, as a graph of direct effects.

Nodes are tokens, biases, original heads, neurons and the logit; edges are exact in the network whose patterns and
normalisation denominators are held (`rewriter.interpret.attribute`). There are no transcoders and no error nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.attribute import AttentionStep, Linear, NeuronStep, Reader
from rewriter.interpret.index import HeadIndex
from rewriter.interpret.stream import FrozenNorm
from rewriter.interpret.sublayers import NeuronHeads
from rewriter.proof.inputs.given import InputsOrText
from rewriter.proof.inputs.roles import Role, input_specs

# -- nodes ----------------------------------------


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


# -- edges ----------------------------------------


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


# -- prune ----------------------------------------


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


# -- published ----------------------------------------


_TYPES = {"neuron": "neuron", "head": "attention head", "rest": "other heads", "bias": "bias"}


@dataclass(frozen=True)
class Target:
    """What the graph is about.

    Attributes:
        value: the logit, or the difference.
        entries: the entry, and the one that it is the difference from, as they are shown.
        probability: the softmax of all entries at this one.
    """

    value: float
    entries: tuple[str, ...]
    probability: float


@dataclass(frozen=True, eq=False)
class Traced:
    """All nodes and edges, and what pruning leaves of them.

    Attributes:
        nodes: the nodes.
        adjacency: [nodes, nodes], what the column's node adds to the activation of the row's.
        pruned: what is left.
        target: the logit.
        thresholds: the shares of influence that pruning keeps, of nodes and of edges.
        tokens: the sequence's token ids; places where the model reads no ids.
        shown: the tokens as they are shown: spelled where the inputs are a text, else their ids.
        prompt: the text, or what is shown.
        index: the heads of the model.
    """

    nodes: tuple[Node, ...]
    adjacency: Array
    pruned: Pruned
    target: Target
    thresholds: tuple[float, float]
    tokens: tuple[int, ...]
    shown: tuple[str, ...]
    prompt: str
    index: HeadIndex


def vocabulary_of(index: HeadIndex, feeds: Mapping[str, Array], sequence: int, tokens: int) -> tuple[int, ...]:
    """The token ids of a sequence; places where no input has ids for that many tokens."""
    for spec in input_specs(index.proto, index.view):
        array = feeds.get(spec.name)
        if spec.role is Role.IDS and array is not None and array.ndim > 1 and array.shape[-1] == tokens:
            return tuple(int(number) for number in array.reshape(-1, tokens)[sequence])
    return tuple(range(tokens))


def document(graph: Traced, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The pruned graph; `facts` are further metadata, which readers of the schema leave alone."""
    ids = _Ids(graph)
    left = np.flatnonzero(graph.pruned.nodes)
    targets, sources = np.nonzero(graph.pruned.edges)
    node_threshold, edge_threshold = graph.thresholds
    return {
        "metadata": {
            "slug": "graph",
            "scan": "attnonly",
            "transcoder_list": [],
            "prompt_tokens": list(graph.shown),
            "prompt": graph.prompt,
            "node_threshold": node_threshold,
            "schema_version": 1,
            "edge_threshold": edge_threshold,
            **facts,
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": [ids.node(graph, int(place)) for place in left],
        "links": [
            {
                "source": ids.of(graph.nodes[source]),
                "target": ids.of(graph.nodes[target]),
                "weight": float(graph.adjacency[target, source]),
            }
            for target, source in zip(targets, sources, strict=True)
        ],
    }


class _Ids:
    """Layers and indices of nodes."""

    def __init__(self, graph: Traced) -> None:
        layers = list(dict.fromkeys(each.layer for each in graph.index.sublayers))
        self._tokens, self._layers = graph.tokens, len(layers)
        self._places: dict[str, tuple[int, int]] = {}
        for number, layer in enumerate(layers):
            start = 0
            own = [each for each in graph.index.sublayers if each.layer == layer]
            for each in sorted(own, key=lambda one: not isinstance(one.sublayer, NeuronHeads)):
                self._places[each.name] = (number, start)
                sublayer = each.sublayer
                start += sublayer.neurons if isinstance(sublayer, NeuronHeads) else sublayer.heads
            self._rest(graph.nodes, [each.name for each in own], number, start)
        known = [*self._places]
        ends = [node.name for node in graph.nodes if node.kind == "bias" and node.name not in known]
        self._places.update({name: (self._layers, place) for place, name in enumerate(dict.fromkeys(ends))})

    def _rest(self, nodes: Sequence[Node], sublayers: list[str], number: int, start: int) -> None:
        """Places for constants and remaining heads of the sublayers of a layer."""
        names = dict.fromkeys(node.name for node in nodes if node.kind in ("rest", "bias"))
        own = [name for name in names if any(name.startswith(f"{each}.") for each in sublayers)]
        self._places.update({name: (number, place) for place, name in enumerate(own, start)})

    def parts(self, node: Node) -> tuple[str, int]:
        """(layer, index)."""
        if node.kind == "embedding":
            return "E", self._tokens[node.token]
        if node.kind == "logit":
            return str(self._layers + 1), node.index
        layer, start = self._places[node.name]
        return str(layer), start + node.index

    def of(self, node: Node) -> str:
        """The id."""
        layer, index = self.parts(node)
        return f"{layer}_{index}_{node.token}"

    def node(self, graph: Traced, place: int) -> dict[str, Any]:
        """One node of the file."""
        node = graph.nodes[place]
        layer, index = self.parts(node)
        is_logit, influence = node.kind == "logit", float(graph.pruned.cumulative[place])
        features = {"embedding": node.token, "logit": node.index}
        made = node.kind not in ("embedding", "bias")
        return {
            "node_id": self.of(node),
            "feature": features[node.kind] if node.kind in features else _paired(int(layer), index),
            "layer": layer,
            "ctx_idx": node.token,
            "feature_type": _TYPES.get(node.kind, node.kind),
            "token_prob": graph.target.probability if is_logit else 0.0,
            "is_target_logit": is_logit,
            "run_idx": 0,
            "reverse_ctx_idx": 0,
            "jsNodeId": f"{'L' if is_logit else layer}_{index}-{node.token}",
            "clerp": _told(graph, node),
            "influence": None if is_logit else influence,
            "activation": node.activation if made else None,
        }


def _told(graph: Traced, node: Node) -> str:
    """What a person reads."""
    if node.kind == "embedding":
        return ""
    if node.kind == "logit":
        entries = " - ".join(f'"{entry}"' for entry in graph.target.entries)
        return f"Output {entries} (p={graph.target.probability:.3f})"
    return f"{node.name}[{node.index}]" if node.kind in ("neuron", "head") else node.name


def _paired(first: int, second: int) -> int:
    """Cantor's pairing, by which the schema makes one number of layer and index."""
    return (first + second) * (first + second + 1) // 2 + second


# -- tracing ----------------------------------------


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
