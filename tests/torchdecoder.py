"""The trained decoders in plain PyTorch and float64, from their files' weights; nothing of the rewriter is used.

In gradients attention patterns, denominators and the activation's gate are held at their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Tensor = Any

LAYERS, HEADS = 2, 4
EPSILON = float(np.float32(1e-5))
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.sigmoid,
    "gelu": lambda y: 0.5 * (1.0 + torch.erf(y / 2.0**0.5)),
}


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder of models/training with the layout of GPT-2."""

    path: Path
    activation: str

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Name in the module to weight."""
        found = {}
        for tensor in onnx.load(self.path).graph.initializer:
            if tensor.name.startswith("model."):
                name = tensor.name.removeprefix("model.").removeprefix("transformer.")
                found[name] = torch.tensor(onnx.numpy_helper.to_array(tensor).astype(np.float64))
        return found

    def run(self, ids: Array) -> tuple[Tensor, list[Tensor]]:
        """Logits [T, entries] and what each MLP writes [T, D]."""
        weights, count = self.weights, len(ids)
        embedding = weights["lm_head.weight"] if "wte.weight" not in weights else weights["wte.weight"]
        x = embedding[torch.tensor(ids)] + weights["wpe.weight"][:count]
        writes = []
        for layer in range(LAYERS):
            x = x + self._attention(x, layer)
            write = self._mlp(x, layer)
            write.retain_grad() if write.requires_grad else write.requires_grad_()
            writes.append(write)
            x = x + write
        return self._norm(x, "ln_f") @ embedding.T, writes

    def gradients(self, ids: Array, read: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Of what is read from the logits, by what each MLP writes."""
        logits, writes = self.run(ids)
        return [each.detach() for each in torch.autograd.grad(read(logits), writes)]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        factor = (centred.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        return centred * factor.detach() * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        count = len(x)
        projected = self._linear(self._norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn")
        q, k, v = (part.reshape(count, HEADS, -1).transpose(0, 1) for part in projected.chunk(3, -1))
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        pattern = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1)
        return self._linear((pattern.detach() @ v).transpose(0, 1).reshape(count, -1), f"h.{layer}.attn.c_proj")

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        y = self._linear(self._norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        gate = GATES[self.activation](y)
        return self._linear(y * gate.detach(), f"h.{layer}.mlp.c_proj")
