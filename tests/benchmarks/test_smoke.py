"""Every benchmark runs at a tiny size and writes well-formed JSON; no times are asserted."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import click
import onnx
import pytest
from click.testing import CliRunner

from benchmarks import error_propagation, forms, gates, large_model, latency, plan_scaling, validation
from benchmarks.common import interleaved
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, mlp, random_weights
from benchmarks.footprint import entered, one_block
from benchmarks.memory import available
from passes.forms import FORMS
from rewriter import rewrite
from tests.benchmarks.conftest import draws
from tests.conftest import slow

MODULES = (error_propagation, forms, gates, large_model, latency, plan_scaling, validation)
TINY = Shape(layers=2, width=32, hidden=128, heads=4, vocabulary=50, positions=64)


def run(command: click.Command, *arguments: str, json_path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(command, [*arguments, "--json", str(json_path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(json_path.read_text(encoding="utf-8"))
    assert content["environment"]["onnx"] == onnx.__version__
    assert content["environment"]["cores"] >= 1
    assert content["rows"]
    return content


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_options(module: ModuleType) -> None:
    """Each can be started; the slow tests below run them."""
    result = CliRunner().invoke(module.main, ["--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "--json" in result.output or "--out" in result.output


@slow
def test_latency(tmp_path: Path) -> None:
    sizes = ("--layers", "2", "--width", "32", "--hidden", "128", "--heads", "4", "--vocabulary", "50")
    arguments = (*sizes, "--tokens", "5", "--tokens", "9", "--repeats", "3")
    content = run(latency.main, *arguments, json_path=tmp_path / "made" / "latency.json")
    assert content["benchmark"] == "latency"
    assert [(row["model"], row["tokens"]) for row in content["rows"]] == [
        (name, tokens) for name in ("silu model", "gelu model", "silu mlp", "gelu mlp") for tokens in (5, 9)
    ]
    for row in content["rows"]:
        assert row["blocks"] == (2 if row["model"].endswith("model") else 1)
        assert {name: len(times) for name, times in row["rounds"].items()} == {
            "original": 3,
            "rewritten": 3,
            "control": 3,
        }


@slow
@pytest.mark.parametrize("dense", [False, True])
def test_large_model(tmp_path: Path, dense: bool) -> None:
    arguments = ["--layers", "2", "--width", "64", "--heads", "4", "--vocabulary", "64", "--repeats", "1"]
    arguments += ["--folder", str(tmp_path), *(["--dense"] if dense else [])]
    content = run(large_model.main, *arguments, json_path=tmp_path / "large.json")
    assert content["settings"]["sparse"] is not dense
    assert [row["task"] for row in content["rows"]] == [
        "import only",
        "plan only (--dry-run)",
        "rewrite, same directory",
        "rewrite, other directory",
    ]
    for row in content["rows"]:
        assert row["peak_mb"] >= row["peak_mb_import"] > 0
        assert row["seconds_process"] >= row["seconds"]


@slow
def test_plan_scaling(tmp_path: Path) -> None:
    content = run(
        plan_scaling.main,
        "--nodes",
        "60",
        "--nodes",
        "200",
        "--repeats",
        "1",
        json_path=tmp_path / "plan.json",
    )
    small, large = content["rows"]
    assert 50 < small["nodes"] < 90 < 170 < large["nodes"] < 230
    assert 0 < small["blocks"] < large["blocks"]
    assert set(large["seconds"]) == set(plan_scaling.STEPS)


@pytest.mark.parametrize(
    "activation", [pytest.param(name, marks=slow if name == "relu" else ()) for name in ACTIVATIONS]
)
@pytest.mark.parametrize(("build", "blocks"), [(decoder, 2), (mlp, 1)])
def test_models_are_valid_and_proved(tmp_path: Path, activation: str, build: Any, blocks: int) -> None:
    shape = Shape(**{**TINY.__dict__, "activation": activation})
    path = tmp_path / "model.onnx"
    onnx.save(build(shape, random_weights()), path)
    onnx.checker.check_model(path, full_check=True)
    report = rewrite(path, tmp_path / "heads.onnx", providers=["cpu"])
    assert (report.exit_status, len(report.converted)) == (0, blocks)


def test_interleaved_runs_every_candidate_once_a_round_in_changing_order() -> None:
    log: list[str] = []
    candidates = {name: lambda name=name: log.append(name) for name in "abc"}
    seconds = interleaved(candidates, repeats=6, warmup=1)
    rounds = ["".join(log[start : start + 3]) for start in range(3, len(log), 3)]
    assert sorted(rounds) == sorted({"abc", "cba", "acb", "bca", "bac", "cab"})
    assert {name: len(times) for name, times in seconds.items()} == {"a": 6, "b": 6, "c": 6}


@slow
def test_validation(tmp_path: Path) -> None:
    sizes = ("--layers", "2", "--width", "32", "--hidden", "64", "--heads", "4", "--vocabulary", "50")
    content = run(validation.main, *sizes, "--repeats", "1", json_path=tmp_path / "validation.json")
    tasks = [row["task"] for row in content["rows"]]
    assert tasks == ["plain inference", "diff --graph-only", "validate", "validate --taps blocks"]
    assert [len(row["seconds"]) for row in content["rows"]] == [1, 1, 1, 1]
    assert {"load", "plan", "validate", "taps"} <= set(content["rows"][-1]["steps"])


@slow
def test_forms(tmp_path: Path) -> None:
    sizes = ("--width", "8", "--hidden", "16", "--memory-width", "8", "--memory-hidden", "16", "--memory-tokens", "9")
    content = run(forms.main, *sizes, "--tokens", "5", "--repeats", "3", json_path=tmp_path / "forms.json")
    times = [row for row in content["rows"] if "milliseconds" in row]
    assert [row["form"] for row in times] == ["control", *FORMS]
    memory = [row for row in content["rows"] if "measured" in row]
    assert [row["form"] for row in memory] == (["local", "compact"] if available() else [])


@draws
def test_error_propagation(tmp_path: Path) -> None:
    arguments = ["--layers", "3", "--tokens", "5", "--sequences", "1", "--activation", "silu", "--out", str(tmp_path)]
    result = CliRunner().invoke(error_propagation.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "error-propagation.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["form"], row["layer"]) for row in rows] == [
        (form, layer) for form in ("original", *FORMS) if form != "whole" for layer in (1, 2, 3)
    ]
    assert all(0.0 < row["largest"] < 1e-5 for row in rows), "an exact program: nothing but rounding"
    figure = tmp_path / "figures" / "error-propagation.svg"
    assert ET.fromstring(figure.read_text(encoding="utf-8")).tag.endswith("svg")  # noqa: S314 - our own file
    assert "| silu | masked |" in (tmp_path / "error-propagation.md").read_text(encoding="utf-8")


def test_a_conversion_crosses_few_files() -> None:
    """The measure of how much a reader must know; a step over it wants a reason."""
    rewrite(one_block())
    assert entered(lambda: rewrite(one_block(), validate=False))[0] <= 45
    assert entered(lambda: rewrite(one_block()))[0] <= 65
