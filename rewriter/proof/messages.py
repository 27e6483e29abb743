"""Foreign text in our messages: one line, short, nothing that could drive a terminal.

Comes in: an exception or text from a model or from onnxruntime. Goes out: one printable line. Used wherever
the proof quotes what it did not write itself.
"""

from __future__ import annotations

_LIMIT = 300


def one_line(text: object, limit: int = _LIMIT) -> str:
    """`text` on one line of at most `limit` characters, control characters escaped."""
    line = " ".join(str(text).split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."
