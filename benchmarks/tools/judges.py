"""What each tool says of a wrong model: its own comparison runs with its defaults and what it needs."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tools.running import run

HERE = Path(__file__).resolve().parent
OUT = "out.onnx"
VOCABULARY = 128
TOKENS = 48
"""The length that tools get to try, if they must or can have one."""


@dataclass(frozen=True)
class Pair:
    """Two models to compare, and where to write.

    Attributes:
        original: the model that is right.
        other: the model that the tool is to judge.
        folder: an empty folder.
    """

    original: Path
    other: Path
    folder: Path

    @property
    def out(self) -> Path:
        """The file that a tool is to make, where it makes one."""
        return self.folder / OUT


@dataclass(frozen=True)
class Judge:
    """One way to ask a tool.

    Attributes:
        title: heading of the column.
        tool: key of its environment.
        inputs: what it runs the models on.
        rule: what it allows.
        commands: run in turn; the last one judges. The first word is a program of the environment.
        says: text that it prints when it objects; empty if the exit status says so.
        writes: the file it writes if it does not object; empty if it makes none.
        exported: whether it needs the PyTorch model too, and so an original that optimum exports.
    """

    title: str
    tool: str
    inputs: str
    rule: str
    commands: Callable[[Pair], list[list[str]]]
    says: str = ""
    writes: str = ""
    exported: bool = False


def _polygraphy(*told: str) -> Callable[[Pair], list[list[str]]]:
    def commands(pair: Pair) -> list[list[str]]:
        inputs, outputs = str(pair.folder / "in.json"), str(pair.folder / "out.json")
        first = [
            "polygraphy",
            "run",
            str(pair.original),
            "--onnxrt",
            "--save-inputs",
            inputs,
            "--save-outputs",
            outputs,
        ]
        then = ["polygraphy", "run", str(pair.other), "--onnxrt", "--load-inputs", inputs, "--load-outputs", outputs]
        return [[*first, *told], then]

    return commands


def _onnxsim(pair: Pair) -> list[list[str]]:
    shapes = [f"{name}:1,{TOKENS}" for name in ("input_ids", "attention_mask")]
    driver = ["python", str(HERE / "patched_onnxsim.py"), str(pair.other)]
    return [[*driver, str(pair.original), str(pair.out), "3", "--test-input-shape", *shapes]]


def _onnxslim(*told: str) -> Callable[[Pair], list[list[str]]]:
    driver = ["python", str(HERE / "patched_onnxslim.py")]
    return lambda pair: [[*driver, str(pair.other), str(pair.original), str(pair.out), "--model-check", *told]]


def _parity(pair: Pair) -> list[list[str]]:
    files = [str(pair.original), str(pair.other)]
    return [["python", str(HERE / "ort_parity.py"), *files, str(VOCABULARY), str(TOKENS)]]


def _optimum(pair: Pair) -> list[list[str]]:
    change = "same" if pair.other == pair.original else pair.other.stem
    return [["python", str(HERE / "patched_optimum.py"), change, str(pair.folder)]]


def _olive(pair: Pair) -> list[list[str]]:
    """Olive's check of a model against the PyTorch model that it was exported from, which lies beside the original.

    It takes architectures whose names contain ForCausalLM; GPT-2's does not, so the copy's configuration is renamed.
    """
    reference = pair.folder / "reference"
    shutil.copytree(pair.original.parent / "reference", reference)
    named = (reference / "config.json").read_text(encoding="utf-8")
    (reference / "config.json").write_text(named.replace("GPT2LMHeadModel", "GPT2ForCausalLM"), encoding="utf-8")
    check = {"type": "OnnxDiscrepancyCheck", "reference_model_path": str(reference), "max_mae": 1e-3}
    return [["olive", "run", "--config", str(workflow(pair.folder, pair.other, check))]]


def workflow(folder: Path, model: Path, step: Mapping[str, Any]) -> Path:
    """Write an Olive workflow of one pass, whose output is `folder`/made."""
    content = {
        "input_model": {"type": "ONNXModel", "model_path": str(model)},
        "passes": {"step": step},
        "output_dir": str(folder / "made"),
        "cache_dir": str(folder / "cache"),
        "no_artifacts": True,
    }
    path = folder / "workflow.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


_SHAPES = [f"{name}:[2,{TOKENS}]" for name in ("input_ids", "attention_mask")]
_RANGES = [f"input_ids:[0,{VOCABULARY - 1}]", "attention_mask:[1,1]"]

JUDGES: dict[str, Judge] = {
    "rewrite": Judge(
        "rewrite validate",
        "rewrite",
        "every input, by a certificate; 3 are run",
        "bounds that are proved; 16 times the original's own rounding",
        lambda pair: [["rewrite", "validate", str(pair.original), str(pair.other)]],
    ),
    "polygraphy": Judge("Polygraphy", "polygraphy", "1, of one token", "atol = rtol = 1e-5", _polygraphy()),
    "polygraphy-told": Judge(
        "Polygraphy, told shapes and ranges",
        "polygraphy",
        f"1, of 2 × {TOKENS} tokens, all token numbers possible",
        "atol = rtol = 1e-5",
        _polygraphy("--input-shapes", *_SHAPES, "--val-range", *_RANGES),
    ),
    "onnxsim": Judge(
        "onnxsim, check_n = 3",
        "onnxsim",
        f"3, of 1 × {TOKENS} tokens, each of them 0, under a mask of 0",
        "atol 1e-5, rtol 1e-4",
        _onnxsim,
        writes=OUT,
    ),
    "onnxslim": Judge(
        "onnxslim --model-check",
        "onnxslim",
        "1, of one token",
        "atol 1e-4, rtol 1e-3",
        _onnxslim(),
        says="mismatch after slimming",
        writes=OUT,
    ),
    "onnxslim-told": Judge(
        "onnxslim --model-check, told shapes",
        "onnxslim",
        f"1, of 1 × {TOKENS} tokens, token numbers below 10",
        "atol 1e-4, rtol 1e-3",
        _onnxslim("--model-check-inputs", *(f"{name}:1,{TOKENS}" for name in ("input_ids", "attention_mask"))),
        says="mismatch after slimming",
        writes=OUT,
    ),
    "parity": Judge(
        "onnxruntime, compare_bert_results",
        "onnxruntime",
        f"100, of up to {TOKENS} tokens",
        "atol 1e-4, rtol 1e-3",
        _parity,
    ),
    "optimum": Judge(
        "optimum, export",
        "optimum",
        "1, of 2 × 16 tokens, all token numbers possible",
        "atol 1e-5, rtol 1e-5, against PyTorch",
        _optimum,
        says="The ONNX export succeeded with the warning",
        writes="model.onnx",
    ),
    "olive": Judge(
        "Olive, OnnxDiscrepancyCheck",
        "olive",
        "1, of one token",
        "none unless given; here 1e-3, against PyTorch",
        _olive,
        says="discrepancy check failed",
        writes="made/model.onnx",
        exported=True,
    ),
}


def ask(judge: Judge, environments: Mapping[str, Path], pair: Pair) -> dict[str, Any]:
    """What a tool says of one pair.

    Returns:
        caught: whether it objects; status: its exit status; file: whether it left a model (None if it makes none);
        last_line: of what it printed.
    """
    *before, last = judge.commands(pair)
    programs = environments[judge.tool]
    for command in before:
        done = run([str(programs / command[0]), *command[1:]], pair.folder)
        if done.status:
            raise RuntimeError(f"{judge.title}: {done.output[-2000:]}")
    done = run([str(programs / last[0]), *last[1:]], pair.folder)
    caught = judge.says in done.output if judge.says else done.status != 0
    if done.traceback and not (judge.says and caught):  # a crash is not a verdict
        raise RuntimeError(f"{judge.title} did not judge: {done.output[-2000:]}")
    return {
        "caught": caught,
        "status": done.status,
        "file": (pair.folder / judge.writes).exists() if judge.writes else None,
        "last_line": done.last_line,
    }
