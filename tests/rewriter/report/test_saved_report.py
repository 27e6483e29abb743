"""A saved report is read back as it was, and whatever is not one ends in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewriter.cli import run
from rewriter.errors import UsageError
from rewriter.report.html import render
from rewriter.report.report import Report
from rewriter.report.saved import read_report
from tests.rewriter.report.html.samples import REPORTS

FEW = ("gelu", "failed", "left", "hostile")


@pytest.mark.parametrize(
    "name", [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in REPORTS]
)
def test_the_page_is_that_of_the_report(name: str, tmp_path: Path) -> None:
    """Without what is not in the JSON: the drawings of programs and the accounting."""
    report: Report = REPORTS[name]()
    report.write(tmp_path / "report.json")
    found = read_report(tmp_path / "report.json")
    assert found.to_json() == report.to_json()
    # What is infinite or not a number is null in JSON.
    if "null" not in json.dumps(report.to_json()["validation"]):
        seconds = {step: round(value, 6) for step, value in report.seconds.items()}  # as the JSON has them
        assert render(found) == render(replace(report, details=None, seconds=seconds))


def saved() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(REPORTS["gelu"]().to_json()))
    return made


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        here: Any = data
        for step in path[:-1]:
            here = here[step]
        here[path[-1]] = value

    return change


def instead(**entries: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data.clear()
        data.update(entries)

    return change


def without_bins(data: dict[str, Any]) -> None:
    outputs = data["validation"]["providers"]["cpu"]["outputs"]
    outputs[next(iter(outputs))]["ulps"] = [1, 2]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "version": (put("version", value=2), "has version 2"),
    "a version that is true": (put("version", value=True), "has version True"),
    "no blocks": (lambda data: data.pop("blocks"), "not a report of"),
    "a comparison": (instead(same=True), "a comparison, which has no page"),
    "a folder": (instead(models={}), "but of a folder"),
    "text for a number": (put("blocks", 0, "heads", value="<script>"), "not a sound report"),
    "a list for a block": (put("blocks", 0, value=[]), "not a BlockRow"),
    "an unknown status": (put("blocks", 0, "status", value="maybe"), "not a sound report"),
    "converted without a program": (put("blocks", 0, "program", value=None), "lacks what a block"),
    "negative": (put("bytes", "before", value=-1), "bytes is out of range"),
    "a negative error": (put("blocks", 0, "max_error", value=-0.5), "max_error is -0.5"),
    "an exit status of errors": (put("exit_status", value=4), "never has exit status 4"),
    "no exit status at all": (put("exit_status", value=99), "99"),
    "passed and failed": (put("exit_status", value=1), "contradict"),
    "no shape": (put("operators", value=None), "not a sound report"),
    "half a proof": (put("validation", value={"passed": True}), "Validation has other fields"),
    "another histogram": (without_bins, "bins"),
    "a huge number": (put("nodes", "before", value=10**400), "not a sound report"),
    "options that are none": (put("options", value=7), "not a sound report"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_report(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = WRONG[name]
    data = saved()
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data), encoding="utf-8")
    assert run(["page", str(tmp_path / "report.json"), "-o", str(tmp_path / "page.html")]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"version": NaN}', "is not JSON"),
        (b"7", "not a report"),
        (b"null", "not a report"),
        (b'{"version": 1}', "not a report"),
        (b'"' + b"x" * 10_000, "is not JSON"),
    ],
)
def test_what_is_no_json(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_report(path)
    assert len(str(caught.value)) < 500


def test_further_fields_are_left_out(tmp_path: Path) -> None:
    """As the contract of the JSON says."""
    data = saved()
    data["further"] = data["blocks"][0]["further"] = 1
    del data["estimate"]
    (tmp_path / "report.json").write_text(json.dumps(data), encoding="utf-8")
    assert read_report(tmp_path / "report.json").blocks == REPORTS["gelu"]().blocks
