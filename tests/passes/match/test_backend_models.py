"""onnx's own node models: the plan accepts each of them, and changes none, since none has an MLP."""

import warnings

import pytest

from passes.options import Options
from passes.plan import apply, make_plan


@pytest.mark.slow
def test_node_models_pass_through() -> None:
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own case makers overflow on purpose
        models = {case.name: case.model for case in node.collect_testcases(None) if case.model is not None}
    assert len(models) > 1000
    for name, model in models.items():
        before = model.SerializeToString(deterministic=True)
        for scope in ("mlp", "all"):
            plan = make_plan(model, Options(scope=scope))
            assert not plan.conversions, name
            assert model.SerializeToString(deterministic=True) == before, name
            if plan.model is model:
                assert apply(plan).SerializeToString(deterministic=True) == before, name
