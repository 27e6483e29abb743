"""Which modules are mutated, by room, and which tests must notice: quick ones first, then those of the whole way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_PROOF = "tests/rewriter/proof"
_REFERENCE = f"{_PROOF}/reference"
_FIGURES = "tests/passes/test_stated_figures.py"
_WHOLE = (
    f"{_PROOF}/run/test_segmented.py {_PROOF}/unchanged tests/rewriter/api/test_amplified.py "
    "tests/rewriter/api/test_rewriting.py"
)

ROOMS: Mapping[str, Sequence[str]] = {
    "rewriter/proof": [
        f"rewriter/proof/{name}.py"
        for name in (
            *("rule", "nudge", "tested", "validate", "statistics", "distance"),
            *("certificate/expressions", "certificate/arithmetic", "certificate/bounds", "certificate/graphs"),
            *("certificate/regions", "certificate/rows", "certificate/constants", "certificate/certify"),
            *("unchanged/model", "unchanged/scopes", "unchanged/definitions", "unchanged/same"),
            *("unchanged/is_attention", "blocks/spread"),
            *("reference/float64", "reference/widen"),
        )
    ],
    "passes": [
        f"passes/{name}.py"
        for name in (
            *("programs/softmax", "programs/program", "programs/line", "programs/powers"),
            *("certificates/changes", "certificates/intervals", "certificates/certify"),
            *("programs/gates", "match/linear", "match/lower", "match/bounds"),
        )
    ],
    "rewriter/compare": [f"rewriter/compare/{name}.py" for name in ("graphs", "weights")],
    "rewriter/files": [
        *(f"rewriter/files/{name}.py" for name in ("external", "journal", "load", "modelfile", "save", "tensors")),
        *(f"rewriter/files/{name}.py" for name in ("datafiles", "mapped", "outputrules", "walk")),
        *(f"rewriter/files/soundness/{name}.py" for name in ("functions", "operators", "order", "scopes", "structure")),
    ],
    "rewriter/graph": [
        f"rewriter/graph/{name}.py"
        for name in ("constants", "edit", "elementwise", "extract", "segments", "surgeon", "types", "view")
    ],
}
"""Room to the modules that decide something."""

_TESTS: Mapping[str, Sequence[str]] = {
    "rewriter/proof/certificate/*.py": (f"{_PROOF}/certificate",),
    "rewriter/proof/reference/*.py": (_REFERENCE,),
    "rewriter/proof/statistics.py": (f"{_PROOF}/test_statistics.py", _WHOLE),
    "rewriter/proof/unchanged/*.py": (f"{_PROOF}/unchanged", _WHOLE),
    "rewriter/proof/blocks/*.py": (f"{_PROOF}/blocks", _WHOLE, "tests/passes/whole"),
    "rewriter/proof/*.py": (f"{_PROOF}/test_rule.py {_PROOF}/unchanged", _WHOLE),
    "passes/programs/softmax.py": (_FIGURES,),
    "passes/programs/line.py": (_FIGURES,),
    "passes/programs/powers.py": (_FIGURES,),
    "passes/certificates/changes.py": (
        _FIGURES,
        "tests/passes/match/test_blocks.py",
    ),
    "passes/certificates/intervals.py": (
        _FIGURES,
        "tests/passes/certificates/test_certify.py",
    ),
    "passes/certificates/certify.py": (_FIGURES,),
    "passes/match/linear.py": ("tests/passes/match/test_blocks.py",),
    "passes/match/lower.py": (
        "tests/passes/match/test_lower.py tests/passes/match/test_blocks.py",
        "tests/passes/test_apply.py",
    ),
    "passes/match/bounds.py": ("tests/passes/match/test_bounds.py",),
    "passes/programs/*.py": (
        _FIGURES,
        "tests/passes/programs",
        "tests/passes/forms",
    ),
    "rewriter/compare/*.py": ("tests/rewriter/compare",),
    "rewriter/files/*.py": ("tests/rewriter/files", "tests/rewriter/api/test_rewriting.py"),
    "rewriter/graph/*.py": ("tests/rewriter/graph", "tests/passes/match tests/rewriter/api/test_rewriting.py"),
}
"""Glob to tests, quick ones first; the first glob that fits counts."""


_OWN: Mapping[str, str] = {
    "rewriter/compare/graphs.py": "test_differences test_wiring test_node_matching",
    "rewriter/files/load.py": "test_load test_modelfile test_external",
    "rewriter/files/outputrules.py": "test_save",
    "rewriter/files/save.py": "test_save test_mapped",
    "rewriter/files/soundness/functions.py": "test_structure",
    "rewriter/files/soundness/scopes.py": "test_structure",
    "rewriter/proof/reference/float64.py": "test_float64 test_reference_engine",
    "rewriter/proof/statistics.py": "test_statistics",
    "passes/certificates/certify.py": "test_tails test_certify",
    "passes/certificates/intervals.py": "test_changes",
    "passes/match/linear.py": "test_linear_table test_linear",
    "passes/programs/program.py": "test_program test_programs",
}
"""Module to its own tests in the mirrored folder, where they have another name."""


def suites_of(module: str) -> list[tuple[str, ...]]:
    """The tests of a module, group by group: its own, then others, quick ones first."""
    groups = next(groups for glob, groups in _TESTS.items() if fnmatchcase(module, glob))
    folder, _, name = module.removesuffix(".py").rpartition("/")
    paths = (f"tests/{folder}/{own}.py" for own in _OWN.get(module, f"test_{name}").split())
    own = tuple(path for path in paths if (ROOT / path).is_file())
    found = [tuple(part for part in group.split() if part not in own) for group in groups]
    return [group for group in (own, *found) if group]
