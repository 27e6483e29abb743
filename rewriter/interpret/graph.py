"""`attribution_graph`: the computation of a logit as a graph of direct effects, without transcoders or error nodes.

docs/heads.md#the-attribution-graph defines nodes and edges, in the network that `attribute` freezes.
Shapes: T tokens, N nodes, K targets or S sources of one token, D = d_model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.attribute import AttentionStep, FrozenRun, Linear, NeuronStep, ScoreTerms, Why, Written
from rewriter.interpret.index import HeadIndex
from rewriter.interpret.run import InputsOrText
from rewriter.interpret.sublayers import NeuronHeads

_MAX_NODES = 10_000  # all their edges fit into a gigabyte
_KEPT_NODES, _KEPT_EDGES = 0.8, 0.98  # shares of influence that pruning keeps, as in circuit-tracer
_TRACED_TERMS = 10  # of a score, in the file
_MIN_DIVISOR = 1e-10  # of a row


@dataclass(frozen=True)
class GraphNode:
    """One node."""

    kind: str  # `embedding`, `neuron`, `head`, `rest`, `bias` or `logit`
    name: str  # `embed`, the sublayer, the constant as in `Attribution.paths`, or `logit`
    index: int  # of the neuron or head in its sublayer, or of a logit's entry; 0 for other kinds
    token: int
    activation: float = 0.0  # the sum of in-edges; 0 for embeddings and biases
    gradient: float = 0.0  # of the logit by the activation, along all paths


@dataclass(frozen=True, eq=False)
class AttributionGraph:
    """All nodes and edges, and which of them pruning keeps."""

    logit: float  # or a difference, before a cap
    entries: tuple[str, ...]  # the entry, and the subtracted one, as shown
    probability: float  # the softmax of all entries at this one
    nodes: tuple[GraphNode, ...]
    adjacency: Array  # [N, N], contributions of the column's node to the row's activation
    kept: Array  # [N], whether pruning keeps the node
    links: Array  # [N, N], whether it keeps the edge
    cumulative: Array  # [N], the share of all influence of nodes with at least this influence
    shown: tuple[str, ...]  # the tokens: spelled where the inputs are a text, else their ids
    prompt: str
    ids: tuple[str, ...]  # `{layer}_{index}_{token}` of the nodes, then of the constants
    constants: tuple[GraphNode, ...]  # biases that only queries or keys read
    why: Mapping[int, Why]  # a head's node to the score of the token that it attends to most; sources are ids

    @cached_property
    def residuals(self) -> Array:
        """[N]: activation minus the sum of the in-edges; 0 for embeddings and biases, which have none."""
        return np.asarray([node.activation for node in self.nodes] - self.adjacency.sum(axis=1))

    @cached_property
    def scores(self) -> tuple[float, float]:
        """The `scores` of the pruned graph; pruned nodes and residuals count as error nodes."""
        missing = np.abs(self.residuals) + np.abs(np.where(self.links, 0.0, self.adjacency)).sum(axis=1)
        among, kinds = np.ix_(self.kept, self.kept), np.array([node.kind for node in self.nodes])
        return scores(np.where(self.links[among], self.adjacency[among], 0.0), missing[self.kept], kinds[self.kept])

    def to_json(self) -> dict[str, Any]:
        """The pruned graph in the JSON schema that circuit-tracer and Neuronpedia publish, version 1.

        Feature types have new names, so that viewers do not look for transcoder features. Heads have the largest terms
        of their score as Neuronpedia's `qk_tracing_results`; nodes that only scores read are `qk_only_nodes`.
        """
        targets, sources = np.nonzero(self.links)
        weights = self.adjacency[targets, sources].tolist()
        ids, left = self.ids, self.kept.nonzero()[0].tolist()
        traced = (row for why in self.why.values() for rows in _traced(why).values() for row in rows)
        further = {each for row in traced for each in row[:-1]}.difference(ids[place] for place in left)
        return {
            "metadata": {
                "slug": "graph",
                "scan": "attnonly",
                "transcoder_list": [],
                "prompt_tokens": list(self.shown),
                "prompt": self.prompt,
                "node_threshold": _KEPT_NODES,
                "schema_version": 1,
                "edge_threshold": _KEPT_EDGES,
                "logit": self.logit,
                "largest_residual": float(np.abs(self.residuals).max()),
                "replacement_score": self.scores[0],
                "completeness_score": self.scores[1],
                "largest_score_residual": max((abs(each.residual) for each in self.why.values()), default=0.0),
                "error_nodes": 0,
            },
            "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
            "nodes": [self._published(place) for place in left],
            "qk_only_nodes": {each: self._published(place) for place, each in enumerate(ids) if each in further},
            "links": [
                {"source": ids[source], "target": ids[target], "weight": weight}
                for target, source, weight in zip(targets.tolist(), sources.tolist(), weights, strict=True)
            ],
        }

    def _published(self, place: int) -> dict[str, Any]:
        node, (layer, index, _) = (*self.nodes, *self.constants)[place], self.ids[place].split("_")
        is_logit, entries = node.kind == "logit", " - ".join(f'"{entry}"' for entry in self.entries)
        told = {"embedding": "", "logit": f"Output {entries} (p={self.probability:.3f})"}
        told |= dict.fromkeys(("neuron", "head"), f"{node.name}[{node.index}]")
        features = {"embedding": node.token, "logit": node.index}
        # Cantor's pairing, by which the schema encodes layer and index in one number; the layer of tokens is a letter.
        both = int(index) + (int(layer) if layer.isdecimal() else 0)
        paired = both * (both + 1) // 2 + int(index)
        found = {
            "node_id": self.ids[place],
            "feature": features.get(node.kind, paired),
            "layer": layer,
            "ctx_idx": node.token,
            "feature_type": {"head": "attention head", "rest": "other heads"}.get(node.kind, node.kind),
            "token_prob": self.probability if is_logit else 0.0,
            "is_target_logit": is_logit,
            "run_idx": 0,
            "reverse_ctx_idx": 0,
            "jsNodeId": f"{'L' if is_logit else layer}_{index}-{node.token}",
            "clerp": told.get(node.kind, node.name),
            "influence": None if is_logit else float(self.cumulative[place]) if place < len(self.nodes) else 1.0,
            "activation": None if node.kind in ("embedding", "bias") else node.activation,
        }
        if place in self.why:
            why = self.why[place]
            found["score"] = {"key": why.key, "total": why.total, "added": why.added, "residual": why.residual}
            found["qk_tracing_results"] = _traced(why)
        return found


def _traced(why: Why) -> dict[str, list[tuple[Any, ...]]]:
    marginal = {f"top_{side}_marginal_contributors": why.largest("qk".index(side), _TRACED_TERMS) for side in "qk"}
    return {"pair_wise_contributors": why.top(_TRACED_TERMS), **marginal}


def _ids(index: HeadIndex, tokens: Sequence[int], nodes: Sequence[GraphNode]) -> tuple[str, ...]:
    """`{layer}_{index}_{token}`, "E" for embeddings; a layer begins with neurons, then heads, then the rest."""
    starts = {"logit": (len(index.layers) + 1, 0)}
    left = [*dict.fromkeys(node.name for node in nodes if node.kind in ("rest", "bias"))]
    for number, sublayers in enumerate([*index.layers.values(), ()]):
        ordered = sorted(sublayers, key=lambda each: not isinstance(each, NeuronHeads))
        counts = {each.name: each.count for each in ordered}
        prefixes = tuple(f"{name}." for name in counts)
        counts |= {name: 1 for name in left if name not in starts and (not sublayers or name.startswith(prefixes))}
        places = accumulate(counts.values(), initial=0)
        starts |= {name: (number, place) for name, place in zip(counts, places, strict=False)}
    begun = ((each, ("E", tokens[each.token]) if each.kind == "embedding" else starts[each.name]) for each in nodes)
    return tuple(f"{layer}_{start + node.index}_{node.token}" for node, (layer, start) in begun)


def attribution_graph(
    model: Source,
    inputs: InputsOrText,
    logit: int,
    *,
    minus: int | None = None,
    position: int = -1,
    max_nodes: int = 2000,
) -> AttributionGraph:
    """The attribution graph of a logit: arguments and errors are those of `attribute`.

    The `max_nodes` heads and neurons, each at one token, with the largest effects on the logit get separate nodes;
    others are one node per sublayer and token. More than 10,000 nodes are a UsageError.
    """
    if max_nodes < 0:
        raise UsageError(f"there cannot be {max_nodes} nodes")
    run = FrozenRun(model, inputs)
    linear = run.linear(logit, minus, position)
    entries, length, entry = linear.entries, len(linear.start), logit % len(linear.entries)
    nodes = [GraphNode("embedding", "embed", 0, token) for token in range(length)]
    members = _members_of(linear, nodes, max_nodes)
    nodes.append(GraphNode("logit", "logit", entry, linear.position, linear.value, 1.0))
    found = _Edges(linear, members, nodes)
    edges, count = found.matrix(), len(nodes)
    kinds = np.array([node.kind for node in nodes])
    kept, links, cumulative = prune(edges, kinds, _KEPT_NODES, _KEPT_EDGES)
    chosen = (entry,) if minus is None else (entry, minus % len(entries))
    shifted = np.exp(entries - entries.max())
    tokens = run.given.token_ids(length) or tuple(range(length))
    shown = run.words or tuple(map(str, tokens))
    why = dict[int, Callable[[Sequence[str]], Why]]()
    scores = cache(partial(ScoreTerms, run))
    for place in np.flatnonzero((kinds == "head") & kept).tolist():
        with suppress(UsageError):  # rotations that are not understood: scores cannot be explained
            why[place] = found.score(scores(nodes[place].name), nodes[place])
    named = _ids(run.index, tokens, nodes)
    return AttributionGraph(
        logit=linear.value,
        entries=run.given.entries(chosen, len(entries)) or tuple(map(str, chosen)),
        probability=float(shifted[logit] / shifted.sum()),
        nodes=tuple(nodes[:count]),
        adjacency=edges,
        kept=kept,
        links=links,
        cumulative=cumulative,
        shown=shown,
        prompt=next(iter(run.given.texts), " ".join(shown)),
        ids=named,
        constants=tuple(nodes[count:]),
        why={place: each(named) for place, each in why.items()},
    )


@dataclass(frozen=True, eq=False)
class Members:
    """The heads or neurons of a sublayer, each at every token. K is d_head, or 1 for neurons."""

    step: AttentionStep | NeuronStep
    places: Array  # [T, members], the node of each; a sublayer's nodes follow on each other by token
    weights: Array  # [T, members, K], the weight of each written number in its node's activation
    at: Sequence[slice]  # token to its nodes, counted from the sublayer's first

    @cached_property
    def nodes(self) -> Array:
        return np.arange(self.places.min(), self.places.max() + 1)

    def by_node(self, values: Array) -> Array:
        """[N, members * K]: numbers [T, members, K] of each node's members, and zeros."""
        found = np.zeros((len(self.nodes), *values.shape[1:]))
        found[self.places - self.nodes[0], np.arange(values.shape[1])] = values
        return found.reshape(len(found), -1)

    @cached_property
    def vectors(self) -> Array:
        """[N, D]."""
        return np.asarray(self.by_node(self.step.written) @ self.step.weight())


def _members_of(linear: Linear, nodes: list[GraphNode], most: int) -> Mapping[str, Members]:
    """Sublayer to its heads or neurons; adds nodes: the `most` with the largest effects have separate ones."""
    every = linear.effects
    sizes = np.concatenate([np.abs(effects).reshape(-1) for effects in every.values()])
    chosen = np.zeros(sizes.size, bool)
    chosen[np.argsort(-sizes, kind="stable")[:most]] = True
    found: dict[str, Members] = {}
    for name, step in (pair for stage in linear.stages for pair in stage.steps.items()):
        neurons, effects, at = isinstance(step, NeuronStep), every[name], linear.inside[name].at
        own, chosen = chosen[: effects.size].reshape(effects.shape), chosen[effects.size :]
        places, starts = np.zeros(effects.shape, np.int64), [len(nodes)]
        for token, row in enumerate(own):
            if not row.all():
                places[token] = len(nodes)
                nodes.append(GraphNode("rest", f"{name}.rest", 0, token, float(effects[token, ~row].sum()), 1.0))
            for number in np.flatnonzero(row).tolist():
                places[token, number] = len(nodes)
                kind, activation, gradient = "head", effects[token, number], 1.0
                if neurons:
                    kind, activation, gradient = "neuron", step.written[token, number, 0], at[token, number, 0]
                nodes.append(GraphNode(kind, name, number, token, float(activation), float(gradient)))
            starts.append(len(nodes))
        spans = [slice(start - starts[0], stop - starts[0]) for start, stop in pairwise(starts)]
        found[name] = Members(step, places, np.where(own[..., None], 1.0, at) if neurons else at, spans)
    return found


# -- edges ---------------------------------------------------------------------------------------------------------

# Of nodes at one token: places [K], their activations' gradients at the stream [K, D], constants' contributions [K].
Read = tuple[Array, Array, Mapping[str, Array]]


class _Edges:
    """All edges; adds the nodes of constants. The first nodes are the embeddings, the last is the logit."""

    def __init__(self, linear: Linear, members: Mapping[str, Members], nodes: list[GraphNode]) -> None:
        self._members, self._nodes = members, nodes
        self._written = Written(
            linear.stages,
            {"embed": linear.start},
            lambda name, _, token: members[name].vectors[members[name].at[token]],
        )
        self._known = {("embed", token): token for token in range(len(linear.start))}
        # Targets [K], sources [S] and weights [K, S], to be added up; no place is twice among targets or sources.
        self._blocks: list[tuple[Array, Array, Array]] = []
        target = np.array([len(nodes) - 1])
        for place, stage in enumerate(linear.stages):
            for name in stage.steps:
                own = members[name]
                reads = _attention(own, own.step) if isinstance(own.step, AttentionStep) else _neurons(own, own.step)
                for token, read in enumerate(reads):
                    self._trace(place, token, read, f"{name}.")
        for token, row in enumerate(linear.last):
            constants = linear.constants if token == linear.position else {}
            added = {name: np.asarray(number).reshape(1) for name, number in constants.items()}
            self._trace(len(linear.stages), token, (target, row[None], added))

    def _trace(self, stage: int, token: int, read: Read, prefix: str = "") -> None:
        """The in-edges of a stage's nodes from one token."""
        targets, rows, constants = read
        reading = rows.any(axis=1)  # heads do not read tokens that a mask hides
        parts = [(targets, f"{prefix}{name}", added[None]) for name, added in constants.items()]
        parts += ((targets[reading], *term) for term in self._written.along(stage, token, rows[reading]))
        self._blocks += ((each, self._sources(name, token), part.T) for each, name, part in parts if part.any())

    def score(self, scores: ScoreTerms, node: GraphNode) -> Callable[[Sequence[str]], Why]:
        """The largest attention score of a head, as a function of all ids; adds the nodes of constants."""
        query, key = scores.tokens(node.index, node.token)
        sides = list[tuple[Array, Array]]()
        for side, token in (("Q", query), ("K", key)):
            terms, cross = scores.side(self._written, side, token, [node.index]), f"{node.name}.other_sequence"
            places = [self._sources(name, query if name == cross else token) for name, _ in terms]
            sides.append((np.concatenate(places), np.concatenate([part[:, 0] for _, part in terms])))
        (asked, first), (told, second) = sides

        def named(ids: Sequence[str]) -> Why:
            rows, columns = (tuple(ids[place] for place in places.tolist()) for places in (asked, told))
            score = scores.at(node.index, query, key)
            return Why(f"{node.name}[{node.index}]", query, key, *score, rows, columns, first @ second.T)

        return named

    def _sources(self, name: str, token: int) -> Array:
        if name in self._members:
            return self._members[name].nodes[self._members[name].at[token]]
        if (name, token) not in self._known:
            self._known[name, token] = len(self._nodes)
            self._nodes.append(GraphNode("bias", name, 0, token))
        return np.array([self._known[name, token]])

    def matrix(self) -> Array:
        size = len(self._nodes)
        if size > _MAX_NODES:
            what = f"the graph would have {size:,} nodes, more than {_MAX_NODES:,}"
            raise UsageError(f"{what}: take fewer of them, or tokens")
        found = np.zeros((size, size))
        for targets, origins, weights in self._blocks:
            found[targets[:, None], origins] += weights
        return found


def _neurons(members: Members, neurons: NeuronStep) -> Iterator[Read]:
    shares = [(members.by_node(members.weights * rate[..., None]), affine) for rate, affine in neurons.reads]
    rows = np.asarray(sum(share @ affine.weight().T for share, affine in shares))
    added = {
        "b_in": np.asarray(sum(share @ affine.bias() for share, affine in shares)),
        "bias_tokens": members.by_node(members.weights).sum(axis=1) * neurons.constant,
        "ln.b": rows @ neurons.norm.bias,
    }
    for token, own in enumerate(members.at):
        yield members.nodes[own], neurons.norm.back(rows[own], token), {name: part[own] for name, part in added.items()}


def _attention(members: Members, step: AttentionStep) -> Iterator[Read]:
    order = np.argsort(members.places, axis=None, kind="stable")
    starts = np.searchsorted(members.places.reshape(-1)[order], members.nodes)

    def by_node(rows: Array) -> Array:
        """[N, ...]: rows [T * heads, ...], in order, summed."""
        return np.asarray(np.add.reduceat(rows, starts, axis=0))

    if step.norm is None:
        values = by_node(np.einsum("thk,hts,shk->th", members.weights, step.pattern, step.value).reshape(-1)[order])
        for own in members.at:
            yield members.nodes[own], np.zeros((len(values[own]), step.bias.size)), {"other_sequence": values[own]}
        return
    # Heads of all tokens [T * heads, ...] at the normalised stream, before their patterns: the same for all sources.
    at = members.weights.swapaxes(0, 1) @ step.value_weight().swapaxes(1, 2)
    at = at.swapaxes(0, 1).reshape(order.size, -1)[order]
    biased = (members.weights * step.value_bias).sum(axis=-1).reshape(-1)[order]
    for token in range(step.pattern.shape[-1]):
        pattern = step.pattern[:, :, token].T.reshape(-1)[order]
        rows = by_node(pattern[:, None] * at)
        parts = {"b_V": by_node(pattern * biased), "ln.b": rows @ step.norm.bias}
        yield members.nodes, step.norm.back(rows, token), parts


# -- influence, pruning and scores, as circuit-tracer defines them (Ameisen et al., "Circuit Tracing", 2025) --------
# Rows of the adjacency matrix are targets; their absolute values divided by their sums are A, and a node's influence is
# its entry of w (A + A^2 + ...), w being 1 at the logit.


def influence(weights: Array, start: Array) -> Array:
    """`start (A + A^2 + ...)`, [N], of rows [N, N] that have no cycles."""
    found, step, reading = np.zeros(len(start)), start, weights.any(axis=1)
    while (rows := np.flatnonzero((step != 0.0) & reading)).size:  # those of later nodes are soon 0
        step = step[: rows[-1] + 1] @ weights[: rows[-1] + 1]
        found += step
    return found


def normalised(adjacency: Array, missing: Array | float = 0.0) -> Array:
    """A; `missing` [N] counts in the sums of rows."""
    sizes = np.abs(adjacency)
    sizes /= np.maximum(sizes.sum(axis=1) + missing, _MIN_DIVISOR)[:, None]
    return sizes


def scores(adjacency: Array, missing: Array, kinds: Array) -> tuple[float, float]:
    """(replacement, the share of influence on the logit that begins at tokens; completeness, the present in-edges').

    Error nodes have the part `missing` [N] of nodes' in-edges; shares of in-edges are averaged by influence.
    """
    start = np.asarray(kinds == "logit", dtype=float)
    found = influence(normalised(adjacency, missing), start)
    passing = found + start
    lost = missing / np.maximum(np.abs(adjacency).sum(axis=1) + missing, _MIN_DIVISOR)
    begun, erred = found[kinds == "embedding"].sum(), (passing * lost).sum()
    completeness = ((1.0 - lost) * passing).sum() / passing.sum()
    return float(begun / (begun + erred)) if begun + erred else 0.0, float(completeness)


def prune(adjacency: Array, kinds: Array, node_threshold: float, edge_threshold: float) -> tuple[Array, Array, Array]:
    """The nodes [N] with the most influence, `node_threshold` of it, tokens and the logit, and edges [N, N] likewise.

    Third is the share of all influence [N] of nodes with at least each one's influence.
    """
    start = np.asarray(kinds == "logit", dtype=float)
    kept, sources = np.isin(kinds, ["embedding", "logit"]), np.isin(kinds, ["embedding", "bias"])
    by_node = influence(normalised(adjacency), start)
    nodes = kept | ((by_node >= _threshold(by_node, node_threshold)) & (by_node > 0.0))
    among, by_edge = np.ix_(nodes, nodes), np.zeros(adjacency.shape)
    inner = normalised(adjacency[among])
    by_edge[among] = inner * (influence(inner, start[nodes]) + start[nodes])[:, None]
    edges = (by_edge >= _threshold(by_edge[by_edge > 0.0], edge_threshold)) & (by_edge > 0.0)
    while True:
        left = nodes & (kept | (edges.any(axis=0) & (sources | edges.any(axis=1))))
        edges &= left[:, None] & left[None, :]
        if (left == nodes).all():
            break
        nodes = left
    order = np.argsort(-by_node, kind="stable")
    cumulative = np.zeros(len(by_node))
    cumulative[order] = np.cumsum(by_node[order]) / max(float(by_node.sum()), _MIN_DIVISOR)
    return nodes, edges, cumulative


def _threshold(sizes: Array, share: float) -> float:
    """The smallest of the largest that together are `share` of the sum."""
    if not sizes.size:
        return 0.0
    falling = np.sort(sizes)[::-1]
    sums = np.cumsum(falling)
    return float(falling[min(int(np.searchsorted(sums / max(float(sums[-1]), _MIN_DIVISOR), share)), len(falling) - 1)])
