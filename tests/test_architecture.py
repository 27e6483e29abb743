"""Which package may import which, read from the source; and the map, docs/architecture.md, against the tree."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for package in ("rewriter", "passes")
    for path in sorted((ROOT / package).rglob("*.py"))
}

COMPOSERS = ("rewriter/api/", "rewriter/cli/", "rewriter/interpret/")
"""The only files of the engine that know the domain."""

FRONT = ("rewriter.adapters", "rewriter.api", "rewriter.cli", "rewriter.interpret", "rewriter.report")
"""What composes; nothing that is composed may import it."""

_OWN_FRONT = ("rewriter/report/", "rewriter/adapters/", "rewriter/interpret/")

_BASE = ("rewriter.arrays", "rewriter.errors", "rewriter.options", "rewriter.text")
_GROUND = (*_BASE, "rewriter.files", "rewriter.graph")
_TABLE = tuple(f"rewriter.evaluate.{each}" for each in ("arithmetic", "kernels", "moves", "scalar", "table"))
"""The table of operators, which knows nothing of graphs; the evaluator does."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "rewriter/graph/": ("rewriter.graph", *_TABLE, *_BASE),
    "rewriter/files/": ("rewriter.files", "rewriter.graph", *_BASE),
    "rewriter/ort.py": ("rewriter.ort", *_GROUND),
    "rewriter/evaluate/": ("rewriter.evaluate", *_GROUND),
    "rewriter/inputs/": ("rewriter.inputs", "rewriter.ort", *_GROUND),
    "rewriter/proof/": ("rewriter.proof", "rewriter.evaluate", "rewriter.inputs", "rewriter.ort", *_GROUND),
    "rewriter/compare.py": ("rewriter.compare", "rewriter.proof", "rewriter.ort", *_GROUND),
    "rewriter/report/": ("rewriter.report", "rewriter.compare", "rewriter.proof", "rewriter.files", *_BASE),
    "rewriter/adapters/": (
        *("rewriter.adapters", "rewriter.api", "rewriter.interpret", "rewriter.report", "rewriter.files"),
        *_BASE,
    ),
    "rewriter/interpret/": (
        *("rewriter.interpret", "passes", "rewriter.evaluate", "rewriter.compare", "rewriter.inputs"),
        *("rewriter.proof", "rewriter.ort", *_GROUND),
    ),
    "passes/": ("passes", "rewriter.graph", *_TABLE, "rewriter.arrays", "rewriter.options"),
}
"""Each package, and what it may import of this project."""


@cache
def imports(source: str) -> tuple[str, ...]:
    """Every module that a file imports, wherever in it; `from a import b` gives a and a.b."""
    return tuple(_imports(parsed(source)))


parsed = cache(ast.parse)


def _imports(source: ast.AST) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def when_run(source: str) -> ast.Module:
    """A file without what it imports for types alone."""
    types = [
        each for each in parsed(source).body if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each.test)
    ]
    return ast.Module([each for each in parsed(source).body if each not in types], type_ignores=[])


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


ONLY: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "the composition root imports the passes": (("passes",), ("rewriter/",), COMPOSERS),
    "no pass imports the front": (FRONT, ("passes/",), ()),
    "no package imports the front": (FRONT, tuple(each for each in PACKAGES if each not in _OWN_FRONT), ()),
    "the core does not import interpretation": (
        ("rewriter.interpret",),
        ("",),
        ("rewriter/interpret/", "rewriter/adapters/", "rewriter/cli/"),
    ),
    "the command line makes pages and prints": (
        ("rewriter.report.html", "rewriter.report.terminal"), ("",), ("rewriter/report/", "rewriter/cli/")
    ),
    "graphsurgeon stays in one file": (("onnx_graphsurgeon",), ("",), ("rewriter/graph/surgeon.py",)),
    "templates stay in one file": (("jinja2", "markupsafe"), ("",), ("rewriter/report/html/__init__.py",)),
    "olive stays in its adapter": (("olive",), ("rewriter/",), ("rewriter/adapters/olive_pass.py",)),
    "onnx_ir stays in its adapter, and where it is loaded": (
        ("onnx_ir",), ("rewriter/",), ("rewriter/adapters/ir_pass.py", "rewriter/files/load.py")
    ),
    "torch stays with the bridges to other tools": (("torch", "transformer_lens"), ("",), ("rewriter/adapters/",)),
    "no exporters and no example models": (("transformers", "onnxscript", "models"), ("",), ()),
    "nothing of the extra dev": (("pydantic", "docstring_parser", "matplotlib"), ("",), ()),
}  # fmt: skip
"""What is imported, below where, and the only files there that may."""


@pytest.mark.sample(11)
@pytest.mark.parametrize("rule", ONLY)
def test_only_some_import(rule: str) -> None:
    packages, under, but = ONLY[rule]
    assert importers(*packages, under=under, but=but) == set()
    assert all(importers(*packages, under=(each,)) for each in but if each in SOURCES)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_no_others(package: str) -> None:
    found = {
        (path, module)
        for path, source in SOURCES.items()
        if path.startswith(package)
        for module in imports(source)
        if below(module, "rewriter", "passes") and not below(module, *PACKAGES[package])
    }
    assert found == set()


def test_no_file_imports_itself_by_way_of_others() -> None:
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in SOURCES}
    edges = {
        name: {module for module in _imports(when_run(SOURCES[path])) if module in modules and module != name}
        for name, path in modules.items()
        if not path.endswith("__init__.py")
    }
    TopologicalSorter(edges).prepare()  # CycleError names the files


MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_QUOTED = re.compile(r"`([^`\s]+)`")
_PATH = re.compile(r"(?:rewriter|passes|models|benchmarks|tests|docs)/[\w./]*")
NAMED = {name for name in _QUOTED.findall(MAP) if _PATH.fullmatch(name)}
MAPPED = {name for row in re.findall(r"^\| (`[^|]*)", MAP, re.MULTILINE) for name in _QUOTED.findall(row)}


def test_every_folder_is_on_the_map() -> None:
    folders = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for package in ("rewriter", "passes")
        for path in (ROOT / package).rglob("*.py")
    }
    assert folders - {"rewriter/"} <= MAPPED
    assert {name for name in MAPPED if name.startswith(("rewriter", "passes"))} <= folders | {*SOURCES}


def test_everything_named_exists() -> None:
    assert len(NAMED) > 30
    assert [name for name in NAMED if not (ROOT / name).exists()] == []


def test_tables_named_beside_a_file_stand_in_it() -> None:
    missing = []
    for line in MAP.splitlines():
        for name, path in re.findall(r"`([A-Z_]{4,})` in `([\w./]+\.py)`", line):
            if not re.search(rf"^{name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE):
                missing.append((name, path))
    assert missing == []
