"""`with_mlp_heads`: a TransformerLens model whose MLPs are the neuron heads of an ONNX file.

TransformerLens has one number of heads per model, so the heads of neurons are a separate layer: they replace
`blocks.3.mlp` and have its hooks, [batch, tokens, heads, ...]. Each head attends from a token to itself and to m bias
tokens, so its pattern has 1 + m entries instead of one per token: the token itself comes first.
`hook_result` is recorded where `cfg.use_attn_result` is set. Needs the extra `transformerlens`.
"""

from functools import reduce
from typing import Any

from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.index import HeadIndex, heads
from rewriter.interpret.sublayers import NeuronHeads

try:
    import torch
    from torch import Tensor, nn
    from transformer_lens.hook_points import HookPoint
except ImportError as error:
    what = f"this needs TransformerLens ({str(error.name).partition('.')[0]} is missing)"
    raise UsageError(f"{what}: pip install 'attnonly[transformerlens]'") from None

_MAX_DISTANCE = 1e-3  # of an MLP from its heads, relative; programs and float32 leave about 1e-6


def with_mlp_heads(bridge: Any, model: Source) -> Any:
    """Replace every MLP of a TransformerLens model by the heads of an ONNX file of the same model.

    The `transformer_lens.TransformerBridge`, with unprocessed weights, is returned. The logits stay, up to rounding and
    the certified errors of the head programs. Raises ModelError, or UsageError if the file has no heads for an MLP of
    the model, or they do not compute what that MLP does; then nothing is changed.
    """
    if not hasattr(bridge, "blocks") or not hasattr(bridge, "clear_hook_registry"):
        raise UsageError(f"a TransformerBridge of TransformerLens 4 is needed, not a {type(bridge).__name__}")
    index = heads(model, program="fast", wide=True)  # accurate in float32, in gates too
    found: list[MlpHeads] = []
    for block, name in zip(bridge.blocks, _layers(index, len(bridge.blocks)), strict=True):
        like = next(iter(block.mlp.parameters()))
        made = MlpHeads(index, name, block.mlp.name, bridge.cfg).to(device=like.device, dtype=like.dtype)
        _compare(block, made, bridge.cfg.d_model)
        found.append(made.train(block.mlp.training))
    for block, made in zip(bridge.blocks, found, strict=True):
        owner, last = _owner(block)
        setattr(owner, last, made)
        block.submodules["mlp"] = made
        block.add_module("mlp", made)
        block._register_aliases()  # noqa: SLF001 - hook_mlp_out is the new module's
    bridge.clear_hook_registry()
    bridge._initialize_hook_registry()  # noqa: SLF001 - the only way to have new hooks found
    return bridge


def _layers(index: HeadIndex, count: int) -> list[str]:
    names = [f"blocks.{number}.mlp_heads" for number in range(count)]
    known = [each.name for each in index.sublayers if isinstance(each.sublayer, NeuronHeads)]
    for name in names:
        if name not in known:
            reason = next((f": {miss.reason} [{miss.node}]" for miss in index.missed), "")
            raise UsageError(f"the file has no {name} for an MLP of the model{reason}")
    for name in known:
        if name not in names:
            what = f"has no place in a model of {count} blocks with one MLP each"
            raise UsageError(f"the file has {name}, which {what}")
    return names


def _compare(block: Any, made: Any, width: int) -> None:
    owner, last = _owner(block)
    mlp, called = block.mlp, getattr(owner, last, None)
    if called is None or called is not mlp:
        raise UsageError(f"the MLP of {block.name} is not a module that can be replaced")
    like = made.get_parameter("W_Q")
    same = like.shape[1] == width
    if same:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(1, 16, width, generator=generator).to(device=like.device, dtype=like.dtype)
        wanted, found = mlp(data).detach(), made(data).detach()
        same = bool((wanted - found).abs().max() <= _MAX_DISTANCE * wanted.abs().max())
    if not same:
        what = "use the file of the same model, before enable_compatibility_mode() folds its weights"
        raise UsageError(f"the MLP of {block.name} is not what the file's heads compute; {what}")


def _owner(block: Any) -> tuple[Any, str]:
    *path, last = str(block.mlp.name).split(".")
    return reduce(lambda owner, part: getattr(owner, part, None), path, block.original_component), last


_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "bias_V")


class MlpHeads(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The neuron heads of one sublayer, which replace its MLP.

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
        """[batch, tokens, d_model] to the same: the sum of the heads' outputs, and b_O."""
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
    heads, rows, width = weight.shape
    return (x @ weight.permute(1, 0, 2).reshape(rows, heads * width)).unflatten(-1, (heads, width)) + bias
