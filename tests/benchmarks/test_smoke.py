"""Every benchmark runs at a tiny size and writes well-formed JSON; no times are asserted."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

from benchmarks import cuda, cuda_proofs, forms, large_model, latency, pattern, plan_scaling, validation
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, mlp, random_weights
from benchmarks.footprint import entered, one_block
from benchmarks.memory import available
from passes.forms import FORMS
from rewriter import rewrite
from tests.conftest import slow

MODULES = (cuda, cuda_proofs, forms, large_model, latency, pattern, plan_scaling, validation)
TINY = Shape(layers=2, width=32, hidden=128, heads=4, vocabulary=50, positions=64)
SIZES = "--layers 2 --width 32 --hidden 64 --heads 4 --vocabulary 50 --repeats 1"
LARGE = "--layers 2 --width 64 --heads 4 --vocabulary 64 --repeats 1"
MEASURED = ("local", "compact") if available() else ()
MEMORY = "--memory-width 8 --memory-hidden 16 --memory-tokens 9"

RUNS: tuple[tuple[ModuleType, str, str, list[Any]], ...] = (
    (
        latency,
        f"{SIZES} --tokens 5".replace("repeats 1", "repeats 3"),
        "model",
        ["silu model", "gelu model", "silu mlp", "gelu mlp"],
    ),
    *(
        (
            large_model,
            f"{LARGE} {dense}",
            "task",
            ["import only", "plan only (--dry-run)", "rewrite, same directory", "rewrite, other directory"],
        )
        for dense in ("", "--dense")
    ),
    (plan_scaling, "--nodes 60 --nodes 200 --repeats 1 --no-today", "blocks", [2, 7]),
    (validation, SIZES, "task", ["plain inference", "diff --graph-only", "validate"]),
    (
        pattern,
        f"{SIZES} --activation silu --tokens 5".replace("repeats 1", "repeats 3"),
        "model",
        ["original", "control", "local", "compact"],
    ),
    (cuda_proofs, "--on cpu --only relu-decoder --type float16", "form", ["local", "compact"]),
    (forms, f"--width 8 --hidden 16 --tokens 5 --repeats 3 {MEMORY}", "form", ["control", *FORMS, *MEASURED]),
)
"""A script, its arguments, and what a column of its rows must hold."""


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_options(module: ModuleType) -> None:
    result = CliRunner().invoke(module.main, ["--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "--json" in result.output


@slow
@pytest.mark.parametrize(
    ("module", "arguments", "column", "wanted"), RUNS, ids=lambda each: getattr(each, "__name__", "")
)
def test_rows(module: ModuleType, arguments: str, column: str, wanted: list[Any], tmp_path: Path) -> None:
    given = [*arguments.split(), "--json", str(tmp_path / "made" / "rows.json")]
    given += ["--folder", str(tmp_path)] if module is large_model else []
    result = CliRunner().invoke(module.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads((tmp_path / "made" / "rows.json").read_text(encoding="utf-8"))
    assert content["environment"]["onnx"] == onnx.__version__
    assert [row[column] for row in content["rows"]] == wanted


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


def test_a_conversion_crosses_few_files() -> None:
    """The measure of how much a reader must know; a step over it wants a reason."""
    rewrite(one_block())
    assert entered(lambda: rewrite(one_block(), validate=False))[0] <= 45
    assert entered(lambda: rewrite(one_block()))[0] <= 65
