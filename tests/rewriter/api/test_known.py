"""`validate` and `diff` on results of every form: what `rewrite` proved passes, and what is wrong still fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from passes.fit.unnamed import domain_of, domains_of
from passes.match.marks import BLOCK_KEY
from rewriter import ExitStatus, diff, rewrite, validate
from tests.conftest import slow
from tests.textmodels import ERF_GELU, FIRST, mlp, values

LOW_RANK = "low = MatMul(x, A1) high = MatMul(low, B1) full = MatMul(x, W1) y = Add(high, full)"
"""W1 with a low-rank addition: no plain matrix, so every form keeps it."""

SWIGLU = "s = Sigmoid(y) g = Mul(y, s) v = MatMul(x, V1) h = Mul(g, v)"
ACTIVATIONS = {"GELU": ERF_GELU, "SwiGLU": SWIGLU}
FORMS = ("compact", "masked", "maskless", "staged")
EACH_FORM = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in ("compact", "masked") else slow) for form in FORMS]
)

UNNAMED = "t = Tanh(y) h = Mul(t, t)"
"""An activation that the table does not name."""


def unnamed(first: str = FIRST, elem: str = "double") -> onnx.ModelProto:
    """A model of it whose pre-activations are small, so that fits are quick."""
    small = {name: 0.1 * values(name) for name in ("W1", "A1", "b1") if name in first}
    return mlp(UNNAMED, elem=elem, first=first, constants=small)


def heads_of(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    made = rewrite(model, validate=False, **options).rewritten
    assert isinstance(made, onnx.ModelProto)
    return made


def scaled(model: onnx.ModelProto, name: str, factor: float) -> onnx.ModelProto:
    """The model with the largest entry of one weight multiplied."""
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    tensor = next(each for each in wrong.graph.initializer if each.name == name)
    values = numpy_helper.to_array(tensor).copy()
    values.reshape(-1)[np.abs(values).argmax()] *= values.dtype.type(factor)
    tensor.CopyFrom(numpy_helper.from_array(values, name))
    return wrong


def failures(model: onnx.ModelProto, other: onnx.ModelProto, **options: Any) -> Sequence[str]:
    found = validate(model, other, **options)
    assert (found.exit_status is ExitStatus.CONVERTED) == (not found.failures)
    return found.failures


@EACH_FORM
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_heads_beside_operators_that_stay(activation: str, form: str) -> None:
    """The forms have other programs than form `local`, and the heads are tested against theirs."""
    model = mlp(ACTIVATIONS[activation], first=LOW_RANK)
    report = rewrite(model, form=form)
    assert report.exit_status is ExitStatus.CONVERTED
    assert isinstance(report.rewritten, onnx.ModelProto)
    found = validate(model, report.rewritten)
    assert found.failures == ()
    assert list(found.regions) == ["mlp"]
    assert found.notes == ()
    assert diff(model, report.rewritten).failures == ()


@pytest.mark.parametrize(
    "options",
    [
        {"spelling": "softmax"},
        {"precision": "double"},
        {"gate": "product"},
        {"form": "compact", "gate": "product"},
    ],
    ids=str,
)
def test_other_ways_of_writing(options: dict[str, str]) -> None:
    for activation in ACTIVATIONS.values():
        model = mlp(activation, first=LOW_RANK)
        assert failures(model, heads_of(model, **options)) == ()


WEIGHTS = {
    ("GELU", "compact"): "v_bias",
    ("GELU", "masked"): "v_bias",
    ("GELU", "maskless"): "v_bias",
    ("GELU", "staged"): "v_bias",
    ("SwiGLU", "compact"): "k_bias_0",
    ("SwiGLU", "masked"): "k_0_0_bias",
    ("SwiGLU", "maskless"): "k_0_0_bias",
    ("SwiGLU", "staged"): "k_0_0_bias",
}
"""A weight of a bias token: its value, or its key where values are 0."""


@pytest.mark.parametrize(
    ("activation", "form"),
    [pytest.param(*each, marks=() if each[1] in ("compact", "masked") else slow) for each in WEIGHTS],
)
def test_a_wrong_bias_token(activation: str, form: str) -> None:
    model = mlp(ACTIVATIONS[activation], first=LOW_RANK)
    wrong = scaled(heads_of(model, form=form), f"mlp/heads/{WEIGHTS[activation, form]}", 1.001)
    found = failures(model, wrong)
    assert any(text.startswith("mlp: in float64 the heads differ from their program by ") for text in found)


@EACH_FORM
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tokens_mixed_up(activation: str, form: str) -> None:
    model = mlp(ACTIVATIONS[activation], first=LOW_RANK)
    wrong = heads_of(model, form=form)
    place = next(index for index, node in enumerate(wrong.graph.node) if "h" in node.output)
    wrong.graph.node[place].output[0] = "h_in_order"
    for name, value in {"last": -1, "first": -(2**62), "tokens": 1, "back": -1}.items():
        wrong.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    turn = helper.make_node("Slice", ["h_in_order", "last", "first", "tokens", "back"], ["h"], "turned")
    wrong.graph.node.insert(place + 1, turn)
    found = failures(model, wrong)
    assert any(text.startswith("mlp: in float64 the heads differ from their program by ") for text in found)


def test_a_program_that_this_tool_would_not_choose() -> None:
    """Right by its own metadata, but coarser than any program that is planned for the original."""
    model = mlp(ERF_GELU, first=LOW_RANK)
    coarse = heads_of(model, form="compact", accuracy=1e-3)
    assert any(
        each.value == "mlp" for node in coarse.graph.node for each in node.metadata_props if each.key == BLOCK_KEY
    )
    found = failures(model, coarse)
    assert any(text.startswith("mlp: in float64 the heads differ from their program by ") for text in found)
    assert any(text.startswith("output out: error ") for text in found)


@pytest.mark.parametrize(
    ("first", "form"),
    [
        pytest.param(FIRST, "local", marks=slow),
        (FIRST, "compact"),
        pytest.param(FIRST, "masked", marks=slow),
        pytest.param(LOW_RANK, "local", marks=slow),
        pytest.param(LOW_RANK, "compact", marks=slow),
        pytest.param(LOW_RANK, "masked", marks=slow),
    ],
    ids=["plain-local", "plain-compact", "plain-masked", "kept-local", "kept-compact", "kept-masked"],
)
def test_a_fitted_program(first: str, form: str) -> None:
    """In float64 its error shows, and is allowed as far as a fit of this tool has it."""
    model = unnamed(first)
    report = rewrite(model, form=form)
    assert report.blocks[0].program == "f_fitted"
    assert isinstance(report.rewritten, onnx.ModelProto)
    found = validate(model, report.rewritten)
    assert found.failures == ()
    assert bool(found.regions) == (form == "local" or first == LOW_RANK)
    output = found.providers["cpu"].outputs["out"]
    assert output.error_b is not None
    assert 0.0 < output.error_b <= output.allowed


@slow
def test_a_wrong_fitted_program() -> None:
    model = unnamed(LOW_RANK)
    wrong = scaled(heads_of(model, form="compact"), "mlp/heads/factor_0", 1.0 + 1e-6)
    found = validate(model, wrong)
    assert [text for text in found.failures if text.startswith("output out: error ")]
    assert found.regions == {}
    assert any("nothing is allowed for their errors (mlp)" in note for note in found.notes)


@slow
def test_a_program_fitted_on_another_domain() -> None:
    """The inputs of the comparison are not those of the conversion, so the domain is searched for."""
    model = unnamed(LOW_RANK, elem="float")
    made = heads_of(model)
    rng = np.random.default_rng(0)
    small = {"x": rng.normal(0.0, 2.0, (2, 5, 4)).astype(np.float32)}
    found = validate(model, made, inputs=small)
    assert found.failures == ()
    assert list(found.regions) == ["mlp"]


@slow
def test_a_fit_beyond_its_domain_is_not_allowed_for() -> None:
    model = unnamed(LOW_RANK)
    made = heads_of(model, domain=1.0)
    assert failures(model, made)


def test_domains_that_a_fit_may_have() -> None:
    assert domains_of(3.0) == (6.0, 3.0, 4.0, 8.0)
    for reached in (0.1, 1.0, 5.0, 100.0):
        domains = domains_of(reached)
        assert domains[0] == domain_of(reached)
        assert min(domains) >= reached
        assert len(set(domains)) == len(domains)
