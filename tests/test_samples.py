"""Of a test marked `sample(N)` the default suite runs N cases; the others are slow tests."""

import pytest


@pytest.mark.sample(3)
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", [*range(4), pytest.param(4, marks=pytest.mark.slow)])
def test_cases(a: int, b: int, request: pytest.FixtureRequest) -> None:
    del a, b
    others = [each for each in request.session.items if each.nodeid.startswith("tests/test_samples.py::test_cases[")]
    slow = [each.nodeid for each in others if each.get_closest_marker("slow")]
    assert len(others) < 10 or (len(slow) == 7 and sum("[4-" in each for each in slow) == 2)
