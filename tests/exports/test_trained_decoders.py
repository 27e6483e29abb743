"""Attribution in decoders that were trained on docstrings, against PyTorch, which knows nothing of the rewriter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rewriter.interpret.attribute import FrozenRun
from tests.committed import FOLDER

tokenizers = pytest.importorskip("tokenizers")

from tests.torchdecoder import LAYERS, Decoder  # noqa: E402 - after the skip

Array = NDArray[Any]

ACTIVATIONS = ("silu", "gelu")
TRAINED = FOLDER / "trained"
LENGTH = 14
SENTENCES = (
    "Return the number of items in the list, or zero if it is empty.",
    "Raise ValueError if the given name is not a valid identifier.",
)


def decoder(activation: str) -> Decoder:
    return Decoder(TRAINED / f"docstrings-{activation}.onnx", activation)


def prompts() -> tuple[Array, Array]:
    """Two prompts that differ in one token near the end."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TRAINED / "docstrings-tokenizer.json"))
    own, other = (np.array(tokenizer.encode(sentence).ids[:LENGTH]) for sentence in SENTENCES)
    minimal = own.copy()
    minimal[LENGTH - 3] = next(token for token in other if token != own[LENGTH - 3])
    return own, minimal


def entries(model: Decoder, own: Array, minimal: Array) -> tuple[int, int]:
    """The likeliest next tokens of both prompts; if they are the same, the one that gains most by the change."""
    before, after = (model.run(ids)[0][-1].detach() for ids in (own, minimal))
    first, second = int(before.argmax()), int(after.argmax())
    return first, second if second != first else int((after - before).argmax())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_predictions_are_those_of_a_frozen_network_in_pytorch(activation: str) -> None:
    """With program `fast`, whose patterns add up to the gate of the activation: y times a gate that is held."""
    model = decoder(activation)
    own, minimal = prompts()
    first, second = entries(model, own, minimal)
    run = FrozenRun(model.path, feeds(own), output=None, sequence=0, program="fast")
    after = {name: link.after for link in run.linear(first, second, -1).links for name in link.steps}
    gradients = model.gradients(own, lambda logits: logits[-1, first] - logits[-1, second])
    writes, others = ([each.detach() for each in model.run(ids)[1]] for ids in (own, minimal))
    for layer in range(LAYERS):
        change = writes[layer] - others[layer]
        wanted = (change * gradients[layer]).sum(-1).numpy()
        assert np.abs(wanted).max() > 1e-2
        found = (after[f"blocks.{layer}.mlp_heads"] * change.numpy()).sum(axis=-1)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def feeds(ids: Array) -> dict[str, Array]:
    return {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)}
