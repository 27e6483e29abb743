"""What draws needs matplotlib."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

draws = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed (extra dev)")
