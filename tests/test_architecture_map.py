"""The map (docs/architecture.md) against the files: whatever is there is on it, and whatever is on it is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

COMPLETE = ("rewriter", "passes", "models", "benchmarks")
"""Folders of which every file is on the map; of the tests only those that belong to no room are."""

_ROOM = re.compile(r"\*\*`([a-z_./]+/)`\*\*")
_QUOTED = re.compile(r"`([^`\s]+)`")
_PATH = re.compile(r"(?:rewriter|passes|models|benchmarks|tests|docs)/[\w./]*")


def rows(text: str) -> Iterator[tuple[str, str]]:
    """(room, name) for every name in the first column of the tables below a room's title."""
    room = ""
    for line in text.splitlines():
        if line.startswith("#"):
            room = ""
        elif title := _ROOM.match(line):
            room = title.group(1)
        elif room and line.startswith("|"):
            yield from ((room, name) for name in _QUOTED.findall(line.split("|")[1]))


ON_THE_MAP = [room + name for room, name in rows(TEXT)]
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in COMPLETE
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "__init__.py"
]


def test_rows_are_read() -> None:
    text = "**`a/`**: words\n\n| file | |\n| --- | --- |\n| `b.py`, `c.py` | `d.py` |\n\n# End\n| `e.py` | |"
    assert list(rows(text)) == [("a/", "b.py"), ("a/", "c.py")]
    assert len(FILES) > 200


@pytest.mark.parametrize("folder", COMPLETE)
def test_every_file_is_on_the_map(folder: str) -> None:
    assert [path for path in FILES if path.startswith(f"{folder}/") and path not in ON_THE_MAP] == []


def test_everything_on_the_map_exists() -> None:
    assert [path for path in ON_THE_MAP if not (ROOT / path).exists()] == []


def test_nothing_is_on_the_map_twice() -> None:
    assert sorted(ON_THE_MAP) == sorted(set(ON_THE_MAP))


def test_every_path_in_the_text_exists() -> None:
    """Rows of the room `tests/` are relative to it."""
    paths = {name for name in _QUOTED.findall(TEXT) if _PATH.fullmatch(name)}
    assert "rewriter/api/rewriting.py" in paths
    assert [path for path in paths if not ((ROOT / path).exists() or f"tests/{path}" in ON_THE_MAP)] == []


def test_tables_and_types_named_as_entries_exist() -> None:
    """`NAME` in a row that also names files stands in one of these."""
    missing = []
    for line in TEXT.splitlines():
        names = _QUOTED.findall(line) if line.startswith("|") else []
        files = [ROOT / name for name in names if _PATH.fullmatch(name) and name.endswith(".py")]
        words = [name for name in names if re.fullmatch(r"_?[A-Z]\w+", name)]
        if files and words:
            source = "\n".join(path.read_text(encoding="utf-8") for path in files)
            missing += [word for word in words if not re.search(rf"\b{word}\b", source)]
    assert missing == []
