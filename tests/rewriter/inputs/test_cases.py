"""Inputs made for a model: valid, consistent, varied, repeatable."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from rewriter.errors import UsageError
from rewriter.inputs.cases import Maker
from rewriter.ort import open_session
from tests.changes import add_weight
from tests.textmodels import filled

INT, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL
Declared = tuple[int, list[Any]]


def declare(inputs: dict[str, Declared], rows: int | None = None) -> onnx.ModelProto:
    """A model that takes `inputs` and looks the first up in a table of `rows`."""
    values = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()]
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in inputs]
    outputs = [helper.make_tensor_value_info(f"{name}_out", kind, None) for name, (kind, _) in inputs.items()]
    weights = []
    if rows is not None:
        weights.append(numpy_helper.from_array(np.zeros((rows, 4), np.float32), "table"))
        nodes.append(helper.make_node("Gather", ["table", next(iter(inputs))], ["embedded"]))
    graph = helper.make_graph(nodes, "g", values, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


TOKENS: Declared = (INT, ["batch_size", "sequence_length"])
TEXT = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "position_ids"), TOKENS)


def test_text_model() -> None:
    cases = {case.name: case for case in Maker(declare(TEXT, rows=30)).usual()}
    assert list(cases) == [
        "batch 3, sequence 17",
        "batch 1, sequence 64",
        "batch 1, sequence 17",
        "batch 1, sequence 1",
        "batch 3, sequence 2",
    ]
    feeds = cases["batch 3, sequence 17"].feeds
    assert feeds["input_ids"].max() < 30
    assert len(np.unique(feeds["input_ids"])) > 10
    assert feeds["attention_mask"].tolist() == [[1] * 17, [0] * 5 + [1] * 12, [1] * 12 + [0] * 5]
    assert feeds["position_ids"].tolist() == [[*range(17)]] * 3
    assert {*feeds["token_type_ids"].ravel().tolist()} == {0, 1}
    assert cases["batch 1, sequence 64"].feeds["attention_mask"].min() == 1


def test_encoder_masks_are_padded_at_both_ends_and_sound_at_its_end_only() -> None:
    inputs: dict[str, Declared] = {
        "input_ids": (INT, ["batch", "sequence"]),
        "encoder_attention_mask": (INT, ["batch", "encoder_sequence"]),
        "padding_mask": (BOOL, ["batch", "frames"]),
    }
    cases = Maker(declare(inputs, rows=30)).usual()
    batches = [case.feeds for case in cases if len(case.feeds["input_ids"]) == 3]
    ends = [feeds["encoder_attention_mask"][:, [0, -1]].tolist() for feeds in batches]
    assert [[1, 1], [0, 1], [1, 0]] in ends
    assert all(case.feeds["padding_mask"][:, 0].all() for case in cases)
    assert not any(feeds["padding_mask"][-1, -1] for feeds in batches)


def test_every_type() -> None:
    import ml_dtypes

    inputs: dict[str, Declared] = {
        "a": (TensorProto.BFLOAT16, [2]),
        "b": (TensorProto.DOUBLE, []),
        "c": (TensorProto.UINT8, ["batch", 3]),
        "d_ids": (TensorProto.INT32, [4]),
        "flag": (BOOL, [1]),
    }
    cases = Maker(declare(inputs)).usual()
    found = {name: array.dtype for name, array in cases[0].feeds.items()}
    assert found == {
        "a": ml_dtypes.bfloat16, "b": np.float64, "c": np.uint8, "d_ids": np.int32, "flag": np.bool_,
    }  # fmt: skip
    assert {bool(case.feeds["flag"][0]) for case in cases} == {True, False}


def decoder(mask_dim: str, *, branch: bool = False) -> onnx.ModelProto:
    inputs: dict[str, Declared] = {
        "input_ids": TOKENS,
        "attention_mask": (INT, ["batch_size", mask_dim]),
        "position_ids": TOKENS,
        "past_key_values.0.key": (FLOAT, ["batch_size", 2, "past_sequence_length", 8]),
        "past_key_values.0.value": (FLOAT, ["batch_size", 2, "past_sequence_length", 8]),
    }
    if branch:
        inputs["use_cache_branch"] = (BOOL, [1])
    return declare(inputs, rows=100)


@pytest.mark.parametrize(
    "mask_dim",
    [
        "past_sequence_length + sequence_length",
        "past_sequence_length + 1",
        "total_sequence_length",
        "attention_mask_sequence_length",
    ],
)
def test_past(mask_dim: str) -> None:
    cases = Maker(decoder(mask_dim)).usual()
    pasts = set()
    for case in cases:
        batch, sequence = case.feeds["input_ids"].shape
        past = case.feeds["past_key_values.0.key"].shape[2]
        assert case.feeds["past_key_values.0.key"].shape == (batch, 2, past, 8)
        assert case.feeds["attention_mask"].shape == (batch, past + sequence)
        assert case.feeds["position_ids"][0, 0] == past
        assert bool(case.feeds["attention_mask"].all()) is (batch == 1)
        pasts.add(past)
    assert 0 in pasts
    assert len(pasts) > 2


def test_cache_branch_goes_with_the_past() -> None:
    cases = Maker(decoder("past_sequence_length + 1", branch=True)).usual()
    assert {bool(case.feeds["use_cache_branch"][0]) for case in cases} == {True, False}
    for case in cases:
        cached = bool(case.feeds["use_cache_branch"][0])
        assert cached == (case.feeds["past_key_values.0.key"].shape[2] > 0)
        assert ("cache branch on" if cached else "cache branch off") in case.name
        assert not cached or case.feeds["input_ids"].shape[1] == 1


def test_encoder_and_decoder_lengths_differ() -> None:
    inputs: dict[str, Declared] = {
        "input_ids": (INT, ["batch_size", "decoder_sequence_length"]),
        "encoder_hidden_states": (FLOAT, ["batch_size", "encoder_sequence_length", 16]),
        "encoder_attention_mask": (INT, ["batch_size", "encoder_sequence_length"]),
    }
    for case in Maker(declare(inputs)).usual():
        length = case.feeds["encoder_attention_mask"].shape[1]
        assert length != case.feeds["input_ids"].shape[1]
        assert case.feeds["encoder_hidden_states"].shape[1:] == (length, 16)
    assert Maker(declare(inputs)).changed(most=12).case((1, 12, 0)).feeds["encoder_attention_mask"].shape == (1, 12)


def test_fixed_shapes_get_two_sets_of_values() -> None:
    first, second = Maker(declare({"x": (FLOAT, [2, 3])})).usual()
    assert (first.name, second.name) == ("fixed shapes, values 1", "fixed shapes, values 2")
    assert not np.array_equal(first.feeds["x"], second.feeds["x"])


def test_images_get_the_channels_that_the_weights_fix() -> None:
    model = declare({"pixel_values": (FLOAT, ["batch", "channels", "height", "width"])})
    add_weight(model, "w", np.zeros((8, 2, 4, 4), np.float32))
    model.graph.node.append(helper.make_node("Conv", ["pixel_values", "w"], ["a"]))
    assert {case.feeds["pixel_values"].shape[1] for case in Maker(model).usual()} == {2}


def test_lengths_count_frames() -> None:
    inputs: dict[str, Declared] = {"audio_signal": (FLOAT, ["batch", 80, "time"]), "length": (INT, ["batch"])}
    for case in Maker(declare(inputs)).usual():
        assert case.feeds["length"][0] == case.feeds["audio_signal"].shape[2]


def test_integers_along_one_axis_are_one_for_each_row() -> None:
    inputs: dict[str, Declared] = {"sample": (FLOAT, ["batch", 4, "height", "width"]), "timestep": (INT, ["steps"])}
    assert {case.feeds["timestep"].shape for case in Maker(declare(inputs)).usual()} == {(1,), (3,)}


def test_same_seed_same_values_and_inputs_are_independent() -> None:
    model, more = declare(TEXT), declare({**TEXT, "extra": (FLOAT, ["batch_size", 3])})
    for one, again, with_extra in zip(Maker(model).usual(), Maker(model).usual(), Maker(more).usual(), strict=True):
        for name in TEXT:
            np.testing.assert_array_equal(one.feeds[name], again.feeds[name])
            np.testing.assert_array_equal(one.feeds[name], with_extra.feeds[name])
    other = Maker(model, seed=1).usual()[0].feeds["input_ids"]
    assert not np.array_equal(other, Maker(model).usual()[0].feeds["input_ids"])


def test_dims_fix_names_everywhere() -> None:
    cases = Maker(decoder("past_sequence_length + sequence_length"), dims={"sequence_length": 5}).usual()
    for case in cases:
        past = case.feeds["past_key_values.0.key"].shape[2]
        assert (case.feeds["input_ids"].shape[1], case.feeds["attention_mask"].shape[1]) == (5, past + 5)


def test_no_sequence_has_more_tokens_than_there_are_positions() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (int64[batch, seq] input_ids) => (float[batch, seq, 4] out)
        <float[30, 4] table, float[20, 4] places, int64 zero = {0}, int64 one = {1}>
        { e = Gather(table, input_ids) s = Shape(input_ids) n = Gather(s, one) p = Range(zero, n, one)
          q = Gather(places, p) out = Add(e, q) }"""
    )
    filled(model, np.ones)
    session, cases = open_session(model), Maker(model).usual()
    assert max(session.run(case.feeds)["out"].shape[1] for case in cases) == 20


def test_unknown_dim_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no input has a dimension 'bath'; .* 'batch_size', 'sequence_length'"):
        Maker(declare(TEXT), dims={"bath": 2}).usual()
    with pytest.raises(UsageError, match="dimension 'batch_size' cannot be -1"):
        Maker(declare(TEXT), dims={"batch_size": -1}).usual()


def test_inputs_that_nothing_can_be_made_for() -> None:
    take = "commands with --inputs take"
    for value, why in (
        (helper.make_tensor_value_info("x", TensorProto.STRING, [1]), f"for input 'x' of type string: {take} them"),
        (helper.make_tensor_sequence_value_info("x", FLOAT, [1]), r"input 'x' is not a tensor \(sequence\)"),
        (helper.make_tensor_value_info("x", FLOAT, None), f"input 'x' has no declared shape: {take} its values"),
        (helper.make_tensor_value_info("x", FLOAT, [2**29]), f"of 536870912 entries is too large .*: {take} it"),
    ):
        with pytest.raises(UsageError, match=why):
            Maker(onnx.ModelProto(graph=onnx.GraphProto(input=[value]))).usual()


def test_initializers_that_are_inputs_too_are_not_fed() -> None:
    model = declare({**TEXT, "w": (FLOAT, [2])})
    add_weight(model, "w", np.zeros(2, np.float32))
    assert "w" not in Maker(model).usual()[0].feeds


# -- what onnxruntime-genai's builder makes ---------------------------------------------------------------------------


def genai(*, window: int = 0) -> onnx.ModelProto:
    """One layer: packed projection, GroupQueryAttention with a head size of 16, lengths from the mask."""
    held = "past_sliding_length" if window else "past_sequence_length"
    past: list[str | int | None] = ["batch_size", 2, held, "kv_cache_dim"]
    sliding = f"local_window_size = {window}, sliding_window_cache = 1," if window else ""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (int64[batch_size, sequence_length] input_ids, int64[batch_size, total_sequence_length] attention_mask)
          => (float[batch_size, sequence_length, 64] out)
          <int64 one = {{1}}, int64[1] ones = {{1}}, float[100, 32] table, float[32, 128] W>
        {{ sum = ReduceSum<keepdims = 0>(attention_mask, ones) less = Sub(sum, ones) last = Cast<to = 6>(less)
           shape = Shape(attention_mask) count = Gather(shape, one) total = Cast<to = 6>(count)
           x = Gather(table, input_ids) qkv = MatMul(x, W)
           out, kk, vv = com.microsoft.GroupQueryAttention<{sliding} num_heads = 4, kv_num_heads = 2>
               (qkv, , , k, v, last, total) }}"""
    )
    filled(model, np.random.default_rng(0).standard_normal)
    model.graph.input.extend(helper.make_tensor_value_info(name, FLOAT, past) for name in "kv")
    model.graph.output.extend(helper.make_tensor_value_info(name, FLOAT, ["a", 2, "b", "c"]) for name in ("kk", "vv"))
    return model


@pytest.mark.parametrize(
    ("window", "states"), [(0, {}), (8, {}), (0, {"past.0.conv": [64, 2], "past.0.ssm": [2, 8, 8]})]
)
def test_every_case_of_a_genai_model_runs(window: int, states: dict[str, list[int]]) -> None:
    """Also with states beside the cache and positions along three axes, as Qwen3.5 has them: they fix no length."""
    model = genai(window=window)
    for name, sizes in states.items():
        model.graph.input.append(helper.make_tensor_value_info(name, FLOAT, ["batch_size", *sizes]))
    if states:
        positions: list[str | int | None] = [3, "batch_size", "sequence_length"]
        model.graph.input.append(helper.make_tensor_value_info("position_ids", INT, positions))
    session, cases = open_session(model), Maker(model).usual()
    pasts = set()
    for case in cases:
        session.run(case.feeds)
        (batch, new), total = case.feeds["input_ids"].shape, case.feeds["attention_mask"].shape[1]
        assert case.feeds["k"].shape == (batch, 2, max(total - new, window), 16)
        pasts.add((batch > 1, total > new))
    assert pasts == {(False, False), (True, False), (False, True), (True, True)}
    assert not all(case.feeds["attention_mask"].all() for case in cases)


def test_few_cases_have_a_past_among_them() -> None:
    names = [case.name for case in Maker(genai()).usual(few=True)]
    assert len(names) == 3
    assert {"past 0" in name for name in names} == {True, False}
    assert max(case.feeds["input_ids"].shape[1] for case in Maker(genai(), most=20).usual(few=True)) == 20


def test_a_name_fixes_the_axis_that_it_names() -> None:
    usual = [case.feeds["input_ids"].shape for case in Maker(genai()).usual()]
    assert usual == [case.feeds["input_ids"].shape for case in Maker(genai(), dims={"kv_cache_dim": 16}).usual()]
    for case in Maker(genai(), dims={"past_sequence_length": 0}).usual():
        assert case.feeds["k"].shape[2] == 0
        assert case.feeds["attention_mask"].shape == case.feeds["input_ids"].shape
    for case in Maker(genai(window=8), dims={"past_sliding_length": 20}).usual():
        assert case.feeds["k"].shape[2] == 20
    assert len({case.feeds["attention_mask"].shape for case in Maker(genai(window=8)).usual()}) > 4


def test_a_multiple_is_divisible() -> None:
    """As torch.export writes dimensions that a model cuts into patches; the name is the number of these."""
    model = declare({"image": (FLOAT, ["batch", 3, "14*rows", "14*columns"]), "grid": (INT, ["rows", "columns"])})
    for case in Maker(model).usual():
        assert case.feeds["image"].shape[2:] == tuple(14 * size for size in case.feeds["grid"].shape)
    assert {case.feeds["image"].shape[2] for case in Maker(model, dims={"rows": 5}).usual()} == {70}


@pytest.mark.parametrize("dim", ["past_seq_len + seq_len", "past_sequence_length+sequence_length", "s0 + s1"])
def test_a_sum_is_the_sum_of_two_sizes(dim: str) -> None:
    """Of names that other inputs have, or of names that say what they count."""
    inputs: dict[str, Declared] = {
        "input_ids": (INT, ["batch", "s0" if dim == "s0 + s1" else "sequence_length"]),
        "bias": (FLOAT, ["batch", dim]),
        "past.0.key": (FLOAT, ["batch", 2, "s1" if dim == "s0 + s1" else "past_sequence_length", 8]),
    }
    found = {
        (case.feeds["input_ids"].shape[1], case.feeds["past.0.key"].shape[2], case.feeds["bias"].shape[1])
        for case in Maker(declare(inputs, rows=30)).usual()
    }
    assert {(17, 0, 17), (2, 5, 7), (1, 9, 10)} <= found


def test_a_sum_with_a_name_of_its_own() -> None:
    cases = Maker(declare({"x": (FLOAT, ["batch", "2*s0 + 1"]), "y": (FLOAT, ["s0"])}), dims={"s0": 4}).usual()
    assert {(case.feeds["x"].shape[1], case.feeds["y"].shape) for case in cases} == {(9, (4,))}


@pytest.mark.parametrize(
    ("shape", "grid"), [(["patches", 12], ["images", 3]), (["batch", "patches", 12], ["batch", 2]), ([36, 12], [1, 3])]
)
def test_the_product_of_a_grid_is_the_number_of_patches(shape: list[str | int], grid: list[str | int]) -> None:
    for case in Maker(declare({"pixel_values": (FLOAT, shape), "image_grid_thw": (INT, grid)})).usual():
        rows = case.feeds["image_grid_thw"].prod(axis=1)
        assert (rows.sum() if len(shape) == 2 else rows[0]) == case.feeds["pixel_values"].shape[-2]
        assert (case.feeds["image_grid_thw"][:, -2:] % 2 == 0).all()


def test_a_static_cache_has_the_past_that_its_positions_say() -> None:
    """As mobius-onnx writes one: keys are written behind the past, and the rest of the cache is not read."""
    model = onnx.parser.parse_model(
        """<ir_version: 11, opset_import: ["": 24]>
        g (int64[batch, seq] input_ids, int64[batch, seq] position_ids, float[batch, 32, 8] key_cache_0,
           int64[batch] write_indices, int64[batch] nonpad_kv_seqlen) => (float[batch, seq, 8] out, float keys)
        <float[50, 8] table, float[32, 8] places>
        { e = Gather(table, input_ids) p = Gather(places, position_ids) x = Add(e, p)
          keys = TensorScatter<axis = 1>(key_cache_0, x, write_indices)
          out = Attention<q_num_heads = 2, kv_num_heads = 2>(x, keys, keys, , , , nonpad_kv_seqlen) }"""
    )
    filled(model, np.ones)
    session, found = open_session(model), set()
    for case in Maker(model).usual():
        session.run(case.feeds)
        (tokens, past) = case.feeds["input_ids"].shape[1], case.feeds["write_indices"][0]
        assert (case.feeds["nonpad_kv_seqlen"] == past + tokens).all()
        assert case.feeds["position_ids"][0].tolist() == [*range(past, past + tokens)]
        found.add((tokens, int(past)))
    assert {(32, 0), (17, 0), (2, 5), (1, 9)} <= found


@pytest.mark.parametrize("moved", ["perm = [1, 0, 2]", ""])
def test_positions_stay_within_a_static_cache(moved: str) -> None:
    """As PyTorch's exporters write one: by ScatterND into a cache whose tokens come first, or by ScatterElements."""
    turned, plain = f"Transpose<{moved}>", "ScatterElements<axis = 1>"
    write = f"c = {turned}(key_cache_0) n = {turned}(x) w = ScatterND(c, at, n) keys = {turned}(w)"
    if not moved:
        write = f"s = Shape(x) i = Expand(at, s) keys = {plain}(key_cache_0, i, x)"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        g (int64[batch, seq] input_ids, int64[seq] cache_position, float[batch, 24, 8] key_cache_0) => (float keys)
        <int64[2] column = {{-1, 1}}, int64[1] two = {{2}}, int64[3] width = {{1, 1, 8}}>
        {{ at = Reshape(cache_position, column) f = Cast<to = 1>(input_ids) r = Unsqueeze(f, two)
          x = Expand(r, width) {write} }}"""
    )
    session = open_session(model)
    tokens = set()
    for case in Maker(model).usual():
        session.run(case.feeds)
        tokens.add(case.feeds["input_ids"].shape[1])
    assert max(tokens) == 24
