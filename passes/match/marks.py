"""How this pass marks what it made, and knows it again.

Comes in: a node. Goes out: the block that an earlier run made it for. Marks are the operator domain of the model-local
functions and node metadata; the metadata also holds what the block was made from.
"""

from __future__ import annotations

import onnx

DOMAIN = "attnonly"
"""Operator domain of the model-local functions, and prefix of the metadata keys."""

BLOCK_KEY = f"{DOMAIN}.block"
PROGRAM_KEY = f"{DOMAIN}.program"


def made_for(node: onnx.NodeProto) -> str | None:
    """The name of the block that an earlier run of this pass made the node for; None for any other node."""
    for entry in node.metadata_props:
        if entry.key == BLOCK_KEY:
            return str(entry.value)
    return node.name.partition("/heads")[0] if node.domain == DOMAIN else None


def program_of(node: onnx.NodeProto) -> str | None:
    """The name of the head program that an earlier run of this pass made the node for."""
    return next((str(entry.value) for entry in node.metadata_props if entry.key == PROGRAM_KEY), None)
