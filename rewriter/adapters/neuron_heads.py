"""The heads of a layer of neurons as a module for TransformerLens; imports PyTorch and transformer-lens.

Each head attends from a token to itself and to m bias tokens of its own, so its pattern has 1 + m entries instead of
one per token: the token itself comes first. Shapes, with H heads:

    hook_q, hook_k      [batch, tokens, H, 1 or 2]    keys of the token itself
    hook_v, hook_z      [batch, tokens, H, 1]
    hook_attn_scores    [batch, tokens, H, 1 + m]
    hook_pattern        [batch, tokens, H, 1 + m]
    hook_result         [batch, tokens, H, d_model]   only where `cfg.use_attn_result` is set
    hook_in, hook_out   [batch, tokens, d_model]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from rewriter.interpret.index import HeadIndex

_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "bias_V")


class NeuronHeads(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The neuron heads of one sublayer, in the place of its MLP.

    Parameters have the names and shapes of `rewriter.heads`. Keys of -inf, of bias tokens that a head lacks, are 0 in
    `bias_K` and named by the buffer `lacking` [H, m] instead: a gradient through -inf would be no number.
    """

    def __init__(self, index: HeadIndex, sublayer: str, place: str, config: Any) -> None:
        """Take the weights of `sublayer` from an index; `place` is the MLP's name in the wrapped block."""
        super().__init__()
        self.name, self.config = place, config
        for name in _WEIGHTS:
            setattr(self, name, nn.Parameter(torch.tensor(index[f"{sublayer}.{name}"])))
        keys = torch.tensor(index[f"{sublayer}.bias_K"])
        self.register_buffer("lacking", torch.isneginf(keys).any(dim=-1))
        self.bias_K = nn.Parameter(torch.where(torch.isneginf(keys), 0.0, keys))
        for name in ("in", "q", "k", "v", "attn_scores", "pattern", "z", "result", "out"):
            setattr(self, f"hook_{name}", HookPoint())

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, tokens, d_model] to the same: what the heads write, summed, and b_O."""
        x = self.hook_in(hidden_states)
        q = self.hook_q(_projected(x, self.W_Q, self.b_Q))
        k = self.hook_k(_projected(x, self.W_K, self.b_K))
        v = self.hook_v(_projected(x, self.W_V, self.b_V))
        others = torch.einsum("bthk,hmk->bthm", q, self.bias_K).masked_fill(self.lacking, -torch.inf)
        scores = self.hook_attn_scores(torch.cat([(q * k).sum(dim=-1, keepdim=True), others], dim=-1))
        pattern = self.hook_pattern(scores.softmax(dim=-1))
        from_bias_tokens = torch.einsum("bthm,hmk->bthk", pattern[..., 1:], self.bias_V)
        z = self.hook_z(pattern[..., :1] * v + from_bias_tokens)
        if getattr(self.config, "use_attn_result", False):
            out = self.hook_result(z * self.W_O[:, 0]).sum(dim=2)
        else:
            out = z[..., 0] @ self.W_O[:, 0]
        return self.hook_out(out + self.b_O)


def _projected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[batch, tokens, H, k] by one product of matrices."""
    heads, rows, width = weight.shape
    return (x @ weight.permute(1, 0, 2).reshape(rows, heads * width)).unflatten(-1, (heads, width)) + bias
