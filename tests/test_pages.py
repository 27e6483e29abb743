"""The commands and examples of the README and of the pages run as they are printed, in order, in a fresh folder."""

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import onnx
import pytest

from benchmarks.performance.readme import made
from rewriter import ExitStatus, rewrite
from rewriter.cli import COMMANDS
from rewriter.cli.models import convert
from rewriter.errors import UsageError
from tests.pages import ROOT, commands, difference, examples, left_over, run_python, run_shell, workplace
from tests.textmodels import FIRST, SILU, mlp

PAGES = ("README.md", "docs/comparing.md", "docs/forms.md", "docs/heads.md", "docs/python.md", "docs/tasks.md")

OTHER_PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "models" / "README.md")
    if path.relative_to(ROOT).as_posix() not in PAGES
)
"""Pages whose examples need more than the package, or take long; none has a block that would run."""

BUILT = "index", "api", "gallery", "models", "benchmarks", "contributing", "changelog", "security"
"""Pages of the site that .ci/site_pages.py adds to those of docs/."""

TESTS = "-m pytest"
"""The README's second command runs this suite; .ci/run carries it out, and it cannot be part of itself."""


@pytest.mark.slow
def test_pages_run_as_printed_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one checkout, the README last: no page needs what it made, or is stopped by another, and git sees nothing."""
    pytest.importorskip("onnx_ir", reason="docs/comparing.md needs the extra ir")
    environment = workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    for page in reversed(PAGES):
        names = dict[str, Any](__name__="__main__")
        for example in examples(page):
            if TESTS in example.code:
                continue
            if example.language == "sh":
                printed = run_shell(example.code, tmp_path, environment)
            else:
                printed = run_python(example.code, names)
            if example.wanted is not None:
                differs = difference(printed, example.wanted)
                assert differs is None, f"{page}\n{example.code}\n{differs}"
    assert left_over(tmp_path) == ""


@pytest.mark.parametrize("page", PAGES)
def test_what_printed_examples_import_of_the_product_exists(page: str) -> None:
    for example in examples(page):
        for node in ast.walk(ast.parse(example.code if example.language == "python" else "")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("rewriter", "passes"):
                try:
                    module = importlib.import_module(node.module or "")
                except UsageError:  # an adapter, of a package that is not installed
                    continue
                assert [each.name for each in node.names if not hasattr(module, each.name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_options_of_printed_commands_exist(page: str) -> None:
    for arguments in commands(page, "rewrite"):
        command = COMMANDS.get(arguments[0], convert)
        rest = arguments[1:] if arguments[0] in COMMANDS else arguments
        with command.make_context("rewrite", list(rest)) as context:
            assert isinstance(context, click.Context)


def test_every_page_has_examples() -> None:
    assert {page: len(examples(page)) for page in PAGES if not examples(page)} == {}
    assert len(commands("README.md", "rewrite")) == 6


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_blocks_that_run_stand_on_tested_pages(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "```sh" not in text
    assert "```python" not in text or page == "CONTRIBUTING.md", "test_the_example_of_a_pass runs that page's example"


def test_the_example_of_a_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    model = tmp_path / re.findall(r'rewrite\("(.*?)"', code)[0]
    model.parent.mkdir()
    own = mlp(SILU, first=f"i = Identity(z) x = Neg(i) {FIRST}", inputs="float[batch, tokens, 4] z")
    own.graph.node[0].name = "copy"
    onnx.save(own, model)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)  # noqa: S102 - our own documentation
    report = names["report"]
    assert report.exit_status is ExitStatus.CONVERTED
    assert "Identity" not in {node.op_type for node in report.rewritten.graph.node}
    without: Any = rewrite(model).rewritten
    assert "Identity" in {node.op_type for node in without.graph.node}


def test_commands_of_the_action_are_accepted() -> None:
    text = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
    line, other = re.findall(r"- run: rewrite (.*?) >", text)
    with convert.make_context("rewrite", shlex.split(line)) as context:
        assert context.params["report"] == Path("report.json")
    command, *arguments = shlex.split(other)
    with COMMANDS[command].make_context(command, arguments) as context:
        assert context.params["markdown"]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    found = re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("decisions/")}
    assert pages | {f"{each}.md" for each in BUILT} | {"decisions/index.md"} == set(found)


def test_the_table_of_times_is_that_of_the_measurement() -> None:
    """`python -m benchmarks.performance.readme` writes it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    content = json.loads((ROOT / "benchmarks" / "results" / "performance.json").read_text(encoding="utf-8"))
    assert made(text, content) == text
