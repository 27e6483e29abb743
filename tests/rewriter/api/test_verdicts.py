"""The verdict on a pair: proved, in agreement on the inputs that were run, or different; and what a plan may say."""

from typing import Any

import onnx
import pytest

from rewriter import ExitStatus, diff, rewrite, validate
from tests.cases import departed, proved
from tests.passes.test_record import claiming, made
from tests.textmodels import ERF_GELU, SILU, mlp, text_model

LONGER = "n = Shape<start=1, end=2>(x) k = Cast<to=1>(n) far = Greater(k, $64.0) f = Cast<to=1>(far) "
"""`f` is 0, or 1 where there are more than 64 tokens."""


def test_a_difference_at_lengths_that_are_not_tried_is_not_certified_there() -> None:
    a = text_model("y = Relu(x) out = Mul(y, $2.0)")
    b = text_model(f"{LONGER} y = Relu(x) z = Mul(y, $2.0) out = Add(z, f)")
    for found in (validate(a, b), diff(a, b)):
        sizes = found.validation.certificate.sizes
        assert (found.verdict, sizes[2]) == ("certified at the sizes tried", "batch 1, sequence 61")
        assert "at 4 sizes" in found.summary
        assert any(
            each.startswith("why not at every size: Add 'out' reads what depends on sizes") for each in found.notes
        )
    assert validate(a, b, dims={"tokens": 65}).verdict == "different"


def test_a_function_that_differs_only_far_out_agrees_and_is_named() -> None:
    a, b = text_model("out = Relu(x)"), text_model("y = Relu(x) out = Min(y, $1e4)")
    found = validate(a, b)
    assert (found.verdict, found.exit_status) == ("agrees", ExitStatus.CONVERTED)
    assert departed(found).node == "Min 'out'"


@pytest.mark.slow
def test_an_accuracy_is_the_users_and_not_the_plans() -> None:
    model = mlp(ERF_GELU)
    report = proved(model, accuracy=0.05)
    assert validate(model, report.rewritten, accuracy=0.05).exit_status is ExitStatus.CONVERTED
    found = validate(model, report.rewritten)
    assert (found.verdict, found.notes[0]) == (
        "different",
        "the second model was written with accuracy 0.05, which counts only if given here too",
    )


def test_a_plan_is_never_believed() -> None:
    model = mlp(SILU)
    good, wrong = made(model), made(mlp("h = Relu(y)"))
    assert validate(model, wrong).verdict == "different"
    assert validate(model, claiming(wrong, "block['program']['max_error'] = (100.0).hex()")).verdict == "different"
    assert validate(model, claiming(wrong, "plan['blocks'].clear()")).verdict == "different"
    assert validate(model, claiming(good, "plan['blocks'].clear()")).same


def test_odd_plans_are_noted() -> None:
    model = mlp(SILU)
    good = made(model)
    found = validate(model, claiming(good, "plan['version'] = 99"))
    assert found.notes[0].startswith("the plan in the metadata of the second model is ignored: ")
    assert found.same
    assert validate(model, claiming(good, "block['block']['region']['output'] = 'other'")).same
    assert validate(model, claiming(good, "plan['options'] = {'form': 'nonsense'}")).same
    assert validate(model, claiming(good, "plan['options'] = {'max_tokens': [1, {}]}")).same


@pytest.mark.parametrize("seed", range(3))
def test_rounding_inside_an_activation_is_the_originals(seed: int) -> None:
    """Its outputs move by units of float16, which the heads, in float32, do not round to."""
    body = "y = MatMul(x, W1) half = Cast<to = 10>(y) kept = Relu(half) h = Cast<to = 1>(kept) out = MatMul(h, W2)"
    report: Any = rewrite(text_model(body), seed=seed)
    assert [each.elem_type for each in report.validation.certificate.regions] == [onnx.TensorProto.FLOAT16]
    assert report
