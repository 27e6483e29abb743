"""Rewrites the MLP blocks of an ONNX transformer as attention heads, and proves that the outputs stay the same.

>>> from rewriter import rewrite
>>> report = rewrite("model.onnx", "attnonly.onnx")
>>> report.exit_status, len(report.converted)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewriter.api.benching import bench
    from rewriter.api.certifying import certify
    from rewriter.api.comparing import diff, validate
    from rewriter.api.diagnosing import doctor
    from rewriter.api.folder import rewrite_folder
    from rewriter.api.inspection import inspect
    from rewriter.api.rewriting import rewrite
    from rewriter.errors import (
        ExitStatus,
        ModelError,
        NothingToConvertError,
        ProviderError,
        RewriteError,
        UsageError,
        ValidationError,
    )
    from rewriter.interpret.attribute import attribute
    from rewriter.interpret.graph import attribution_graph
    from rewriter.interpret.index import heads
    from rewriter.interpret.interventions import ablate, freeze, patch
    from rewriter.interpret.page import head_pictures
    from rewriter.interpret.rank import compositions, head_tokens
    from rewriter.interpret.run import run_with_cache
    from rewriter.proof.inputs.given import Text
    from rewriter.report.benchmark import Benchmark
    from rewriter.report.certification import Certification
    from rewriter.report.comparison import Comparison
    from rewriter.report.folder import FolderReport
    from rewriter.report.report import Report

__all__ = [
    "Benchmark",
    "Certification",
    "Comparison",
    "ExitStatus",
    "FolderReport",
    "ModelError",
    "NothingToConvertError",
    "ProviderError",
    "Report",
    "RewriteError",
    "Text",
    "UsageError",
    "ValidationError",
    "ablate",
    "attribute",
    "attribution_graph",
    "bench",
    "certify",
    "compositions",
    "diff",
    "doctor",
    "freeze",
    "head_pictures",
    "head_tokens",
    "heads",
    "inspect",
    "patch",
    "rewrite",
    "rewrite_folder",
    "run_with_cache",
    "validate",
]

_HOMES = {
    "errors": (
        *("ExitStatus", "ModelError", "NothingToConvertError", "ProviderError", "RewriteError"),
        *("UsageError", "ValidationError"),
    ),
    "api.certifying": ("certify",),
    "api.comparing": ("diff", "validate"),
    "api.diagnosing": ("doctor",),
    "api.folder": ("rewrite_folder",),
    "api.inspection": ("Inspection", "inspect"),
    "interpret.attribute": ("attribute",),
    "interpret.run": ("run_with_cache",),
    "interpret.graph": ("attribution_graph",),
    "interpret.index": ("heads",),
    "interpret.interventions": ("ablate", "freeze", "patch"),
    "interpret.page": ("head_pictures",),
    "interpret.rank": ("compositions", "head_tokens"),
    "api.rewriting": ("rewrite",),
    "api.benching": ("bench",),
    "proof.inputs.given": ("Text",),
    "report.benchmark": ("Benchmark",),
    "report.certification": ("Certification",),
    "report.comparison": ("Comparison",),
    "report.folder": ("FolderReport",),
    "report.report": ("Report",),
}
"""Module to the names that are imported from it when they are used."""


def __getattr__(name: str) -> Any:
    """Import lazily: `passes` imports `rewriter.graph`, and the API imports `passes`."""
    if name == "__version__":
        from importlib.metadata import version

        return version("attnonly")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"rewriter.{module}"), name)
    raise AttributeError(f"module 'rewriter' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
