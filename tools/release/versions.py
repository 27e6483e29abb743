"""`python -m tools.release.versions`: the main job and some tests with the oldest and newest dependencies allowed.

Each Python that is found gets an environment of its own, made by uv: the oldest Python has the oldest versions that
`pyproject.toml` allows, and the newest ones too; the others have the newest. Needs `.[release]` and network.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.release.__main__ import ROOT

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TESTS = ("tests/rewriter/files", "tests/rewriter/graph", "tests/rewriter/ort", "tests/passes/programs")
_SHOWN = ("onnx", "onnxruntime", "onnx-graphsurgeon", "numpy", "click", "rich")
_HELPERS = ("pytest", "hypothesis", "jsonschema", "jinja2")


def combinations(pythons: tuple[str, ...]) -> list[tuple[str, str]]:
    """Pairs of a Python and `lowest-direct` or `highest`, uv's names for the oldest and newest versions."""
    return [(pythons[0], "lowest-direct"), *((python, "highest") for python in pythons)] if pythons else []


def interpreter(python: str) -> str | None:
    """The newest interpreter of a version, from pyenv or the search path."""
    found = (Path.home() / ".pyenv" / "versions").glob(f"{python}.*/bin/python3")
    newest = sorted(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])])
    return str(newest[-1]) if newest else shutil.which(f"python{python}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release.versions", description=__doc__)
    parser.add_argument("--oldest", action="store_true", help="only the oldest versions, and only the main job")
    given = parser.parse_args()
    pythons = tuple(python for python in PYTHONS if interpreter(python))
    failed = 0
    for python, resolution in combinations(pythons)[: 1 if given.oldest else None]:
        with tempfile.TemporaryDirectory() as place:
            failed += not _tried(python, resolution, Path(place), () if given.oldest else TESTS)
    return 1 if failed else 0


def _tried(python: str, resolution: str, place: Path, tests: tuple[str, ...]) -> bool:
    executable, tree = place / "bin" / "python", place / "tree"
    uv = [sys.executable, "-m", "uv"]
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=ignored)
    subprocess.run([*uv, "venv", "-q", "--allow-existing", f"--python={interpreter(python)}", str(place)], check=True)
    install = [*uv, "pip", "install", "-q", f"--python={executable}"]
    subprocess.run([*install, f"--resolution={resolution}", str(tree)], check=True)
    subprocess.run([*install, *_HELPERS], check=True)
    listed = subprocess.run(
        [*uv, "pip", "freeze", f"--python={executable}"], capture_output=True, text=True, check=True
    )
    versions = [line.replace("==", " ") for line in listed.stdout.split("\n") if line.partition("==")[0] in _SHOWN]
    environment = {**os.environ, "PYTHONPATH": ""}
    job = [str(place / "bin" / "rewrite"), "models/silu-decoder.onnx", "-o", str(place / "attnonly.onnx"), "-q"]
    converted = subprocess.run(job, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    said = [converted.stderr.strip() if converted.returncode else "converts and proves a model"]
    passed = converted.returncode == 0
    if tests:
        command = [str(executable), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        passed = passed and run.returncode == 0
        said += [line for line in run.stdout.split("\n") if line.startswith(("FAILED", "ERROR"))]
        said += [run.stdout.strip().rpartition("\n")[2]]
    sys.stdout.write(f"Python {python}, {', '.join(versions)}: {'; '.join(said)}\n")
    sys.stdout.flush()
    return passed


if __name__ == "__main__":
    sys.exit(main())
