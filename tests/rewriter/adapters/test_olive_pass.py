"""The pass for Olive, in a workflow that Olive runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

pytest.importorskip("olive", reason="needs olive-ai, which needs a separate environment")

from olive.workflows import run

from rewriter.adapters.olive_pass import package_config
from rewriter.api.rewriting import REPORT
from tests.errors import EMITTED, apart
from tests.textmodels import SILU, mlp, text_model

pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")


def workflow(model: onnx.ModelProto, folder: Path, **options: Any) -> Any:
    onnx.save(model, folder / "model.onnx")
    config = {
        "input_model": {"type": "ONNXModel", "model_path": str(folder / "model.onnx")},
        "systems": {
            "here": {
                "type": "LocalSystem",
                "accelerators": [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}],
            }
        },
        "target": "here",
        "passes": {"heads": {"type": "AttentionOnly", **options}},
        "output_dir": str(folder / "out"),
        "cache_dir": str(folder / "cache"),
    }
    return run(config, package_config=package_config())


def test_a_workflow(tmp_path: Path) -> None:
    original = mlp(SILU)
    workflow(original, tmp_path)
    (path,) = (tmp_path / "out").rglob("*.onnx")
    made = onnx.load(path)
    assert "NeuronAttention" in {node.op_type for node in made.graph.node}
    assert apart(original, made, []).exact <= EMITTED
    (report,) = (tmp_path / "out").rglob(REPORT)
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["exit_status"] == 0
    assert list(found["validation"]["providers"]) == ["cpu"]


def test_options_reach_the_rewriting(tmp_path: Path) -> None:
    workflow(mlp(SILU), tmp_path, form="masked")
    (report,) = (tmp_path / "out").rglob(REPORT)
    assert json.loads(report.read_text(encoding="utf-8"))["form"] == "masked"


def test_nothing_to_convert_passes_through(tmp_path: Path) -> None:
    workflow(text_model("out = Relu(x)"), tmp_path)
    (path,) = (tmp_path / "out").rglob("*.onnx")
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Relu"]


@pytest.mark.usefixtures("wrong_bias")
@pytest.mark.parametrize(("form", "said"), [("round", "unknown form 'round'"), ("local", "FAILED  1 block")])
def test_an_error_gives_no_model(form: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workflow(mlp(SILU), tmp_path, form=form)
    assert said in caplog.text
    assert not list((tmp_path / "out").rglob("*.onnx"))


def test_the_package_configuration_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "package.json"
    subprocess.run([sys.executable, "-m", "rewriter.adapters.olive_pass", path], check=True)
    found = json.loads(path.read_text(encoding="utf-8"))["passes"]
    assert found["AttentionOnly"]["module_path"] == "rewriter.adapters.olive_pass.AttentionOnly"
    assert "OnnxDynamicQuantization" in found
