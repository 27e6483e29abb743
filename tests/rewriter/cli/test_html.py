"""`rewrite --html FILE`: the page beside the tables."""

import sys
from pathlib import Path

import pytest

from rewriter.cli import run
from tests.cases import names
from tests.conftest import Ran


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
