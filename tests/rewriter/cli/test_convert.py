"""The plain command: exit statuses, options, and what a person sees."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import onnxruntime
import pytest

from rewriter import ort, rewrite
from rewriter.cli import COMMANDS, run
from rewriter.cli.models import convert
from tests.cases import names, plant
from tests.changes import change_values, weight
from tests.committed import FOLDER
from tests.conftest import Ran
from tests.rewriter.report.test_schemas import SCHEMAS
from tests.textmodels import SILU, mlp


def last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def test_0_converted(folder: Path, ran: Ran) -> None:
    out, err = ran(0, ["model.onnx", "-o", "out.onnx", "-v"])
    assert names(folder) == {"model.onnx", "out.onnx"}
    assert err == ""
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    for part in (
        "Blocks to attention heads, form local",
        "MatMul 4x8",
        "silu",
        "exact",
        "Operators",
        "nodes",
        "seconds",
    ):
        assert part in out
    assert re.search(r"Sigmoid\s+1\s+0\s+-1", out)
    assert re.search(r"out +\d\.\de-\d\d", out)
    assert re.fullmatch(
        r"PASSED  1 block, read as 8 attention heads, certified for every input, run on .*; written to out\.onnx in .*",
        last_line(out),
    )


@pytest.mark.slow
def test_1_proof_failed(folder: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda model: change_values(weight(model, "*/heads/key"), "v.flat[0] *= 1.001"))
    (folder / "out.onnx").write_bytes(b"precious")
    out = ran(1, ["model.onnx", "-o", "out.onnx", "--report", "report.json", "--html", "p.html", "--force"]).out
    assert (folder / "out.onnx").read_bytes() == b"precious"
    assert names(folder) == {"model.onnx", "out.onnx", "report.json", "p.html"}
    assert "<title>Failed: " in (folder / "p.html").read_text(encoding="utf-8")
    assert "mlp: refuted: " in out.replace("\n", " ")
    assert last_line(out) == "FAILED  1 block, read as 8 attention heads: refuted, nothing was written"
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(report, SCHEMAS["report"])
    assert (report["exit_status"], report["output"], report["validation"]["passed"]) == (1, "", False)
    assert last_line(ran(0, ["model.onnx", "-o", "unproved.onnx", "--no-validate"]).out).startswith(
        "NOT PROVED  1 block, read as 8 attention heads, written to unproved"
    )


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a model was run")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)


@pytest.mark.usefixtures("nothing_runs")
def test_certificate_only(folder: Path, ran: Ran) -> None:
    """Proved, not run, and every report says so; also where no runtime has an operator."""
    onnx.save(mlp(SILU, second="second = MatMul(h, W2) out = own.Unknown(second)", domains={"own": 1}), "custom.onnx")
    for model in ("model.onnx", "custom.onnx"):
        told = ["--report", "r.json", "--html", "p.html", "--certificate", "c.json"]
        out = ran(0, [model, "-o", "out.onnx", "--certificate-only", "--force", *told]).out
        last = (
            "CERTIFIED  1 block, read as 8 attention heads, certified for every input, not run; written to out.onnx in "
        )
        assert last_line(out).startswith(last)
        report = json.loads((folder / "r.json").read_text(encoding="utf-8"))
        jsonschema.validate(report, SCHEMAS["report"])
        assert (report["validation"]["providers"], report["validation"]["cases"]) == ({}, [])
        for text in (out.replace("\n", " "), report["validation"]["notes"][0], (folder / "p.html").read_text("utf-8")):
            assert "neither model was run" in text
        assert run(["certify", model, "out.onnx", "--check", "c.json"]) == 0


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--form", "whole"], 0, "CERTIFIED"),
        (["--no-validate"], 0, "NOT PROVED"),
        (["--dry-run"], 0, "PLANNED"),
        (["--inputs", "in.npz"], 2, "--certificate-only runs no model: leave out --inputs, --provider and --dim"),
        (["--provider", "cpu"], 2, "--certificate-only runs no model"),
        (["--dim", "batch=2"], 2, "--certificate-only runs no model"),
    ],
)
def test_certificate_only_with_other_options(
    arguments: list[str], status: int, message: str, folder: Path, ran: Ran
) -> None:
    printed = ran(status, ["model.onnx", "-o", "out.onnx", "--certificate-only", *arguments])
    assert message in " ".join("".join(printed).split())
    assert (folder / "out.onnx").exists() is (status == 0 and "--dry-run" not in arguments)


@pytest.mark.usefixtures("nothing_runs")
def test_certificate_only_measures_nothing(folder: Path, ran: Ran) -> None:
    onnx.save(mlp("s = Sin(y) h = Mul(s, y)"), "odd.onnx")
    assert "--option domain=R" in " ".join(ran(3, ["odd.onnx", "-o", "out.onnx", "--certificate-only"]).out.split())
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, lambda model: change_values(weight(model, "*/heads/key"), "v.flat[0] *= 1.001"))
        out = ran(1, ["model.onnx", "-o", "out.onnx", "--certificate-only"]).out
    assert "mlp: refuted" in " ".join(out.split())
    assert not (folder / "out.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.onnx"], "where should the result go? give -o OUT, or --dry-run to see the plan only"),
        (["--dry-run"], "Missing argument 'MODEL'"),
        (["insepct", "model.onnx"], "no command or file 'insepct'; did you mean 'rewrite inspect'?"),
        (["model.onnx", "out.onnx"], "did you mean 'rewrite model.onnx -o out.onnx'?"),
        (["model.onnx", "-o", "out.json"], "'out.json' would be an ONNX model under another kind of name"),
        (["model.onnx", "-o", "-"], "models are read from files and written to files"),
        (["model.onnx", "-o", "out.onnx", "--colour"], "No such option"),
        (["model.onnx", "-o", "out.onnx", "--form", "spiral"], "'spiral' is not"),
        (["model.onnx", "-o", "out.onnx", "--provider", "tpu"], "unknown execution provider 'tpu'"),
        (["model.onnx", "-o", "out.onnx", "--dim", "tokens"], "'tokens' is not NAME=VALUE with a value of at least 1"),
        (["model.onnx", "-o", "out.onnx", "--dim", "tokens=0"], "'tokens=0' is not NAME=VALUE"),
        (["model.onnx", "-o", "out.onnx", "--dim", "tokens=٣"], "is not NAME=VALUE"),
        (["model.onnx", "-o", "out.onnx", "--dim", "width=3"], "width"),
        (["model.onnx", "-o", "out.onnx", "--option", "seed=-1"], "seed is -1; it must be an integer of at least 0"),
        (["model.onnx", "-o", "out.onnx", "--inputs", "no.npz"], "no.npz: no such file"),
        (["model.onnx", "-o", "model.onnx"], "'model.onnx' is the input itself, which is never overwritten"),
        (["model.onnx", "-o", "model.onnx", "--force"], "'model.onnx' is the input itself, which is never overwritten"),
        (["model.onnx", "-o", "./sub/../model.onnx"], "does not exist"),
        (["model.onnx", "-o", "nowhere/out.onnx"], "does not exist"),
        (["model.onnx", "-o", "."], "is a directory"),
        (["model.onnx", "other.onnx", "-o", "out.onnx"], "unexpected extra argument"),
        (["model.onnx", "-o", "link.onnx", "--force"], "is a symbolic link"),
        (["model.onnx", "-o", "old.onnx"], "'old.onnx' exists; pass --force to replace it"),
        (["model.onnx", "-o", "out.onnx", "--inputs", "mine.npz"], "input 'x' has shape [1, 1, 5], the model takes"),
    ],
)
def test_2_usage(folder: Path, arguments: list[str], message: str, ran: Ran) -> None:
    before = (folder / "model.onnx").read_bytes()
    (folder / "link.onnx").symlink_to("target.onnx")
    np.savez("mine.npz", x=np.ones((1, 1, 5), np.float32))
    (folder / "old.onnx").write_bytes(b"precious")
    printed = ran(2, arguments)
    assert printed.out == ""
    assert message in printed.refusal
    assert names(folder) == {"model.onnx", "link.onnx", "mine.npz", "old.onnx"}
    assert (folder / "model.onnx").read_bytes() == before


@pytest.mark.parametrize("option", ["--report", "--html", "--certificate"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/PAGE", "does not exist; create it first"),
        ("model.onnx", "would replace another file"),
        ("./out.onnx", "would replace another file"),
        ("notes.txt", "file; remove it"),
        ("folder", "exists and is not a ."),
    ],
)
def test_paths_are_checked_before_the_work(option: str, path: str, message: str, folder: Path, ran: Ran) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "folder").mkdir()
    out, err = ran(2, ["model.onnx", "-o", "out.onnx", option, path])
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert names(folder) == {"model.onnx", "notes.txt", "folder"}
    assert (folder / "notes.txt").read_text() == "mine"


def test_without_jinja_nothing_starts(folder: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert ran(2, ["model.onnx", "-o", "out.onnx", "--html", "page.html"]).err == (
        "rewrite: a page needs jinja2, which is not installed; run: pip install 'attnonly[report]'\n"
    )
    assert names(folder) == {"model.onnx"}
    assert run(["model.onnx", "-o", "out.onnx", "-q", "--report", "report.json"]) == 0, "nothing else needs it"


def test_3_nothing_to_convert(folder: Path, ran: Ran) -> None:
    onnx.save(mlp("r = Relu(y) h = Sin(r)"), folder / "model.onnx")
    out = ran(3, ["model.onnx", "-o", "out.onnx", "--report", "report.json", "--option", "fit=false"]).out
    assert names(folder) == {"model.onnx", "report.json"}
    assert "no known activation; the nearest" in out
    assert re.fullmatch(r"NOTHING TO CONVERT  in \S*model\.onnx: 1 candidate left", last_line(out))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(report, SCHEMAS["report"])
    assert (report["exit_status"], report["validation"], report["after"]) == (3, None, None)


@pytest.mark.parametrize("name", ["nowhere.onnx", "/dev/null", "model.onnx"])
def test_4_unreadable(folder: Path, name: str, ran: Ran) -> None:
    (folder / "model.onnx").write_bytes(mlp(SILU).SerializeToString()[:-3])
    out, err = ran(4, [name, "-o", "out.onnx"])
    assert (out, len(err.splitlines()), err[:9]) == ("", 1, "rewrite: ")
    assert names(folder) == {"model.onnx"}


def test_5_no_such_provider(folder: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "_obstacle", lambda known: None if known.name == "cpu" else "no driver here")
    said = "rewrite: execution provider 'cuda' is not available: no driver here\n"
    assert ran(5, ["model.onnx", "-o", "out.onnx", "--provider", "cuda"]).err == said
    assert names(folder) == {"model.onnx"}
    out, err = ran(0, ["model.onnx", "-o", "out.onnx", "--provider", "cpu", "-q"])
    assert (out.count("\n"), out[:6], err) == (1, "PASSED", ""), "-q prints one line"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt, 130, "rewrite: interrupted; no half-written file is left\n"),
        (MemoryError, 1, "rewrite: out of memory; try --certificate-only"),
    ],
)
def test_what_ends_a_run_while_the_saved_file_is_proved(
    error: type[BaseException], status: int, said: str, folder: Path, ran: Ran
) -> None:
    def ended(*_: Any, **__: Any) -> None:
        assert any(path.name.startswith(".rewrite-") for path in folder.iterdir())
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{rewrite.__module__}.Judge", ended)
        assert ran(status, ["model.onnx", "-o", "out.onnx"]).err.lstrip().startswith(said)
    assert names(folder) == {"model.onnx"}


def test_progress_on_a_terminal(folder: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = ran(0, ["model.onnx", "-o", "out.onnx"]).err
    assert "running the" in shown  # the last step, which stays until the bar is taken away
    assert ran(0, ["model.onnx", "-o", "out.onnx", "--force", "-q"]).err == ""


def test_own_inputs(folder: Path, ran: Ran) -> None:
    np.savez("mine.npz", **{"short/x": np.ones((1, 1, 4), np.float32), "long/x": np.ones((2, 9, 4), np.float32)})  # type: ignore[arg-type]
    out = ran(0, ["model.onnx", "-o", "out.onnx", "--inputs", "mine.npz", "-v"]).out
    assert "Inputs of the proof:\n  short\n  long\n" in out
    out = ran(0, ["model.onnx", "-o", "out.onnx", "--force", "--dim", "tokens=5", "--dim", "batch=2", "-v"]).out
    assert re.search(r"Inputs of the proof:\n  .*values 1\n  .*values 2\n", out)


@pytest.mark.slow
def test_inputs_that_the_model_rejects(folder: Path, ran: Ran) -> None:
    """Some of them are one line, with the reasons behind -v; all of them are a usage error that names the token."""
    ids, mask = np.array([[1, 2, 99_999]]), np.ones((1, 3), np.int64)
    good = {"good/input_ids": np.minimum(ids, 3), "good/attention_mask": mask}
    bad: dict[str, Any] = {"bad/input_ids": ids, "bad/attention_mask": mask}
    np.savez("some.npz", **bad, **good)
    np.savez("all.npz", **bad)
    model = str(FOLDER / "silu-decoder.onnx")
    reason = "input 'input_ids' holds 99999, and the table that Gather '/model/transformer/wte/Gather' reads has 128 "
    out = ran(0, [model, "-o", "out.onnx", "--inputs", "some.npz"]).out
    assert "1 of 2 inputs skipped, which the original rejects (bad); -v says why" in out
    assert "99999" not in out
    out = ran(0, ["validate", model, "out.onnx", "--inputs", "some.npz", "-v"]).out
    assert f"input skipped, because the original rejects it: bad: {reason}" in out
    error = ran(2, [model, "-o", "new.onnx", "--inputs", "all.npz"]).err
    assert f"all.npz: the original model runs on none of these inputs: bad: {reason}" in error


def test_version_and_help(ran: Ran) -> None:
    assert re.match(
        r"rewrite \S+ \(onnx \S+, onnxruntime \S+, onnx-graphsurgeon \S+, numpy \S+\)\n", ran(0, ["--version"]).out
    )
    text = ran(0, ["--help"]).out
    for status, meaning in enumerate(("converted", "the proof failed", "usage", "nothing to convert", "the model is")):
        assert re.search(rf"{status} +{meaning}", text)
    assert re.search("5 +an execution provider is not available", text)
    assert "--scope" not in text
    assert "--scope" in ran(0, ["--help-all"]).out


def test_help_names_every_command_in_80_columns() -> None:
    sections = [part.partition("\n\n")[0] for part in (convert.epilog or "").split("Commands for ")[1:]]
    listed = [line.split()[0] for part in sections for line in part.splitlines()[1:]]
    assert sorted(listed) == sorted(COMMANDS)
    assert max(map(len, (convert.epilog or "").splitlines())) <= 78


@pytest.mark.parametrize("command", sorted(COMMANDS)[::4])
def test_model_called_like_a_subcommand(folder: Path, command: str, ran: Ran) -> None:
    (folder / command).write_bytes((folder / "model.onnx").read_bytes())
    assert ran(0, [f"./{command}", "-o", "out.onnx", "-q", "--no-validate"]).out.startswith("NOT PROVED  1 block")


def test_help_needs_no_heavy_imports() -> None:
    code = (
        "import sys; from rewriter.cli import run; run(['--help']); "
        "heavy = ('onnxruntime', 'onnx', 'numpy', 'passes.plan', 'torch', 'rich'); "
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
