"""Every activation of the table is converted and proved where attention is written with a literal Softmax."""

from __future__ import annotations

from typing import Any

import pytest

from rewriter import ExitStatus, rewrite
from tests.conftest import slow
from tests.spellings import SPELLINGS
from tests.textmodels import mlp

ONE_EACH = {label: text for _, label, text in reversed(SPELLINGS)}
LITERAL = {"compact": {"form": "compact"}, "local": {"form": "local", "spelling": "softmax"}}


@slow
@pytest.mark.parametrize("options", LITERAL.values(), ids=LITERAL)
@pytest.mark.parametrize("label", ONE_EACH)
def test_every_activation(label: str, options: dict[str, Any]) -> None:
    report = rewrite(mlp(ONE_EACH[label]), **options)
    assert report.exit_status is ExitStatus.CONVERTED, (report.problems, report.left)
    assert report.validation is not None
    assert report.validation.certificate is not None
    assert report.validation.certificate.certified
