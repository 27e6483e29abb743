"""Marks on the nodes that this pass emits, by which a later run recognises them.

A mark is the operator domain of a model-local function or an entry in the node's metadata, which also records the head
program.
"""

from __future__ import annotations

import onnx

DOMAIN = "attnonly"
"""Operator domain of the model-local functions, and prefix of the metadata keys."""

BLOCK_KEY = f"{DOMAIN}.block"
PROGRAM_KEY = f"{DOMAIN}.program"
PROJECTIONS_KEY = f"{DOMAIN}.projections"
OWN_PROJECTIONS = "W_Q, W_V, W_O"
"""What the metadata says of heads that replace a whole block; others keep its linear operators."""


def made_for(node: onnx.NodeProto) -> str | None:
    """The name of the block for which an earlier run emitted the node; None for any other node."""
    for entry in node.metadata_props:
        if entry.key == BLOCK_KEY:
            return str(entry.value)
    # Tools may drop metadata on a round trip; a call of a model-local function is known by its domain and name.
    return node.name.partition("/heads")[0] if node.domain == DOMAIN else None
