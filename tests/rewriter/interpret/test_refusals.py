"""What each function of interpretation refuses, and why."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from rewriter import (
    UsageError,
    ablate,
    attribute,
    attribution_graph,
    compositions,
    freeze,
    head_pictures,
    head_tokens,
    heads,
    run_with_cache,
    why,
)
from tests.committed import FOLDER
from tests.rewriter.interpret.test_attribution import LOGIT, given

PATH, OTHER = FOLDER / "silu-decoder.onnx", FOLDER / "conformer-encoder.onnx"
NEURON, HEAD = "blocks.0.mlp_heads[1]", "blocks.0.attn[1]"


def of(call: Callable[..., Any], *given_first: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda x: call(PATH, x, *given_first, **options)


REFUSED: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda _: ablate(PATH, "blocks.9.attn.0"), "no head matches 'blocks.9.attn.0'; there are, for example"),
    (lambda _: ablate(PATH, ["*", "blocks.0.attn.4"]), "no head matches 'blocks.0.attn.4'"),
    (lambda _: ablate(PATH, []), "no head is named"),
    (lambda _: ablate(PATH, "*", "median"), "unknown ablation 'median'"),
    (lambda _: ablate(PATH, "*", "mean"), "ablation by mean takes inputs"),
    (lambda x: ablate(PATH, "*", inputs=x), "ablation by zero takes no inputs"),
    (lambda x: freeze(PATH, "*", x), "blocks.0.mlp_heads are neurons, whose patterns cannot be frozen"),
    (of(attribution_graph, LOGIT, max_nodes=-1), "there cannot be -1 nodes"),
    (of(attribution_graph, LOGIT, position=99), "there is no token 99"),
    (of(attribute, 1000), "there is no logit 1000"),
    (of(attribute, LOGIT, minus=-1000), "there is no logit -1000"),
    (of(attribute, LOGIT, position=99), "there is no token 99"),
    (lambda x: attribute(PATH, [x, x], LOGIT), "takes one case, and there are 2"),
    (lambda _: attribute(OTHER, given(OTHER.stem), LOGIT), "is not on the stream that it reads"),
    (of(why, "blocks.7.attn[0]"), "no head matches 'blocks.7.attn.0'"),
    (of(why, "blocks.0.attn.*"), "no head matches"),
    (of(why, NEURON, key=1), "it has no key"),
    (of(why, NEURON, query=7), "there is no token 7"),
    (of(why, HEAD, key=-8), "there is no token -8"),
    (of(head_pictures, logit=4000), "there is no logit 4000"),
    (of(head_pictures, most=-1), "there cannot be -1 neurons"),
    (lambda _: head_pictures(OTHER, given(OTHER.stem), logit=1), "cannot be attributed"),
    (of(run_with_cache, names=["*.hook_pattern", "blocks.9.*"]), "no hook matches 'blocks.9"),
    (lambda x: run_with_cache(PATH, {"input_ids": x["input_ids"]}, names="*.hook_q"), "'attention_mask' missing"),
    (lambda _: compositions(PATH, top=0), "take 1 or more"),
    (lambda _: head_tokens(PATH, top=0), "take 1 or more"),
    (lambda _: head_tokens(PATH, names="x.*"), "no head matches"),
    (lambda _: heads(PATH, program="most"), "unknown program 'most'"),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        call(given("silu-decoder"))
