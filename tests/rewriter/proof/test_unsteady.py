"""What onnxruntime never writes is left out and named, what it writes is compared."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rewriter import Comparison, rewrite, validate
from rewriter.inputs.cases import Case
from rewriter.proof.run import ModelRuns, Ran, Way, cleared, gaps_of, remarks
from tests.textmodels import SILU, text_model

PLAIN, AGAIN = Way("cpu", optimise=False), Way("cpu", optimise=False, again=True)


def sliding(*, off: float = 0.0) -> onnx.ModelProto:
    """An MLP, then attention whose cache holds more tokens than there are: the rest of it is never written.

    `off` is added to the keys and values that are written.
    """
    rng = np.random.default_rng(0)
    shapes = {"A": (4, 8), "B": (8, 64), "W": (32, 4)}
    weights = {name: rng.normal(0.0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}
    weights["moved"] = np.array(off, np.float32)
    past: list[str | int | None] = ["batch", 1, "capacity", "kv_cache_dim"]
    model = text_model(
        f"y = MatMul(x, A) {SILU} f = MatMul(h, B) qkv = Add(f, moved) a, kk, vv = com.microsoft.GroupQueryAttention"
        "<num_heads = 2, kv_num_heads = 1, local_window_size = 12, sliding_window_cache = 1>"
        "(qkv, , , k, v, last, total) out = MatMul(a, W)",
        inputs="float[batch, tokens, 4] x, int32[batch] last, int32 total",
        domains={"com.microsoft": 1},
        constants={name: numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()},
    )
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, past) for name in "kv")
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, past) for name in ("kk", "vv"))
    return model


def notes(found: Comparison) -> str:
    return "; ".join(found.notes)


@pytest.mark.slow
def test_a_model_with_a_sliding_cache_is_itself() -> None:
    found = validate(sliding(), sliding(), providers="cpu")
    assert found.same, found.failures
    assert "elements of kk, vv are unwritten memory or random: they are not the same" in notes(found)
    report = rewrite(sliding(), providers="cpu")
    assert report.validation.passed, report.problems
    assert any("kk, vv are unwritten" in each for each in report.validation.notes)


@pytest.mark.slow
def test_an_error_in_the_written_part_is_refused() -> None:
    """By the run alone too: the certificate's own refusal is one failure, an output that is off another."""
    found = validate(sliding(), sliding(off=1e-3), providers="cpu")
    assert found.verdict == "different"
    assert any(each.startswith("output kk is off by") for each in found.failures)
    assert any(each.startswith("output out is off by") for each in found.failures)


def runs(values: np.ndarray, again: np.ndarray) -> ModelRuns:
    ways = {way: Ran([{"out": each}]) for way, each in ((PLAIN, values), (AGAIN, again))}
    return ModelRuns((Case("one", {}),), (), ways, gaps=gaps_of(ways))


FILLED = np.full(4, 0xFF, np.uint8).view(np.float32)[0]


@pytest.mark.parametrize(
    ("values", "again", "left_out"),
    [
        ([1.0, 2.0], [1.0, 2.0], []),
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], []),  # a sum in another order
        ([1.0, 2.0], [1.0, 2.1], [1]),
        ([1.0, FILLED], [1.0, FILLED], [1]),  # memory of an earlier run
        ([1.0, np.nan], [1.0, np.nan], []),
        ([1.0, np.inf], [1.0, 3.0], [1]),
        ([0.0, 1e-30], [0.0, 1e-20], [1]),
    ],
)
def test_what_is_left_out(values: list[float], again: list[float], left_out: list[int]) -> None:
    both = runs(*(np.array(each, np.float32) for each in (values, again)))
    assert [int(k) for masks in both.gaps for mask in masks.values() for k in np.flatnonzero(mask)] == left_out
    assert len(list(remarks([], both))) == len(left_out)


def test_an_output_that_is_never_the_same_proves_nothing() -> None:
    both = runs(np.array([1, 2], np.float32), np.array([3, 4], np.float32))
    (said,) = remarks([], both)
    assert said.startswith("2 of 2 elements of out are unwritten memory or random")


def test_another_shape_is_not_covered_up() -> None:
    both = runs(np.zeros(2, np.float32), np.ones(2, np.float32))
    assert cleared([{"out": np.ones(3, np.float32)}], both.gaps)[0]["out"].tolist() == [1.0, 1.0, 1.0]
    assert cleared([{"out": np.ones(2, np.float32)}], both.gaps)[0]["out"].tolist() == [0.0, 0.0]


# -- models that round activations to 8 bits -------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 4])
def test_the_note_is_about_models_that_round_activations(level: int) -> None:
    rng, product = np.random.default_rng(0), f"MatMulNBits<K = 32, N = 32, block_size = 32, accuracy_level = {level}>"
    packed = {name: onnx.numpy_helper.from_array(rng.integers(0, 256, (32, 1, 16)).astype("B"), name) for name in "wvu"}
    body = f"n = SimplifiedLayerNormalization(x, g) y = com.microsoft.{product}(n, w, c) {SILU}"
    model = text_model(
        f"{body} z = com.microsoft.{product}(h, v, c) logits = com.microsoft.{product}(z, u, c)",
        inputs="float[batch, tokens, 32] x", outputs="float[batch, tokens, 32] logits",
        domains={"com.microsoft": 1}, constants={**packed, "c": np.full(32, 0.02), "g": rng.uniform(0.5, 2, 32)},
    )  # fmt: skip
    proof = rewrite(model, providers="cpu").validation
    assert [each.startswith("activations are rounded to 8 bits") for each in proof.notes] == [True] * (level == 4)
