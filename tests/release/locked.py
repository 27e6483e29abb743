"""Dependencies with versions and hashes: `.ci/locked/`, made by uv, and what it says as a CycloneDX SBOM.

torch is not in it, nor what only the extras with torch need: some machines take torch from a local file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.release.build import ROOT

LOCKED = ROOT / ".ci" / "locked"
DEV_EXTRAS = ("dev", "docs", "ir", "text", "notebooks", "mutation")
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
