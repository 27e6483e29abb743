"""The list of slow tests names tests that exist."""

from pathlib import Path

from tools.slow import LIST

ROOT = Path(__file__).parents[2]


def test_listed_tests_exist() -> None:
    names = LIST.read_text(encoding="utf-8").splitlines()
    assert names
    for test in names:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text(encoding="utf-8"), test
