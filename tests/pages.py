"""Examples in Markdown pages: the shell and Python blocks that run, and the output printed below them.

A block marked `sh` or `python` runs. A block without a mark is what the example before it prints; anything else, such
as a drawing, is marked `text`, and commands that take long are marked `console`.
"""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_TIMES = re.compile(r"^seconds .*$| in \d+\.\d+ s$", re.MULTILINE)
_ROUNDING = 1e-12
_FACTOR = 4.0
_FEW_PER_MILLE = 5e-3


@dataclass(frozen=True)
class Example:
    """One block that runs, and what the page says it prints (None if it does not say)."""

    language: str
    code: str
    wanted: str | None


def examples(page: str) -> tuple[Example, ...]:
    found: list[Example] = []
    for language, code in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if language in ("sh", "python"):
            found.append(Example(language, code, None))
        elif not language:
            assert found, f"output of no example: {code!r}"
            # Blocks between the example and its output print too, but the page does not show what.
            at = next(index for index in reversed(range(len(found))) if "pytest" not in found[index].code)
            found[at] = Example(found[at].language, found[at].code, code)
    return tuple(found)


def commands(page: str, program: str) -> tuple[list[str], ...]:
    """The arguments of each call of `program` in the shell blocks of a page."""
    lines = [
        line for each in examples(page) if each.language == "sh" for line in each.code.replace("\\\n", "").splitlines()
    ]
    calls = [part for line in lines for part in line.split(" && ")]
    words = [shlex.split(call, comments=True) for call in calls]
    return tuple(each[1:] for each in words if each and Path(each[0]).name == program)


def workplace(folder: Path) -> dict[str, str]:
    """Make `folder` look like a fresh checkout; the environment in which its pages' commands run.

    Programs in front of the path replace what takes minutes: `python3 -m venv` and `pip install` do nothing, since
    the packages are those of the tests.
    """
    for name in (".gitignore", "models", "docs", "README.md"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    _script(tools / "python", f'exec {python} "$@"')
    _script(tools / "python3", f'[ "$*" = "-m venv .venv" ] || exec {python} "$@"')
    _script(tools / "rewrite", f'exec {python} -m rewriter "$@"')
    _script(tools / "pip", '[ "$1" = install ]')
    (tools / "activate").write_text("", encoding="utf-8")
    path = os.pathsep.join((str(tools), os.environ.get("PATH", "")))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}


def left_over(folder: Path) -> str:
    """What `git status` lists there since `workplace` made it: files that are new or changed."""
    command = ["git", "status", "--porcelain"]
    status = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return "".join(line for line in status.splitlines(keepends=True) if not line.startswith("A  "))


def _script(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_shell(code: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a shell block in `folder` and return what it prints."""
    arguments = ["bash", "-ec", code]
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{code}\nexit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_python(code: str, names: dict[str, Any]) -> str:
    """Run a Python block in the current directory and return what it prints; `names` are those of the whole page."""
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "<page>", "exec"), names)  # noqa: S102 - our own documentation
    return printed.getvalue()


def difference(printed: str, wanted: str) -> str | None:
    """The first line that differs by more than times and rounding; None if there is none.

    Whole numbers must be equal. Numbers with an exponent are errors, and may differ by a factor of four, as may ratios
    ("1.26 times"); below 1e-12 they are rounding, whatever they are. Other decimal numbers may differ by 5 per mille.
    """
    ours, theirs = (_TIMES.sub("", each).splitlines() for each in (printed, wanted))
    for one, other in zip(ours, theirs, strict=False):
        if not _alike(one, other):
            return f"printed: {one}\nwanted:  {other}"
    return None if len(ours) == len(theirs) else f"{len(ours)} lines instead of {len(theirs)}"


def _alike(one: str, other: str) -> bool:
    texts = [_NUMBER.sub("#", each).split() for each in (one, other)]
    numbers = [[(found[0], each[found.end() :]) for found in _NUMBER.finditer(each)] for each in (one, other)]
    return texts[0] == texts[1] and all(
        _close(a, b, ratio=after.startswith(" times") or one.startswith("CONVERTED"))
        for (a, after), (b, _) in zip(*numbers, strict=True)
    )


def _close(one: str, other: str, *, ratio: bool) -> bool:
    if one == other:
        return True
    if not any(mark in number for number in (one, other) for mark in ".e"):
        return False
    a, b = float(one), float(other)
    if "e" in one + other or ratio:
        return max(abs(a), abs(b)) < _ROUNDING or (a * b > 0 and 1 / _FACTOR < a / b < _FACTOR)
    return abs(a - b) <= _FEW_PER_MILLE * abs(b)
