"""`python -m tools.release OUT`: everything that a release needs, made and checked; needs `.[release]` and network.

Builds the sdist and the wheel twice, in different folders, and compares them: the same commit gives the same bytes,
wherever it is built. What git has is built, not the working tree; times are those of the commit, permissions and owners
are fixed. Installs the wheel beside the locked dependencies, whose hashes pip checks, in a fresh environment; converts
a model there; and writes an SBOM (CycloneDX) of the lock.

`--lock` makes the lock files `.ci/locked/` anew instead, with uv, from the newest versions, or from those that
`--versions` lists. torch is not in them, nor what only the extras with torch need: some machines take torch from a
local file.
"""

import argparse
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = re.compile(
    r"(rewriter|passes)/([\w/]+\.py|__init__\.pyi|py\.typed|report/\w+(\.schema)?\.json|report/html/templates/[\w.]+|programs/programs\.json)"
    r"|attnonly-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|top_level\.txt|licenses/LICENSE)"
)
"""Everything that a wheel may hold."""
NEEDED = (
    "passes/programs/programs.json",
    "passes/py.typed",
    "rewriter/__init__.pyi",
    "rewriter/py.typed",
    "rewriter/report/certificate.schema.json",
    "rewriter/report/comparison.schema.json",
    "rewriter/report/floats.json",
    "rewriter/report/report.schema.json",
    "rewriter/report/html/templates/page.html.j2",
)


def build(place: Path, commit: str = "HEAD") -> list[Path]:
    """Build a commit in an empty folder, with the package `build`; the sdist, then the wheel."""
    source, out = place / "source", place / "dist"
    epoch = int(_git("log", "-1", "--format=%ct", commit))
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        archive.extractall(source, filter="data")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(source)],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"},
        umask=0o022,  # generated files get their permissions from it
        stdout=subprocess.DEVNULL,
        check=True,
    )
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    sdist.write_bytes(normalised(sdist.read_bytes(), epoch))
    return [sdist, wheel]


def normalised(sdist: bytes, epoch: int) -> bytes:
    """The same files in order, with fixed times, owners and permissions: setuptools takes them from the machine."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(sdist)) as given, tarfile.open(fileobj=tar, mode="w") as made:
        for member in sorted(given.getmembers(), key=lambda each: each.name):
            fixed = tarfile.TarInfo(member.name)
            fixed.type, fixed.size, fixed.mtime = member.type, member.size, epoch
            fixed.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            made.addfile(fixed, given.extractfile(member) if member.isfile() else None)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=epoch) as file:
        file.write(tar.getvalue())
    return packed.getvalue()


def wrong_contents(wheel: Path, source: Path) -> list[str]:
    """What a wheel lacks of the tree that it was built from, or should not hold."""
    names = set(zipfile.ZipFile(wheel).namelist())
    surplus = sorted(f"{name} is in it" for name in names if not DATA.fullmatch(name))
    sources = {
        str(path.relative_to(source)) for package in ("rewriter", "passes") for path in (source / package).rglob("*.py")
    }
    return surplus + sorted(f"{name} is missing" for name in {*sources, *NEEDED} - names)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


# -- dependencies -----------------------------------------------------------------------------------------------------

LOCKED = ROOT / ".ci" / "locked"
DEV_EXTRAS = ("dev", "docs", "ir", "text", "notebooks")
_PYTHON = "3.11.5"
"""The oldest Python of the lock; mkdocs-material needs more than 3.11.0."""
_PIN = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[\w.]+)(?: ; (?P<marker>.*?))? \\\n(?P<hashes>(?: +--hash=.*\n?)+)"
)


def lock(path: Path, extras: tuple[str, ...], versions: Path | None) -> None:
    """Write a lock file for all systems, without names of package indexes."""
    options = [f"--extra={extra}" for extra in extras] + ([f"--constraints={versions}"] if versions else [])
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "-q", "--generate-hashes", "--universal", "--no-header",
         f"--python-version={_PYTHON}", "--no-annotate", "--no-emit-index-url", *options, "pyproject.toml", "-o", path],
        cwd=ROOT,
        check=True,
    )  # fmt: skip


def pins(path: Path) -> dict[str, set[str]]:
    """The names in a lock file, and their versions; several if they differ by Python or system.

    Raises:
        ValueError: a line is not a pinned version with SHA-256 hashes.
    """
    text = path.read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for match in _PIN.finditer(text):
        found.setdefault(match["name"], set()).add(match["version"])
        if not re.fullmatch(r"(\s+--hash=sha256:[0-9a-f]{64}( \\)?\n?)+", match["hashes"]):
            raise ValueError(f"{match['name']} has no SHA-256 hash")
    if rest := _PIN.sub("", text).strip():
        raise ValueError(f"not pinned: {rest.splitlines()[0]}")
    return found


def bill_of_materials(requirements: Path, path: Path) -> int:
    """Write the SBOM of a lock file, checked against the schema by cyclonedx-py; the number of components."""
    subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", "requirements", str(requirements), "--pyproject", "pyproject.toml",
         "--mc-type", "application", "--output-reproducible", "--validate", "--of", "JSON", "-o", str(path)],
        cwd=ROOT,
        check=True,
    )  # fmt: skip
    components = json.loads(path.read_text(encoding="utf-8"))["components"]
    named = {(each["name"], each["version"]) for each in components}
    wanted = {(name, version) for name, versions in pins(requirements).items() for version in versions}
    if named != wanted:
        raise ValueError(f"the SBOM and the lock differ: {sorted(named ^ wanted)}")
    return len(components)


# -- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
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
