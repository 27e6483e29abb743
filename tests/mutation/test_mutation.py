"""Some mutants of the proof that must always be killed, what is mutated at all, and the page against the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="needs the extra mutation")

from cosmic_ray.work_item import MutationSpec

from tests.mutation.__main__ import RESULTS, ROOMS, ROOT, Copy, copied, score, suites_of
from tests.mutation.mutants import Mutant, mutants

FIXED = {
    "a-wider-rule": ("rewriter/proof/rule.py", "FACTOR = 16.0", "FACTOR = 1e9"),
    "kinks-closed": ("rewriter/proof/certificate/expressions.py", "number >= 0):", "number > 0):"),
    "float32-passes": (
        "rewriter/proof/reference/float64.py",
        "and value.dtype != np.float64:",
        "and value.dtype == np.float16:",
    ),
    "weights-unread": (
        "rewriter/compare/graphs.py",
        "digest([self.kind.encode(), self.data().data])",
        "digest([self.kind.encode()])",
    ),
}
"""Name to module, a piece of it, and what takes its place."""


@pytest.fixture(scope="module")
def copy() -> Iterator[Copy]:
    with copied() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
def test_fixed_mutants_are_killed(name: str, copy: Copy) -> None:
    module, before, after = FIXED[name]
    code = (ROOT / module).read_text(encoding="utf-8")
    assert code.count(before) == 1
    spec = MutationSpec(module, "by hand", 0, (1, 0), (2, 0))
    killer = copy.killer(Mutant(spec, code.replace(before, after), before, after))
    assert killer
    assert killer != "out of time"
    assert (copy.root / module).read_text(encoding="utf-8") == code


SOURCE = '''
from typing import TYPE_CHECKING

__all__ = ["f" + "g"]
Alias = dict[str, int | None]

if TYPE_CHECKING:
    WRONG = 1 + 1

@cache
def f(x: int | None, y: int = 3, *, z: int) -> int | None:
    """Add 1 + 1."""
    total: int | float = 0
    for one, other in zip([x], [y], strict=True):
        if one > other:
            total = one * other
    raise ValueError(one_line("x", 120 + 1))

def g(
    *,
    x: int,
) -> int:
    return x
'''


def test_what_means_nothing_is_not_mutated(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SOURCE)
    found = list(mutants(tmp_path, ["m.py"], 100, 0))
    lines = SOURCE.splitlines()
    assert {lines[each.spec.start_pos[0] - 1].strip() for each in found} == {
        "def f(x: int | None, y: int = 3, *, z: int) -> int | None:",
        "total: int | float = 0",
        "for one, other in zip([x], [y], strict=True):",
        "if one > other:",
        "total = one * other",
    }
    assert all(each.before in SOURCE and each.before != each.after for each in found)
    assert all("*, z" in each.after for each in found if "def f" in each.before)
    places = [each.spec.start_pos for each in found]
    assert len(places) == len(set(places)), "one mutant at each place"


def test_a_sample_is_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SOURCE)
    whole = [each.after for each in mutants(tmp_path, ["m.py"], 100, 7)]
    assert [each.after for each in mutants(tmp_path, ["m.py"], 3, 7)] == whole[:3]


def test_a_module_s_own_tests_come_first() -> None:
    """Where there are any; what comes later is not run twice."""
    own, *others = suites_of("rewriter/files/load.py")
    assert own == ("tests/rewriter/files/test_load.py",)
    assert others[0] == ("tests/rewriter/files",)
    for module in (module for room in ROOMS.values() for module in room):
        groups = suites_of(module)
        assert groups
        assert len(set(groups)) == len(groups)


def test_the_page_tells_the_results() -> None:
    """The score, and why every survivor was left."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert score(rows) in (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    assert all(row["by"] for row in rows)
