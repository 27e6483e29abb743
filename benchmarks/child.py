"""One task in a separate process, so that time and peak memory are those of the task.

Run as `python -m benchmarks.child TASK MODEL [OUT]`, where TASK is import, plan, rewrite or prove; prints one JSON
object. Peak memory is the high-water mark of the resident set (`benchmarks.timing`).
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT


def measure(task: str, model: Path, out: Path | None = None) -> dict[str, Any]:
    """Run `task` in a new process.

    Returns:
        seconds_process: from start to exit; seconds_import; seconds: of the task without imports;
        steps: seconds by step, from the report; peak_mb_import and peak_mb: megabytes (10^6 bytes) resident.
    """
    command = [sys.executable, "-m", "benchmarks.child", task, str(model), *([str(out)] if out else [])]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{task} failed: {done.stderr.strip()[-2000:]}")
    return {"seconds_process": seconds, **json.loads(done.stdout)}


def _run(task: str, model: Path, out: Path | None) -> dict[str, Any]:
    start = time.perf_counter()
    from rewriter import rewrite

    imported = time.perf_counter()
    peak_import = _peak_mb()
    steps: dict[str, float] = {}
    if task != "import":
        report = rewrite(model, out, dry_run=task == "plan", validate=task == "prove", providers=["cpu"])
        steps = dict(report.seconds)
        if not report.converted:
            raise RuntimeError("nothing was converted")
        if report.exit_status:
            raise RuntimeError("the proof failed")
    return {
        "seconds_import": imported - start,
        "seconds": time.perf_counter() - imported,
        "steps": steps,
        "peak_mb_import": peak_import,
        "peak_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    from benchmarks.timing import resident_peak

    return (resident_peak() or 0) / 1e6


if __name__ == "__main__":
    _, _task, _model, *_rest = sys.argv
    json.dump(_run(_task, Path(_model), Path(_rest[0]) if _rest else None), sys.stdout)
