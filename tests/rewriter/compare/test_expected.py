"""What is expected of a conversion to a narrower type, and where its error comes from."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from benchmarks.decoder import Shape, decoder, random_weights
from rewriter import UsageError, validate
from rewriter.compare.boundaries import Boundary
from rewriter.compare.expected import Expected, costs
from rewriter.compare.taps import Tap
from tests.committed import FOLDER
from tests.conftest import slow

TINY = Shape(layers=3, width=16, hidden=32, heads=2, vocabulary=40, positions=64)


def tap(label: str, relative: float, *, finite: int = 1) -> Tap:
    return Tap(Boundary(label, label, "stream"), 2.0, 0.0, None, 2.0 * relative, 1.0, None, finite=finite)


def test_costs_are_differences_of_squares() -> None:
    found = costs([tap("a", 3e-3), tap("b", 5e-3), tap("c", 4e-3), tap("d", 13e-3), tap("empty", 9.0, finite=0)])
    assert [each.part for each in found] == ["d", "b", "a", "c"]
    assert [each.added for each in found] == pytest.approx([np.sqrt(169 - 16) * 1e-3, 4e-3, 3e-3, 0.0])
    assert sum(each.share for each in found) == pytest.approx(1.0)
    assert [each.keep for each in found] == [True, False, False, False]
    assert [each.keep for each in costs([tap("a", 0.0)])] == [False]
    assert costs([]) == ()


def test_the_share_grows_with_the_root_of_the_operators() -> None:
    assert Expected("fp16", 4).share == 2 * Expected("fp16", 1).share == 16 * 2.0**-11
    assert Expected("bf16", 4).share == 8 * Expected("fp16", 4).share
    values = [np.asarray([1.0, -4.0]), np.asarray([2.0, np.inf])]
    assert Expected("fp16", 1).tolerance(values).atol == 4.0 * Expected("fp16", 1).share


def rounded(model: onnx.ModelProto, *names: str, bits: int = 8) -> onnx.ModelProto:
    """Matrices of the given scopes with symmetric rounding to `bits` bits."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for each in made.graph.initializer:
        values = onnx.numpy_helper.to_array(each)
        if values.ndim == 2 and values.dtype == np.float32 and any(name in each.name for name in names):
            step = np.abs(values).max() / (2 ** (bits - 1) - 1)
            each.CopyFrom(onnx.numpy_helper.from_array((np.round(values / step) * step).astype(np.float32), each.name))
    return made


def test_the_costly_layer_is_named() -> None:
    original = decoder(TINY, random_weights())
    converted = rounded(original, "h.1.mlp", bits=4)
    assert not validate(original, converted, providers=["cpu"]).same
    found = validate(original, converted, providers=["cpu"], expect="int8")
    assert found.taps is not None
    assert found.costs[0].keep
    assert "h.1" in found.costs[0].part
    assert found.costs[0].share > 0.5
    assert any("expected of int8: at most " in note for note in found.notes)


@slow
def test_eight_bits_are_expected_and_three_are_not() -> None:
    original = decoder(TINY, random_weights())
    assert validate(original, rounded(original, "."), providers=["cpu"], expect="int8").same
    assert not validate(original, rounded(original, ".", bits=2), providers=["cpu"], expect="int8").same
    assert not validate(original, rounded(original, "."), providers=["cpu"], expect="fp16").same


@slow
def test_a_tolerance_that_is_given_takes_precedence() -> None:
    original = decoder(TINY, random_weights())
    converted = rounded(original, ".")
    name = original.graph.output[0].name
    assert not validate(original, converted, providers=["cpu"], expect="int8", atol={name: 1e-6}).same


def test_usage() -> None:
    original = decoder(TINY, random_weights())
    with pytest.raises(UsageError, match="unknown type 'fp8' to expect; known are: fp16, bf16, int8"):
        validate(original, original, providers=["cpu"], expect="fp8")
    with pytest.raises(UsageError, match="leave it or --expect out"):
        validate(original, original, providers=["cpu"], expect="fp16", bisect=True)


@slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gelu-encoder", "gated-decoder", "relu-decoder"])
def test_real_conversions(name: str, tmp_path: object) -> None:
    """onnxruntime's own float16 converter and dynamic quantisation pass; types inside may differ."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.float16 import convert_float_to_float16

    path = FOLDER / f"{name}.onnx"
    half = convert_float_to_float16(onnx.load(path), keep_io_types=True)
    ids = np.random.default_rng(0).integers(0, 100, (2, 20))
    unpadded = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    found = validate(path, half, providers=["cpu"], expect="fp16", inputs=unpadded)
    assert found.same
    assert found.costs
    assert not validate(path, half, providers=["cpu"], inputs=unpadded).same
    # The converter cuts the masks of decoders off at -1e4, so that padding at the start is seen: a real error.
    assert validate(path, half, providers=["cpu"], expect="fp16").same == name.endswith("encoder")
    quantised = f"{tmp_path}/int8.onnx"
    quantize_dynamic(path, quantised, weight_type=QuantType.QInt8)
    assert validate(path, quantised, providers=["cpu"], expect="int8").same
