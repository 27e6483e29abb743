"""Forms: how a head program becomes nodes. One file per form; the table is `FORMS`."""

from __future__ import annotations

from collections.abc import Callable

from passes.conversion import Conversion
from passes.forms.local import emit_local
from rewriter.graph.edit import Replacement
from rewriter.graph.view import GraphView

Emit = Callable[[GraphView, Conversion], Replacement]

FORMS: dict[str, Emit] = {"local": emit_local}
"""Form name to the function that emits one conversion in that form."""
