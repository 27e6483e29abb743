"""An error that nobody foresaw: one line for the user, and a file to attach to a bug report.

The file names places in code, versions and the names of options. It holds no paths, no tensor names, no values: people
can share it without reading it first.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from rewriter.report.environment import environment
from rewriter.text import quoted


def crash_line(error: BaseException, arguments: Sequence[str]) -> str:
    """What to print for an unexpected error; writes the file to attach, if a temporary directory can be written."""
    calls = traceback.extract_tb(error.__traceback__)
    frames = [f"{_place(Path(call.filename))}:{call.lineno} {call.name}" for call in calls]
    options = " ".join(each.partition("=")[0] for each in arguments if each.startswith("-") and len(each) > 1)
    lines = (
        f"error: {type(error).__name__}",
        f"options: {options or 'none'}",
        *(f"{name}: {value}" for name, value in environment().items()),
        "calls, the innermost last:",
        *(f"  {frame}" for frame in frames),
    )
    where = f" in {frames[-1]}" if frames else ""
    line = f"internal error ({type(error).__name__}{where}); this is a bug, please report it"
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="rewrite-error-", suffix=".txt", delete=False
        ) as file:
            file.write("\n".join(lines) + "\n")
    except OSError:
        return line
    return f"{line} with {quoted(Path(file.name))}, which holds neither paths nor weights"


def _place(file: Path) -> str:
    """The path below the directory that is on `sys.path`: that of the outermost package."""
    top = file.parent
    while (top / "__init__.py").exists():
        top = top.parent
    return file.relative_to(top).as_posix() if top != file.parent else file.name
