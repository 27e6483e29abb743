"""The child process of `rewrite doctor`: starts one execution provider, so that a crash takes nobody along.

`python -m rewriter.health.probe` reads a pickled request: None for what this onnxruntime was built with, or the name of
a provider. It answers with one line of JSON.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
from pathlib import Path
from typing import Any

from rewriter.child import pipes, received, started, teller
from rewriter.health.libraries import cuda_libraries
from rewriter.text import one_line

_MODULE = "rewriter.health.probe"


def ask(request: str | None, *, seconds: float = 120.0) -> dict[str, Any]:
    """The child's answer; `{"crash": how it ended}` if it did not answer within the time."""
    with started(_MODULE) as child:
        pipes(child)
        try:
            printed, _ = child.communicate(pickle.dumps(request), timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"crash": f"it did not answer within {seconds:.0f} s"}
        status = child.returncode
    try:
        found = json.loads(printed)
    except ValueError:
        return {"crash": f"the process ended by {_signal(status)}" if status < 0 else f"it ended with status {status}"}
    return found if isinstance(found, dict) else {"crash": "it answered something else"}


def _signal(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def main() -> None:
    """Answer one request."""
    tell = teller()
    request = received()
    try:
        tell(_built() if request is None else _tried(request))
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base class, and the parent wants a line
        tell({"reason": one_line(f"{type(error).__name__}: {error}", 200)})


def _built() -> dict[str, Any]:
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds the CUDA libraries of pip packages
    return {
        "version": onnxruntime.__version__,
        "providers": onnxruntime.get_available_providers(),
        "libraries": cuda_libraries(Path(onnxruntime.__file__).parent),
    }


def _tried(name: str) -> dict[str, Any]:
    from rewriter.ort.providers import load_onnxruntime, parse_provider

    ort, provider = load_onnxruntime(), parse_provider(name)
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    reason = _runs(ort, provider.onnxruntime, double=False)
    return {"reason": reason or "", "float64": not reason and _runs(ort, provider.onnxruntime, double=True) is None}


def _runs(ort: Any, providers: Any, *, double: bool) -> str | None:
    """Why a model of one product does not run there; None if it does."""
    import numpy as np
    from onnx import TensorProto

    from rewriter.ort.providers import product_model

    model = product_model(TensorProto.DOUBLE if double else TensorProto.FLOAT)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if providers[0][0] != "CPUExecutionProvider":
        # Otherwise what the provider does not take runs on the CPU, and all seems well.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    value = np.array([[1.0, 2.0], [3.0, 4.0]]).astype(np.float64 if double else np.float32)
    try:
        session = ort.InferenceSession(model, options, providers=providers, enable_fallback=0)
        (found,) = session.run(None, {"x": value})
    except Exception as error:  # noqa: BLE001 - as above
        return one_line(error, 160)
    return None if np.allclose(found, [[7.0, 10.0], [15.0, 22.0]], rtol=1e-3) else "it computes a wrong product"


if __name__ == "__main__":
    main()
