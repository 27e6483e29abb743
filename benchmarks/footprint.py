"""How much of the code one conversion crosses: `python -m benchmarks.footprint`.

Counts the files and functions of `rewriter` and `passes` that are entered when one SiLU block is converted, without and
with the proof. Imports do not count.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(str(ROOT / name) + "/" for name in ("rewriter", "passes"))


def one_block() -> onnx.ModelProto:
    """x W1 + b1, SiLU, W2 + b2."""
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[b, n, 4] x) => (float[b, n, 4] out) '
        "{ m = MatMul(x, W1) y = Add(m, b1) s = Sigmoid(y) h = Mul(y, s) o = MatMul(h, W2) out = Add(o, b2) }"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"W1": (4, 8), "b1": (8,), "W2": (8, 4), "b2": (4,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


def entered(call: Callable[[], Any]) -> tuple[int, int]:
    """The number of files and functions of ours that a call enters; comprehensions belong to their function."""
    files, functions = set[str](), set[tuple[str, str]]()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_OURS) and not code.co_name.startswith("<"):
            files.add(code.co_filename)
            functions.add((code.co_filename, code.co_qualname))

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), len(functions)


def main() -> None:
    from rewriter import rewrite

    model = one_block()
    rewrite(model)  # imports what is imported late
    for what, validate in (("without the proof", False), ("with the proof", True)):
        files, functions = entered(lambda validate=validate: rewrite(model, validate=validate))  # type: ignore[misc]
        print(f"one SiLU block, {what}: {files} files, {functions} functions")


if __name__ == "__main__":
    main()
