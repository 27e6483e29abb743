"""The offline fits of the line and of GELU in powers, on small cases."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("mpmath", reason="mpmath is not installed (extra test)")
pytest.importorskip("scipy", reason="scipy is not installed (extra test)")

from benchmarks.fit.__main__ import main
from benchmarks.fit.precise import fit
from passes.programs.activations import normal_cdf
from passes.programs.program import BiasToken, Head, lines


def run(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.output)
    return found


@pytest.mark.slow
def test_line_of_four_keys_is_that_of_the_table() -> None:
    found = run("line", "--keys", "4", "--domain", "-512", "512", "--step", "0.0078125", "--float32")
    (line,) = lines("half")
    assert (found["name"], found["step"], found["domain"]) == (line.name, line.step, line.domain)
    assert found["end"] == pytest.approx(line.end, rel=1e-6)
    np.testing.assert_allclose(np.array(found["pairs"]), np.array(line.pairs), rtol=1e-6)
    assert found["max_error"] == line.max_error


def test_a_short_fit_is_as_close_as_it_says() -> None:
    largest, tokens = fit("gelu", 12, 1.0, rounds=12)
    head, y = Head(0.0, tuple(BiasToken(*token) for token in tokens)), np.linspace(-8.0, 8.0, 4001)
    error = float(np.max(np.abs(head.evaluate(y, y) - y * normal_cdf(y))))
    assert largest < 1e-6
    assert 0.5 * largest <= error <= 1.5 * largest
