"""The README's table of times, from the committed measurement: `python -m benchmarks.performance.readme`."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_MARKED = re.compile(r"(<!-- made by python -m benchmarks.performance.readme -->\n).*?(<!-- end -->)", re.DOTALL)
_TOKENS = 128
_NAMES = {
    "gpt2-silu": "GPT-2 small, SiLU",
    "gpt2-gelu": "GPT-2 small, GELU",
    "llama-swiglu": "Llama 3.2 1B, SwiGLU",
    "gemma-geglu": "Gemma 2B, GEGLU",
    "mish": "GPT-2 small, Mish",
    "relu6": "GPT-2 small, ReLU6",
    "hard_swish": "GPT-2 small, hard swish",
}


def made(text: str, content: Mapping[str, Any]) -> str:
    """The README's text with the table between the marks made anew from the results."""
    table = "\n".join(_lines(content))
    found, count = _MARKED.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    if count != 1:
        sys.exit("README.md has no place for the table")
    return found


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    yield "| widths and activation | float32: original ms | ratio | control | float16: original ms | ratio | control |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    rows = {(row["model"], row["type"]): row for row in content["rows"] if row["tokens"] == _TOKENS}
    for model, name in _NAMES.items():
        cells = [cell for kind in ("float32", "float16") for cell in _cells(rows.get((model, kind)))]
        yield f"| {' | '.join((name, *cells))} |"


def _cells(row: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    return (
        f"{row['milliseconds']['original']:.0f}",
        f"{row['rewritten']['paired']:.2f}",
        f"{row['control']['paired']:.2f}",
    )


def main() -> None:
    """Write the table into the README."""
    page = _ROOT / "README.md"
    results = _ROOT / "benchmarks" / "results" / "performance.json"
    content = json.loads(results.read_text(encoding="utf-8"))
    page.write_text(made(page.read_text(encoding="utf-8"), content), encoding="utf-8")


if __name__ == "__main__":
    main()
