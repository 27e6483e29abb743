"""Files of form `whole`, read back: original heads are those of the original, heads of neurons are told from them."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest

from passes.made import ALREADY
from passes.network.names import BIAS_ROWS, POSITION_ROWS, neuron_scores
from passes.options import FormOptions, Options
from passes.plan import apply, make_plan
from passes.whole.read import narrow, read_whole
from rewriter import heads, inspect
from rewriter.api.interpret.attribution import attribute
from rewriter.api.interpret.cache import run_with_cache
from rewriter.api.interpret.interventions import ablate
from rewriter.errors import UsageError
from rewriter.graph.view import view_model
from tests.attention import Array
from tests.committed import FOLDER, feeds
from tests.conftest import slow
from tests.passes.test_made import stripped
from tests.whole import changed

LONGEST = 24
NAMES = ("silu-decoder", "gated-decoder", "relu-decoder", "gelu-encoder", "gelu-vision")
EACH = pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=slow) for name in NAMES[1:])])


@cache
def original(name: str) -> onnx.ModelProto:
    return onnx.load(FOLDER / f"{name}.onnx")


@cache
def whole(name: str) -> onnx.ModelProto:
    return apply(make_plan(original(name), Options(form="whole", forms=FormOptions(max_tokens=LONGEST))))


@EACH
def test_heads_are_those_of_the_original(name: str) -> None:
    expected, found = heads(original(name)), heads(whole(name))
    assert found.names() == expected.names()
    assert [miss.reason for miss in found.missed] == [miss.reason for miss in expected.missed]
    for tensor in expected.names():
        np.testing.assert_array_equal(found[tensor], expected[tensor], tensor)
    facts = [[(each.name, each.module, each.sublayer.heads) for each in index.sublayers] for index in (expected, found)]
    assert facts[0] == facts[1]


@EACH
def test_what_a_run_records_is_that_of_the_original(name: str) -> None:
    """Tokens only, without the rows of the bias tokens. Scores of pairs that may not attend are below -1000 in both."""
    fed = feeds(original(name), 0, 2, 7)
    expected, found = (run_with_cache(each, fed).cache for each in (original(name), whole(name)))
    assert list(found) == list(expected)
    assert any(hook.endswith("hook_resid_mid") for hook in found)
    for hook, array in expected.items():
        assert found[hook].shape == array.shape, hook
        near = array > -1e3 if hook.endswith("attn_scores") else np.ones(array.shape, bool)
        np.testing.assert_allclose(found[hook][near], array[near], rtol=0.0, atol=3e-5, err_msg=hook)
        assert (found[hook][~near] < -1e3).all()


@EACH
def test_neurons_are_told_from_heads_without_names_and_metadata(name: str) -> None:
    bare = stripped(whole(name))
    found = inspect(bare)
    made = [row for row in found.report.left if (row.reason or "").startswith(ALREADY)]
    assert len(made) == 2
    assert all("whose mask is W_QK between positions" in (row.reason or "") for row in made)
    assert found.accounting.attention_heads in (None, 4)
    assert found.accounting.head_dimension in (None, 8)
    index = heads(bare)
    assert [each.sublayer.heads for each in index.sublayers] == [4, 4]
    assert sum(miss.reason.endswith("whose mask is W_QK between positions") for miss in index.missed) == 2


def test_marked_neurons_are_not_the_models_own_attention() -> None:
    assert inspect(whole("silu-decoder")).accounting.attention_heads is None
    vision = inspect(whole("gelu-vision")).accounting
    assert (vision.attention_heads, vision.head_dimension) == (4, 8)


def test_sizes_are_those_of_the_stream() -> None:
    found = read_whole(view_model(whole("gelu-vision")))
    assert found is not None
    assert (found.width, found.bias_tokens, found.max_tokens) == (32, 9, LONGEST)
    assert [product.neurons for product in found.products] == [False, True, False, True]


def zeros_in_a_row(values: Array) -> Array:
    values[0, 3] = 0.0
    return values


def filled(values: Array) -> Array:
    values[0, 0, 0] = 1.0
    return values


@pytest.mark.parametrize(("tensor", "edit"), [(POSITION_ROWS, zeros_in_a_row), (BIAS_ROWS, filled)])
def test_another_stream_is_not_read(tensor: str, edit: object) -> None:
    assert callable(edit)
    other = changed(whole("silu-decoder"), tensor, edit)
    assert read_whole(view_model(other)) is None
    assert narrow(other) is None


def test_a_head_that_sees_bias_tokens_and_neighbours_is_neither() -> None:
    def opened(values: Array) -> Array:
        values[-1, -2] = 0.0
        return values

    found = read_whole(view_model(changed(whole("silu-decoder"), neuron_scores(1), opened)))
    assert found is not None
    assert [product.neurons for product in found.products] == [False, False]


def test_a_graph_of_another_form_is_none() -> None:
    masked = Options(form="masked", forms=FormOptions(bias_token="network"))
    assert read_whole(view_model(original("silu-decoder"))) is None
    assert read_whole(view_model(apply(make_plan(original("silu-decoder"), masked)))) is None


def test_edits_and_attribution_are_refused() -> None:
    fed = feeds(original("silu-decoder"), 0, 1, 5)
    with pytest.raises(UsageError, match="an intervention does not work on a file of form whole; use the original"):
        ablate(whole("silu-decoder"), "blocks.0.attn.*")
    with pytest.raises(UsageError, match="attribution does not work on a file of form whole"):
        attribute(whole("silu-decoder"), fed, logit=0)
