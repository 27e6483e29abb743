"""`--tune`: the fastest way is taken if it is faster by more than the margin; the file is proved like any other."""

from __future__ import annotations

import json
from typing import Any

import onnx
import pytest

from benchmarks.common import RESULTS
from passes.options import WAYS
from passes.tuning import ORIGINAL, Sample
from rewriter import ExitStatus, Report, UsageError, rewrite
from rewriter.api.timing import tuning
from tests.textmodels import ERF_GELU, SILU, mlp

USUAL, FEW, SOFTMAX = WAYS


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({USUAL: [1.0, 2.0], FEW: [2.0, 4.0]}, USUAL),
        ({USUAL: [1.0, 2.0], FEW: [0.9, 1.8]}, FEW),
        ({USUAL: [1.0, 2.0], FEW: [0.98, 1.96]}, USUAL),  # within the margin
        ({USUAL: [1.0, 1.0], FEW: [0.5, 1.9]}, USUAL),  # the mean is geometric: 0.975
        ({USUAL: [1.0, 1.0], FEW: [0.5, 1.8]}, FEW),
        ({USUAL: [1.0, 2.0], FEW: [0.9, 1.8], SOFTMAX: [0.8, 1.7]}, SOFTMAX),
    ],
)
def test_fastest(times: dict[str, list[float]], chosen: str) -> None:
    assert tuning.fastest({ORIGINAL: [0.1, 0.1], **times}) == chosen


def told(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[tuple[str, str]]:
    """Give these times instead of measured ones; returns what is timed, and on which provider."""
    asked: list[tuple[str, str]] = []

    def timed(sample: Sample, provider: str) -> dict[str, list[float]]:
        asked.append((sample.kind, provider))
        return {name: [seconds[name]] * len(tuning.TOKENS) for name in sample.models}

    monkeypatch.setattr(tuning, "timed", timed)
    return asked


def graph_of(report: Report) -> onnx.GraphProto:
    assert isinstance(report.rewritten, onnx.ModelProto)
    return report.rewritten.graph


def test_another_way_is_written_proved_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = told(monkeypatch, {ORIGINAL: 1.0, USUAL: 2.0, FEW: 1.5})
    model = mlp(ERF_GELU)
    report = rewrite(model, tune=True, providers="cpu")
    assert report.exit_status is ExitStatus.CONVERTED
    assert asked == [("gelu, float, 8 neurons", "cpu")]
    assert (
        "--tune on cpu, 1 block of gelu, float, 8 neurons, times the original block: fewest operations 2.00, fewest "
        "keys 1.50; took fewest keys"
    ) in report.notes
    assert graph_of(report) == graph_of(rewrite(model, precision="double", providers="cpu"))
    assert graph_of(report) != graph_of(rewrite(model, providers="cpu"))


def test_the_default_stays_where_it_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, {ORIGINAL: 1.0, USUAL: 1.2, SOFTMAX: 9.0})
    model = mlp(SILU)
    report = rewrite(model, tune=True, providers="cpu")
    assert graph_of(report) == graph_of(rewrite(model, providers="cpu"))
    (note,) = report.notes
    assert note.endswith("operator Softmax 9.00; took fewest operations, the default")


def test_blocks_without_a_choice_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = told(monkeypatch, {})
    report = rewrite(mlp("r = Relu(y) h = Mul(r, r)"), tune=True, providers="cpu")
    assert (asked, report.exit_status) == ([], ExitStatus.CONVERTED)
    assert "--tune: no kind of block has more than one way of writing its heads" in report.notes


def test_it_really_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TOKENS", (4,))
    monkeypatch.setattr(tuning, "ROUNDS", 1)
    (note,) = rewrite(mlp(SILU), tune=True, providers="cpu", dry_run=True).notes
    assert note.startswith("--tune on cpu, 1 block of silu, float, 8 neurons, times the original block: fewest")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "masked"}, "--tune chooses among the ways of form local; form masked has only one"),
        ({"spelling": "softmax"}, "--tune chooses what --spelling fixes; give only one of them"),
        ({"precision": "double"}, "--tune chooses what --precision fixes; give only one of them"),
    ],
)
def test_options_that_leave_no_choice_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rewrite(mlp(SILU), tune=True, **options)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("ways-*.json")), ids=lambda path: path.stem)
def test_the_default_is_the_fastest_by_the_committed_measurements(path: Any) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert rows
    for row in rows:
        assert tuning.fastest(row["milliseconds"]) == USUAL, row["activation"]


def test_a_model_that_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, {ORIGINAL: 1.0, USUAL: 2.0, FEW: 1.5})
    model = mlp(ERF_GELU)
    before = onnx.ModelProto()
    before.CopyFrom(model)
    rewrite(model, tune=True, providers="cpu")
    assert model == before
