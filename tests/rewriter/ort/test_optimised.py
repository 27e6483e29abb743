"""What onnxruntime makes of a model is proved; where it is not, the optimiser at fault is named."""

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from rewriter import UsageError, ValidationError, certify
from rewriter.api import comparing
from rewriter.files.load import LoadedModel, load_model
from rewriter.ort import LEVELS, RULES, optimisers, write_optimised
from tests.conftest import Ran
from tests.textmodels import SILU, mlp, text_model


def scaled_convolution(elem: str) -> onnx.ModelProto:
    """The scale is folded into the weights: in float32 within an ulp, in float16 too coarsely to be the same."""
    rng = np.random.default_rng(0)
    weights = {"W": rng.normal(size=(4, 4, 1)), "B": rng.normal(size=4), "S": rng.normal(size=(1, 4, 1))}
    ends: dict[str, Any] = {"inputs": f"{elem}[batch, 4, tokens] x", "outputs": f"{elem}[batch, 4, tokens] out"}
    return text_model("c = Conv(x, W, B) out = Mul(c, S)", constants=weights, elem=elem, **ends)


def test_all_levels_are_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(SILU), "a.onnx", save_as_external_data=True, location="a.data", size_threshold=0)
    out = ran(0, ["certify", "a.onnx", "-o", "c.json"]).out
    assert "level extended: CERTIFIED, 6 -> 5 nodes" in out, "com.microsoft.QuickGelu"
    assert out.splitlines()[-1].startswith(
        f"CERTIFIED  what onnxruntime {onnxruntime.__version__} makes of a.onnx, in "
    )
    data = json.loads(Path("c.json").read_text(encoding="utf-8"))
    assert [(each["level"], each["verdict"], each["guilty"]) for each in data["levels"]] == [
        (level, "certified", []) for level in LEVELS
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.data", "a.onnx", "c.json"]


@pytest.mark.slow
def test_the_optimiser_at_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(comparing, "LEVELS", ("basic",))
    assert certify(scaled_convolution("float"))
    kept, write = list[int](), write_optimised

    def written(model: LoadedModel, level: str, folder: Path, disabled: Sequence[str]) -> Path:
        kept.append(len([*tmp_path.iterdir()]))
        return write(model, level, folder, disabled)

    monkeypatch.setattr(comparing, "write_optimised", written)
    found = certify(scaled_convolution("float16"))
    assert (len(kept) > 10, max(kept)) == (True, 1), "what was judged is removed: a large model would fill the disk"
    assert (found.levels[0].verdict, found.levels[0].guilty) == ("not proved", ("ConvMulFusion",))
    assert found.problems == ("level basic is not proved; certified without ConvMulFusion",)
    assert found.summary.startswith("NOT PROVED  what onnxruntime ")
    assert found.exit_status == 1
    monkeypatch.setattr(comparing, "optimisers", lambda _model, _level: ["FuseReluClip"])
    assert certify(scaled_convolution("float16")).problems[0].endswith("; no optimiser alone is at fault")


@pytest.mark.slow
def test_those_that_act_are_known_from_the_log() -> None:
    model = load_model(mlp(SILU))
    basic, extended = (optimisers(model, level) for level in ("basic", "extended"))
    assert "QuickGeluFusion" not in basic
    assert "QuickGeluFusion" in extended
    assert "ConvMulFusion" in optimisers(load_model(scaled_convolution("float")), "basic"), "a rule"


def test_rules_are_those_of_this_onnxruntime() -> None:
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("onnxruntime_pybind11_state*")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        missing = [name for rules in RULES.values() for name in rules if content.find(name.encode() + b"\0") < 0]
    assert missing == []


@pytest.mark.parametrize("options", [{"claims": {"h": (1e-7, None)}}, {"names": {"x": "y"}}, {"accuracy": 0.1}])
def test_what_takes_two_models(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="are for two models"):
        certify(mlp(SILU), **options)


def test_what_onnxruntime_does_not_load() -> None:
    model = text_model("out = strange.Unknown(x)", domains={"strange": 1})
    with pytest.raises(ValidationError, match=r"^onnxruntime could not load the model at level basic: "):
        certify(model)
