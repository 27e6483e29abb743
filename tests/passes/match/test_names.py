"""Names of blocks: the same in float32, float16 and int8, and those of convolutions."""

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

FLOAT16, DYNAMIC, STATIC = runtime_float16(), dynamic_int8(per_channel=False), static_qdq("QDQ")


def names(path: Path) -> list[str]:
    return [each.block.name for each in make_plan(onnx.load(path), Options()).conversions]


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "convert"),
    [
        *((f"{name}-encoder", DYNAMIC) for name in ("gelu", "conformer")),
        *((f"{name}-decoder", DYNAMIC) for name in ("silu", "gated")),
        ("gelu-vision", DYNAMIC),
        *((name, each) for name in ("gelu-encoder", "silu-decoder") for each in (FLOAT16, STATIC)),
        ("gated-decoder", STATIC),
    ],
)
def test_a_block_has_one_name_in_all_types(
    model: str, convert: Callable[[Path, Path, Hints], None], tmp_path: Path
) -> None:
    source, target = FOLDER / f"{model}.onnx", tmp_path / "converted.onnx"
    convert(source, target, Hints())
    found = names(target)
    assert found == names(source)
    assert found


def test_a_block_of_convolutions_is_no_mlp() -> None:
    planes = {"inputs": "float[batch, 4, tokens] x", "outputs": "float[batch, 4, tokens] out"}
    convolutions = mlp(SILU, first="y = Conv(x, K1, b1)", second="out = Conv(h, K2, b2)", **planes)
    for model, expected in ((convolutions, "conv"), (mlp(SILU), "mlp")):
        assert [each.block.name for each in make_plan(model, Options()).conversions] == [expected]
