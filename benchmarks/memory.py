"""Peak memory of one run of a model in onnxruntime, in a separate process.

Run as `python -m benchmarks.memory MODEL TOKENS`; prints one JSON object. The figure is the high-water mark of the
resident set during the run (reset before it) less the resident set before it: the tensors that the run needs at one
time. onnxruntime's arena and memory patterns are off, and malloc returns memory at once, so that the figure is that of
live tensors and not of an allocator's cache. Linux only.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.common import ROOT

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def available() -> bool:
    """Whether this system can reset the high-water mark of a process."""
    return _STATUS.exists() and os.access(_CLEAR, os.W_OK)


def peak_bytes(model: Path, tokens: int) -> int:
    """Bytes that one run of `model` on [1, tokens] inputs needs beyond the loaded model.

    Raises:
        RuntimeError: the run failed.
    """
    command = [sys.executable, "-m", "benchmarks.memory", str(model), str(tokens)]
    environment = {**os.environ, **_GIVE_BACK}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"measuring {model.name} failed: {done.stderr.strip()[-2000:]}")
    return int(json.loads(done.stdout)["peak_bytes"])


def _measure(model: Path, tokens: int) -> int:
    import onnxruntime

    from rewriter.files.load import load_model
    from rewriter.inputs.cases import Maker

    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.intra_op_num_threads = 1
    proto = load_model(model).proto
    names = [dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param]
    feeds = Maker(proto, dims={name: 1 if "batch" in name else tokens for name in names}).usual()[0].feeds
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    before = _status("VmRSS")
    session.run(None, dict(feeds))
    return _status("VmHWM") - before


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    json.dump({"peak_bytes": _measure(Path(sys.argv[1]), int(sys.argv[2]))}, sys.stdout)
