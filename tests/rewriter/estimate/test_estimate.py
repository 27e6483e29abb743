"""The estimate of a dry run: its counts by hand, its sum, and what is printed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from passes.options import Options
from passes.plan import make_plan
from rewriter import UsageError, rewrite
from rewriter.api.estimating.counting import counts_for
from rewriter.cli import run
from rewriter.estimate.counts import Counts
from rewriter.estimate.formula import BLOCKS, FACTORS, MEMORY, TERMS, WHOLE, estimate, term
from rewriter.files.load import load_model
from rewriter.proof.inputs.given import as_given
from rewriter.proof.settings import Settings
from rewriter.report.terminal.summary import duration
from tests.textmodels import SILU, mlp

ROWS = 2 * 3
CASES = [{"x": np.zeros((2, 3, 4), np.float32)}, {"x": np.zeros((1, 5, 4), np.float32)}]


def counts(form: str = "local", **settings: object) -> Counts:
    source = load_model(mlp(SILU))
    given = {"inputs": as_given(CASES), **settings}
    return counts_for(source, make_plan(source.proto, Options(form=form)), Settings(**given))  # type: ignore[arg-type]


def test_counts_of_a_block() -> None:
    """W1 is 4x8 and W2 8x4: 64 multiplications per token, on 6 and on 5 tokens; SiLU has one head with 2 keys."""
    found = counts()
    assert (found.cases, found.blocks, found.sublayers) == (2, 1, 0)
    assert found.products == found.block_products == 64 * 11
    assert found.scores == 8 * 2 * 11
    assert found.points_scores == found.largest_points_scores == 2 * 50_000
    assert found.block_bytes == 4 * 64
    assert (found.whole_bytes, found.segment_bytes, found.read_bytes) == (found.bytes, 0, 0)


def test_counts_of_a_sublayer() -> None:
    """In form masked each of 3 tokens, in the other case of 5, has a key for every token and for the bias token."""
    found = counts("masked")
    assert found.sublayers == 1
    assert found.scores == found.sublayer_scores == 8 * (6 * 4 + 5 * 6)
    assert found.points_scores == 0


@pytest.mark.parametrize(("form", "slots", "stages"), [("masked", 0, 0), ("maskless", 1, 0), ("staged", 1, 3)])
def test_counts_of_the_forms_with_positions(form: str, slots: int, stages: int) -> None:
    found = counts(form)
    assert (found.slots, found.stages) == (slots, stages)


def test_what_the_proof_leaves_out_counts_for_nothing() -> None:
    three = as_given([CASES[0], {"x": np.zeros((4, 9, 4), np.float32)}, CASES[1]])
    full, quick, by_blocks = counts(inputs=three), counts(inputs=three, quick=True), counts(proof="blocks")
    assert (full.cases, full.products) == (3, 64 * (6 + 36 + 5))
    assert (quick.cases, quick.products) == (2, 64 * (6 + 5))
    assert (by_blocks.whole_bytes, by_blocks.segment_bytes) == (0, 4 * 32)
    assert estimate(quick).cpu_seconds < estimate(full).cpu_seconds


def test_the_estimate_is_the_sum_of_its_terms() -> None:
    found, factors = counts(), json.loads(FACTORS.read_text(encoding="utf-8"))
    expected = sum(value * term(found, name) for phase in factors["seconds"].values() for name, value in phase.items())
    made = estimate(found)
    assert made.cpu_seconds == pytest.approx(expected)
    assert made.cpu_seconds == pytest.approx(sum(made.seconds.values()))
    assert set(estimate(found, proved=False).seconds) == set(TERMS) - {BLOCKS, WHOLE}
    assert (made.cpu_factor, made.memory_factor) == tuple(factors["off"].values())
    assert min(made.cpu_factor, made.memory_factor) >= 1.0


def test_factors_are_of_known_terms() -> None:
    factors = json.loads(FACTORS.read_text(encoding="utf-8"))
    assert all(set(factors["seconds"][phase]) <= set(terms) for phase, terms in TERMS.items())
    assert set(factors["memory"]) <= set(MEMORY)
    assert all(value >= 0 for part in (*factors["seconds"].values(), factors["memory"]) for value in part.values())


def test_more_of_anything_never_takes_less() -> None:
    found = counts()
    for name in Counts.__dataclass_fields__:
        if name != "by_blocks":
            more = estimate(replace(found, **{name: getattr(found, name) + 10**6}))
            assert more.cpu_seconds >= estimate(found).cpu_seconds
            assert more.memory_bytes >= estimate(found).memory_bytes


def test_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(SILU), "model.onnx")
    assert run(["model.onnx", "--dry-run", "--json", "plan.json"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))["estimate"]
    assert re.search(r"estimate about \d+ s of CPU time \(within a factor of [\d.]+\) and \d+.* of memory", text)
    assert f"about {duration(data['cpu_seconds'])} of CPU time" in text
    assert run(["model.onnx", "--dry-run", "--no-validate"]) == 0
    assert "of CPU time, without a proof" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (2.04, "2 s"), (47.4, "47 s"), (119.0, "120 s"), (130.0, "2.2 min"), (9000.0, "2.5 h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_inputs_that_do_not_fit_are_refused_before_the_run() -> None:
    with pytest.raises(UsageError, match="nonsense"):
        rewrite(mlp(SILU), dry_run=True, dims={"nonsense": 3})
    assert rewrite(mlp("h = Softmax(y)"), dry_run=True).estimate is None
    assert rewrite(mlp(SILU), validate=False).estimate is None
