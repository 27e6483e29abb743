"""Random weights drive the activation functions as trained ones do; needs PyTorch."""

from typing import Any

import pytest
import torch

from models.registry import ENTRIES, get

RANDOM = [
    entry.name
    for entry in ENTRIES  # experts are scaled by their weights
    if "tiny" in entry.sizes and entry.mlp_blocks("tiny") > entry.routed(entry.config("tiny"))
]


@pytest.mark.parametrize("name", RANDOM)
def test_spread_and_outliers(name: str) -> None:
    from models.build import build, example_inputs
    from models.scaling import watch_activations

    entry = get(name)
    module, seen = build(entry, "tiny"), list[Any]()
    lengths = {"batch": 3, "sequence": 20, "decoder_sequence": 9, "past": 6, "total": 26}
    inputs = example_inputs(entry, "tiny", lengths, seed=77)
    with watch_activations(module, entry, lambda _, tensor: seen.append(tensor)):
        module(*inputs)
    assert len(seen) == entry.mlp_blocks("tiny") - entry.routed(entry.config("tiny"))
    together = torch.cat([tensor.flatten() for tensor in seen])
    assert 1 < float(together.std()) < 3.2  # the most in albert, whose layers share what one of them was scaled for
    assert 10 < float(together.abs().max()) < 30
