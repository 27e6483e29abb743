"""Makes `benchmarks` importable: it is run from the checkout and never installed. What draws needs matplotlib."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

draws = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed (extra dev)")
