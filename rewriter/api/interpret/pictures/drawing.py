"""The pruned attribution graph, laid out: tokens from left to right, layers from the bottom to the top.

Places are columns and rows; the page turns them into coordinates. Of large graphs the nodes with the most influence and
the strongest edges are drawn, nodes without edges are not, and the rest is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MOST_NODES, MOST_EDGES = 100, 300


def drawn(graph: Mapping[str, Any], window: range) -> dict[str, Any]:
    """Nodes with `row`, `column` (a token of the window) and `lane` (their place among those of one row and column).

    Args:
        graph: in the published schema.
        window: the tokens that are shown; nodes at others are left out.
    """
    inside = [node for node in graph["nodes"] if node["ctx_idx"] in window]
    ranked = sorted(inside, key=lambda node: (_weight(node), node["node_id"]))[:MOST_NODES]
    kept = {node["node_id"]: node for node in ranked}
    links = [link for link in graph["links"] if link["source"] in kept and link["target"] in kept]
    links = sorted(links, key=lambda link: (-abs(link["weight"]), link["source"], link["target"]))[:MOST_EDGES]
    joined = {link[end] for link in links for end in ("source", "target")}
    kept = {name: node for name, node in kept.items() if name in joined or node["is_target_logit"]}
    layers = sorted({_layer(node) for node in kept.values()})
    lanes: dict[tuple[int, int], int] = {}
    nodes = []
    for node in sorted(kept.values(), key=lambda each: (_layer(each), each["ctx_idx"], each["node_id"])):
        place = (layers.index(_layer(node)), node["ctx_idx"] - window.start)
        lane = lanes.get(place, 0)
        lanes[place] = lane + 1
        nodes.append(
            {
                "id": node["node_id"],
                "row": place[0],
                "column": place[1],
                "lane": lane,
                "kind": node["feature_type"],
                "label": node["clerp"] or "embedding",
                "head": _head(node),
                "activation": node["activation"],
            }
        )
    return {
        "nodes": nodes,
        "links": [[link["source"], link["target"], float(f"{link['weight']:.4g}")] for link in links],
        "rows": [_row(layer, layers[-1], kept.values()) for layer in layers],
        "left_out": [len(graph["nodes"]) - len(nodes), len(graph["links"]) - len(links)],
    }


def _weight(node: Mapping[str, Any]) -> float:
    """Small for what must be drawn: influence is the share of all that nodes of at least this size have."""
    if node["is_target_logit"] or node["feature_type"] == "embedding":
        return -1.0
    return float(node["influence"])


def _layer(node: Mapping[str, Any]) -> int:
    return -1 if node["layer"] == "E" else int(node["layer"])


def _row(layer: int, last: int, nodes: Iterable[Mapping[str, Any]]) -> str:
    if layer in (-1, last):
        return "tokens" if layer == -1 else "logit"
    # Biases after the last layer have one of their own in the published schema.
    own = {node["feature_type"] for node in nodes if _layer(node) == layer}
    return "biases" if own == {"bias"} else f"layer {layer}"


def _head(node: Mapping[str, Any]) -> str | None:
    """`blocks.0.attn.3`, where the node is one head or neuron."""
    if node["feature_type"] not in ("neuron", "attention head"):
        return None
    sublayer, _, number = node["clerp"].rpartition("[")
    return f"{sublayer}.{number.rstrip(']')}"
