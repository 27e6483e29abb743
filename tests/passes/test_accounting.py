"""Heads, keys and patterns that the accounting states for each form."""

from __future__ import annotations

import pytest

from passes.accounting import account
from passes.options import Options
from passes.plan import make_plan
from tests.textmodels import ERF_GELU, SILU, mlp

COUNTS: dict[str, dict[str, tuple[tuple[int, ...], int, int]]] = {
    SILU: {
        "local": ((8,), 2, 8 * 100 * 2 * 4),
        "compact": ((8,), 2, 8 * 100 * 2 * 4),
        "masked": ((8,), 101, 8 * 101 * 101 * 4),
        "maskless": ((8,), 101, 8 * 101 * 101 * 4),
        # W1, one per neuron, and W2 together with the clearing of the hidden columns; d_head is 4.
        "staged": ((2, 8, 3), 101, 8 * 101 * 101 * 4),
        "whole": ((8,), 101, 8 * 101 * 101 * 4),
    },
    # GELU has 9 heads over 11 shared keys in form local, and float64 heads with 8 bias tokens in the others.
    ERF_GELU: {"local": ((72,), 11, 72 * 100 * 11 * 4), "masked": ((8,), 108, 8 * 108 * 108 * 8)},
}


@pytest.mark.parametrize("text", COUNTS, ids=["silu", "gelu"])
def test_heads_keys_and_patterns(text: str) -> None:
    (block,) = account(make_plan(mlp(text), Options()), 4, tokens=100).blocks
    found = {each.form: (each.heads, each.keys, each.pattern_bytes) for each in block.forms}
    assert {form: found[form] for form in COUNTS[text]} == COUNTS[text]


def test_a_form_that_does_not_take_the_block_says_why() -> None:
    (block,) = account(make_plan(mlp(SILU, opset=10), Options())).blocks
    assert [each.form for each in block.forms] == ["local"]
    assert "needs opset 11" in dict(block.refused)["masked"]
