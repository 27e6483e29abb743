"""Rewrites the MLP blocks of an ONNX transformer as attention heads, and proves that the outputs stay the same.

>>> from rewriter import rewrite
>>> report = rewrite("model.onnx", "attnonly.onnx")
>>> report.exit_status, len(report.converted)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewriter.api import (
        ablate,
        attribute,
        attribution_graph,
        bench,
        compositions,
        diff,
        freeze,
        head_activity,
        head_pictures,
        head_tokens,
        heads,
        idle_heads,
        inspect,
        judge,
        patch,
        rewrite,
        rewrite_folder,
        run_with_cache,
        validate,
    )
    from rewriter.api.estimating.doctor import doctor
    from rewriter.errors import (
        ExitStatus,
        ModelError,
        NothingToConvertError,
        ProviderError,
        RewriteError,
        TimeLimitError,
        UsageError,
        ValidationError,
    )
    from rewriter.proof.inputs.given import Text
    from rewriter.report.benchmark import Benchmark
    from rewriter.report.comparison import Comparison
    from rewriter.report.folder import FolderReport
    from rewriter.report.report import Report

__all__ = [
    "Benchmark",
    "Comparison",
    "ExitStatus",
    "FolderReport",
    "ModelError",
    "NothingToConvertError",
    "ProviderError",
    "Report",
    "RewriteError",
    "Text",
    "TimeLimitError",
    "UsageError",
    "ValidationError",
    "ablate",
    "attribute",
    "attribution_graph",
    "bench",
    "compositions",
    "diff",
    "doctor",
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

_ERRORS = (
    *("ExitStatus", "ModelError", "NothingToConvertError", "ProviderError", "RewriteError", "TimeLimitError"),
    *("UsageError", "ValidationError"),
)
_HOMES = {
    **dict.fromkeys(_ERRORS, "rewriter.errors"),
    "doctor": "rewriter.api.estimating.doctor",
    "Benchmark": "rewriter.report.benchmark",
    "Comparison": "rewriter.report.comparison",
    "FolderReport": "rewriter.report.folder",
    "Report": "rewriter.report.report",
    "Text": "rewriter.proof.inputs.given",
}


def __getattr__(name: str) -> Any:
    """Import lazily: `passes` imports `rewriter.graph`, and the API imports `passes`."""
    if name == "__version__":
        from importlib.metadata import version

        return version("attnonly")
    if name not in __all__:
        raise AttributeError(f"module 'rewriter' has no attribute '{name}'")
    return getattr(import_module(_HOMES.get(name, "rewriter.api")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
