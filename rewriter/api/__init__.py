"""The Python API, and the composition of the engine with the pass.

Apart from the command line, these are the only modules of `rewriter` that import `passes`. A verb is imported when it
is used: a rewriting does not need what compares models.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewriter.api.comparing import diff, judge, validate
    from rewriter.api.folder import rewrite_folder
    from rewriter.api.inspection import Inspection, inspect
    from rewriter.api.interpret.attribution import attribute
    from rewriter.api.interpret.cache import run_with_cache
    from rewriter.api.interpret.graph.tracing import attribution_graph
    from rewriter.api.interpret.index import heads
    from rewriter.api.interpret.interventions import ablate, freeze, patch
    from rewriter.api.interpret.pictures.contents import head_pictures
    from rewriter.api.interpret.ranking.activity import head_activity
    from rewriter.api.interpret.ranking.composition import compositions
    from rewriter.api.interpret.ranking.copies import idle_heads
    from rewriter.api.interpret.ranking.tokens import head_tokens
    from rewriter.api.rewriting import rewrite
    from rewriter.api.timing.benching import bench

__all__ = [
    "Inspection",
    "ablate",
    "attribute",
    "attribution_graph",
    "bench",
    "compositions",
    "diff",
    "freeze",
    "head_activity",
    "head_pictures",
    "head_tokens",
    "heads",
    "idle_heads",
    "inspect",
    "judge",
    "patch",
    "rewrite",
    "rewrite_folder",
    "run_with_cache",
    "validate",
]

_HOMES = {
    "attribute": "interpret.attribution",
    "attribution_graph": "interpret.graph.tracing",
    "bench": "timing.benching",
    "compositions": "interpret.ranking.composition",
    "head_pictures": "interpret.pictures.contents",
    "head_activity": "interpret.ranking.activity",
    "head_tokens": "interpret.ranking.tokens",
    "idle_heads": "interpret.ranking.copies",
    **dict.fromkeys(("diff", "judge", "validate"), "comparing"),
    **dict.fromkeys(("Inspection", "inspect"), "inspection"),
    "heads": "interpret.index",
    **dict.fromkeys(("ablate", "freeze", "patch"), "interpret.interventions"),
    "run_with_cache": "interpret.cache",
    "rewrite": "rewriting",
    "rewrite_folder": "folder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rewriter.api' has no attribute '{name}'")
    return getattr(import_module(f"rewriter.api.{_HOMES[name]}"), name)
