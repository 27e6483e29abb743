"""A folder: everything or nothing, and what is copied."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import ExitStatus, ModelError, UsageError, rewrite
from rewriter.errors import RewriteError
from tests.cases import names, plant
from tests.changes import change_values, weight
from tests.conftest import Ran
from tests.errors import EMITTED, apart
from tests.textmodels import SILU, mlp, text_model

FAST: dict[str, Any] = {"providers": "cpu"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """model.onnx with a block, onnx/plain.onnx without one and with external data, config.json, tokenizer/vocab.txt."""
    made = tmp_path / "in"
    (made / "onnx").mkdir(parents=True)
    (made / "tokenizer").mkdir()
    onnx.save(mlp(SILU), made / "model.onnx")
    plain = text_model("out = MatMul(x, w)", constants={"w": np.eye(4)})
    onnx.save(plain, made / "onnx" / "plain.onnx", save_as_external_data=True, location="plain.data", size_threshold=0)
    (made / "config.json").write_text("{}", encoding="utf-8")
    (made / "tokenizer" / "vocab.txt").write_text("a\n", encoding="utf-8")
    return made


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_all_models_and_all_files(folder: Path, ran: Ran) -> None:
    out = folder.with_name("out")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    text = ran(0, [str(folder), "-o", str(out), "--provider", "cpu"]).out
    assert text.splitlines()[-1] == f"PASSED  1 model, 1 block, read as 8 attention heads, written to {out}"
    assert "onnx/plain.onnx\ncopied    as is" in text
    assert ".rewrite-" not in text
    assert files(out) == files(folder) | {"attnonly-report.json"}
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert (out / "onnx" / "plain.data").read_bytes() == (folder / "onnx" / "plain.data").read_bytes()
    made = onnx.load(out / "model.onnx")
    assert "NeuronAttention" in {node.op_type for node in made.graph.node}
    assert apart(onnx.load(folder / "model.onnx"), made, []).exact <= EMITTED
    report = json.loads((out / "attnonly-report.json").read_text(encoding="utf-8"))
    assert (report["exit_status"], report["copied"]) == (0, ["config.json", "onnx/plain.data", "tokenizer/vocab.txt"])
    assert report["models"]["model.onnx"]["output"] == str(out / "model.onnx")


def test_what_is_left_in_a_folder_has_its_reason(folder: Path, ran: Ran) -> None:
    fused = text_model('out = com.microsoft.MoE(x, r, w, "", w)', domains={"com.microsoft": 1},
                       constants={"w": np.eye(4)},
                       inputs="float[tokens, 4] x, float[tokens, 3] r", outputs="float[tokens, 4] out")  # fmt: skip
    onnx.save(fused, folder / "onnx" / "plain.onnx")
    arguments = [str(folder), "-o", str(folder.with_name("out")), "--provider", "cpu", "--no-validate"]
    reason = "its experts are inside one operator, and its weights are not initializers of the shapes that it asks for"
    assert f"copied    as is: 1 candidate left: com.microsoft::MoE 'out': {reason}" in ran(0, arguments).out


def test_a_failed_proof_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda model: change_values(weight(model, "b2"), "v += 1e-2"))
    report = rewrite(folder, folder.with_name("out"), **FAST)
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.problems[0].startswith("model.onnx: ")
    assert names(folder.parent) == {"in"}


def _full(_source: Path, target: Path, **_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


def _no_models(folder: Path, _: object) -> None:
    for path in [*folder.rglob("*.onnx")]:
        path.unlink()


REFUSED: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], type[RewriteError], str]] = {
    "unreadable": (lambda it, _: (it / "zz.onnx").write_bytes(b"no model"), ModelError, r"'zz\.onnx': "),
    "a link": (lambda it, _: (it / "key").symlink_to("/etc/passwd"), UsageError, "is a link"),
    "no models": (_no_models, UsageError, r"no \.onnx file"),
    "a full disk": (
        lambda _, patch: patch.setattr("shutil.copyfile", _full),
        UsageError,
        r"^cannot write '.*/out': No space left on device; free some space",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_leaves_nothing(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, error, message = REFUSED[what]
    change(folder, monkeypatch)
    with pytest.raises(error, match=message):
        rewrite(folder, folder.with_name("out"), validate=False)
    assert names(folder.parent) == {"in"}


def test_nothing_to_convert(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    report = rewrite(folder, folder.with_name("out"), **FAST)
    assert report.exit_status is ExitStatus.NOTHING_TO_CONVERT
    assert names(folder.parent) == {"in"}


def test_data_that_two_models_share_is_kept(folder: Path) -> None:
    options: dict[str, Any] = {"save_as_external_data": True, "location": "shared.data", "size_threshold": 0}
    onnx.save(mlp(SILU), folder / "model.onnx", **options)
    shared = onnx.load(folder / "model.onnx", load_external_data=False)
    plain = text_model("out = MatMul(x, W1)", outputs="float[batch, tokens, 8] out")
    plain.graph.initializer[0].CopyFrom(weight(shared, "W1"))
    onnx.save(plain, folder / "other.onnx")
    out = folder.with_name("out")
    rewrite(folder, out, validate=False)
    assert files(out) == files(folder) | {"attnonly-report.json"}
    for name in ("model.onnx", "other.onnx"):
        assert apart(onnx.load(folder / name), onnx.load(out / name), []).exact <= EMITTED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "in"], "exists; a folder is never replaced"),
        (["-o", "in/out"], "would lie in the folder that is converted"),
        (["-o", "nowhere/out"], "does not exist; create it first"),
        (["-o", "-"], "models are read from files"),
        (["-o", "out", "--inputs", "x.npz"], "--inputs is for one model"),
        (["-o", "out", "--html", "x.html"], "--html is for one model"),
        (["-o", "out", "--force"], "--force is for one model"),
        ([], "where should the result go"),
    ],
)
def test_usage(folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    monkeypatch.chdir(folder.parent)
    np.savez("x.npz", x=np.zeros((1, 1, 4), np.float32))
    assert message in ran(2, ["in", *arguments]).refusal
    assert not (folder.parent / "out").exists()


def test_dry_run_writes_nothing(folder: Path) -> None:
    report = rewrite(folder, dry_run=True)
    assert report.summary.startswith("PLANNED  1 model, 1 block")
    assert names(folder.parent) == {"in"}


def test_a_folder_that_appears_meanwhile_is_not_replaced(folder: Path) -> None:
    out = folder.with_name("out")

    def progress(what: str, _done: int, _total: int) -> None:
        if "proving" in what:
            out.mkdir(exist_ok=True)

    with pytest.raises(UsageError, match="exists by now"):
        rewrite(folder, out, progress=progress, **FAST)
    assert names(folder.parent) == {"in", "out"}
    assert not list(out.iterdir())
