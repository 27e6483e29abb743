"""Foreign text stays on one line."""

from __future__ import annotations

import pytest

from rewriter.text import one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n  b\tc", "a b c"),
        ("red \x1b[31m", "red \\x1b[31m"),
        ("right \u202e to left", "right \\u202e to left"),
        ("x" * 30, "x" * 17 + "..."),
        (ValueError("no\nsuch"), "no such"),
    ],
)
def test_one_line(text: object, line: str) -> None:
    assert one_line(text, 20 if isinstance(text, str) and len(text) > 25 else 300) == line
