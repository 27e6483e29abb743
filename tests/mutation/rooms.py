"""Which modules are mutated, by room, and which tests must notice: quick ones first, then those of the whole way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

_PROOF = "tests/rewriter/proof"
_REFERENCE = f"{_PROOF}/reference"
_FLOAT64 = f"{_PROOF}/test_float64.py {_PROOF}/test_planned.py"
_PAIRS = f"{_PROOF}/test_pairs.py {_PROOF}/test_taps.py {_PROOF}/test_sensitivity.py"
_REGIONS = f"{_PROOF}/test_regions.py {_PROOF}/test_spread.py {_PROOF}/test_planned.py"
_UNCHANGED = f"{_PROOF}/test_same.py {_PROOF}/test_unchanged.py {_PROOF}/test_is_attention.py"
_WHOLE = f"{_PROOF}/test_proof_segments.py {_UNCHANGED} tests/rewriter/test_amplified.py tests/rewriter/test_api.py"

ROOMS: Mapping[str, Sequence[str]] = {
    "rewriter/proof": [
        f"rewriter/proof/{name}.py"
        for name in (
            *("endtoend", "pass_rule", "unchanged", "scope_changes", "definitions", "same", "is_attention", "regions"),
            *("wholes", "blocks", "spread", "points", "judging", "compare", "distance", "planned", "doubt"),
            *("sensitivity", "reference/engine", "reference/audit", "reference/tolerance", "reference/decisions"),
        )
    ],
    "passes": [
        f"passes/{name}.py"
        for name in (
            *("softmax", "changes", "intervals", "certify", "programs", "gating", "linear", "lower", "merge"),
            *("neurons", "bounds"),
        )
    ],
    "rewriter/differences": [f"rewriter/differences/{name}.py" for name in ("models", "nodes", "scopes", "tensors")],
    "rewriter/files": [
        f"rewriter/files/{name}.py"
        for name in ("external", "functions", "load", "modelfile", "order", "save", "scopes", "structure", "tensors")
    ],
    "rewriter/graph": ["rewriter/graph/edit.py"],
}
"""Room to the modules that decide something."""

_TESTS: Mapping[str, Sequence[str]] = {
    "rewriter/proof/reference/*.py": (_REFERENCE, _FLOAT64),
    "rewriter/proof/pass_rule.py": (f"{_PROOF}/test_pass_rule.py {_PROOF}/test_judging.py", _WHOLE),
    "rewriter/proof/distance.py": (f"{_PROOF}/test_pass_rule.py {_PROOF}/test_judging.py {_REGIONS}", _WHOLE),
    "rewriter/proof/compare.py": (f"{_PROOF}/test_compare.py {_PROOF}/test_histogram.py {_PAIRS}", _WHOLE),
    "rewriter/proof/planned.py": (f"{_PROOF}/test_planned.py", _WHOLE),
    "rewriter/proof/doubt.py": (f"{_PROOF}/test_doubt.py", _PAIRS, "tests/rewriter/test_comparing.py"),
    "rewriter/proof/sensitivity.py": (f"{_PROOF}/test_sensitivity.py", _PAIRS, "tests/rewriter/test_comparing.py"),
    "rewriter/proof/judging.py": (f"{_PROOF}/test_judging.py", _PAIRS, "tests/rewriter/test_comparing.py"),
    "rewriter/proof/is_attention.py": (f"{_PROOF}/test_is_attention.py", _WHOLE),
    "rewriter/proof/endtoend.py": (f"{_PROOF}/test_endtoend.py", _WHOLE),
    "rewriter/proof/wholes.py": (f"{_PROOF}/test_blocks.py", "tests/passes/test_network.py", _WHOLE),
    "rewriter/proof/blocks.py": (f"{_PROOF}/test_blocks.py {_REGIONS}", _WHOLE, "tests/passes/test_network.py"),
    "rewriter/proof/*.py": (f"{_UNCHANGED} {_REGIONS}", _WHOLE),
    "passes/softmax.py": ("tests/passes/test_softmax.py",),
    "passes/changes.py": ("tests/passes/test_changes.py", "tests/passes/test_find.py"),
    "passes/intervals.py": ("tests/passes/test_changes.py", "tests/passes/test_certify.py"),
    "passes/certify.py": ("tests/passes/test_certify.py",),
    "passes/linear.py": ("tests/passes/test_linear.py", "tests/passes/test_find.py tests/passes/test_cost.py"),
    "passes/lower.py": ("tests/passes/test_lower.py tests/passes/test_find.py", "tests/passes/test_apply.py"),
    "passes/bounds.py": ("tests/passes/test_bounds.py tests/passes/test_merge.py",),
    "passes/merge.py": ("tests/passes/test_merge.py",),
    "passes/neurons.py": ("tests/passes/test_merge.py",),
    "passes/*.py": ("tests/passes/test_programs.py tests/passes/test_closed_forms.py", "tests/passes/forms"),
    "rewriter/differences/*.py": ("tests/rewriter/differences",),
    "rewriter/files/*.py": ("tests/rewriter/files",),
    "rewriter/graph/edit.py": ("tests/rewriter/graph", "tests/rewriter/test_api.py"),
}
"""Glob to tests, quick ones first; the first glob that fits counts."""


def suites_of(module: str) -> list[tuple[str, ...]]:
    """The tests of a module, group by group, quick ones first."""
    groups = next(groups for glob, groups in _TESTS.items() if fnmatchcase(module, glob))
    return [tuple(group.split()) for group in groups]
