"""Random transformers: every MLP is found, and its heads are the same function by the oracle of the tests."""

from functools import partial
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from passes.options import FORM_NAMES
from rewriter import ExitStatus, Report, rewrite
from rewriter.errors import ValidationError
from tests.cases import run
from tests.changes import maker
from tests.oracle import evaluate
from tools.fuzz.random_transformers import Transformer, transformer
from tools.fuzz.trial import WRONG, a_way, tried_transformer, unproved

DRAWN = partial(settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SEEDS = st.randoms(use_true_random=False)


@pytest.mark.slow
def test_what_is_drawn() -> None:
    drawn = [transformer(Random(number)) for number in range(60)]  # noqa: S311 - not for secrets
    told = " ".join(word for each in drawn for word in each.drawn)
    for word in ("float,", "double", "float16", "rank 2", "rank 3", "gate", "causal", "linear", "side by side"):
        assert word in told
    for word in ("layer_norm before", "rms_norm behind", "no residual", "in function", "in branch", "in loop"):
        assert word in told
    compared = 0
    for number, each in enumerate(drawn):
        feeds = each.feeds(number)
        try:
            made = run(each.model, **feeds)
        except ValidationError:  # no kernel of this type
            continue
        expected, half = evaluate(each.model, feeds), "float16" in each.drawn[0]
        for name, value in expected.items():
            bound = (0.1 if half else 1e-3) * float(np.abs(value).max())
            np.testing.assert_allclose(made[name].astype(np.float64), value, rtol=0.0, atol=bound, err_msg=name)
        compared += 1
    assert compared > 40


@pytest.mark.slow
@DRAWN(max_examples=60)
@given(SEEDS)
def test_any_transformer_in_any_form(rng: Random) -> None:
    drawn = transformer(rng)
    way, seed = unproved(a_way(rng, ("rewrite",))), rng.randrange(1000)
    outcome = tried_transformer(drawn, way, seed)
    assert not outcome.finding, (outcome.message, way, seed, onnx.printer.to_text(drawn.model))


@pytest.mark.sample(0)
@pytest.mark.parametrize("form", FORM_NAMES[:3])
def test_another_function_is_a_finding(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _plain()

    def wrong(model: onnx.ModelProto, **options: Any) -> Report:
        report = rewrite(model, **{**options, "validate": False})
        maker(report.rewritten, "out").op_type = "Neg"
        return report

    way = {"command": "rewrite", "form": form}
    assert tried_transformer(drawn, way, 0).status == ExitStatus.CONVERTED
    monkeypatch.setattr("tools.fuzz.trial.rewrite", wrong)
    outcome = tried_transformer(drawn, way, 0)
    assert outcome.status == WRONG
    assert outcome.finding
    assert "differs by 2, more than 0.0001" in outcome.message


MENDED = {
    (100000, "local"): "a norm amplifies rounding, of which two models of float32 show more or less by chance",
    (100016, "local"): "float16, the square root of 2 computed by a node",
    (100106, "local"): "float64, so that the original is its own truth and shows no rounding",
    (100213, "local"): "noise in the bodies of control flow",
    ("200/6", "compact"): "a product as Einsum",
    ("200/2", "maskless"): "the square root of 2, which has no axes, beside a product as Einsum",
    (2, "local"): "a block in a loop of several rounds",
    (3, "compact"): "the second linear operator as Einsum",
}
"""Right transformers that failed the proof once."""


@pytest.mark.sample(0)
@pytest.mark.parametrize(("seed", "form"), MENDED, ids=str)
def test_right_transformers_pass_the_proof(seed: int | str, form: str) -> None:
    found = rewrite(transformer(Random(seed)).model, form=form, fit=False).validation  # noqa: S311 - not for secrets
    assert found.failures == ()


@pytest.mark.sample(0)
@pytest.mark.parametrize("seed", range(20))
def test_any_right_transformer_passes_the_proof(seed: int) -> None:
    rng = Random(f"right {seed}")  # noqa: S311 - what Hypothesis draws depends on the modules that are loaded
    way = {"command": "rewrite", "form": rng.choice(("local", "compact")), "validate": True}
    outcome = tried_transformer(transformer(rng), way, rng.randrange(1000))
    assert not outcome.finding, (outcome.message, way)


@pytest.mark.slow
def test_inputs_that_leave_a_domain_are_told_from_another_function() -> None:
    rng = Random("7700/1033")  # noqa: S311 - not for secrets
    drawn = transformer(rng)
    assert tried_transformer(drawn, {"command": "rewrite", "form": "local", "scope": "all"}, 1033).status == 0


def _plain() -> Transformer:
    """One with an MLP that every form converts, in float32."""
    found = (transformer(Random(number)) for number in range(1000))  # noqa: S311 - not for secrets
    return next(
        each for each in found if each.drawn[0].startswith("float,") and "sigmoid-left in place" in " ".join(each.drawn)
    )
