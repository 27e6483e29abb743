"""The list of slow tests names tests that exist, and the choice leaves something of everything."""

from __future__ import annotations

from pathlib import Path

from tools.slow import LIST, chosen

ROOT = Path(__file__).parents[2]


def test_listed_tests_exist() -> None:
    names = LIST.read_text(encoding="utf-8").splitlines()
    assert names
    for test in names:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_the_quickest_case_and_a_test_of_each_file_stay() -> None:
    seconds = {"a.py::x[1]": 9.0, "a.py::x[2]": 8.0, "a.py::y": 7.0, "b.py::z": 6.0}
    assert chosen(seconds, 0.0) == ["a.py::x[1]", "a.py::y"]
    assert chosen(seconds, 0.8) == ["a.py::x[1]"]
