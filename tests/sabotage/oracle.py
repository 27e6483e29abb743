"""How far a sabotaged model is from the original, measured without the rewriter: onnxruntime and numpy alone.

A sabotage that the proof catches must be a real change of the function, or one of the file; a harmless one must not
be. Inputs are this module's own: several batches and lengths, longer than those of the proof, and two magnitudes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from tests.attention import Array

Feeds = Mapping[str, Array]

_SIZES = ((1, 17), (3, 6), (2, 29), (1, 1), (2, 50), (1, 41), (1, 64), (2, 70))
"""Batch and length. Inputs that the original refuses are left out: the committed models have 64 positions."""

_SCALES = (1.0, 40.0)
_IDS = 100


def difference(original: Path, rewritten: bytes, folder: Path, *, moderate: bool = False) -> float:
    """Largest |difference| over the largest |output|, over all outputs and inputs; infinite where NaN differ.

    NaN where the rewritten model does not run on what the original accepts. `moderate` leaves out the larger inputs,
    which may be outside of the range of a fit, and entries that are not finite in both; the largest |output| is that of
    all inputs.
    """
    path = folder / "oracle.onnx"
    path.write_bytes(rewritten)
    old, new = _session(original), _session(path)
    worst, gaps, scales = 0.0, [0.0], [0.0]
    for feeds in inputs(onnx.load(original, load_external_data=False), _SCALES[: 1 if moderate else None]):
        expected = None if old is None else _run(old, feeds)
        if expected is not None:
            made = None if new is None else _run(new, feeds)
            if made is None or len(made) != len(expected):
                return float("nan")
            for pair in zip(expected, made, strict=True):
                gap, scale = _distance(*pair, moderate)
                worst = max(worst, gap / scale if scale else gap)
                gaps.append(gap)
                scales.append(scale)
    return max(gaps) / (max(scales) or 1.0) if moderate else worst


def inputs(model: onnx.ModelProto, scales: Sequence[float] = _SCALES) -> Iterator[Feeds]:
    """Random inputs by element type alone: tokens for integers, ones for masks, normal numbers for floats."""
    given = {tensor.name for tensor in model.graph.initializer}
    wanted = [value for value in model.graph.input if value.name not in given]
    floats = any(value.type.tensor_type.elem_type != onnx.TensorProto.INT64 for value in wanted)
    for scale in scales if floats else scales[:1]:
        for number, size in enumerate(_SIZES):
            rng = np.random.default_rng(number)
            yield {value.name: _array(value, size, scale, rng) for value in wanted}


def _array(value: onnx.ValueInfoProto, size: tuple[int, int], scale: float, rng: np.random.Generator) -> Array:
    batch, length = size
    dims = value.type.tensor_type.shape.dim
    shape = [
        max(dim.dim_value, 0) if dim.HasField("dim_value") else {"batch": batch}.get(dim.dim_param, length)
        for dim in dims
    ]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if dtype == np.bool_:
        return np.full(shape, length % 2 == 0)
    if dtype.kind in "iu":
        return np.ones(shape, dtype) if "mask" in value.name else rng.integers(0, _IDS, shape).astype(dtype)
    with np.errstate(over="ignore"):
        return (scale * rng.normal(size=shape)).astype(dtype)


def _session(path: Path) -> onnxruntime.InferenceSession | None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - onnxruntime's exceptions have no common base
        return None


def _run(session: onnxruntime.InferenceSession, feeds: Feeds) -> list[Array] | None:
    try:
        results: list[Array] = session.run(None, feeds)
    except Exception:  # noqa: BLE001
        return None
    return results


def _distance(old: Array, new: Array, both: bool) -> tuple[float, float]:
    """The largest difference and the largest entry; `both`: where both are finite."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf"), 0.0
    before, after = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(before)
    if both:
        finite &= np.isfinite(after)
    elif not np.array_equal(finite, np.isfinite(after)):
        return float("inf"), 0.0
    if not finite.any():
        return 0.0, 0.0
    return float(np.abs(after[finite] - before[finite]).max()), float(np.abs(before[finite]).max())
