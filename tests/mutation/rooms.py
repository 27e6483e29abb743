"""Which modules are mutated, by room, and which tests must notice: quick ones first, then those of the whole way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FOLDERS: Mapping[str, Sequence[str]] = {
    "rewriter/proof": ("rewriter/proof",),
    "passes": ("passes/programs", "passes/match"),
    "rewriter/compare": ("rewriter/compare",),
    "rewriter/files": ("rewriter/files",),
    "rewriter/graph": ("rewriter/graph",),
}
"""Room to the folders whose modules decide something."""

ROOMS: Mapping[str, Sequence[str]] = {
    room: [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    for room, folders in _FOLDERS.items()
}

_WHOLE = ("tests/rewriter/api/test_rewriting.py",)
"""What sees the effect of most modules."""


def suites_of(module: str) -> list[tuple[str, ...]]:
    """The tests of a module, group by group: its own, those of its folder, those of the room, and of the whole way."""
    path = Path("tests") / module
    groups = (
        [path.with_name(f"test_{path.name}")],
        [path.parent],
        [path.parent.parent],
        [Path(name) for name in _WHOLE],
    )
    found: list[tuple[str, ...]] = []
    for group in groups:
        tests = tuple(each.as_posix() for each in group if (ROOT / each).exists() and each != Path("tests"))
        if tests and tests not in found:
            found.append(tests)
    return found
