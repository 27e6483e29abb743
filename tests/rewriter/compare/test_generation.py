"""Generation with two models: through a cache and without, against a numpy evaluation, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from rewriter import ExitStatus, UsageError, ValidationError, rewrite, validate
from rewriter.compare.generation import Generation, generate, matched
from rewriter.files.load import LoadedModel
from rewriter.proof.inputs.cases import Case
from rewriter.proof.rule import Judgement
from tests.changes import change_values, rename, weight
from tests.committed import FOLDER
from tests.textmodels import tensor, text_model

PAST, PRESENT = "past_key_values.0.value", "present.0.value"
RNG = np.random.default_rng(3)
TABLE, FIRST, SECOND = RNG.normal(0, 1, (20, 4)), RNG.normal(0, 1, (4, 8)), RNG.normal(0, 1, (8, 20))


def model(*, cached: bool = True, keep: str = "past", kept: str = "both") -> onnx.ModelProto:
    """Reads the sum of all embeddings so far; `keep` and `kept` are what a wrong cache reads and gives instead."""
    inputs = "int64[batch, tokens] input_ids" + (", float[batch, 1, seen, 4] past" if cached else "")
    outputs = "float[batch, tokens, 20] logits" + (", float[batch, 1, all, 4] present" if cached else "")
    context = f"both = Concat<axis = 2>({keep}, new) present = Identity({kept})" if cached else "both = Identity(new)"
    text = f"""<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => ({outputs})
        <int64[1] one = {{1}}, int64[1] two = {{2}}, float zero = {{0}}> {{
        e = Gather(table, input_ids) new = Unsqueeze(e, one) {context}
        sum = ReduceSum(both, two) c = Squeeze(sum, one) h = Add(e, c)
        y = MatMul(h, first) s = Sigmoid(y) a = Mul(y, s) logits = MatMul(a, second) }}"""
    made = parser.parse_model(text)
    for name, values in (("table", TABLE), ("first", FIRST), ("second", SECOND)):
        made.graph.initializer.append(tensor(name, values))
    for value in (*made.graph.input, *made.graph.output):
        value.name = {"past": PAST, "present": PRESENT}.get(value.name, value.name)
    rename(made.graph.node, {"past": PAST, "present": PRESENT})
    return made


def greedy(prompt: list[int], steps: int) -> list[int]:
    """The same in numpy, without a cache."""
    tokens = list(prompt)
    for _ in range(steps):
        h = TABLE[tokens[-1]] + TABLE[tokens].sum(0)
        y = h @ FIRST
        tokens.append(int((y / (1 + np.exp(-y)) @ SECOND).argmax()))
    return tokens[len(prompt) :]


def generated(a: onnx.ModelProto, b: onnx.ModelProto, **options: Any) -> Generation:
    found = validate(a, b, providers=["cpu"], generate=12, **options).generation
    assert found is not None
    return found


@pytest.mark.parametrize("cached", [True, False])
def test_the_tokens_are_those_of_numpy(*, cached: bool) -> None:
    ids = np.asarray([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    inputs: dict[str, Any] = {"input_ids": ids}
    if cached:
        inputs[PAST] = np.zeros((2, 1, 0, 4), np.float32)
    original = model(cached=cached)
    rewritten = rewrite(original, validate=False).rewritten
    found = generated(original, rewritten, inputs=inputs)
    assert found.tokens == tuple(tuple(greedy(list(row), 12)) for row in ids)
    assert (found.agreement, found.differences, found.steps) == (1.0, (), 12)
    assert found.cache == (((PAST, PRESENT),) if cached else ())


def test_a_cache_that_is_not_read_is_noticed() -> None:
    wrong = model(keep="lost")
    wrong.graph.node.insert(0, onnx.helper.make_node("Mul", [PAST, "zero"], ["lost"]))
    # From most prompts this model generates the same token for ever, with or without a cache; not from this one.
    found = validate(model(), wrong, providers=["cpu"], generate=12, atol=1e3, seed=14)
    assert found.generation is not None
    assert found.generation.agreement < 1
    # Within an absurd tolerance every difference counts as a tie; by the rule it is a failure.
    assert found.exit_status is ExitStatus.CONVERTED
    assert found.generation.failures == ()
    strict = validate(model(), wrong, providers=["cpu"], generate=12, seed=14)
    assert any(each.startswith("generation, step ") for each in strict.failures)


def test_a_cache_that_does_not_grow_is_an_error() -> None:
    with pytest.raises(ValidationError, match=r"has 0 tokens after \d+"):
        generated(model(), model(kept="past"), atol=1e9)


def test_an_encoder_is_refused() -> None:
    path = FOLDER / "gelu-encoder.onnx"
    with pytest.raises(UsageError, match=r"needs an output \[batch, tokens, vocabulary\]"):
        validate(path, path, providers=["cpu"], generate=2)


def test_text_without_tokens_is_refused() -> None:
    other = text_model("out = Relu(x)")
    with pytest.raises(UsageError, match="generate= needs a model that reads token ids"):
        validate(other, other, providers=["cpu"], generate=2)


@pytest.mark.parametrize(
    ("pasts", "outputs", "wanted"),
    [
        (["past_key_values.0.key", "past_key_values.0.value"], ["logits", "present.0.value", "present.0.key"], [2, 1]),
        (["past_key_self_1", "past_value_self_1"], ["out_1_key", "present_key_self_1", "present_value_self_1"], [1, 2]),
        (
            ["past_key_values.1.decoder.key", "past_key_values.1.encoder.key"],
            ["logits", "present.1.encoder.key", "present.1.decoder.key"],
            [2, 1],
        ),
        (["past_0", "past_1"], ["logits", "present_1", "present_0"], [2, 1]),
    ],
)
def test_matching(pasts: list[str], outputs: list[str], wanted: list[int]) -> None:
    assert matched(pasts, outputs) == {name: outputs[index] for name, index in zip(pasts, wanted, strict=True)}


@pytest.mark.parametrize("outputs", [["logits"], ["present.0.key", "cache.0.key"], ["present.1.key"]])
def test_a_dropped_cache_tensor_is_refused(outputs: list[str]) -> None:
    with pytest.raises(UsageError, match=r"continues? the input 'past_key_values\.0\.key'"):
        matched(["past_key_values.0.key"], outputs)


@pytest.mark.parametrize(
    ("allowed", "tolerated", "fails"),
    [(1.0, (), False), (1e-4, (), True), (50, "logits", False), (1e-3, "logits", True)],
)
def test_ties_are_no_failures(allowed: float, tolerated: str | tuple[()], *, fails: bool) -> None:
    """A choice that differs is one only where A prefers its token by more than twice the error that is allowed."""
    a, b = model(), model()
    change_values(weight(b, "second"), "v = v[:, ::-1]")
    models = tuple(LoadedModel(each, None, None, (), 0) for each in (a, b))
    cases = [Case("one", {"input_ids": np.asarray([[3, 1, 4]]), PAST: np.zeros((1, 1, 0, 4), np.float32)})]
    found = generate(models, cases, "cpu", 3, {"logits": Judgement("logits", 0, 0, allowed)}, tolerated)  # type: ignore[arg-type]
    assert found.agreement < 1
    assert bool(found.failures) is fails
    assert len(found.differences) == round(3 * (1 - found.agreement))
