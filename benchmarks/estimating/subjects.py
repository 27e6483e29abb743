"""What is measured: the committed models, and decoders from `benchmarks.decoder`, in all forms that suit them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.common import ROOT
from benchmarks.decoder import Shape, decoder

_COMMITTED = ("gelu-encoder", "silu-decoder", "relu-decoder", "gated-decoder", "gelu-vision", "conformer-encoder")
_FORMS = ("local", "compact", "masked", "maskless", "staged")
_DECODERS = {
    "decoder-256-silu": Shape(6, 256, 1024, 4, 8192, 512, "silu"),
    "decoder-512-gelu": Shape(4, 512, 2048, 8, 16384, 512, "gelu"),
    "decoder-512-swiglu": Shape(4, 512, 1408, 8, 16384, 512, "swiglu"),
    "decoder-768-silu": Shape(12, 768, 3072, 12, 50257, 512, "silu"),
    "decoder-768-gelu": Shape(6, 768, 3072, 12, 30000, 512, "gelu"),
}


@dataclass(frozen=True)
class Subject:
    """A model and the keywords of `rewriter.rewrite` with which it is converted."""

    name: str
    path: Path
    keywords: dict[str, Any]


def subjects(folder: Path) -> Iterator[Subject]:
    """All of them; models that are not committed are written to `folder`."""
    for name in _COMMITTED:
        path = ROOT / "models" / f"{name}.onnx"
        yield from (Subject(name, path, {"form": form}) for form in _FORMS)
        yield Subject(name, path, {"form": "local", "quick": True})
        yield Subject(name, path, {"form": "local", "proof": "blocks"})
    for name in ("silu-decoder", "gelu-encoder"):
        yield Subject(name, ROOT / "models" / f"{name}.onnx", {"form": "whole"})
    for name in ("docstrings-silu", "docstrings-gelu", "induction"):
        yield Subject(name, ROOT / "models" / "trained" / f"{name}.onnx", {"form": "local"})
    for name, shape in _DECODERS.items():
        path = folder / f"{name}.onnx"
        yield Subject(name, _made(path, shape), {"form": "local"})
        if shape.width <= 512:
            yield Subject(name, path, {"form": "local", "proof": "blocks"})
            yield Subject(name, path, {"form": "local", "quick": True})
            yield Subject(name, path, {"form": "compact"})
        if shape.width <= 256:
            yield Subject(name, path, {"form": "masked"})


def _made(path: Path, shape: Shape) -> Path:
    """The decoder with random weights."""
    if not path.exists():
        generator = np.random.default_rng(0)

        def weight(name: str, dims: tuple[int, ...], std: float) -> onnx.TensorProto:
            values = generator.standard_normal(dims, np.float32) * np.float32(std) + np.float32(std == 0.0)
            return onnx.numpy_helper.from_array(values, name)

        onnx.save(decoder(shape, weight), path)
    return path
