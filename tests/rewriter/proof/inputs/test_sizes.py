"""Arithmetic on symbolic dimensions: what has a value, what has none."""

from __future__ import annotations

import pytest

from rewriter.proof.inputs.sizes import names_in, value_of

VALUES = {"past_sequence_length": 5, "sequence_length": 3, "s0": 7}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("past_sequence_length + 1", 6),
        ("past_sequence_length + sequence_length", 8),
        ("2*s0", 14),
        ("s0//2", 3),
        ("s0 / 2", 3),
        ("floor(s0/2) - 1", 2),
        ("Max(s0, sequence_length)", 7),
        ("-s0 + 10", 3),
        ("unknown + 1", None),
        ("s0 // 0", None),
        ("s0 ** 9", None),
        ("__import__('os').system('true')", None),
        ("s0.__class__", None),
        ("1000000 * 1000000 * s0", None),
        ("past_sequence_length +", None),
        ("(" * 150 + ")" * 150, None),
        ("s0 + " * 100 + "1", None),
        ("exec(s0)", None),
    ],
)
def test_value(text: str, value: int | None) -> None:
    assert value_of(text, VALUES) == value


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("batch_size", ("batch_size",)),
        ("past_sequence_length + sequence_length", ("past_sequence_length", "sequence_length")),
        ("floor(s0/2)", ("s0",)),
        ("input_ids.shape[1]", ("input_ids.shape[1]",)),
        ("unk__12", ("unk__12",)),
    ],
)
def test_names(text: str, names: tuple[str, ...]) -> None:
    assert names_in(text) == names


def test_a_name_that_looks_like_arithmetic_may_have_a_value_of_its_own() -> None:
    assert value_of("a + b", {"a + b": 4}) == 4
