"""Modules in plain PyTorch, for MLP blocks that transformers lacks or does not export in plain operators.

They have the interface that `models.build` expects of transformers models: keyword inputs, a dictionary of outputs,
`config`. Needs PyTorch and transformers.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN


class Config(SimpleNamespace):
    """The configuration of a table entry, with its keys as attributes."""


class TimestepEmbedder(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Sinusoids of a time step, then Linear, SiLU, Linear, as in the U-Nets and transformers of diffusion models."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.linear_1 = nn.Linear(config.channels, config.width)
        self.act = ACT2FN["silu"]
        self.linear_2 = nn.Linear(config.width, config.width)

    def forward(self, timestep: Tensor) -> dict[str, Tensor]:
        """Time steps [batch] to embedding [batch, width]."""
        half = self.config.channels // 2
        steps = torch.arange(half, dtype=timestep.dtype, device=timestep.device)
        angles = 1000 * timestep[:, None] * torch.exp(-math.log(10000) * steps / half)
        waves = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        return {"embedding": self.linear_2(self.act(self.linear_1(waves)))}


class Expert(nn.Module):  # type: ignore[misc]
    """One MLP, gated or not."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.d_ff, bias=not config.gated)
        self.up_proj = nn.Linear(config.width, config.d_ff, bias=False) if config.gated else None
        self.act = ACT2FN[config.activation]
        self.down_proj = nn.Linear(config.d_ff, config.width, bias=not config.gated)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        hidden = self.act(self.gate_proj(hidden_states))
        return self.down_proj(hidden if self.up_proj is None else hidden * self.up_proj(hidden_states))


class DenseMixture(nn.Module):  # type: ignore[misc]
    """Layers of experts that are all computed; the router's weights are zero except for the largest few."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.routers = nn.ModuleList(nn.Linear(config.width, config.experts) for _ in range(config.layers))
        self.layers = nn.ModuleList(
            nn.ModuleList(Expert(config) for _ in range(config.experts)) for _ in range(config.layers)
        )

    def forward(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """[batch, sequence, width] to the same."""
        for router, experts in zip(self.routers, self.layers, strict=True):
            scores = torch.softmax(router(hidden_states), dim=-1)
            threshold = scores.topk(self.config.top, dim=-1).values[..., -1:]
            weights = torch.where(scores >= threshold, scores, torch.zeros_like(scores))
            mixed = [weights[..., i : i + 1] * expert(hidden_states) for i, expert in enumerate(experts)]
            hidden_states = hidden_states + torch.stack(mixed).sum(0)
        return {"last_hidden_state": hidden_states}


class CachedDecoder(nn.Module):  # type: ignore[misc]
    """GPT-2 with keys and values of earlier tokens as inputs and outputs, named as the optimum exporter names them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        settings = GPT2Config(
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            vocab_size=config.vocab_size,
            n_positions=64,
            activation_function=config.activation,
            bos_token_id=config.vocab_size - 1,
            eos_token_id=config.vocab_size - 1,
        )
        settings._attn_implementation = "eager"  # noqa: SLF001 - as in models.build
        self.decoder = GPT2LMHeadModel(settings)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **past: Tensor) -> dict[str, Tensor]:
        """The logits [batch, sequence, vocabulary] of the new tokens, and the longer cache."""
        cache = DynamicCache(config=self.decoder.config)
        for layer in range(self.config.layers):
            cache.update(past[f"past_key_values.{layer}.key"], past[f"past_key_values.{layer}.value"], layer)
        result = self.decoder(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        outputs = {"logits": result.logits}
        for layer, held in enumerate(result.past_key_values.layers):
            outputs |= {f"present.{layer}.key": held.keys, f"present.{layer}.value": held.values}
        return outputs
