"""Text from strangers: names in quotation marks, and messages on one line."""

from pathlib import Path

import pytest

from rewriter.text import LIMIT, one_line, quoted


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.0/mlp", "'blocks.0/mlp'"),
        (Path("a/b.onnx"), "'a/b.onnx'"),
        ("line\nbreak", r"'line\nbreak'"),
        ("\x1b[31mred", r"'\x1b[31mred'"),
        ("\u202eright to left", r"'\u202eright to left'"),
        ("\u2028", r"'\u2028'"),
        ("\udcff", r"'\udcff'"),
        (b"\xff\x00", r"'\\xff\x00'"),
        ("größe", "'größe'"),
        ("", "''"),
    ],
)
def test_control_characters_are_escaped(name: str | bytes | Path, expected: str) -> None:
    assert quoted(name) == expected


@pytest.mark.parametrize("name", ["x" * 79, "x" * 10_000_000, "\n" * 79, "\x00" * 1000, "/very/long" * 30 + "/w.bin"])
def test_long_names_keep_both_ends(name: str) -> None:
    text = quoted(name)
    assert len(text) == LIMIT
    assert "..." in text
    assert text.isprintable()
    assert text[1:10] == repr(name[:20])[1:10]
    assert text[-7:] == repr(name[-20:])[-7:]


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
