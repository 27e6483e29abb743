"""Build the sdist and the wheel of a commit so that the same commit gives the same bytes, wherever it is built.

What git has is built, not the working tree; times are those of the commit, permissions and owners are fixed.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = re.compile(
    r"(rewriter|passes)/([\w/]+\.py|py\.typed|report/\w+\.schema\.json|report/html/templates/[\w.]+|programs/programs\.json|proof/certificate/bounds\.json)"
    r"|attnonly-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|top_level\.txt|licenses/LICENSE)"
)
"""Everything that a wheel may hold."""
NEEDED = (
    "passes/programs/programs.json",
    "passes/py.typed",
    "rewriter/proof/certificate/bounds.json",
    "rewriter/py.typed",
    "rewriter/report/certificate.schema.json",
    "rewriter/report/comparison.schema.json",
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
        str(path.relative_to(source)) for room in ("rewriter", "passes") for path in (source / room).rglob("*.py")
    }
    return surplus + sorted(f"{name} is missing" for name in {*sources, *NEEDED} - names)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
