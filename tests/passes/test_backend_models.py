"""onnx's own node models: the plan reads every one of them, and changes none that holds no MLP."""

from __future__ import annotations

import warnings
from functools import cache

import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

from passes.plan import Options, apply, make_plan


@cache
def node_models() -> tuple[tuple[str, onnx.ModelProto], ...]:
    """All node models of the onnx package, made without their data."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own case makers overflow on purpose
        return tuple((case.name, case.model) for case in collect_testcases(None) if case.model is not None)


def test_there_are_node_models() -> None:
    assert len(node_models()) > 1000
    assert load_model_tests(kind="simple")


@pytest.mark.parametrize("scope", ["mlp", "all"])
def test_node_models_pass_through(scope: str) -> None:
    for name, model in node_models():
        before = model.SerializeToString(deterministic=True)
        plan = make_plan(model, Options(scope=scope))
        assert not plan.conversions, name
        assert model.SerializeToString(deterministic=True) == before, name
        if plan.model is model:
            assert apply(plan).SerializeToString(deterministic=True) == before, name
