"""Two models with other inputs or outputs cannot be compared by running them; the reason is one line each."""

from __future__ import annotations

import pytest

from rewriter.compare.signature import signature_differences
from tests.textmodels import text_model

PLAIN = {"inputs": "float[batch, tokens, 4] x", "outputs": "float[batch, tokens, 4] out"}


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        ({}, ()),
        ({"inputs": "float[b, 7, 4] x"}, ()),
        ({"outputs": "float[b, 7, 4] out"}, ()),
        ({"inputs": "float16[batch, tokens, 4] x"}, ("input 'x': float in A, float16 in B",)),
        ({"inputs": "float[batch, 4] x"}, ("input 'x': [batch, tokens, 4] in A, [batch, 4] in B",)),
        (
            {"outputs": "float[batch, tokens, 5] out"},
            ("output 'out': [batch, tokens, 4] in A, [batch, tokens, 5] in B",),
        ),
        ({"inputs": "float[batch, tokens, 4] x, float[4] z"}, ("input 'z' is only in B",)),
    ],
)
def test_signatures(other: dict[str, str], differences: tuple[str, ...]) -> None:
    a, b = (
        text_model("out = Relu(x)", inputs=given["inputs"], outputs=given["outputs"])
        for given in (PLAIN, {**PLAIN, **other})
    )
    assert signature_differences(a, b) == differences


def test_an_initializer_that_is_an_input_too_is_none() -> None:
    """IR version 3 lists all of them as inputs."""
    a = text_model("out = Add(x, b2)")
    b = text_model("out = Add(x, b2)", inputs="float[batch, tokens, 4] x, float[4] b2")
    assert signature_differences(a, b) == ()
    assert signature_differences(b, a) == ()
