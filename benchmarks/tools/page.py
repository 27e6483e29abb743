"""The tables of docs/comparing.md, made from benchmarks/results/tools.json."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common import RESULTS, ROOT
from benchmarks.tools.conduct import TOOLS
from benchmarks.tools.judges import JUDGES
from benchmarks.tools.wrong import VARIANTS

PAGE = ROOT / "docs" / "comparing.md"
_PART = re.compile(r"(<!-- (\w+): made by python -m benchmarks\.tools -->\n)[^<]*(<!-- end -->)")


def judges(results: dict[str, Any]) -> str:
    """Who noticed which wrong model."""
    header = ["check", "right rewrite", *(title for title, _ in VARIANTS.values())]
    rows = []
    for key, row in results["judges"].items():
        said = row["said"]
        right = "—" if "right" not in said else "alarm" if said["right"]["caught"] else "passes"
        rows.append(
            [JUDGES[key].title, right, *("caught" if said[name]["caught"] else "**missed**" for name in VARIANTS)]
        )
    return _table(header, rows)


def conduct(results: dict[str, Any]) -> str:
    """Bad files, files in the way, full disks."""
    names = ("truncated", "short", "above", "linked", "taken", "full")
    header = ["tool", "truncated file", "weights cut short", "weights in `../`", "weights behind a link"]
    rows = [[TOOLS[key].title, *(_cell(name, row[name]) for name in names)] for key, row in results["conduct"].items()]
    return _table([*header, "OUT is taken", "disk full"], rows)


def cost(results: dict[str, Any]) -> str:
    """CPU time and memory."""
    sizes = list(dict.fromkeys(key.split(" ", 1)[1] for key in results["cost"]))
    tools = list(dict.fromkeys(key.split(" ", 1)[0] for key in results["cost"]))
    rows = [
        [TOOLS[tool].title, *(cell for size in sizes for cell in _cost(results["cost"].get(f"{tool} {size}")))]
        for tool in tools
    ]
    header = ["tool", *(f"{what}, {size}" for size in sizes for what in ("CPU s", "peak MB"))]
    return _table(header, rows)


def _cost(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["not measured", "—"]
    return ["fails", "—"] if row["status"] else [f"{row['cpu_seconds']:.1f}", f"{row['peak_mb']:,}"]


def _cell(name: str, row: dict[str, Any]) -> str:
    status = f"traceback, {row['status']}" if row["traceback"] else f"message, {row['status']}"
    if name == "taken":
        return {"kept": f"kept, {row['status']}"}.get(row["file"], "replaced")
    if name == "full":
        file = {"none": "no file", "broken": "**half a file**", "whole": "whole file"}[row["file"]]
        return f"{file}; {status}"
    return "**writes a model**" if row["file"] == "whole" else status


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_TABLES = {each.__name__: each for each in (judges, conduct, cost)}


def made(text: str) -> str:
    """The page with its tables made anew."""
    results = json.loads((RESULTS / "tools.json").read_text(encoding="utf-8"))
    return _PART.sub(lambda match: f"{match[1]}{_TABLES[match[2]](results)}\n{match[3]}", text)


def main(*, check: bool) -> None:
    """Write the page, or exit with an error if it is out of date."""
    text = PAGE.read_text(encoding="utf-8")
    new = made(text)
    if check:
        sys.exit("docs/comparing.md is out of date: run python -m benchmarks.tools" if new != text else 0)
    PAGE.write_text(new, encoding="utf-8")
