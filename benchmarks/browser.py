"""`python -m benchmarks.browser SITE`: docs/browser.html and all that it loads, in one folder.

onnxruntime-web comes from npm in a pinned version whose SHA-512 is checked; the models are a committed one and what
`rewrite` makes of it. Nothing of this is committed: the WebAssembly alone has 14 MB. The page loads no other file.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import click

from benchmarks.common import ROOT

VERSION = "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
"""SHA-512 of the package as npm publishes it, in base64."""

RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
MODEL = ROOT / "models" / "trained" / "docstrings-silu.onnx"
TOKENIZER = ROOT / "models" / "trained" / "docstrings-tokenizer.json"
PAGE = ROOT / "docs" / "browser.html"


def build(site: Path) -> Path:
    """Make `site`/browser.html and `site`/browser/, which appears when it is complete.

    Returns:
        The page.

    Raises:
        click.ClickException: npm is missing or fails, the package is another one, or the proof fails.
    """
    site.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=site) as name:
        made = Path(name) / "browser"
        made.mkdir()
        _runtime(Path(name), made)
        _models(made)
        target = site / "browser"
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    shutil.copyfile(PAGE, site / "browser.html")
    return site / "browser.html"


def _runtime(scratch: Path, target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise click.ClickException("npm is not on PATH: install Node.js 20 or newer")
    package = f"onnxruntime-web@{VERSION}"
    done = subprocess.run([npm, "pack", package, "--silent"], cwd=scratch, capture_output=True, text=True, check=False)
    archive = scratch / f"onnxruntime-web-{VERSION}.tgz"
    if done.returncode or not archive.exists():
        reason = (done.stderr.strip().splitlines() or ["no file"])[-1]
        raise click.ClickException(f"npm pack {package} failed: {reason}")
    unpack(archive, target)


def unpack(archive: Path, target: Path, integrity: str = INTEGRITY) -> None:
    """Copy the files of the runtime out of the package. Raises `click.ClickException` if it is another package."""
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != integrity:
        raise click.ClickException(f"{archive.name} is not the published package: its SHA-512 is {digest}")
    with tarfile.open(archive) as package:
        for name in RUNTIME:
            content = package.extractfile(f"package/dist/{name}")
            if content is None:
                raise click.ClickException(f"{archive.name} has no dist/{name}")
            (target / name).write_bytes(content.read())


def _models(target: Path) -> None:
    from rewriter import rewrite

    shutil.copyfile(MODEL, target / "original.onnx")
    shutil.copyfile(TOKENIZER, target / "tokenizer.json")
    report = rewrite(MODEL, target / "attnonly.onnx", form="compact", expose=("pattern",), providers=["cpu"])
    if report.exit_status:
        raise click.ClickException(f"rewrite failed with status {report.exit_status}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("site", type=click.Path(path_type=Path, file_okay=False))
def main(site: Path) -> None:
    """Put the page that runs both models in the browser into SITE."""
    page = build(site)
    size = sum(path.stat().st_size for path in (site / "browser").iterdir())
    click.echo(f"{page}: {size / 1e6:.1f} MB beside it; python -m http.server -d {site} -b 127.0.0.1 shows it")


if __name__ == "__main__":
    main()
