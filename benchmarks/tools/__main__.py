"""`python -m benchmarks.tools`: tries other tools on wrong models, bad files and full disks.

Writes `benchmarks/results/tools.json` and the tables of docs/comparing.md. `--environments FOLDER` holds one virtual
environment per tool (`--make` makes those that are missing); parts of earlier runs are kept, so that one part or one
tool can be measured again.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.common import RESULTS, ROOT, environment
from benchmarks.decoder import Shape
from benchmarks.large_model import make_model
from benchmarks.tools import page
from benchmarks.tools.conduct import SITUATIONS, TOOLS, shown, try_out
from benchmarks.tools.environments import found, make, versions
from benchmarks.tools.judges import HERE, JUDGES, Judge, Pair, ask
from benchmarks.tools.running import run
from benchmarks.tools.wrong import write

ORIGINAL = ROOT / "models" / "silu-decoder.onnx"
WHERE = RESULTS / "tools.json"
SIZES = {
    "44 MB": Shape(layers=2, width=512, hidden=2048, heads=8, vocabulary=8192),
    "2.3 GB": Shape(layers=11, width=2048, hidden=8192, heads=16, vocabulary=8192),
}
PARTS = ("judges", "conduct", "cost")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--environments", type=click.Path(path_type=Path), help="Folder of virtual environments, one per tool.")
@click.option(
    "--make", "make_them", is_flag=True, help="Make the environments that are missing: needs a package index."
)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Measure only this; all by default.")
@click.option("--only", multiple=True, help="Measure only this judge or tool.")
@click.option("--check", is_flag=True, help="Measure nothing; fail if the page is not what the results say.")
def main(
    environments: Path | None, *, make_them: bool, parts: tuple[str, ...], only: tuple[str, ...], check: bool
) -> None:
    """Try the tools and write the page."""
    if check or environments is None:
        page.main(check=check)
        return
    if make_them:
        make(environments)
    there = found(environments)
    results: dict[str, Any] = json.loads(WHERE.read_text(encoding="utf-8")) if WHERE.exists() else {}
    results.update(environment=environment(), versions=versions(there))
    for part in parts or PARTS:
        for key, row in _PARTS[part](there, only):
            results.setdefault(part, {})[key] = row
            WHERE.write_text(
                json.dumps(_without_places(results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            click.echo(f"{part} {key}: {row}")
    page.main(check=False)


def _without_places(found: Any) -> Any:
    """The same data, with the folders of the machine left out of what tools printed."""
    if isinstance(found, dict):
        return {key: _without_places(value) for key, value in found.items()}
    return re.sub(r"/(?:[\w.+-]+/)+", "…/", found) if isinstance(found, str) else found


Rows = Iterator[tuple[str, dict[str, Any]]]


def judged(environments: Mapping[str, Path], only: tuple[str, ...]) -> Rows:
    """Every judge on the original, a right rewrite of it, and the wrong models."""
    asked = {key: judge for key, judge in JUDGES.items() if judge.tool in environments and key in (only or JUDGES)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for sub in ("committed", "exported"):
            (folder / sub).mkdir()
        right = folder / "committed" / "right.onnx"
        subprocess.run([str(environments["rewrite"] / "rewrite"), str(ORIGINAL), "-o", str(right), "-q"], check=True)
        committed = {"same": ORIGINAL, "right": right, **write(ORIGINAL, folder / "committed")}
        exported: dict[str, Path] = {}
        if any(judge.exported for judge in asked.values()):
            command = [str(environments["optimum"] / "python"), str(HERE / "patched_optimum.py"), "same"]
            run([*command, str(folder / "exported")], folder)
            original = folder / "exported" / "model.onnx"
            exported = {"same": original, **write(original, folder / "exported")}
        for key, judge in asked.items():
            paths = exported if judge.exported else committed
            if judge.tool == "optimum":
                paths = {name: path for name, path in paths.items() if name != "right"}
            yield key, {"inputs": judge.inputs, "rule": judge.rule, "said": _verdicts(judge, environments, paths)}


def _verdicts(judge: Judge, environments: Mapping[str, Path], paths: Mapping[str, Path]) -> dict[str, Any]:
    made = {}
    for name, path in paths.items():
        with _folder() as folder:
            made[name] = ask(judge, environments, Pair(paths["same"], path, folder))
    return made


def conducted(environments: Mapping[str, Path], only: tuple[str, ...]) -> Rows:
    """Every tool in every situation."""
    for key, tool in TOOLS.items():
        if tool.environment in environments and key in (only or TOOLS):
            row = {}
            for situation in SITUATIONS:
                with _folder() as folder:
                    row[situation] = try_out(tool, environments, ORIGINAL, situation, folder)
            yield key, row


def costs(environments: Mapping[str, Path], only: tuple[str, ...]) -> Rows:
    """CPU time and memory of every tool on larger models, whose weights are external data."""
    with _folder() as folder:
        for size, shape in SIZES.items():
            (folder / size).mkdir()
            model, _ = make_model(folder / size, shape, sparse=True)
            for key, tool in TOOLS.items():
                if tool.environment in environments and key in (only or TOOLS):
                    with _folder() as other:
                        (other / "out").mkdir()
                        out = other / "out" / "out.onnx"
                        program, *arguments = tool.command(model, out, other)
                        done = run([str(environments[tool.environment] / program), *arguments], other)
                        written = sum(path.stat().st_size for path in out.parent.rglob("*") if path.is_file())
                        yield f"{key} {size}", {**shown(done), "written_mb": round(written / 1e6)}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


_PARTS = {"judges": judged, "conduct": conducted, "cost": costs}

if __name__ == "__main__":
    main()
