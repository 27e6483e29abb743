"""The offline fits of the line and of GELU in powers, on small cases."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("mpmath", reason="mpmath is not installed (extra test)")
pytest.importorskip("scipy", reason="scipy is not installed (extra test)")
from benchmarks.fit.__main__ import main
from passes.programs.fitted import lines, power_programs
from tests.conftest import slow


def run(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.output)
    return found


def test_line_of_four_keys_is_that_of_the_table() -> None:
    found = run("line", "--keys", "4", "--domain", "-512", "512", "--step", "0.0078125", "--float32")
    (line,) = lines("half")
    assert (found["name"], found["step"], found["domain"]) == (line.name, line.step, line.domain)
    assert found["end"] == pytest.approx(line.end, rel=1e-6)
    np.testing.assert_allclose(np.array(found["pairs"]), np.array(line.pairs), rtol=1e-6)
    assert found["max_error"] == line.max_error


@slow
def test_a_longer_line_of_the_same_keys_is_worse() -> None:
    found = [run("line", "--keys", "5", "--domain", f"-{end}", f"{end}", "--step", "1") for end in (2, 3)]
    assert 0.0 < float(str(found[0]["max_error"])) < float(str(found[1]["max_error"])) < 1e-4


def test_powers_over_five_keys_are_as_close_as_those_of_the_table() -> None:
    found = run("gelu", "--powers", "5")
    (known,) = (program for _, program in power_programs() if program.name == found["name"])
    assert float(str(found["max_error"])) <= known.max_error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("line", "--keys", "4"), "a line needs"),
        (("line", "--keys", "3", "--domain", "-1", "1", "--step", "1"), "a line needs"),
        (("gelu", "--powers", "6"), "odd"),
        (("softplus", "--powers", "5"), "not y Phi"),
        (("gelu", "--powers", "5", "--write"), "--write"),
        (("gelu", "--powers", "13", "--step", "1", "--no-base"), "divides by a number near 0"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert message in result.output
