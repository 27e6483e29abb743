"""`python -m benchmarks all`: rows, resuming, the page, the comparison with committed ratios; no times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks.__main__ import main
from benchmarks.common import write_json
from benchmarks.decoder import Shape
from benchmarks.performance import measure, run
from benchmarks.performance.check import losses
from benchmarks.performance.subjects import Subject
from rewriter import bench
from tests.benchmarks.conftest import draws
from tests.conftest import slow

TINY = Shape(layers=1, width=16, hidden=32, heads=2, vocabulary=50, positions=64)
FEW = (
    Subject("one", "the first", TINY, tokens=(3, 5), halves=(False, True)),
    Subject("two", "the second", replace(TINY, activation="mish"), tokens=(5,), halves=(False,), group="unfused"),
)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SUBJECTS", FEW)
    monkeypatch.setattr("benchmarks.performance.page.SUBJECTS", FEW)
    monkeypatch.setattr("rewriter.timing.measure.measure.__kwdefaults__", {"seconds": 0.0})


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["all", "--repeat", "3", "--threads", "1", *arguments])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / "benchmarks" / "results" / "performance.json").read_text(encoding="utf-8"))
    return list(content["rows"])


@draws
@slow
def test_a_run_and_its_page(tmp_path: Path) -> None:
    result = invoke("--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    expected = [("one", kind, tokens) for kind in ("float32", "float16") for tokens in (3, 5)] + [("two", "float32", 5)]
    assert [(row["model"], row["type"], row["tokens"]) for row in rows_of(tmp_path)] == expected
    assert all(row["blocks"] == 1 and row["kinds"]["rewritten"] for row in rows_of(tmp_path))
    text = (tmp_path / "docs" / "performance.md").read_text(encoding="utf-8")
    assert text.count("| `one` | float16 | 3, 5 |") == 1
    assert "- `two`: the second" in text
    assert (tmp_path / "docs" / "figures" / "performance.svg").stat().st_size > 1000


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The lengths that are measured; at an entry of None the run is interrupted."""
    found: list[int | None] = []

    def logged(*models: Any, **options: Any) -> Any:
        if None in found:
            raise KeyboardInterrupt
        found.append(options["tokens"])
        return bench(*models, **options)

    monkeypatch.setattr(measure, "bench", logged)
    return found


@slow
def test_a_run_goes_on(tmp_path: Path, log: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written one by one, and measured once."""
    arguments = ("--out", str(tmp_path), "--type", "float32", "--only", "one", "--no-page")
    written: list[Path] = []

    def interrupted(path: Path, *content: Any) -> None:
        write_json(path, *content)
        written.append(path)
        log.extend([None] * (len(written) == 1))

    monkeypatch.setattr(measure, "write_json", interrupted)
    assert invoke(*arguments).exit_code == 1
    assert [row["tokens"] for row in rows_of(tmp_path)] == [3]
    for further, expected in (((), [5]), (("--fresh",), [3, 5]), (("--repeat", "4"), [3, 5])):
        log.clear()
        assert invoke(*arguments, *further).exit_code == 0
        assert log == expected, further
        assert [row["tokens"] for row in rows_of(tmp_path)] == [3, 5]
    assert not (tmp_path / "docs").exists()


def row(ratio: float, control: float = 1.0, **names: Any) -> dict[str, Any]:
    named = {"model": "one", "type": "float32", "tokens": 3, "layers": 1, **names}
    return {**named, "rewritten": {"paired": ratio}, "control": {"paired": control}}


def test_losses() -> None:
    committed = [row(1.0), row(2.0, tokens=5)]
    assert list(losses(committed, [row(1.29), row(2.59, tokens=5), row(9.0, tokens=7)])) == []
    assert list(losses(committed, [row(1.31)])) == [
        "one float32, 3 tokens, 1 layers: 1.31 times the original, committed is 1.00 (control 1.00)"
    ]
    assert list(losses(committed, [row(1.5, control=1.2)])) == [], "the original itself is 20 % off"
    assert len(list(losses(committed, [row(1.5, control=0.5)]))) == 1, "a low control excuses nothing"


@slow
def test_check(tmp_path: Path, log: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    committed = tmp_path / "committed.json"
    monkeypatch.setattr(run, "COMMITTED", committed)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    arguments = ("--out", str(tmp_path / "out"), "--check", "--only", "two")
    assert "nothing to compare" in invoke(*arguments).output
    for ratio, status in ((1e9, 0), (1e-9, 1)):
        rows = [row(ratio, model="two", tokens=5)]
        committed.write_text(json.dumps({"rows": rows}), encoding="utf-8")
        before = committed.read_text(encoding="utf-8")
        result = invoke(*arguments)
        assert result.exit_code == status, result.output
        assert committed.read_text(encoding="utf-8") == before
    assert log == [5, 5, 5], "what an earlier check measured is measured again"
    assert "1 of 1 ratios are more than 30 % above" in result.output
