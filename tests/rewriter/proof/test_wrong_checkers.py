"""Errors planted in the checker itself, each of which its own tests must notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import slow

ROOT = Path(__file__).resolve().parents[3]
PLANTED = {
    "a wider rule": ("rewriter/proof/rule.py", "FACTOR = 16.0", "FACTOR = 1e9", "proof/test_rule.py"),
    "kinks that are closed": (
        "rewriter/proof/certificate/expressions.py", "number >= 0):", "number > 0):",
        "proof/certificate/test_expressions.py",
    ),
    "a reference that takes float32": (
        "rewriter/proof/reference.py",
        "and value.dtype != np.float64:",
        "and value.dtype == np.float16:",
        "proof/reference",
    ),
    "weights that are not read": (
        "rewriter/proof/certificate/graphs.py",
        "made.update(tensor.raw_data or np.ascontiguousarray(self.read(tensor)).tobytes())",
        "pass",
        "compare/test_graphs.py",
    ),
}  # fmt: skip
"""What is wrong: the module, a piece of it, what takes its place, and the tests that fail then."""


@slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_checker_is_noticed(name: str, tmp_path: Path) -> None:
    module, before, after, tests = PLANTED[name]
    shutil.copytree(ROOT / "rewriter", tmp_path / "rewriter", ignore=shutil.ignore_patterns("__pycache__"))
    code = (ROOT / module).read_text(encoding="utf-8")
    assert code.count(before) == 1
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not exports", "-o", f"pythonpath={tmp_path} ."]
    command = [sys.executable, "-m", "pytest", *options, f"tests/rewriter/{tests}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "ATTNONLY_SLOW": ""}
    (tmp_path / module).write_text(code.replace(before, after), encoding="utf-8")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "FAILED" in done.stdout
