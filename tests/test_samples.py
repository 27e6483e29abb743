"""Of a test marked `sample(N)` the default suite runs N cases; the others are slow tests, and take turns."""

import pytest

from tests.conftest import drawn


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [*range(9), pytest.param(9, marks=pytest.mark.slow)])
def test_cases(case: int, request: pytest.FixtureRequest) -> None:
    others = [each for each in request.session.items if each.nodeid.startswith("tests/test_samples.py::test_cases[")]
    slow = sum(each.get_closest_marker("slow") is not None for each in others)
    assert case == 9 or len(others) < 10 or slow == 7


def test_every_case_has_one_turn_in_six() -> None:
    cases = [f"test_it[{number}]" for number in range(20)]
    assert sorted(case for turn in "012345" for case in drawn(cases, turn)) == sorted(cases)
    assert drawn(cases, "all") == cases
    assert all(drawn(cases[:1], turn) for turn in "012345")
