"""Every benchmark runs at a tiny size and writes well-formed JSON; no times are asserted."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

from benchmarks import cuda_proofs, forms, fusions, large_model, latency, pattern, plan_scaling, validation
from benchmarks.footprint import entered, one_block
from benchmarks.memory import available
from models.cells import Job
from passes.forms import FORMS
from rewriter import rewrite
from tests.committed import FOLDER

SIZES = "--layers 2 --width 32 --hidden 64 --heads 4 --vocabulary 50 --repeats 1"
THRICE = SIZES.replace("repeats 1", "repeats 3")
LARGE = "--layers 2 --width 64 --heads 4 --vocabulary 64 --repeats 1"
MEASURED = ("local", "compact") if available() else ()
MEMORY = "--memory-width 8 --memory-hidden 16 --memory-tokens 9"

RUNS: tuple[tuple[ModuleType, str, str, list[Any]], ...] = (
    (latency, f"{THRICE} --tokens 5", "model", ["silu model", "gelu model", "silu mlp", "gelu mlp"]),
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
    (validation, SIZES, "task", ["plain inference", "diff(outputs=False)", "validate"]),
    (pattern, f"{THRICE} --activation silu --tokens 5", "model", ["original", "control", "local", "compact"]),
    (cuda_proofs, "--on cpu --only relu-decoder --type float16", "form", ["local", "compact"]),
    (forms, f"--width 8 --hidden 16 --tokens 5 --repeats 3 {MEMORY}", "form", ["control", *FORMS, *MEASURED]),
)
"""A script, its arguments, and what a column of its rows must hold."""


@pytest.mark.sample(0)
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


def test_a_conversion_crosses_few_files() -> None:
    """The measure of how much a reader must know; a step over it wants a reason."""
    rewrite(one_block())
    assert entered(lambda: rewrite(one_block(), validate=False))[0] <= 45
    assert entered(lambda: rewrite(one_block()))[0] <= 65


@pytest.mark.slow
def test_what_tools_make_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal, different, refused; a second run only compares what a cut line lost."""
    job = Job("bert", "torchscript", 17, "fp32", "exports")
    results, folder = tmp_path / "results.jsonl", tmp_path / job.name
    folder.mkdir()
    model = onnx.load(FOLDER / "gelu-encoder.onnx")
    onnx.save(model, folder / "export.onnx")
    weight = next(each for each in model.graph.initializer if len(each.dims) == 2)
    weight.raw_data = bytes(len(weight.raw_data) - 4) + weight.raw_data[-4:]
    onnx.save(model, folder / "onnxsim.onnx")
    (folder / "onnxslim.refused").write_text("no such operator", encoding="utf-8")
    tools = ("ort-extended", "onnxsim", "onnxslim")
    monkeypatch.setattr(fusions, "cells", lambda quick: [fusions.Cell(job, tool) for tool in tools])  # noqa: ARG005

    def printed() -> list[str]:
        arguments = [str(tmp_path), "--results", str(results)]
        return CliRunner().invoke(fusions.main, arguments, catch_exceptions=False).stdout.splitlines()

    lines = printed()
    assert lines[2:4] == ["| onnxruntime, extended | 1 | 1 | 0 | 0 |", "| onnxsim | 1 | 0 | 0 | 1 |"]
    assert "output 'last_hidden_state' has other values" in lines[5]
    assert "Gather 'node_embedding' computes from 'input_ids' something that A does not compute" in lines[5]
    assert lines[6] == "onnxslim: refused 1 times: no such operator"
    with results.open("a", encoding="utf-8") as file:
        file.write('{"key": "cut sho')
    monkeypatch.setattr(fusions, "prove", None)
    assert printed() == lines
