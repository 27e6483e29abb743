"""Rewrites the MLP blocks of an ONNX transformer as attention heads, and proves that the outputs stay the same.

>>> from rewriter import rewrite
>>> report = rewrite("model.onnx", "attnonly.onnx")
>>> report.exit_status, len(report.converted)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewriter.api.benching import bench as bench
    from rewriter.api.certifying import certify as certify
    from rewriter.api.comparing import diff as diff
    from rewriter.api.comparing import validate as validate
    from rewriter.api.diagnosing import doctor as doctor
    from rewriter.api.folder import rewrite_folder as rewrite_folder
    from rewriter.api.inspection import inspect as inspect
    from rewriter.api.rewriting import rewrite as rewrite
    from rewriter.errors import ExitStatus as ExitStatus
    from rewriter.errors import ModelError as ModelError
    from rewriter.errors import NothingToConvertError as NothingToConvertError
    from rewriter.errors import ProviderError as ProviderError
    from rewriter.errors import RewriteError as RewriteError
    from rewriter.errors import UsageError as UsageError
    from rewriter.errors import ValidationError as ValidationError
    from rewriter.interpret.attribute import attribute as attribute
    from rewriter.interpret.graph import attribution_graph as attribution_graph
    from rewriter.interpret.index import heads as heads
    from rewriter.interpret.interventions import ablate as ablate
    from rewriter.interpret.interventions import freeze as freeze
    from rewriter.interpret.interventions import patch as patch
    from rewriter.interpret.page import head_pictures as head_pictures
    from rewriter.interpret.rank import compositions as compositions
    from rewriter.interpret.rank import head_tokens as head_tokens
    from rewriter.interpret.run import run_with_cache as run_with_cache
    from rewriter.interpret.why import why as why
    from rewriter.proof.inputs.given import Text as Text
    from rewriter.report.benchmark import Benchmark as Benchmark
    from rewriter.report.certification import Certification as Certification
    from rewriter.report.comparison import Comparison as Comparison
    from rewriter.report.folder import FolderReport as FolderReport
    from rewriter.report.report import Report as Report

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
    "interpret.why": ("why",),
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

__all__ = [name for names in _HOMES.values() for name in names]


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
