"""Errors at every float: against a plain evaluation, and with an error at a single float."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.floats import __main__ as command
from benchmarks.floats import report
from benchmarks.floats.atlas import Entry, Source
from benchmarks.floats.errors import KINDS, Errors, Floats
from benchmarks.floats.pairs import Pair, Run, pair
from benchmarks.floats.subjects import SUBJECTS, Doubles

RESULTS: dict[str, Any] = json.loads(command.ATLAS.read_text(encoding="utf-8"))
HERE = Source("1.0", "test", "test")
EVERY = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)


def made(name: str, kind: str = "float16") -> Pair:
    found = pair(SUBJECTS[name], KINDS[kind])
    assert isinstance(found, Pair)
    return found


def entry(name: str, given: Pair, kind: str = "float16", *, blocks: int | None = None, done: int = 0) -> Entry:
    one = Entry.begun(name, kind, given, HERE)
    one.done = done
    for _ in range(KINDS[kind].blocks if blocks is None else blocks):
        one.extend(given, SUBJECTS[name].exact)
    return one


def call(one: Run | str) -> Run:
    assert not isinstance(one, str)
    return one


@pytest.mark.parametrize(("name", "domain", "inside"), [("SiLU", None, 63488), ("SwiGLU", 512.0, 49154)])
def test_every_float16(name: str, domain: float | None, inside: int) -> None:
    """The same in numpy, at once, with f and the spacing of numbers in other words."""
    given = made(name)
    found: Any = entry(name, given)
    assert (found.domain, found.floats, found.beyond_floats) == (domain, inside, 63488 - inside)
    with np.errstate(all="ignore"):
        y = EVERY[np.isfinite(EVERY) & (np.abs(EVERY) <= (domain or np.inf))]
        wide = y.astype(np.float64)
        f = np.where(wide < 0.0, wide * np.exp(wide) / (1.0 + np.exp(wide)), wide / (1.0 + np.exp(-wide)))
    for one, errors in ((call(given.original), found.original), (given.rewritten, found.rewritten)):
        values = one(EVERY)[np.isfinite(EVERY) & (np.abs(EVERY) <= (domain or np.inf))]
        error = np.abs(values.astype(np.float64) - f)
        relative, places = error / np.maximum(1.0, np.abs(f)), error / _spacing(f)
        assert errors.relative == pytest.approx(relative.max(), rel=1e-9)
        assert errors.ulp == pytest.approx(places.max(), rel=1e-9)
        at = {float(number): place for place, number in enumerate(y)}
        assert relative[at[float.fromhex(errors.relative_at)]] == pytest.approx(relative.max(), rel=1e-9)
        assert places[at[float.fromhex(errors.ulp_at)]] == pytest.approx(places.max(), rel=1e-9)
        assert errors.exact + sum(errors.powers.values()) == inside
        for power in (-12, -20):
            wanted = int(((relative >= 2.0**power) & (relative < 2.0 ** (power + 1))).sum())
            assert errors.powers[str(power)] == pytest.approx(wanted, abs=1)


def _spacing(f: Doubles) -> Doubles:
    """2^(e - 10) for 2^e <= |f| < 2^(e + 1), but no less than 2^-24."""
    exponents: Doubles = np.exp2(np.maximum(np.frexp(np.abs(f))[1] - 1, -14) - 10.0)
    return exponents


def planted(one: Run, at: float, change: float) -> Run:
    """The same with a change at one number."""

    def wrong(y: Floats) -> Floats:
        values = one(y)
        return np.where(y == np.asarray(at, y.dtype), (values + change).astype(y.dtype), values)

    return wrong


@pytest.mark.parametrize(("kind", "at", "change"), [("float16", -1.5, 0.002), ("float32", 1.2500001192092896, 1e-6)])
def test_an_error_at_a_single_float_is_found(kind: str, at: float, change: float) -> None:
    given = made("SiLU", kind)
    block = int(np.asarray(at, KINDS[kind].dtype).view(f"u{KINDS[kind].dtype.itemsize}")) // KINDS[kind].block
    wrong = replace(given, rewritten=planted(given.rewritten, at, change))
    right, found = (entry("SiLU", each, kind, blocks=1, done=block) for each in (given, wrong))
    assert float.fromhex(found.rewritten.relative_at) == at != float.fromhex(right.rewritten.relative_at)
    assert found.rewritten.relative == pytest.approx(change, rel=0.3)
    assert found.rewritten.relative > 2.0 * right.rewritten.relative
    assert found.rewritten.digest != right.rewritten.digest
    assert found.original == right.original
    power = str(math.floor(math.log2(found.rewritten.relative)))
    assert found.rewritten.powers[power] == 1
    assert power not in right.rewritten.powers


def test_committed_rows_are_complete() -> None:
    finite = {"float16": 63488, "bfloat16": 65280, "float32": 2**32 - 2**24}
    for row in RESULTS["rows"]:
        assert row["floats"] + row["beyond_floats"] == finite[row["type"]]
        for each in (row["original"], row["rewritten"]):
            if each is not None:
                errors = Errors(**each)
                counted = errors.exact + sum(errors.powers.values()) + errors.infinite
                assert counted == row["floats"] - row["overflow"]
        assert row["rewritten"]["infinite"] == row["disagreements"] == 0
    measured = {(row["activation"], row["type"]) for row in RESULTS["rows"]}
    assert {(name, kind) for name in SUBJECTS for kind in ("float16", "bfloat16")} - measured == {
        ("softsign", "bfloat16")
    }


def test_reports_have_what_was_measured() -> None:
    """`python -m benchmarks.floats.report` writes it."""
    assert json.loads(report.FLOATS.read_text(encoding="utf-8")) == report.errors(RESULTS)
