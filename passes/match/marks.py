"""Marks on the nodes that this pass emits, by which a later run recognises them.

A mark is the operator domain of a model-local function or an entry in the node's metadata, which also records the head
program.
"""

DOMAIN = "attnonly"
"""Operator domain of the model-local functions, and prefix of the metadata keys."""

BLOCK_KEY = f"{DOMAIN}.block"
PROGRAM_KEY = f"{DOMAIN}.program"
PROJECTIONS_KEY = f"{DOMAIN}.projections"
OWN_PROJECTIONS = "W_Q, W_V, W_O"
"""What the metadata says of heads that replace a whole block; others keep its linear operators."""
