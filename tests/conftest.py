"""Makes the checkout importable, for `models`, `tests.textmodels` and, from a plain checkout, the packages."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)
