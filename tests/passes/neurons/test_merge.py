"""Merging neurons: planted ones are found, near misses stay, and the merged model computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import passes.plan
import rewriter.api.rewriting
from passes.neurons.merge import Merged, Record, merge
from passes.options import Options
from passes.plan import make_plan
from rewriter import ExitStatus, Report, rewrite
from rewriter.cli import run
from rewriter.graph.view import all_views
from rewriter.pipeline import Unit
from tests.conftest import slow
from tests.errors import apart, error_ratio
from tests.oracle import evaluate, tensors
from tests.textmodels import ERF_GELU, FIRST, SECOND, SILU, Array, mlp, tensor, text_model, values

RELU = "h = Relu(y)"
GATED_FIRST = "g1 = MatMul(x, W1) y = Add(g1, b1) u1 = MatMul(x, V1) u = Add(u1, c1)"
GLU = "s = Sigmoid(y) h = Mul(s, u)"
BARE = "out = MatMul(h, W2)"
NORMED = "n = LayerNormalization<axis = -1>(x, scale, shift) "


def weights(**changes: Any) -> dict[str, Array]:
    """The usual weights, float64; `W1=(column, value)` and so on plants one or several columns (rows of W2)."""
    result = {name: values(name).copy() for name in ("W1", "b1", "V1", "c1", "W2", "b2")}
    for name, planted in changes.items():
        for neuron, value in planted.items():
            result[name][(neuron,) if name == "W2" else (..., neuron)] = value
    return result


def like(other: int, factor: float = 1.0, names: str = "W1 b1") -> dict[str, Any]:
    """Column `other` of these weights, times a factor, to plant as neuron 5."""
    return {name: {5: factor * values(name)[..., other]} for name in names.split()}


def read(proto: onnx.TensorProto) -> Array:
    return onnx.numpy_helper.to_array(proto)


def merged(model: onnx.ModelProto) -> Merged:
    plan = make_plan(model, Options())
    return merge(plan.model, plan.views, [conversion.block for conversion in plan.conversions], read)


def only_record(model: onnx.ModelProto) -> Record:
    (record,) = merged(model).records
    return record


def counts(record: Record) -> dict[str, int]:
    kinds = ("dead", "constant", "duplicate", "proportional", "affine")
    return {kind: number for kind in kinds if (number := getattr(record, kind))}


ROUNDED = {"float": 7e-8, "float16": 3.6e-4, "double": 3e-16}
"""Allowed error from rounding the new weights, over the largest output; measured: 3.6e-8, 1.9e-4, 1.5e-16."""


def converted(model: onnx.ModelProto) -> Report:
    """Rewrite with merging; by the oracle and by onnxruntime, the result computes what the model does."""
    report = rewrite(model, merge=True)
    assert report.exit_status is ExitStatus.CONVERTED
    assert report.rewritten is not None
    assert apart(model, report.rewritten, []).exact <= ROUNDED["float"]
    assert error_ratio(model, report.rewritten) <= 3.0  # measured: at most 1.8
    return report


def needed(model: onnx.ModelProto, elem: str = "float") -> dict[str, int]:
    """What merging counts in a model of one block, after checking that the result computes the same in float64."""
    before = model.SerializeToString(deterministic=True)
    result = merged(model)
    (record,) = result.records
    assert record.reason is None
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(result.model, full_check=True)
    shape = [dim.dim_value or 3 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    x = np.random.default_rng(1).normal(0.0, 2.0, shape).astype(dtype)
    old, new = (evaluate(each, {"x": x})["out"] for each in (model, result.model))
    assert np.abs(new - old).max() <= ROUNDED[elem] * np.abs(old).max()
    assert (record.before, record.after) == (8, 8 - record.removed)
    names = {i.name: list(i.dims) for i in result.model.graph.initializer}
    assert record.removed == 0 or names["W1_merged"][-1] == record.after or names["W1_merged"][0] == record.after
    return counts(record)


# -- what is found ---------------------------------------------------------------------------------------------

PLAIN: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "nothing": (SILU, {}, {}),
    "dead: nothing reads it": (SILU, {"W2": {5: 0.0}}, {"dead": 1}),
    "dead: its constant is 0": (RELU, {"W1": {5: 0.0}, "b1": {5: -1.0}}, {"dead": 1}),
    "constant": (SILU, {"W1": {5: 0.0}}, {"constant": 1}),
    "two constants": (SILU, {"W1": {5: 0.0, 0: 0.0}}, {"constant": 2}),
    "negative zeros": (SILU, {"W1": {5: -0.0}}, {"constant": 1}),
    "duplicate": (SILU, like(2), {"duplicate": 1}),
    "three alike": (SILU, {n: {5: values(n)[..., 2], 7: values(n)[..., 2]} for n in ("W1", "b1")}, {"duplicate": 2}),
    "duplicates that cancel": (SILU, {**like(2), "W2": {5: -values("W2")[2]}}, {"dead": 1, "duplicate": 1}),
    "proportional, larger": (RELU, like(2, 4.0), {"proportional": 1}),
    "proportional, smaller": (RELU, like(2, 0.125), {"proportional": 1}),
    "proportional, leaky": ("h = LeakyRelu<alpha = 0.1>(y)", like(2, 2.0), {"proportional": 1}),
    "not homogeneous": (SILU, like(2, 2.0), {}),
    "negative multiple": (RELU, like(2, -1.0), {}),
    "no power of two": (RELU, like(2, 3.0), {}),
    "bias not alike": (SILU, like(2, names="W1"), {}),
    "weight not alike": (SILU, like(2, names="b1"), {}),
    "bias not multiplied": (RELU, {**like(2, 2.0), "b1": {5: values("b1")[2]}}, {}),
}


@pytest.mark.parametrize(("activation", "planted", "found"), PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("elem", ["float", "double", "float16"])
def test_plain(activation: str, planted: dict[str, Any], found: dict[str, int], elem: str) -> None:
    assert needed(mlp(activation, constants=weights(**planted), elem=elem), elem) == found


LATE = values("V1")[..., 2] * (np.arange(len(values("V1"))) > 0)
"""A column of weights of which the first is 0."""

GATED: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "nothing": ({}, {}),
    "duplicate": (like(2, names="W1 b1 V1 c1"), {"duplicate": 1}),
    "value proportional": ({**like(2), **like(2, 4.0, "V1 c1")}, {"proportional": 1}),
    "value negative": ({**like(2), **like(2, -1.0, "V1 c1")}, {"proportional": 1}),
    "value negative, 0 first": (
        {**like(2), "V1": {2: LATE, 5: -LATE}, "c1": {5: -values("c1")[2]}},
        {"proportional": 1},
    ),
    "value no power of two": ({**like(2), **like(2, 3.0, "V1 c1")}, {}),
    "gate proportional": ({**like(2, 2.0), **like(2, names="V1 c1")}, {}),
    "gate alike only": (like(2), {}),
    "value alike only": (like(2, names="V1 c1"), {}),
    "dead: the value is 0": ({"V1": {5: 0.0}, "c1": {5: 0.0}}, {"dead": 1}),
    "value constant, gate not": ({"V1": {5: 0.0}}, {}),
    "gate constant, value not": ({"W1": {5: 0.0}}, {}),
    "constant": ({"W1": {5: 0.0}, "V1": {5: 0.0}}, {"constant": 1}),
}


@pytest.mark.parametrize(("planted", "found"), GATED.values(), ids=GATED)
def test_gated(planted: dict[str, Any], found: dict[str, int]) -> None:
    assert needed(mlp(GLU, first=GATED_FIRST, constants=weights(**planted))) == found


def test_a_gate_that_scales_merges_too() -> None:
    """ReLU as a gate is homogeneous in the gate and linear in the value: the factors multiply."""
    from passes.neurons.reduce import Nature, Neurons, reduce_neurons

    gate, value, rows = np.ones((3, 3)), np.ones((3, 3)), np.array([[1.0], [10.0], [5.0]])
    gate[2, 0] = 7.0
    gate[1] *= 0.25
    value[1] *= -2.0
    neurons = Neurons(gate, 3, value, 3, (rows,))
    nothing = np.zeros(3, dtype=bool)
    nature = Nature(lambda g, u: np.maximum(g, 0.0) * u, 1, nothing, nothing)
    reduction = reduce_neurons(neurons, nature)
    assert (list(reduction.kept), reduction.proportional) == ([0, 2], 1)
    assert reduction.rows[0][0] == 1.0 + 0.25 * -2.0 * 10.0


@pytest.mark.parametrize("elem", ["float", "float16", "double"])
@pytest.mark.parametrize("name", ["W1", "b1"])
def test_one_unit_in_the_last_place_apart_is_not_alike(elem: str, name: str) -> None:
    given = weights(**like(2))
    narrow = np.dtype({"float": "float32", "float16": "float16", "double": "float64"}[elem])
    place: tuple[int, ...] = (1, 5) if name == "W1" else (5,)
    assert needed(mlp(SILU, constants=given, elem=elem), elem) == {"duplicate": 1}
    given[name] = given[name].astype(narrow)
    given[name][place] = np.nextafter(given[name][place], np.asarray(9.0, narrow))
    assert needed(mlp(SILU, constants=given, elem=elem), elem) == {}


def test_a_row_that_the_type_would_round_is_not_scaled() -> None:
    """2^-12 times a float16 row is not exact in float16; 2^12 times it would be infinite."""
    planted = {**like(2, 2.0**-12), "W2": {5: 0.1, 2: 100.0}}
    tiny = weights(**planted)
    tiny["W1"][:, 5], tiny["b1"][5] = 0.0, 0.0
    tiny["W1"][0, [2, 5]] = 1.0, 2.0**-12
    tiny["W1"][1:, 2] = 0.0
    tiny["b1"][2] = 0.0
    assert needed(mlp(RELU, constants=tiny, elem="float16"), "float16") == {}
    assert needed(mlp(RELU, constants=tiny)) == {"proportional": 1}


def test_sums_that_overflow_are_not_formed() -> None:
    planted = {**like(2), "W2": {5: 6e4, 2: 6e4}}
    assert merged(mlp(SILU, constants=weights(**planted), elem="float16")).records[0].removed == 0
    assert merged(mlp(SILU, constants=weights(**planted))).records[0].duplicate == 1


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_weights_that_are_not_finite_are_left_alone(bad: float) -> None:
    given = weights(W1={5: bad, 2: bad}, b1={5: 0.0, 2: 0.0})
    assert counts(only_record(mlp(SILU, constants=given))) == {}
    given = weights(**like(2))
    given["W2"][5, 0] = bad
    assert counts(only_record(mlp(SILU, constants=given))) == {}


def test_bfloat16() -> None:
    given = weights(**like(2, 2.0), W2={0: 0.0})
    given["W1"][:, 7] = 0.0
    assert counts(only_record(mlp(RELU, constants=given, elem="bfloat16"))) in (
        {"dead": 1, "constant": 1, "proportional": 1},
        {"dead": 2, "proportional": 1},  # where the bias of neuron 7 is negative
    )


TWO_OUTPUTS = "p = MatMul(h, W2) q = MatMul(h, U2) out = Add(p, q)"


@pytest.mark.parametrize(
    ("rows", "found"),
    [({}, {"duplicate": 1, "constant": 1}), ({0: 0.0}, {"duplicate": 1, "constant": 1, "dead": 1})],
)
def test_two_second_operators(rows: dict[int, float], found: dict[str, int]) -> None:
    """Both lose the same neurons, a neuron is dead only if neither reads it, and each gets its own constant."""
    given = weights(**like(2, names="W1 b1 c1"), W2={0: 0.0})
    given["W1"][:, 7] = 0.0
    given["U2"] = 1.0 - values("W2")
    for neuron, value in rows.items():
        given["U2"][neuron] = value
    del given["b2"]
    model = mlp(SILU, second=TWO_OUTPUTS, constants=given)
    assert needed(model) == found
    report = converted(model)
    assert report.rewritten is not None
    assert [node.op_type for node in report.rewritten.graph.node].count("Add") == 4


def test_a_constant_as_a_weight_goes_with_its_node() -> None:
    model = mlp(SILU, constants=weights(**like(2)))
    (weight,) = (i for i in model.graph.initializer if i.name == "W1")
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["W1"], value=weight))
    model.graph.initializer.remove(weight)
    assert needed(model) == {"duplicate": 1}
    assert not any(node.op_type == "Constant" for node in merged(model).model.graph.node)


def test_no_room_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.neurons.shrink._MOST_BYTES", 100)
    model = mlp(SILU, constants=weights(**like(2)))
    assert merged(model).model is model
    assert "larger than protobuf's limit of 2 GB" in str(only_record(model).reason)


def test_a_constant_too_large_for_the_bias() -> None:
    given = weights(W1={5: 0.0}, b1={5: 600.0}, W2={5: 100.0})
    given["b2"][:] = 6e4
    model = mlp(SILU, constants=given, elem="float16")
    assert merged(model).model is model
    assert "too large for the output's bias" in str(only_record(model).reason)


def test_two_neurons_stay() -> None:
    everything = mlp(SILU, constants={**weights(), "W1": np.zeros((4, 8))})
    assert needed(everything) == {"constant": 6}
    again = merged(everything).model
    assert only_record(again).text == "merge: all 2 neurons of mlp are needed"


def test_merging_twice_finds_nothing_more() -> None:
    once = merged(mlp(RELU, constants=weights(**like(2, 2.0), V1={}))).model
    assert merged(once).model is once


# -- proofs of a sign -----------------------------------------------------------------------------------------------


def normed(activation: str, low: float, *, shift: float = 0.0, opset: int = 17) -> onnx.ModelProto:
    """A block behind a LayerNormalization, in which neuron 5 has the weights 3, -1, -1, -1 and the bias `low`."""
    given = weights(b1={5: low})
    given["W1"][:, 5] = 3.0, -1.0, -1.0, -1.0
    given |= {"scale": np.full(4, 0.5), "shift": np.full(4, shift)}
    first = NORMED + FIRST.replace("x, W1", "n, W1")
    return mlp(activation, first=first, constants=given, opset=opset)


REACH = 0.5 * np.sqrt(12.0) * 2.0
"""|g * w| sqrt(D) of neuron 5: its weights sum to zero, so centring them changes nothing."""


@pytest.mark.parametrize(
    ("activation", "low", "shift", "found"),
    [
        (RELU, -REACH - 1e-3, 0.0, {"dead": 1}),
        (RELU, -REACH + 1e-3, 0.0, {}),
        (RELU, -REACH - 1e-3, 0.2, {"dead": 1}),  # the weights sum to zero, so the shift moves nothing
        (RELU, REACH + 1e-3, 0.0, {"affine": 1}),
        ("h = LeakyRelu<alpha = 0.1>(y)", -REACH - 1e-3, 0.0, {"affine": 1}),
        (SILU, -REACH - 1e-3, 0.0, {}),
    ],
)
def test_a_neuron_that_normalisation_keeps_off(
    activation: str, low: float, shift: float, found: dict[str, int]
) -> None:
    assert needed(normed(activation, low, shift=shift)) == found


def test_the_bound_is_reached() -> None:
    """The input that points along the weights comes within 1e-3 of the bound: a tighter one would be wrong."""
    x = np.array([[[300.0, -100.0, -100.0, -100.0]]], dtype=np.float32)
    model = normed(RELU, 0.0)
    model.graph.output.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
    reached = tensors(model, {"x": x})["y"][0, 0, 5]
    assert REACH - 1e-3 < reached <= REACH


def test_unknown_data_have_no_bound() -> None:
    given = weights(b1={5: -1e6})
    assert needed(mlp(RELU, constants=given)) == {}


def test_a_bound_needs_the_last_axis() -> None:
    model = normed(RELU, -REACH - 1.0)
    model.graph.node[0].attribute[0].i = 1
    assert counts(only_record(model)) == {}


# -- spellings -----------------------------------------------------------------------------------------------------

FLAT = {"inputs": "float[tokens, 4] x", "outputs": "float[tokens, 4] out"}
SPELLED: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "bias first": ("f = MatMul(x, W1) y = Add(b1, f)", "s2 = MatMul(h, W2) out = Add(b2, s2)", {}, ["Add"]),
    "no second bias": (FIRST, BARE, {}, ["Add"]),
    "gemm": ("y = Gemm(x, W1, b1)", "out = Gemm(h, W2, b2)", FLAT, []),
    "gemm, transposed": ("y = Gemm<transB = 1>(x, W1t, b1)", "out = Gemm<transB = 1>(h, W2t, b2)", FLAT, []),
    "gemm, no second bias": ("y = Gemm(x, W1, b1)", "out = Gemm(h, W2)", FLAT, ["Add"]),
    "live transposes": (
        "T1 = Transpose<perm = [1, 0]>(W1t) f = MatMul(x, T1) y = Add(f, b1)",
        "T2 = Transpose<perm = [1, 0]>(W2t) s2 = MatMul(h, T2) out = Add(s2, b2)",
        {},
        [],
    ),
    "einsum": (
        'f = Einsum<equation = "bsd,df->bsf">(x, W1) y = Add(f, b1)',
        's2 = Einsum<equation = "fd,bsf->bsd">(W2, h) out = Add(s2, b2)',
        {},
        [],
    ),
    "einsum, transposed": (
        'f = Einsum<equation = "bsd,fd->bsf">(x, W1t) y = Add(f, b1)',
        's2 = Einsum<equation = "bsf,df->bsd">(h, W2t) out = Add(s2, b2)',
        {},
        [],
    ),
    "several biases": ("f = MatMul(x, W1) g = Add(f, b1) y = Add(g, c1)", SECOND, {}, []),
    "behind an identity": ("i = Identity(W1) f = MatMul(x, i) y = Add(f, b1)", SECOND, {}, []),
}


@pytest.mark.parametrize(("first", "second", "options", "_"), SPELLED.values(), ids=SPELLED)
def test_spellings(first: str, second: str, options: dict[str, Any], _: list[str]) -> None:
    given = weights(**like(2, names="W1 b1 c1"), W2={0: 0.0})
    given["W1"][:, 7] = 0.0
    model = mlp(SILU, first=first, second=second, constants=both(given, first + second), **options)
    result = merged(model)
    assert counts(result.records[0]) == {"dead": 1, "constant": 1, "duplicate": 1}
    report = converted(model)
    assert report.rewritten is not None
    assert [row.heads for row in report.converted] == [5]
    sizes = [list(i.dims) for i in report.rewritten.graph.initializer if "/heads/" not in i.name]
    assert all(8 not in size for size in sizes), "the old weights are gone"
    assert not any(node.op_type in ("Transpose", "Identity") for node in report.rewritten.graph.node)


def both(given: dict[str, Array], text: str) -> dict[str, Array]:
    """The weights that a text names, the transposed ones too."""
    given = {**given, "W1t": given["W1"].T, "W2t": given["W2"].T}
    return {name: value for name, value in given.items() if any(f"{name}{end}" in text for end in (",", ")"))}


def test_nothing_to_merge_changes_nothing() -> None:
    model = mlp(SILU)
    plain, with_merge = rewrite(model), rewrite(model, merge=True)
    assert plain.rewritten == with_merge.rewritten
    assert plain.notes == ()
    assert with_merge.notes == ("merge: all 8 neurons of mlp are needed",)


def test_stated_widths_are_corrected() -> None:
    model = mlp(SILU, constants=weights(**like(2)))
    model = onnx.shape_inference.infer_shapes(model)
    assert any(value.name == "h" for value in model.graph.value_info)
    report = rewrite(model, merge=True)
    assert report.rewritten is not None
    onnx.checker.check_model(merged(model).model, full_check=True)
    widths = {v.name: v.type.tensor_type.shape.dim[-1].dim_value for v in merged(model).model.graph.value_info}
    assert (widths["y"], widths["h"], widths["second"]) == (7, 7, 4)


TWO = (
    f"{FIRST} {SILU} second = MatMul(h, W2) z = Add(second, b2) "
    "f2 = MatMul(z, W1) y2 = Add(f2, {bias}) s2 = Sigmoid(y2) h2 = Mul(s2, y2) out = MatMul(h2, W2)"
)


def test_shared_weights_go_on_being_shared_where_both_lose_the_same() -> None:
    report = converted(text_model(TWO.replace("{bias}", "b1"), constants=weights(**like(2), V1={}) | {}))
    assert [row.heads for row in report.converted] == [7, 7]
    assert report.rewritten is not None
    names = [i.name for i in report.rewritten.graph.initializer]
    assert [name for name in names if name.startswith(("W1", "W2"))] == ["W1_merged", "W2_merged"]


def test_a_shared_weight_stays_for_the_block_that_needs_it() -> None:
    """With another bias, neurons 2 and 5 differ in the second block: that one keeps W1 and W2 as they are."""
    model = text_model(TWO.replace("{bias}", "c1"), constants=weights(**like(2)))
    report = converted(model)
    assert [row.heads for row in report.converted] == [7, 8]
    assert report.rewritten is not None
    after = {i.name: i for i in report.rewritten.graph.initializer}
    before = {i.name: i for i in model.graph.initializer}
    assert (after["W1"], after["W2"]) == (before["W1"], before["W2"])
    assert list(after["W1_merged"].dims) == [4, 7]


def test_inside_a_body_with_weights_of_the_graph_around_it() -> None:
    body = f"{FIRST} {SILU} {SECOND}".replace("out =", "o =")
    text = f"out = If(c) <then_branch = t () => (float[2, 4] o) {{ {body} }}, else_branch = e () => (float[2, 4] p) {{ p = Identity(x) }}>"  # noqa: E501
    model = text_model(text, inputs="bool c, float[2, 4] x", outputs="float[2, 4] out", constants=weights(**like(2)))
    report = converted(model)
    assert [row.heads for row in report.converted] == [7]
    assert report.rewritten is not None
    assert not {"W1", "b1", "W2"} & {i.name for i in report.rewritten.graph.initializer}
    assert {view.where for view in all_views(report.rewritten)} == {"", "If/then_branch", "If/else_branch"}


# -- why not --------------------------------------------------------------------------------------------------------

PACKED = "m = MatMul(x, W1wide) y, u = Split<axis = -1>(m)"
WHY: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "packed": (PACKED, GLU, SECOND, {"opset": 13}, "Split 'y' stands between"),
    "a width in a constant": (
        FIRST,
        SILU,
        "r = Reshape(h, size) q = MatMul(r, W2) out = Add(q, b2)",
        {},
        "read by Reshape",
    ),
    "used elsewhere": (FIRST, SILU, "a = ReduceMax(h) q = MatMul(h, W2) out = Add(q, a)", {}, "read by ReduceMax"),
    "an output": (FIRST, SILU, SECOND, {"outputs": "float[b, t, 4] out, float[b, t, 8] y"}, "an output of the graph"),
    "two projections": (
        "a1 = MatMul(x, W1) a2 = MatMul(x, V1) y = Add(a1, a2)",
        SILU,
        SECOND,
        {},
        "not a single linear operator",
    ),
    "scaled": ("y = Gemm<alpha = 2.0>(x, W1, b1)", SILU, BARE, FLAT, "scales its operands"),
    "a factor per neuron": (
        f"{FIRST.replace(' y =', ' z =')} y = Mul(z, c1)",
        SILU,
        SECOND,
        {},
        "Mul 'y' stands between",
    ),
    "computed": ("V = Mul(W1, W1) f = MatMul(x, V) y = Add(f, b1)", SILU, SECOND, {}, "computed by Mul"),
    "from the left": (
        "f = MatMul(W1t, x) y = Identity(f)",
        SILU,
        "out = MatMul(W2t, h)",
        {"inputs": "float[b, 4, t] x", "outputs": "float[b, 4, t] out"},
        "does not hold a plain matrix",
    ),
    "old IR": (FIRST, SILU, SECOND, {"ir": 3}, "in IR version 3 every weight is a graph input"),
}


@pytest.mark.parametrize(("first", "activation", "second", "options", "reason"), WHY.values(), ids=WHY)
def test_why_not(first: str, activation: str, second: str, options: dict[str, Any], reason: str) -> None:
    size = onnx.numpy_helper.from_array(np.array([0, 0, 8]), "size")
    constants = {"size": size} if "Reshape" in second else {}
    model = mlp(activation, first=first, second=second, constants=constants, **options)
    result = merged(model)
    assert result.model is model
    (record,) = result.records
    assert record.reason is not None
    assert reason in record.reason
    assert record.text == f"merge: {record.block} keeps its neurons: {record.reason}"


def test_a_weight_that_a_caller_may_replace_is_left() -> None:
    model = mlp(SILU, constants=weights(**like(2)))
    model.graph.input.append(onnx.helper.make_tensor_value_info("W1", onnx.TensorProto.FLOAT, [4, 8]))
    assert "also a graph input, which a caller may override" in str(only_record(model).reason)


# -- the whole way ---------------------------------------------------------------------------------------------------


def planted_file(path: Path) -> Path:
    given = weights(**like(2, 2.0), W2={0: 0.0})
    given["W1"][:, 7], given["b1"][7] = 0.0, 1.5
    onnx.save(mlp(RELU, constants=given), path)
    return path


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = planted_file(tmp_path / "model.onnx"), tmp_path / "out.onnx"
    assert run([str(source), "-o", str(out), "--merge"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mlp has 5 neurons instead of 8 (1 dead, 1 constant, 1 proportional)" in shown
    assert "1 block, 5 attention heads" in shown
    assert [list(i.dims) for i in onnx.load(out).graph.initializer if i.name == "W1_merged"] == [[4, 5]]


def test_external_weights(tmp_path: Path) -> None:
    model = onnx.load(planted_file(tmp_path / "inline.onnx"))
    source, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, source, save_as_external_data=True, location="model.data", size_threshold=0)
    report = rewrite(source, out, merge=True)
    assert report.exit_status is ExitStatus.CONVERTED
    assert [row.heads for row in report.converted] == [5]


def test_only_the_chosen_blocks_are_merged() -> None:
    model = text_model(TWO.replace("{bias}", "b1"), constants=weights(**like(2)))
    report = rewrite(model, merge=True, only=["mlp"])
    assert [row.heads for row in report.converted] == [7]
    assert report.notes == ("merge: mlp has 7 neurons instead of 8 (1 duplicate)",)


def test_a_dry_run_says_what_would_be_merged(tmp_path: Path) -> None:
    report = rewrite(planted_file(tmp_path / "model.onnx"), dry_run=True, merge=True)
    assert [row.heads for row in report.converted] == [5]
    assert set(tmp_path.iterdir()) == {tmp_path / "model.onnx"}


@pytest.mark.parametrize("spoiled", ["W1_merged", "b1_merged", "W2_merged", "b2_merged"])
def test_a_wrong_merge_fails_the_proof(spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Merged:
        result = merge(*arguments)
        (weight,) = (i for i in result.model.graph.initializer if i.name == spoiled)
        values = onnx.numpy_helper.to_array(weight).copy()
        values.flat[0] += 1e-3
        weight.CopyFrom(tensor(spoiled, values))
        return result

    monkeypatch.setattr(passes.plan, "merge", wrong)
    source, out = planted_file(tmp_path / "model.onnx"), tmp_path / "out.onnx"
    report = rewrite(source, out, merge=True)
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.validation is not None
    assert any(
        failure.startswith("mlp: merging its neurons changes what the block computes, error ")
        for failure in report.validation.failures
    )
    assert not out.exists()


def test_a_block_that_was_not_examined_lost_nothing() -> None:
    assert Record("mlp", 8, 8, reason="its weights are not plain").removed == 0


# -- blocks that are replaced as a whole -----------------------------------------------------------------------------


def planted(activation: str, **options: Any) -> onnx.ModelProto:
    """A model that loses three of its neurons: a dead one, a constant one, and one that equals another."""
    given = weights(**like(2), W2={0: 0.0})
    given["W1"][:, 7], given["b1"][7] = 0.0, 1.5
    return mlp(activation, constants=given, **options)


WHOLE_BLOCKS: dict[str, dict[str, Any]] = {
    "masked": {"form": "masked"},
    "compact": {"form": "compact"},
    "maskless": {"form": "maskless", "max_tokens": 70},
    "staged": {"form": "staged", "max_tokens": 70},
    "whole": {"form": "whole", "max_tokens": 70},
    "network": {"form": "masked", "bias_token": "network"},
}
SHOWN: dict[str, dict[str, Any]] = {
    "masked": {"form": "masked", "expose": "q,scores,pattern,z"},
    "compact": {"form": "compact", "expose": "q,scores,pattern,z"},
    "local": {"spelling": "softmax", "expose": "q,scores,pattern,z"},
}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"relu, {name}": (RELU, options) for name, options in WHOLE_BLOCKS.items()},
    **{f"gelu, {name}": (ERF_GELU, options) for name, options in WHOLE_BLOCKS.items()},
    **{f"exposed, {name}": (ERF_GELU, options) for name, options in SHOWN.items()},
}


QUICK = (*(name for name in FURTHER if name.startswith("relu")), "gelu, masked", "gelu, compact", "exposed, local")


@pytest.mark.parametrize(
    ("activation", "options"),
    [pytest.param(*case, id=name, marks=() if name in QUICK else slow) for name, case in FURTHER.items()],
)
def test_heads_of_merged_neurons_are_proved_in_every_form(activation: str, options: dict[str, Any]) -> None:
    model = planted(activation)
    report = rewrite(model, merge=True, **options)
    assert report.exit_status is ExitStatus.CONVERTED
    assert [row.heads for row in report.converted] == [5]
    assert report.validation is not None
    (block,) = report.validation.blocks
    assert block.exact_error is not None
    assert report.rewritten is not None
    x = np.random.default_rng(1).normal(0.0, 1.0, (2, 9, 4)).astype(np.float32)
    old, new = (evaluate(each, {"x": x})["out"] for each in (model, report.rewritten))
    assert np.abs(new - old).max() <= 2e-6 * np.abs(old).max()


def failures_of(report: Report) -> str:
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.rewritten is None
    assert report.validation is not None
    return "\n".join(report.validation.failures)


def one_percent(model: onnx.ModelProto, name: str) -> None:
    """Change the first number of one weight by 1 %."""
    (weight,) = (i for i in model.graph.initializer if i.name == name)
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[0] *= 1.01
    weight.CopyFrom(tensor(name, values))


MERGED_WEIGHTS = ("W1_merged", "b1_merged", "W2_merged", "b2_merged")
SPOILED = [
    pytest.param(activation, form, weight, id=f"{kind}-{form}-{weight}", marks=() if quick else slow)
    for kind, activation in (("relu", RELU), ("gelu", ERF_GELU))
    for form in ("masked", "compact", "maskless", "staged", "whole")
    for weight in MERGED_WEIGHTS
    for quick in [(form, weight) in (("masked", "W1_merged"), ("compact", "W2_merged"))]
]


@pytest.mark.parametrize(("activation", "form", "spoiled"), SPOILED)
def test_a_wrong_merge_fails_the_proof_in_every_form(
    activation: str, form: str, spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan, heads and merged original share the wrong weight: only the comparison with the original shows it."""

    def wrong(*arguments: Any) -> Merged:
        result = merge(*arguments)
        one_percent(result.model, spoiled)
        return result

    monkeypatch.setattr(passes.plan, "merge", wrong)
    failures = failures_of(rewrite(planted(activation), merge=True, **WHOLE_BLOCKS[form]))
    assert "mlp: merging its neurons changes what the block computes, error " in failures


@pytest.mark.parametrize(("activation", "form", "spoiled"), SPOILED)
def test_a_wrong_merged_weight_of_the_heads_fails_the_proof(
    activation: str, form: str, spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge is right, and a weight in the file is not."""

    def wrong(unit: Unit) -> onnx.ModelProto:
        one_percent(unit.model, spoiled)
        return unit.model

    monkeypatch.setattr(rewriter.api.rewriting, "made", wrong)
    failures = failures_of(rewrite(planted(activation), merge=True, **WHOLE_BLOCKS[form]))
    ahead = spoiled in ("W1_merged", "b1_merged")
    found = "heads differ from their program by" if ahead else "heads' outputs are projected to something else"
    assert f"mlp: in float64 the {found}" in failures


@pytest.mark.parametrize("form", ["local", "masked", "compact"])
def test_merging_must_leave_the_activation(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of a whole block are measured by the merged original, whose activation must be the original's."""

    def wrong(*arguments: Any) -> Merged:
        result = merge(*arguments)
        (node,) = (node for node in result.model.graph.node if node.op_type == "Relu")
        node.op_type = "LeakyRelu"
        node.attribute.append(onnx.helper.make_attribute("alpha", 1e-9))
        return result

    monkeypatch.setattr(passes.plan, "merge", wrong)
    failures = failures_of(rewrite(planted(RELU), merge=True, form=form))
    assert "mlp: merging its neurons changes the activation itself" in failures
