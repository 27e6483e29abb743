"""The table of proved bounds that comes with the package: what the standard programs ask, and every entry is true."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import rewriter
from rewriter.proof.certificate import bounds
from tests.conftest import slow
from tests.rewriter.proof.certificate.standard import ACTIVATIONS, TABLE, claims, standard
from tests.textmodels import mlp

ENTRIES = json.loads(TABLE.read_text(encoding="utf-8"))


def test_every_entry_is_a_claim_that_holds() -> None:
    assert ENTRIES
    for key, entry in ENTRIES.items():
        found = bounds.Bound(key=key, **entry)
        assert found.holds, key
        assert found.at_least <= found.bound <= found.limit, key
        assert not found.reason
        assert found.relative is None or math.isfinite(found.relative)
        assert found.exact == (found.bound == 0.0)


def test_bounds_are_close_to_the_supremum() -> None:
    for key, entry in ENTRIES.items():
        assert entry["bound"] <= max(1.01 * entry["at_least"], bounds.FLOOR), key


@pytest.mark.parametrize("name", ["silu", "relu", "gelu"])
def test_standard_programs_are_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_PROVED", {})
    monkeypatch.setattr(bounds, "prove", None)
    asked = claims(mlp(ACTIVATIONS[name]))
    assert asked
    assert all(claim.key in ENTRIES for claim in asked)


@slow
def test_every_entry_is_proved_anew() -> None:
    claimed = standard()
    assert claimed.keys() == ENTRIES.keys()
    for key, claim in claimed.items():
        found = claim.bound()
        entry = bounds.Bound(key=key, **ENTRIES[key])
        # Precision is fixed, but the last digit of a bound may depend on the version of the library.
        assert found.bound <= entry.bound * (1 + 1e-9), key
        assert found.at_least == pytest.approx(entry.at_least, rel=1e-9), key
        if not found.exact:
            assert not replace(claim, limit=found.at_least * 0.98).bound().holds, key


@slow
@pytest.mark.parametrize("name", ["hard swish", "relu6", "silu of a clip"])
def test_steep_lines_of_float64_are_computed_with_enough_bits(name: str) -> None:
    """Kinks are the limits of lines of slope 2^80."""
    model = mlp(ACTIVATIONS[name], elem="double")
    rewritten = rewriter.rewrite(model, form="compact", validate=False).rewritten
    assert rewritten is not None
    assert rewriter.certify(model, rewritten).certificate.certified
