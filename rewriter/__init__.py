"""Rewrites the MLP blocks of an ONNX transformer as attention heads, and proves that the outputs stay the same.

>>> from rewriter import rewrite
>>> report = rewrite("model.onnx", "attnonly.onnx")
>>> report.exit_status, len(report.converted)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewriter.api import diff, inspect, rewrite, validate
    from rewriter.errors import ExitStatus, ModelError, ProviderError, RewriteError, UsageError, ValidationError
    from rewriter.report.comparison import Comparison
    from rewriter.report.report import Report

__all__ = [
    "Comparison",
    "ExitStatus",
    "ModelError",
    "ProviderError",
    "Report",
    "RewriteError",
    "UsageError",
    "ValidationError",
    "diff",
    "inspect",
    "rewrite",
    "validate",
]

_HOMES = {
    **dict.fromkeys(("diff", "inspect", "rewrite", "validate"), "rewriter.api"),
    "Comparison": "rewriter.report.comparison",
    "Report": "rewriter.report.report",
}


def __getattr__(name: str) -> Any:
    """Import lazily: `passes` imports `rewriter.graph`, and the API imports `passes`."""
    if name not in __all__:
        raise AttributeError(f"module 'rewriter' has no attribute '{name}'")
    return getattr(import_module(_HOMES.get(name, "rewriter.errors")), name)
