"""`python -m benchmarks.floats.report`: measured errors by program, for reports and docs/programs.md."""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.common import RESULTS, ROOT

FLOATS = ROOT / "rewriter" / "report" / "floats.json"
_KINDS = ("float32", "float16", "bfloat16")
_INSTRUCTIONS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse2": "SSE2", "asimd": "NEON"}


def errors(content: Mapping[str, Any]) -> dict[str, Any]:
    """By element type and program, the largest errors of the heads and of the original's nodes (null: not run)."""
    rows = [row for row in content["rows"] if not row["measured"]]
    ((version, instructions),) = {(row["source"]["onnxruntime"], row["source"]["instructions"]) for row in rows}
    found: dict[str, dict[str, list[float | None]]] = {kind: {} for kind in _KINDS}
    for row in rows:
        pair = found[row["type"]].setdefault(row["program"], [0.0, None])
        for place, side in enumerate((row["rewritten"], row["original"])):
            if side is not None:
                pair[place] = max(pair[place] or 0.0, side["relative"])
    return {"onnxruntime": version, "instructions": _INSTRUCTIONS[instructions], "errors": found}


def main() -> None:
    """Write the errors from `results/floats.json`."""
    content = json.loads((RESULTS / "floats.json").read_text(encoding="utf-8"))
    FLOATS.write_text(json.dumps(errors(content)).replace('"silu"', '\n"silu"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
