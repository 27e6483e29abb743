"""Operators that only change how entries are laid out; the one table, for everything that follows tensors.

Each set adds to the one before it. Whether a given node keeps tokens or channels apart depends on its axes, which those
who follow a tensor check where it matters to them.
"""

from __future__ import annotations

SAME_ENTRIES = frozenset(("Identity", "Dropout", "Reshape", "Squeeze", "Unsqueeze", "Flatten"))
"""Entries keep their values and their order; axes may be split, merged, added or dropped."""

SAME_NUMBERS = SAME_ENTRIES | {"Cast"}
"""As before, perhaps in another type."""

REARRANGED = SAME_NUMBERS | {"Transpose"}
"""As before, perhaps in another order."""
