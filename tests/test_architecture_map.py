"""The map (docs/architecture.md) against the tree: every room is on it, and whatever it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("rewriter", "passes")

_QUOTED = re.compile(r"`([^`\s]+)`")
_PATH = re.compile(r"(?:rewriter|passes|models|benchmarks|tests|docs)/[\w./]*")
NAMED = {name for name in _QUOTED.findall(TEXT) if _PATH.fullmatch(name)}
ROWS = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `")]
ROOMS = {name for row in ROWS for name in _QUOTED.findall(row)}


def test_every_room_is_on_the_map() -> None:
    folders = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert folders - {"rewriter/"} <= ROOMS
    assert {name for name in ROOMS if name.startswith(PACKAGES)} <= folders


def test_everything_named_exists() -> None:
    assert len(NAMED) > 30
    assert [name for name in NAMED if not (ROOT / name).exists()] == []


def test_tables_named_beside_a_file_stand_in_it() -> None:
    missing = []
    for line in TEXT.splitlines():
        for name, path in re.findall(r"`([A-Z_]{4,})` in `([\w./]+\.py)`", line):
            if not re.search(rf"^{name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE):
                missing.append((name, path))
    assert missing == []
