"""Which attribution predicts what a change to an MLP's output does, in decoders that were trained on docstrings.

The figures of docs/decisions/0030 are those of `python -m tests.exports.test_trained_decoders`. Changes and
local derivatives come from PyTorch, which knows nothing of the rewriter (`tests/torchdecoder.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rewriter.interpret.attribute import FrozenRun
from tests.committed import FOLDER

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

from tests.torchdecoder import FROZEN, LAYERS, LOCAL, Decoder  # noqa: E402 - after the skip

Array = NDArray[Any]
Figures = Mapping[tuple[str, str], float]

ACTIVATIONS = ("silu", "gelu")
TRAINED = FOLDER / "trained"
PAGE = FOLDER.parent / "docs" / "decisions" / "0030-frozen-attribution-beside-patching.md"
LENGTH, STEPS = 14, 4
KINDS = {
    "pair": "that of a prompt with one other token",
    "other": "that of another sentence",
    "zero": "nothing",
    "tenth": "a tenth of the way to another sentence",
}
"""Kind of change to what it is called in docs/decisions/0030: what an MLP's output at a token is replaced by."""
MEASURED: Mapping[tuple[str, str, str], float] = {
    ("silu", "pair", "fast"): 0.991,
    ("silu", "pair", "integrated"): 1.000,
    ("silu", "pair", "fewest"): 0.991,
    ("silu", "pair", "local"): 0.919,
    ("silu", "other", "fast"): 0.960,
    ("silu", "other", "fewest"): 0.960,
    ("silu", "other", "local"): 0.415,
    ("silu", "zero", "fast"): 0.904,
    ("silu", "zero", "fewest"): 0.904,
    ("silu", "zero", "local"): 0.418,
    ("silu", "tenth", "fast"): 0.655,
    ("silu", "tenth", "fewest"): 0.655,
    ("silu", "tenth", "local"): 0.947,
    ("gelu", "pair", "fast"): 0.969,
    ("gelu", "pair", "integrated"): 1.000,
    ("gelu", "pair", "fewest"): 0.777,
    ("gelu", "pair", "local"): 0.954,
    ("gelu", "other", "fast"): 0.821,
    ("gelu", "other", "fewest"): 0.931,
    ("gelu", "other", "local"): 0.445,
    ("gelu", "zero", "fast"): 0.819,
    ("gelu", "zero", "fewest"): 0.807,
    ("gelu", "zero", "local"): 0.401,
    ("gelu", "tenth", "fast"): 0.629,
    ("gelu", "tenth", "fewest"): 0.512,
    ("gelu", "tenth", "local"): 0.980,
}
"""(activation, kind, attribution) to the correlation."""
SENTENCES = (
    "Return the number of items in the list, or zero if it is empty.",
    "Raise ValueError if the given name is not a valid identifier.",
    "This module provides classes for reading and writing files.",
    "If the optional argument is true, the default value is used instead.",
    "Create a new instance of the class with the given arguments.",
    "Read at most size bytes from the stream and return them.",
    "The function returns a tuple of two strings and an integer.",
    "Convert a string or number to a floating point value.",
    "Send a message to the server and wait for the response.",
    "Called when the end of the document has been reached.",
    "Remove the file with the given path from the directory.",
    "An error occurred while the object was being created.",
    "Set the timeout for all operations on this socket object.",
    "Write the contents of the buffer to the underlying file.",
    "A context manager that restores the previous state on exit.",
    "Test whether the process is still running on the system.",
)


def decoder(activation: str) -> Decoder:
    return Decoder(TRAINED / f"docstrings-{activation}.onnx", activation)


@cache
def pairs() -> tuple[tuple[Array, Array, Array], ...]:
    """(tokens, the same with one of the last three before the end replaced, those of another sentence)."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TRAINED / "docstrings-tokenizer.json"))
    ids = [np.array(tokenizer.encode(sentence).ids[:LENGTH]) for sentence in SENTENCES]
    rng = np.random.default_rng(0)
    found = []
    for own, other in zip(ids, [*ids[1:], ids[0]], strict=True):
        minimal, place = own.copy(), LENGTH - 2 - int(rng.integers(3))
        while minimal[place] == own[place]:
            minimal[place] = other[int(rng.integers(LENGTH))]
        found.append((own, minimal, other))
    return tuple(found)


def entries(model: Decoder, own: Array, minimal: Array) -> tuple[int, int]:
    """The likeliest next tokens of both prompts; if they are the same, the one that gains most by the change."""
    before, after = (model.run(ids)[0][-1].detach() for ids in (own, minimal))
    first, second = int(before.argmax()), int(after.argmax())
    return first, second if second != first else int((after - before).argmax())


def changes(model: Decoder, pair: tuple[Array, Array, Array]) -> Iterator[tuple[str, dict[str, float]]]:
    """(kind of change, what it is measured and predicted to do) for every MLP and token."""
    own, minimal, other = pair
    first, second = entries(model, own, minimal)

    def read(logits: Any) -> Any:
        return logits[-1, first] - logits[-1, second]

    base, writes = model.run(own)
    gradients = {"local": model.gradients(own, read, LOCAL)}
    for program in ("fast", "fewest"):
        reader = FrozenRun(model.path, feeds(own), output=None, sequence=0, program=program)
        links = reader.linear(first, second, -1).links
        after = {name: link.after for link in links for name in link.steps}
        gradients[program] = [torch.tensor(after[f"blocks.{layer}.mlp_heads"]) for layer in range(LAYERS)]
    writes = [each.detach() for each in writes]
    ends = {name: [each.detach() for each in model.run(ids)[1]] for name, ids in (("pair", minimal), ("other", other))}
    for layer in range(LAYERS):
        for token in range(LENGTH):
            value = writes[layer][token]
            targets = {name: each[layer][token] for name, each in ends.items()}
            targets |= {"zero": 0.0 * value, "tenth": value + 0.1 * (targets["other"] - value)}
            for kind, target in targets.items():
                change = target - value
                changed = read(model.run(own, replaced=(layer, token, target))[0])
                row = {"measured": float((changed - read(base)).detach())}
                row |= {name: float(each[layer][token] @ change) for name, each in gradients.items()}
                if kind == "pair":
                    row["integrated"] = integrated(model, own, (layer, token), value, change, read)
                yield kind, row


def integrated(model: Decoder, own: Array, at: tuple[int, int], value: Any, change: Any, read: Any) -> float:
    """The local derivative's mean on the way from one value to the other, times the change."""
    total = 0.0
    for step in range(STEPS):
        middle = (value + (step + 0.5) / STEPS * change).clone().requires_grad_()
        (gradient,) = torch.autograd.grad(read(model.run(own, replaced=(*at, middle))[0]), middle)
        total += float(gradient @ change) / STEPS
    return total


@cache
def figures(activation: str) -> Figures:
    """(kind of change, attribution) to the correlation over all prompts, MLPs and tokens."""
    model = decoder(activation)
    rows = [row for pair in pairs() for row in changes(model, pair)]
    found: dict[tuple[str, str], float] = {}
    for kind in dict.fromkeys(kind for kind, _ in rows):
        own = [row for each, row in rows if each == kind]
        measured = [row["measured"] for row in own]
        for name in own[0].keys() - {"measured"}:
            found[kind, name] = float(np.corrcoef(measured, [row[name] for row in own])[0, 1])
    return found


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_predictions_are_those_of_a_frozen_network_in_pytorch(activation: str) -> None:
    """With program `fast`, whose patterns add up to the gate of the activation: y times a gate that is held."""
    model = decoder(activation)
    own, minimal, _ = pairs()[0]
    first, second = entries(model, own, minimal)
    run = FrozenRun(model.path, feeds(own), output=None, sequence=0, program="fast")
    after = {name: link.after for link in run.linear(first, second, -1).links for name in link.steps}
    gradients = model.gradients(own, lambda logits: logits[-1, first] - logits[-1, second], FROZEN)
    writes, others = ([each.detach() for each in model.run(ids)[1]] for ids in (own, minimal))
    for layer in range(LAYERS):
        change = writes[layer] - others[layer]
        wanted = (change * gradients[layer]).sum(-1).numpy()
        assert np.abs(wanted).max() > 1e-2
        found = (after[f"blocks.{layer}.mlp_heads"] * change.numpy()).sum(axis=-1)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def feeds(ids: Array) -> dict[str, Array]:
    return {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)}


@pytest.mark.parametrize(("activation", "kind", "name"), MEASURED)
def test_correlations(activation: str, kind: str, name: str) -> None:
    assert figures(activation)[kind, name] == pytest.approx(MEASURED[activation, kind, name], abs=0.005)


def test_the_table_of_the_page_has_these_figures() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for activation in ACTIVATIONS:
        for kind, told in KINDS.items():
            (row,) = [line for line in lines if line.startswith(f"| {activation} | {told} |")]
            cells = [float(cell) for cell in row.strip("|").split("|")[2:]]
            assert cells == [MEASURED[activation, kind, name] for name in ("fast", "fewest", "local")]


def main() -> None:
    """Print the figures."""
    for activation in ACTIVATIONS:
        for (kind, name), value in figures(activation).items():
            print(activation, kind, name, f"{value:.3f}")  # noqa: T201 - this is what it is for


if __name__ == "__main__":
    main()
