"""A browser for the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rewriter.report.html.browser import EXECUTABLE, Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium, for all tests of a module."""
    assert EXECUTABLE is not None
    with Browser(EXECUTABLE, tmp_path_factory.mktemp("profile")) as opened:
        yield opened
