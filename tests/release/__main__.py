"""`python -m tests.release OUT`: everything that a release needs, made and checked; needs `.[release]` and network.

Builds the sdist and the wheel twice, in different folders, and compares them; installs the wheel beside the locked
dependencies, whose hashes pip checks, in a fresh environment; converts a model there; and writes an SBOM of the lock.
`--lock` makes the lock files anew instead, from the newest versions, or from those that `--versions` lists.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.release.build import ROOT, build, wrong_contents
from tests.release.locked import DEV_EXTRAS, LOCKED, bill_of_materials, lock


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the sdist, the wheel and the SBOM")
    parser.add_argument("--lock", action="store_true", help="make the lock files anew, in OUT")
    parser.add_argument("--versions", type=Path, help="with --lock: a file of NAME==VERSION that is to be kept to")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.lock:
        lock(given.out / "runtime.txt", (), given.versions)
        lock(given.out / "dev.txt", DEV_EXTRAS, given.versions)
        return 0
    with tempfile.TemporaryDirectory() as place:
        first, second = (build(Path(place) / name) for name in ("one", "another-place"))
        for one, other in zip(first, second, strict=True):
            if one.read_bytes() != other.read_bytes():
                return _say(f"{one.name} differs between two builds", 1)
            shutil.copy(one, given.out)
        if wrong := wrong_contents(first[1], first[1].parents[1] / "source"):
            return _say("; ".join(wrong), 1)
        _tried(first[1], Path(place) / "environment")
    components = bill_of_materials(LOCKED / "runtime.txt", given.out / "sbom.cdx.json")
    names = " and ".join(path.name for path in first)
    return _say(f"{names} are reproducible and convert a model; {components} components in sbom.cdx.json", 0)


def _tried(wheel: Path, folder: Path) -> None:
    """Install a wheel and the locked dependencies in a fresh environment, and convert a model with it."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    model, out = ROOT / "models" / "silu-decoder.onnx", folder / "attnonly.onnx"
    for command in (
        [*pip, "--require-hashes", "-r", str(LOCKED / "runtime.txt")],
        [*pip, "--no-deps", "--no-index", str(wheel)],
        [str(folder / "bin" / "pip"), "check", "-q"],
        [str(folder / "bin" / "rewrite"), str(model), "-o", str(out), "-q"],
    ):
        subprocess.run(command, cwd=folder, check=True)


def _say(line: str, status: int) -> int:
    sys.stdout.write(f"{line}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
