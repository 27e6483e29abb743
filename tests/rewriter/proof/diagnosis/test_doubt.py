"""Why an original is far from float64: what is found, in which order cases are tried, and when nobody looks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Side
from rewriter.proof.diagnosis import doubt as asked
from rewriter.proof.diagnosis.doubt import Doubt, doubt
from rewriter.proof.inputs.cases import Case
from rewriter.proof.reference.audit import Disagreement
from rewriter.proof.run.whole import Wanted, Way, run_whole
from rewriter.proof.settings import LARGE
from tests.textmodels import text_model

PLAIN = Way("cpu", optimise=False)
SCALED = "k = Constant<value = float {0.6931472}>() l = Log(x) d = Div(l, k)"


def loaded(body: str, size: int = 0) -> LoadedModel:
    return LoadedModel(text_model(body, inputs="float[n] x", outputs="float[n] out"), None, None, (), size)


def cases(*arrays: list[float]) -> list[Case]:
    return [Case(str(number), {"x": np.array(values, np.float32)}) for number, values in enumerate(arrays)]


def doubted(model: LoadedModel, given: Sequence[Case], ways: tuple[Way, ...] = (PLAIN,)) -> Doubt:
    return doubt(model, run_whole(Side.of(model), given, Wanted(ways, wide=True), lambda *_: None))


POWERS = [2.0**power for power in range(1, 31)]


def test_a_model_that_amplifies_rounding_is_to_be_believed() -> None:
    found = doubted(loaded("h = Constant<value = float {1e8}>() a = Add(x, h) out = Sub(a, h)"), cases([0.3, 0.7]))
    assert found.trusted
    assert found.why == "every operator agrees with float64 on its own operands, so the model amplifies rounding"


def test_a_rounding_that_decides_is_named() -> None:
    found = doubted(loaded(f"{SCALED} f = Floor(d) out = Neg(f)"), cases([3.0], POWERS))
    assert found == Doubt(False, "rounding decides what Floor 'f' gives")
    assert doubted(loaded(f"{SCALED} f = Floor(d) out = Neg(f)"), cases([3.0])).trusted


OTHER = """<domain: "com.microsoft", opset_import: ["" : 17]> QuickGelu (a) => (b) { b = Tanh(a) }"""
"""A local function of the name of an operator of onnxruntime, which runs its own."""


@pytest.mark.parametrize("ways", [(PLAIN,), (Way("cpu", optimise=True),)], ids=["known", "run-again"])
def test_an_operator_that_onnxruntime_runs_instead_is_found(ways: tuple[Way, ...]) -> None:
    model = text_model(
        "s = com.microsoft.QuickGelu(x) out = Neg(s)",
        inputs="float[n] x",
        outputs="float[n] out",
        domains={"com.microsoft": 1},
        functions=OTHER,
    )
    found = doubted(LoadedModel(model, None, None, (), 0), cases([-3.0, 0.5, 2.0], [-2.0]), ways)
    assert not found.trusted
    assert found.wrong
    assert found.why.startswith("onnxruntime runs something else than the model's operators: output 'out' is 0.9")


def test_an_operator_that_is_wrong_is_named_and_small_cases_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def audit(_: onnx.ModelProto, __: object, feeds: dict[str, np.ndarray]) -> Disagreement | None:
        seen.append(feeds["x"].size)
        return Disagreement("Exp 'out'", "Exp", "out", 0.5, 0.25, False) if feeds["x"].size > 1 else None

    monkeypatch.setattr(asked, "audit", audit)
    found = doubted(loaded("out = Exp(x)"), cases([1, 2, 3], [1], [1, 2]))
    assert seen == [1, 2]
    assert found == Doubt(
        False,
        "the float64 evaluation of Exp 'out' differs from onnxruntime's by 0.5, more than the 0.25 that rounding "
        "explains",
        wrong=True,
    )


def test_where_nothing_can_be_found() -> None:
    found = doubted(loaded("out = RandomNormalLike(x)"), cases([1.0]))
    assert found == Doubt(
        False,
        "the float64 evaluation differs by more than rounding explains; where could not be found: "
        "RandomNormalLike 'out' is random",
    )


@pytest.mark.parametrize(("size", "looked"), [(LARGE, True), (LARGE + 1, False)])
def test_nobody_looks_into_a_large_model(size: int, looked: bool) -> None:
    found = doubted(loaded("out = Exp(x)", size), cases([1.0]))
    assert found.trusted is looked
    assert ("too large to find out where" in found.why) is not looked


def test_outputs_that_are_no_floats_are_passed_over() -> None:
    """The first output holds integers; what onnxruntime runs instead shows in the second one."""
    model = text_model(
        "n = Shape(x) s = com.microsoft.QuickGelu(x) out = Neg(s)",
        inputs="float[n] x",
        outputs="int64[1] n, float[n] out",
        domains={"com.microsoft": 1},
        functions=OTHER,
    )
    found = doubted(LoadedModel(model, None, None, (), 0), cases([-3.0, 0.5, 2.0]))
    assert found.wrong
    assert "output 'out' is 0.9" in found.why
