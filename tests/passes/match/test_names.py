"""Names of blocks: the same in float32, float16 and int8, and those of convolutions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from models.tools.common import Hints
from models.tools.precision import dynamic_int8, runtime_float16, static_qdq
from passes.options import Options
from passes.plan import make_plan
from tests.committed import FOLDER
from tests.textmodels import SILU, mlp

Convert = Callable[[Path, Path, Hints], None]
HINTS = Hints()
FLOAT16, DYNAMIC, STATIC = runtime_float16(), dynamic_int8(per_channel=False), static_qdq("QDQ")


def names(path: Path) -> list[str]:
    return [each.block.name for each in make_plan(onnx.load(path), Options()).conversions]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "convert"),
    [
        pytest.param("gelu-encoder", FLOAT16, id="dynamo-float16"),
        pytest.param("gelu-encoder", DYNAMIC, id="dynamo-dynamic"),
        pytest.param("silu-decoder", DYNAMIC, id="torchscript-dynamic"),
        pytest.param("gated-decoder", DYNAMIC, id="gated-dynamic"),
        pytest.param("gelu-encoder", STATIC, id="dynamo-static", marks=pytest.mark.slow),
        pytest.param("gated-decoder", STATIC, id="gated-static", marks=pytest.mark.slow),
        pytest.param("silu-decoder", STATIC, id="torchscript-static", marks=pytest.mark.slow),
        pytest.param("silu-decoder", FLOAT16, id="torchscript-float16", marks=pytest.mark.slow),
        pytest.param("gelu-vision", DYNAMIC, id="vision-dynamic", marks=pytest.mark.slow),
        pytest.param("conformer-encoder", DYNAMIC, id="conformer-dynamic", marks=pytest.mark.slow),
    ],
)
def test_a_block_has_one_name_in_all_types(model: str, convert: Convert, tmp_path: Path) -> None:
    source, target = FOLDER / f"{model}.onnx", tmp_path / "converted.onnx"
    convert(source, target, HINTS)
    found = names(target)
    assert found == names(source)
    assert found


def test_a_block_of_convolutions_is_no_mlp() -> None:
    planes = {"inputs": "float[batch, 4, tokens] x", "outputs": "float[batch, 4, tokens] out"}
    convolutions = mlp(SILU, first="y = Conv(x, K1, b1)", second="out = Conv(h, K2, b2)", **planes)
    for model, expected in ((convolutions, "conv"), (mlp(SILU), "mlp")):
        assert [each.block.name for each in make_plan(model, Options()).conversions] == [expected]
