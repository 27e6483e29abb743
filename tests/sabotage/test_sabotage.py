"""No wrong function passes: every sabotage fails the proof, leaves no file, and is blamed on its block.

One of a sample runs always, the others of it are slow tests, and all run with ATTNONLY_SLOW.
`python -m tools.sabotage` tries single ones and writes the table.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sabotage.edits import patch
from tests.sabotage.harness import SabotageError, attempt
from tests.sabotage.subjects import Subject, on
from tests.sabotage.table import SAMPLE, TABLE, Expect, Sabotage
from tests.sabotage.trials import controls, tried

ALL = bool(os.environ.get("ATTNONLY_SLOW"))
LATER = {(sabotage.name, subject.name) for sabotage in SAMPLE[1:] for subject in sabotage.subjects}


def trials() -> Iterator[Any]:
    for sabotage in TABLE if ALL else SAMPLE:
        for subject in sabotage.subjects:
            slow = (sabotage.name, subject.name) in LATER
            name = f"{sabotage.name}-{subject.name}"
            yield pytest.param(sabotage, subject, id=name, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("sabotage", "subject"), list(trials()))
def test_sabotage_ends_as_it_must(sabotage: Sabotage, subject: Subject) -> None:
    trial = tried(sabotage, subject)
    assert trial.fault == "", trial.attempt.messages


CONTROLS = controls(TABLE) if ALL else on("silu", "branches", "external")


@pytest.mark.parametrize("subject", CONTROLS, ids=lambda subject: subject.name)
def test_without_sabotage_it_passes(subject: Subject, tmp_path: Path) -> None:
    outcome = attempt(subject.path(tmp_path), subject.options, {})
    assert outcome.passed, outcome.messages
    assert "out.onnx" in outcome.left


def test_every_sabotage_has_a_model_and_a_figure_where_it_is_harmless() -> None:
    for sabotage in TABLE:
        assert sabotage.subjects, sabotage.name
        assert (sabotage.expect is Expect.HARMLESS) is (sabotage.below > 0.0), sabotage.name


def test_an_edit_that_does_nothing_is_an_error(tmp_path: Path) -> None:
    (subject,) = on("silu")
    with pytest.raises(SabotageError, match="changed nothing"):
        attempt(subject.path(tmp_path), {}, patch("model", "model.ir_version += 0"))


@pytest.mark.slow
def test_a_sabotage_that_passes_is_a_fault(tmp_path: Path) -> None:
    """A multiplication by 1 is none, so the rewriter is right to let it pass, and the suite must say so."""
    trial = tried(Sabotage("none", patch("heads", "out = Mul(own, $1.0)"), on("silu")), *on("silu"))
    if trial.attempt.passed:
        assert trial.fault == "left out.onnx, and passed"


def test_a_harmful_one_is_not_called_harmless() -> None:
    harmful = Sabotage("off", patch("heads", "out = Mul(own, $1.001)"), on("silu"), Expect.HARMLESS, below=1e-6)
    assert tried(harmful, *on("silu")).fault.startswith("not harmless: outputs differ by 0.001")
