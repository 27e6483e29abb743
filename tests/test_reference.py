"""docs/reference.md names the options of every command: all of them, and no others."""

import re
import tomllib
from pathlib import Path

import click
import pytest

from rewriter.cli import COMMANDS
from rewriter.cli.models import convert
from rewriter.errors import ExitStatus
from tools.reference import PAGE, made

ROOT = Path(__file__).parents[1]
ALL = {"rewrite": convert, **{f"rewrite {name}": command for name, command in COMMANDS.items()}}
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def _section(title: str) -> str:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def _first_cells(section: str) -> list[str]:
    return [line.split(" | ", 1)[0] for line in section.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("title", ALL)
def test_options_are_those_of_the_command(title: str) -> None:
    command = ALL[title]
    context = click.Context(command, help_option_names=["-h", "--help"])
    found = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    options = {name for each in found for name in (*each.opts, *each.secondary_opts)}
    documented = [name for cell in _first_cells(_section(title)) for name in OPTION.findall(cell)]
    assert sorted(documented) == sorted(set(documented)), "an option is named twice"
    assert set(documented) == options


def test_option_tables_are_made_from_the_options() -> None:
    """`python -m tools.reference` writes them."""
    text = PAGE.read_text(encoding="utf-8")
    assert made(text) == text


def test_exit_statuses() -> None:
    cells = _first_cells(_section("rewrite"))
    assert [int(cell[2:]) for cell in cells if cell[2:].isdigit()] == [int(each) for each in ExitStatus]


def test_extras() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    cells = _first_cells(_section("Extras"))
    assert {cell[2:].strip("`") for cell in cells if "`" in cell} == set(declared)
