"""Sanitise strings from outside (tensor names, paths, onnxruntime's exceptions) before they are shown.

The result is one short line without control characters: a hostile name can neither drive a terminal nor flood a log.
"""

import os
from collections.abc import Sequence

LIMIT = 80  # maximum length of the text that `quoted` returns, in characters
_TAIL = 24


def clean(text: str) -> str:
    """Printable characters only: no control characters, line breaks or overrides of the writing direction."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def shortened(text: str, limit: int) -> str:
    """`clean` text of at most `limit` characters; a longer one keeps its start and its end."""
    if len(text) <= limit:
        return clean(text)
    half = limit // 2
    return f"{clean(text[:half])}…{clean(text[len(text) - limit + half + 1 :])}"


def decoded(text: str | bytes) -> str:
    """The string itself; bytes, which protobuf returns for strings that are not UTF-8, are escaped."""
    return text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else text


def quoted(name: str | bytes | os.PathLike[str]) -> str:
    """A name for a message: quoted, control characters escaped, start and end of at most `LIMIT` characters."""
    text = decoded(name if isinstance(name, bytes) else os.fspath(name))
    # Truncated before it is escaped as well as after: a name may be gigabytes long.
    escaped = repr(text if len(text) <= 2 * LIMIT else text[:LIMIT] + text[-LIMIT:])
    return escaped if len(escaped) <= LIMIT else f"{escaped[: LIMIT - _TAIL - 3]}...{escaped[-_TAIL:]}"


def one_line(text: object, limit: int = 300) -> str:
    """`text` on one line of at most `limit` characters, control characters escaped."""
    line = " ".join(str(text).split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def counted(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[str]) -> str:
    """The first three of some names, with dots if there are more."""
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def size(nbytes: int) -> str:
    """A size in bytes, in a suitable power of 1000."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"
