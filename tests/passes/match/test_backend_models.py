"""onnx's own node models: the plan accepts each of them, and changes none, since none has an MLP.

By default only some operators are tested, because making all models takes onnx a while.
"""

import importlib
import warnings
from collections.abc import Mapping

import onnx
import pytest

from passes.options import Options
from passes.plan import apply, make_plan
from tests.conftest import slow

SAMPLE = (
    "add", "attention", "clip", "dropout", "einsum", "elu", "gelu", "gemm", "hardswish", "if_", "layernormalization",
    "loop", "matmul", "mish", "optionalhaselement", "prelu", "qlinearmatmul", "relu", "scan", "softmax", "swiglu",
    "swish", "where",
)  # fmt: skip
"""Modules of onnx with the node models of one operator each; not every version of onnx has all of them."""


def node_models(modules: tuple[str, ...] | None) -> Mapping[str, onnx.ModelProto]:
    """The node models of some modules of the onnx package, or of all, made without their data."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own case makers overflow on purpose
        if modules is None:
            cases = node.collect_testcases(None)
        else:
            for name in modules:
                if importlib.util.find_spec(f"{node.__name__}.{name}"):
                    importlib.import_module(f"{node.__name__}.{name}")
            cases = node._NodeTestCases
    return {case.name: case.model for case in cases if case.model is not None}


@pytest.mark.parametrize("scope", ["mlp", "all"])
@pytest.mark.parametrize(
    ("modules", "least"), [(SAMPLE, 100), pytest.param(None, 1000, marks=slow)], ids=["some", "all"]
)
def test_node_models_pass_through(modules: tuple[str, ...] | None, least: int, scope: str) -> None:
    models = node_models(modules)
    assert len(models) > least
    for name, model in models.items():
        before = model.SerializeToString(deterministic=True)
        plan = make_plan(model, Options(scope=scope))
        assert not plan.conversions, name
        assert model.SerializeToString(deterministic=True) == before, name
        if plan.model is model:
            assert apply(plan).SerializeToString(deterministic=True) == before, name
