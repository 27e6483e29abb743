"""Modules in plain PyTorch, for MLP blocks that transformers lacks or does not export in plain operators.

They have the interface that `models.build` expects of transformers models: keyword inputs, a dictionary of outputs,
`config`. Needs PyTorch and transformers.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput


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


class StaticDecoder(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Llama whose keys and values are written into a cache of fixed size, at the positions `cache_position`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        settings = transformers.LlamaConfig(**config.decoder)
        settings._attn_implementation = "eager"  # noqa: SLF001 - as in models.build
        self.decoder = transformers.LlamaForCausalLM(settings)

    def forward(self, input_ids: Tensor, cache_position: Tensor, **caches: Tensor) -> dict[str, Tensor]:
        """The logits [batch, sequence, vocabulary] of the new tokens, and the caches with them."""

        class Static(DynamicCache):  # type: ignore[misc]
            def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
                for part, new in (("key", keys), ("value", values)):
                    name = f"{part}_cache.{layer}"
                    caches[name] = caches[name].index_copy(2, cache_position, new)
                return caches[f"key_cache.{layer}"], caches[f"value_cache.{layer}"]

        capacity = torch.arange(self.config.capacity, device=input_ids.device)
        allowed = (capacity <= cache_position[:, None])[None, None].expand(input_ids.shape[0], 1, -1, -1)
        lowest = torch.finfo(self.decoder.dtype).min
        result = self.decoder(
            input_ids=input_ids,
            attention_mask=torch.where(allowed, 0.0, lowest).to(self.decoder.dtype),
            position_ids=cache_position[None],
            past_key_values=Static(),
            use_cache=True,
        )
        return {"logits": result.logits, **{f"updated_{name}": tensor for name, tensor in caches.items()}}


class Decoder(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A decoder with keys and values of earlier tokens as outputs and, with `past`, inputs, named as in optimum.

    One with an encoder reads its output instead of running it, or the keys and values of it.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        settings = getattr(transformers, f"{config.family}Config")(**config.decoder)
        settings._attn_implementation = "eager"  # noqa: SLF001 - as in models.build
        self.decoder = getattr(transformers, config.model)(settings)

    def forward(self, input_ids: Tensor, **given: Tensor) -> dict[str, Tensor]:
        """The logits [batch, sequence, vocabulary] of the new tokens, and the longer cache."""
        past = self._past({name: given.pop(name) for name in tuple(given) if name.startswith("past_key_values")})
        named = {"input_ids": input_ids, **given}
        if self.config.encoder:
            mask = torch.ones_like(input_ids)
            old = past.self_attention_cache.layers
            if old:  # then the encoder's output itself is not read
                mask = torch.cat([torch.ones_like(old[0].keys[:, 0, :, 0], dtype=mask.dtype), mask], dim=1)
                given["encoder_hidden_states"] = torch.zeros_like(past.cross_attention_cache.layers[0].keys[:, 0])
            named = {
                "decoder_input_ids": input_ids,
                "decoder_attention_mask": mask,
                "encoder_outputs": BaseModelOutput(last_hidden_state=given["encoder_hidden_states"]),
            }
            if "encoder_attention_mask" in given:
                named["attention_mask"] = given["encoder_attention_mask"]
        result = self.decoder(**named, past_key_values=past, use_cache=True)
        return {"logits": result.logits, **self._present(result.past_key_values)}

    def _past(self, past: Mapping[str, Tensor]) -> Any:
        def cache(kind: str) -> Any:
            filled = DynamicCache()
            for layer in range(self.config.layers) if past else ():
                pair = (past[f"past_key_values.{layer}{kind}.{part}"] for part in ("key", "value"))
                filled.update(*pair, layer)
            return filled

        if not self.config.encoder:
            return cache("")
        return EncoderDecoderCache(cache(".decoder"), cache(".encoder"))

    def _present(self, cache: Any) -> dict[str, Tensor]:
        kinds = {"": cache}
        if self.config.encoder:
            kinds = {".decoder": cache.self_attention_cache, ".encoder": cache.cross_attention_cache}
        return {
            f"present.{layer}{kind}.{part}": tensor
            for kind, each in kinds.items()
            for layer, held in enumerate(each.layers)
            for part, tensor in (("key", held.keys), ("value", held.values))
        }
