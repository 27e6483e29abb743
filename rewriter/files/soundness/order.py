"""Sort graphs that are not in topological order.

ONNX requires the order, but onnxruntime loads unsorted graphs and its float16 converter writes them, so refusing them
would refuse working models. The sort is stable; a graph with a cycle is left as it is, for `structure` to refuse.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import onnx

from rewriter.files.walk import iter_nodes


def sort_main_graph(model: onnx.ModelProto) -> bool:
    """Sort the main graph in place and return whether anything moved. Linear time for a graph that is in order."""
    nodes = model.graph.node
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    reads = [sources_of(node, producer) for node in nodes]
    if all(source < index for index, sources in enumerate(reads) for source in sources):
        return False
    order = sorted_order(reads)
    if len(order) < len(nodes):
        return False
    copies = [onnx.NodeProto() for _ in order]
    for copy, index in zip(copies, order, strict=True):
        copy.CopyFrom(nodes[index])
    del nodes[:]
    nodes.extend(copies)
    return True


def sources_of(node: onnx.NodeProto, producer: dict[str, int]) -> set[int]:
    """Indices of the producers of what a node, or a body inside it, reads."""
    inner = iter_nodes([node]) if node.attribute else (node,)
    return {producer[name] for each in inner for name in each.input if name in producer}


def sorted_order(reads: list[set[int]]) -> list[int]:
    """Kahn's algorithm, the ready node of lowest index first; nodes in or downstream of a cycle are left out."""
    readers: list[list[int]] = [[] for _ in reads]
    for index, sources in enumerate(reads):
        for source in sources:
            readers[source].append(index)
    waiting = [len(sources) for sources in reads]
    ready = [index for index, count in enumerate(waiting) if not count]
    heapify(ready)
    order = []
    while ready:
        index = heappop(ready)
        order.append(index)
        for reader in readers[index]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heappush(ready, reader)
    return order
