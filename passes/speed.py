"""Which activations make a float32 model slower as heads than the original, by the committed measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from passes.conversion import Conversion

NOTEWORTHY = 1.10
"""Times the original from which users are told."""


@dataclass(frozen=True)
class Measured:
    """A row of `benchmarks/results/performance.json`.

    Attributes:
        model: its model.
        what: that model, in words.
        ratio: time of the rewritten model over that of the original, in form `local` on the CPU provider.
    """

    model: str
    what: str
    ratio: float


MEASURED = {
    ("gelu", False): Measured("gpt2-gelu", "GELU at GPT-2's widths", 1.10),
    ("silu", True): Measured("llama-swiglu", "SwiGLU at Llama 1B's widths", 1.05),
    ("gelu", True): Measured("gemma-geglu", "GEGLU at Gemma 2B's widths", 1.16),
}
"""Activation, and whether the block is gated, to what was measured in float32."""


def speed_notes(conversions: Sequence[Conversion]) -> tuple[str, ...]:
    """One line if the result is likely to be slower than the original by more than a tenth."""
    found = {measured.model: measured for each in conversions if (measured := _measured(each)) is not None}
    if not found:
        return ()
    listed = ", ".join(f"{each.what} {each.ratio:.2f}" for each in found.values())
    return (f"expect a slower model on CPU, by measurement (times the original): {listed}; see 'rewrite bench'",)


def _measured(conversion: Conversion) -> Measured | None:
    block = conversion.block
    if conversion.form != "local" or block.elem_type != onnx.TensorProto.FLOAT:
        return None
    name = block.identified.activation.name.removesuffix("_tanh")
    measured = MEASURED.get((name, block.gate != block.value))
    return measured if measured is not None and measured.ratio > NOTEWORTHY else None
