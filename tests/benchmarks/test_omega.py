"""The curve of error against omega: it falls as the theorem says, and the default is exact."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from benchmarks.omega import OMEGAS, PROGRAMS, main, measure
from passes.programs.program import Program
from tests.benchmarks.conftest import draws

SILU, RELU, GELU = PROGRAMS


@pytest.mark.parametrize("program", [SILU, GELU], ids=lambda program: program.name)
def test_error_falls_with_omega(program: Program) -> None:
    errors = [measure(program, double=True, omega=omega).max_error for omega in (4.0, 16.0, 32.0)]
    assert errors[0] > 1e-1 > errors[1] > 1e-6 > errors[2] > 1e-14


@draws
def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.omega.OMEGAS", OMEGAS[3::5])
    numbers, figure = tmp_path / "omega.json", tmp_path / "figures" / "omega.svg"
    result = CliRunner().invoke(main, ["--json", str(numbers), "--figure", str(figure)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(numbers.read_text(encoding="utf-8"))
    assert content["benchmark"] == "omega"
    assert len(content["rows"]) == 2 * len(PROGRAMS) * len(OMEGAS[3::5])
    assert ET.fromstring(figure.read_text(encoding="utf-8")).tag.endswith("svg")  # noqa: S314 - our own file
