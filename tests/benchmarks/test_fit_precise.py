"""The fit of programs for float64 finds one head that is as close as it says."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flint")

from benchmarks.fit.precise import fit
from passes.programs.head import BiasToken, Head
from rewriter.graph import elementwise


def test_a_short_fit_is_as_close_as_it_says() -> None:
    largest, tokens = fit("gelu", 12, 1.0, rounds=12)
    head, y = Head(0.0, tuple(BiasToken(*token) for token in tokens)), np.linspace(-8.0, 8.0, 4001)
    error = float(np.max(np.abs(head.evaluate(y, y) - elementwise.gelu_erf(y))))
    assert largest < 1e-6
    assert 0.5 * largest <= error <= 1.5 * largest
