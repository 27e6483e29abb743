"""One run of `rewrite` in a process of its own: CPU time by phase, and peak memory.

Run as `python -m benchmarks.estimating.child MODEL KEYWORDS`, KEYWORDS being those of `rewriter.rewrite` as JSON;
prints one JSON object. CPU time is user and system time of all threads, so that other processes on the machine hardly
matter. The phases are told from the progress messages of the proof.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from rewriter.timing.memory import resident_peak

BLOCKS, WHOLE, REST = "blocks", "whole", "rest"
_PHASES = (("proving ", BLOCKS), ("running ", WHOLE), ("evaluating ", WHOLE), ("end to end ", WHOLE))


class Clock:
    """A progress callback that adds up CPU time by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((BLOCKS, WHOLE, REST), 0.0)
        self._phase, self._last = REST, 0.0

    def __call__(self, what: str, _done: int, _total: int) -> None:
        """Begin the phase that `what` belongs to."""
        self.stop()
        self._phase = next((phase for start, phase in _PHASES if what.startswith(start)), REST)

    def stop(self) -> None:
        """Add the time since the last call to the current phase."""
        now = time.process_time()
        self.seconds[self._phase] += now - self._last
        self._last = now


def measure(model: Path, keywords: dict[str, Any], limit: float) -> dict[str, Any] | None:
    """Seconds by phase, their sum `cpu_seconds`, and `memory_bytes`; None past `limit` seconds, or if it failed."""
    command = [sys.executable, "-m", "benchmarks.estimating.child", str(model), json.dumps(keywords)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    found: dict[str, Any] | None = json.loads(done.stdout) if not done.returncode else None
    return found


def _run(model: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    from rewriter import rewrite

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        report = rewrite(model, Path(folder) / "out.onnx", progress=clock, providers=["cpu"], **keywords)
    clock.stop()
    if report.validation is None:
        raise SystemExit("nothing was proved")
    seconds = {phase: round(each, 2) for phase, each in clock.seconds.items()}
    return {"seconds": seconds, "cpu_seconds": round(time.process_time(), 2), "memory_bytes": resident_peak()}


if __name__ == "__main__":
    json.dump(_run(Path(sys.argv[1]), json.loads(sys.argv[2])), sys.stdout)
