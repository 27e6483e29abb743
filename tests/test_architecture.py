"""Which room may import which, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for package in ("rewriter", "passes")
    for path in sorted((ROOT / package).rglob("*.py"))
}

COMPOSERS = ("rewriter/api/", "rewriter/cli/")
"""The only files of the engine that know the domain."""

FRONT = ("rewriter.api", "rewriter.cli", "rewriter.report.html", "rewriter.report.report", "rewriter.report.comparison")
"""What composes; nothing that is composed may import it."""

ROOMS: dict[str, tuple[str, ...]] = {
    "rewriter/graph/": ("rewriter.graph",),
    "rewriter/files/": ("rewriter.files", "rewriter.errors", "rewriter.text"),
    "rewriter/compare/files/": (
        "rewriter.compare.files",
        "rewriter.files",
        "rewriter.graph",
        "rewriter.errors",
        "rewriter.text",
    ),
    "rewriter/proof/": ("rewriter.proof", "rewriter.files", "rewriter.graph", "rewriter.errors", "rewriter.text"),
    "rewriter/report/html/": (
        "rewriter.report.html",
        "rewriter.report.report",
        "rewriter.report.details",
        "rewriter.proof",
        "rewriter.files",
        "rewriter.errors",
        "rewriter.text",
    ),
    "passes/": ("passes", "rewriter.graph"),
}
"""Each room, and all that it may import of this project."""


@cache
def imports(source: str) -> tuple[str, ...]:
    """Every module that a file imports, wherever in it; `from a import b` gives a and a.b."""
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def below(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def importers(*packages: str, under: tuple[str, ...] = ("",), but: tuple[str, ...] = ()) -> set[str]:
    """The files below `under`, except those below `but`, that import one of `packages`."""
    return {
        path
        for path, source in SOURCES.items()
        if path.startswith(under) and not (but and path.startswith(but))
        if any(below(module, *packages) for module in imports(source))
    }


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 40
    assert all(any(path.startswith(room) for path in SOURCES) for room in (*ROOMS, "rewriter/cli/", "passes/forms/"))


def test_only_the_composition_root_imports_the_passes() -> None:
    assert importers("passes", under=("rewriter/",), but=COMPOSERS) == set()
    assert importers("passes", under=("rewriter/api/",))


def test_passes_do_not_import_the_front() -> None:
    assert importers(*FRONT, under=("passes/",)) == set()


def test_rooms_do_not_import_the_front() -> None:
    assert importers(*FRONT, under=tuple(room for room in ROOMS if room != "rewriter/report/html/")) == set()
    assert importers(*FRONT)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_no_others(room: str) -> None:
    found = {
        (path, module)
        for path, source in SOURCES.items()
        if path.startswith(room)
        for module in imports(source)
        if below(module, "rewriter", "passes") and not below(module, *ROOMS[room])
    }
    assert found == set()


def test_only_the_command_line_makes_pages() -> None:
    assert {path.split("/")[1] for path in importers("rewriter.report.html", but=("rewriter/report/html/",))} == {"cli"}


def test_graphsurgeon_stays_in_one_file() -> None:
    """Its types too are named through `rewriter.graph.surgeon`."""
    assert importers("onnx_graphsurgeon") == {"rewriter/graph/surgeon.py"}


def test_templates_stay_in_one_room() -> None:
    """jinja2 is an extra: whoever makes no page does not need it."""
    assert importers("jinja2", "markupsafe") == {"rewriter/report/html/page.py"}


def test_no_torch_and_no_example_models() -> None:
    assert importers("torch", "transformers", "onnxscript", "models") == set()


def calls_of(name: str, source: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_no_print() -> None:
    assert {path for path, source in SOURCES.items() if calls_of("print", source)} == set()
    assert calls_of("print", "def f():\n    print('x')") == [2]


def test_every_file_says_what_it_is_for() -> None:
    assert {
        path for path, source in SOURCES.items() if source.strip() and not ast.get_docstring(ast.parse(source))
    } == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import passes.plan as p", {"passes.plan"}),
        ("from passes import plan", {"passes", "passes.plan"}),
        ("def f():\n    from passes.match.blocks import find", {"passes.match.blocks", "passes.match.blocks.find"}),
        ("if True:\n    import torch", set()),
        ("from passes_extra import x", set()),
    ],
)
def test_imports_are_seen_wherever_they_stand(source: str, found: set[str]) -> None:
    assert {module for module in imports(source) if below(module, "passes")} == found
