"""An attribution graph in the JSON schema that circuit-tracer and Neuronpedia publish, version 1.

Layers are numbers as text, "E" for embeddings and the number of layers plus one for logits; ids are
`{layer}_{index}_{token}`. In a layer neurons have the first indices, original heads the next, then what remains.
Feature types are `embedding` and `logit` as there, and `neuron`, `attention head`, `other heads` and `bias`: the
schema leaves them open, and a name of its own keeps a viewer from looking for transcoder features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from passes.heads.neurons import NeuronHeads
from rewriter.api.interpret.graph.nodes import Node
from rewriter.api.interpret.graph.prune import Pruned
from rewriter.api.interpret.index import HeadIndex
from rewriter.arrays import Array
from rewriter.proof.inputs.roles import Role, input_specs

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
