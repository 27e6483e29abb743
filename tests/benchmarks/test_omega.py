"""The curve of error against omega: it falls as the theorem says, and the default is exact."""

from __future__ import annotations

from benchmarks.omega import PROGRAMS, measure


def test_error_falls_with_omega() -> None:
    silu = PROGRAMS[0]
    errors = [measure(silu, double=True, omega=omega)["max_error"] for omega in (4.0, 16.0, 32.0)]
    assert errors[0] > 1e-1 > errors[1] > 1e-6 > errors[2] > 1e-14


def test_default_omega_leaves_rounding_alone() -> None:
    for program in PROGRAMS:
        assert measure(program, double=False, omega=None)["max_error"] < 2e-6
        assert measure(program, double=True, omega=None)["max_error"] < 1e-14


def test_a_steep_program_needs_more_than_the_sources_constant() -> None:
    relu = PROGRAMS[1]
    assert measure(relu, double=False, omega=1000.0)["max_error"] > 1e-1
