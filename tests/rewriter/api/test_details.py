"""Programs with their keys, and the accounting, for the page."""

from __future__ import annotations

import pytest

from passes.accounting import account
from passes.plan import make_plan
from rewriter import rewrite
from rewriter.api.run import checked_options
from rewriter.report.details import Details, ProgramDetails
from tests.textmodels import ERF_GELU, FIRST, SILU, mlp, text_model

TWO_PROGRAMS = (
    f"{FIRST} {SILU} second = MatMul(h, W2) z = Add(second, x) "
    "f2 = MatMul(z, V1) y2 = Add(f2, c1) h2 = Relu(y2) out = MatMul(h2, W2)"
)
GATED = "s = Sigmoid(y) u = MatMul(x, V1) h = Mul(s, u)"


def details(activation: str) -> Details:
    found = rewrite(mlp(activation), dry_run=True, details=True).details
    assert found is not None
    return found


def only(activation: str) -> ProgramDetails:
    (program,) = details(activation).programs
    return program


def test_not_asked_for_not_made() -> None:
    assert rewrite(mlp(SILU), dry_run=True).details is None
    assert "details" not in rewrite(mlp(SILU), dry_run=True, details=True).to_json()


def test_the_value_of_a_gate_is_the_other_projection() -> None:
    ((own, *_),) = only(GATED).heads
    assert own.value == "u"


def test_heads_over_equally_spaced_keys_are_listed_once() -> None:
    program = only(ERF_GELU)
    (head,) = program.heads
    assert (program.count, program.tokens, len(head)) == (9, 10, 11)
    assert [key.value for key in head].count("0") == 2


@pytest.mark.parametrize(
    ("gate", "keys", "value"),
    [("s = Sigmoid(y) g = Mul(y, s)", 2, "line(y) u"), ("g = Identity(y)", 13, "-1897.49 u")],
)
def test_gates_with_a_line(gate: str, keys: int, value: str) -> None:
    program = only(f"{gate} u = MatMul(x, V1) h = Mul(g, u)")
    (head,) = program.heads
    assert (program.count, len(head), head[0].value) == (2, keys, value)


def test_one_entry_per_program() -> None:
    found = rewrite(text_model(TWO_PROGRAMS), dry_run=True, details=True).details
    assert found is not None
    assert [(each.program, each.blocks) for each in found.programs] == [("silu", 1), ("relu", 1)]


def test_accounting_is_the_one_of_inspect() -> None:
    found, expected = details(SILU), account(make_plan(mlp(SILU), checked_options()))
    assert [(each.name, each.heads, each.parameters) for each in found.counts] == [
        (each.name, each.heads, each.parameters) for each in expected.blocks
    ]
    assert found.share == expected.share == 1.0
    assert found.remaining == ""


def test_what_remains_is_told() -> None:
    model = mlp(SILU, second="second = MatMul(h, W2) out = Relu(second)")
    found = rewrite(model, dry_run=True, details=True).details
    assert found is not None
    assert found.remaining == "1 Relu"
