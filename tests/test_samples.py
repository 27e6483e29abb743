"""Of a test marked `sample(N)` the default suite runs N cases; the others are slow tests."""

import pytest


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [*range(9), pytest.param(9, marks=pytest.mark.slow)])
def test_cases(case: int, request: pytest.FixtureRequest) -> None:
    others = [each for each in request.session.items if each.nodeid.startswith("tests/test_samples.py::test_cases[")]
    slow = sum(each.get_closest_marker("slow") is not None for each in others)
    assert case == 9 or len(others) < 10 or slow == 7
