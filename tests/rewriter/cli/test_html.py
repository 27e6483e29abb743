"""`rewrite --html FILE`: the page beside the tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from rewriter.cli import run
from tests.cases import names
from tests.rewriter.report.html.samples import failed
from tests.textmodels import SILU, mlp


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, with model.onnx in it."""
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(SILU), tmp_path / "model.onnx")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "verdict"),
    [
        (["-o", "out.onnx"], 0, "Passed: model.onnx"),
        (["-o", "out.onnx", "--no-validate"], 0, "Not proved: model.onnx"),
        (["--dry-run"], 0, "Planned: model.onnx"),
        (["-o", "out.onnx", "--skip", "*"], 3, "Nothing to convert: model.onnx"),
    ],
)
def test_page(arguments: list[str], status: int, verdict: str, room: Path) -> None:
    assert run(["model.onnx", *arguments, "-q", "--html", "page.html"]) == status
    text = (room / "page.html").read_text(encoding="utf-8")
    assert f"<title>{verdict}</title>" in text
    assert ("<caption>Blocks to attention heads" in text) is (status == 0)
    assert names(room) <= {"model.onnx", "out.onnx", "page.html"}


def test_failed_proof_leaves_a_page_and_no_model(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = failed()
    monkeypatch.setattr("rewriter.rewrite", lambda *_arguments, **_options: report)
    assert run(["model.onnx", "-o", "out.onnx", "-q", "--html", "page.html"]) == 1
    assert "<title>Failed: " in (room / "page.html").read_text(encoding="utf-8")
    assert names(room) == {"model.onnx", "page.html"}


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("missing/page.html", "does not exist; create it first"),
        ("model.onnx", "would replace another file"),
        ("./out.onnx", "would replace another file"),
        ("notes.txt", "is not a .html file; remove it"),
        ("folder", "is not a .html file"),
        ("page.html", "would replace another file"),
    ],
)
def test_paths_are_checked_before_the_work(
    page: str, message: str, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (room / "notes.txt").write_text("mine")
    (room / "folder").mkdir()
    assert run(["model.onnx", "-o", "out.onnx", "--report", "page.html", "--html", page]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert names(room) == {"model.onnx", "notes.txt", "folder"}
    assert (room / "notes.txt").read_text() == "mine"


def test_without_jinja_nothing_starts(
    room: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert run(["model.onnx", "-o", "out.onnx", "--html", "page.html"]) == 2
    assert capsys.readouterr().err == (
        "rewrite: a page needs jinja2, which is not installed; run: pip install 'attnonly[report]'\n"
    )
    assert names(room) == {"model.onnx"}
    assert run(["model.onnx", "-o", "out.onnx", "-q", "--report", "report.json"]) == 0, "nothing else needs it"


def test_link_is_replaced_and_not_followed(room: Path) -> None:
    target = room / "model.onnx"
    before = target.read_bytes()
    (room / "page.html").symlink_to(target)
    assert run(["model.onnx", "-o", "out.onnx", "-q", "--html", "page.html"]) == 0
    assert target.read_bytes() == before
    assert not (room / "page.html").is_symlink()


def test_no_page_no_jinja() -> None:
    code = (
        "import sys; from rewriter import rewrite; from rewriter.cli import run; import rewriter.api; "
        "print('jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
