"""No wrong function passes: every sabotage fails the proof, leaves no file, and is blamed on its block.

A sample runs always, all with ATTNONLY_SLOW. `python -m tools.sabotage` tries single ones and writes the table.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter.errors import ExitStatus
from tests.changes import change_values, weight
from tests.sabotage.edits import patch
from tests.sabotage.harness import Attempt, SabotageError, attempt
from tests.sabotage.oracle import difference
from tests.sabotage.subjects import SMALL, Subject, on
from tests.sabotage.table import SAMPLE, TABLE, Expect, Sabotage
from tests.sabotage.trials import Trial, controls, tried
from tools.sabotage import BEGIN, END, write

ALL = bool(os.environ.get("ATTNONLY_SLOW"))
CHOSEN = TABLE if ALL else SAMPLE


def trials() -> Iterator[Any]:
    for sabotage in CHOSEN:
        for subject in sabotage.subjects:
            yield pytest.param(sabotage, subject, id=f"{sabotage.name}-{subject.name}")


@pytest.mark.parametrize(("sabotage", "subject"), list(trials()))
def test_sabotage_ends_as_it_must(sabotage: Sabotage, subject: Subject) -> None:
    trial = tried(sabotage, subject)
    assert trial.fault == "", trial.attempt.messages


CONTROLS = controls(TABLE) if ALL else on("silu", "relu6", "branches", "external")


@pytest.mark.parametrize("subject", CONTROLS, ids=lambda subject: subject.name)
def test_without_sabotage_it_passes(subject: Subject, tmp_path: Path) -> None:
    outcome = attempt(subject.path(tmp_path), subject.options, {})
    assert outcome.passed, outcome.messages
    assert "out.onnx" in outcome.left


# -- the table -------------------------------------------------------------------------------------------------------


def test_names_are_unique() -> None:
    names = [sabotage.name for sabotage in TABLE]
    assert len(names) == len(set(names)) > 200
    assert sum(len(sabotage.subjects) for sabotage in TABLE) >= 690


def test_every_sabotage_has_a_model_and_a_figure_where_it_is_harmless() -> None:
    for sabotage in TABLE:
        assert sabotage.subjects, sabotage.name
        assert (sabotage.expect is Expect.HARMLESS) is (sabotage.below > 0.0), sabotage.name


def test_the_page_has_totals_and_the_file_beside_it_the_rows(tmp_path: Path) -> None:
    sabotage = next(each for each in TABLE if each.expect is Expect.BLOCK)
    missed = Attempt(ExitStatus.CONVERTED, ("out.onnx",), (), ("block",), None, 1.25)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}\nafter {END}\n", encoding="utf-8")
    (tmp_path / "tables").mkdir()
    write(page, [Trial(sabotage, sabotage.subjects[0], missed, 0.5)])
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}| kind |")
    assert f"| all | {len(TABLE)} | 1 | 0 |" in text
    assert text.endswith(f"{END}\nafter {END}\n")
    with (tmp_path / "tables" / "sabotage.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["sabotage"], row["difference"], row["s"]) == (sabotage.name, "0.5", "1.2")
    assert row["ends with"].startswith("**")


# -- the suite itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_small_models_are_valid(name: str, tmp_path: Path) -> None:
    onnx.checker.check_model(Subject(name).path(tmp_path))


def test_an_edit_that_does_nothing_is_an_error(tmp_path: Path) -> None:
    (subject,) = on("silu")
    with pytest.raises(SabotageError, match="changed nothing"):
        attempt(subject.path(tmp_path), {}, patch("model", "model.ir_version += 0"))


def test_a_part_that_never_runs_is_an_error(tmp_path: Path) -> None:
    (subject,) = on("silu")
    with pytest.raises(SabotageError, match="serialise was never called"):
        attempt(subject.path(tmp_path), {"dry_run": True}, {"serialise": lambda right: right})


def test_a_sabotage_that_passes_is_a_fault(tmp_path: Path) -> None:
    """A multiplication by 1 is none, so the rewriter is right to let it pass, and the suite must say so."""
    trial = tried(Sabotage("none", patch("heads", "out = Mul(own, $1.0)"), on("silu")), *on("silu"))
    if trial.attempt.passed:
        assert trial.fault == "left out.onnx, and passed"


def test_a_message_must_name_the_block() -> None:
    negated = Sabotage("negated", patch("heads", "out = Neg(own)"), on("outputs"), block=1)
    assert tried(negated, *on("outputs")).fault == "no message names mlp_2"


def test_a_crash_is_a_fault() -> None:
    def crashing(_: Any) -> Any:
        def crash(*_: Any) -> Any:
            raise KeyError("h")

        return crash

    trial = tried(Sabotage("crash", {"made": crashing}, on("silu")), *on("silu"))
    assert trial.fault == "crashed: KeyError: 'h'"


def test_a_harmful_one_is_not_called_harmless() -> None:
    harmful = Sabotage("off", patch("heads", "out = Mul(own, $1.001)"), on("silu"), Expect.HARMLESS, below=1e-6)
    assert tried(harmful, *on("silu")).fault.startswith("not harmless: outputs differ by 0.001")


def test_the_oracle_measures(tmp_path: Path) -> None:
    (subject,) = on("silu")
    path = subject.path(tmp_path)
    model = onnx.load(path)
    assert difference(path, model.SerializeToString(), tmp_path) == 0.0
    change_values(weight(model, "W2"), "v *= 0.5")
    assert 0.4 < difference(path, model.SerializeToString(), tmp_path) < 0.6
