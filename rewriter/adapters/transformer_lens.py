"""ONNX files in TransformerLens: run by a bridge, or with their neuron heads in place of a model's MLPs.

A bridge of `boot_onnx` has no modules, weights or gradients, like those to vLLM: hooks read, and `intervene` changes.

TransformerLens has one number of heads per model, so the heads of neurons in a PyTorch bridge (`with_mlp_heads`) are a
separate layer: they replace `blocks.3.mlp` and have its hooks, [batch, tokens, heads, ...]. Each head attends from a
token to itself and to m bias tokens, so its pattern has 1 + m entries instead of one per token: the token itself comes
first. `hook_result` is recorded where `cfg.use_attn_result` is set. Needs the extra `transformerlens`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.index import HeadIndex, heads
from rewriter.interpret.run import Hook, batch_of, hooks_of, ids_input, tensors_of, values_of
from rewriter.interpret.sublayers import NeuronHeads
from rewriter.text import quoted

try:
    import torch
    from torch import Tensor, nn
    from transformer_lens import TransformerBridgeConfig
    from transformer_lens.hook_points import HookPoint
    from transformer_lens.model_bridge import ArchitectureAdapter, RemoteBridge
    from transformer_lens.model_bridge.driver_protocol import ForwardResult, to_torch
    from transformer_lens.model_bridge.sources._bridge_builder import configure_tokenizer
    from transformer_lens.model_bridge.sources._driver_base import DriverBase
    from transformer_lens.model_bridge.sources.vllm.intervention_specs import validate_spec
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
    known = [each.name for each in index.sublayers if isinstance(each, NeuronHeads)]
    if missing := [name for name in names if name not in known]:
        reason = next((f": {miss.reason} [{miss.node}]" for miss in index.missed), "")
        raise UsageError(f"the file has no {missing[0]} for an MLP of the model{reason}")
    if more := [name for name in known if name not in names]:
        raise UsageError(f"the file has {more[0]}, which has no place in a model of {count} blocks with one MLP each")
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
        weights = ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        q, k, v = (torch.einsum("btd,hdk->bthk", x, weight) + bias for weight, bias in weights)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        others = torch.einsum("bthk,hmk->bthm", q, self.bias_K).masked_fill(self.lacking, -torch.inf)
        scores = self.hook_attn_scores(torch.cat([(q * k).sum(dim=-1, keepdim=True), others], dim=-1))
        pattern = self.hook_pattern(scores.softmax(dim=-1))
        z = self.hook_z(pattern[..., :1] * v + torch.einsum("bthm,hmk->bthk", pattern[..., 1:], self.bias_V))
        if getattr(self.config, "use_attn_result", False):
            out = self.hook_result(z * self.W_O[:, 0]).sum(dim=2)
        else:
            out = z[..., 0] @ self.W_O[:, 0]
        return self.hook_out(out + self.b_O)


def boot_onnx(model: Source, tokenizer: Any = None) -> Any:
    """A `RemoteBridge` of TransformerLens that runs an ONNX file, original or rewritten, with onnxruntime.

    Hooks are those of `rewriter.run_with_cache`, for neurons under `blocks.3.mlp`. `intervene` maps hooks to functions
    of a tensor, or to specifications such as `{"op": "scale", "factor": 0.5, "pos": [3]}`; text needs a `tokenizer` of
    transformers. Raises ModelError, or UsageError for a model that is not one stack of blocks, read from token ids.
    """
    index = heads(model, fold_ln=True)  # as if, so that it says which normalisations sublayers read
    maker, blocks = index.maker(), len(index.layers)
    if not index.attention or [*index.layers] != [f"blocks.{number}" for number in range(blocks)]:
        reason = next((f": {miss.reason} [{miss.node}]" for miss in index.missed_attention), "")
        raise UsageError(f"a bridge needs one stack of blocks with attention, which the file lacks{reason}")
    n_heads, d_model, d_head = index.tensors[f"{index.attention[0].name}.W_Q"].shape
    rows = ids_input(maker, "a batch of token ids").rows or -1
    *_, entries = index.view.type_of(index.view.outputs[0]).shape or (None,)
    entries = entries if isinstance(entries, int) else rows
    sizes = d_model, d_head, blocks, maker.longest, n_heads, rows
    config = TransformerBridgeConfig(*sizes, d_vocab_out=entries, architecture="ONNX")
    adapter = ArchitectureAdapter(config)
    adapter.component_mapping = {}
    adapter.supports_hf_output_attentions = False
    tokenizer = None if tokenizer is None else configure_tokenizer(tokenizer, config)
    return RemoteBridge(adapter, tokenizer, OnnxDriver(index, config, tokenizer))


class OnnxDriver(DriverBase):  # type: ignore[misc]  # TransformerLens is untyped here
    """Runs the file of an index for TransformerLens."""

    _supported_features = frozenset({"intervention_callbacks"})

    def __init__(self, index: HeadIndex, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._index = index
        hooks = {name.replace(".mlp_heads.", ".mlp."): hook for name, hook in hooks_of(index).items()}
        # As in TransformerBridge, `hook_resid_mid` is what one normalisation reads, and not the stream.
        self._norms = {name: self._norm_of(hook) for name, hook in hooks.items() if ".hook_resid_mid" in name}
        self._hooks = {name: hook for name, hook in hooks.items() if self._norms.get(name, True)}
        self.supported_hook_points = frozenset(self._hooks)

    def forward(
        self,
        input_ids: Any = None,
        *,
        capture: tuple[str, ...] = (),
        intervene: Mapping[str, Any] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        **inputs: Any,
    ) -> Any:
        """Run the file once on token ids [batch, tokens], and on further `inputs` of it by name.

        The logits are its first output. Interventions take effect in the order of the graph, and changed values are
        captured. Raises UsageError for hooks that the file lacks or that cannot be changed, and unfitting inputs.
        """
        if input_ids is None or max_new_tokens != 1:
            raise UsageError("a bridge to an ONNX file takes token ids, and makes no new ones")
        changes, view = dict(intervene or {}), self._index.view
        if unknown := {*capture, *changes} - self.supported_hook_points:
            raise UsageError(f"the file has no hook {quoted(min(unknown))}; hook_dict lists its hooks")
        case = batch_of(self._index, np.atleast_2d(_array(input_ids)), {name: _array(inputs[name]) for name in inputs})
        read = dict[str, Array]()  # changed values of `hook_resid_mid`
        for name in sorted(changes, key=lambda name: view.producer.get(self._hooks[name].tensors[0], -1)):
            hook = self._hooks[name]
            values = values_of(self._index, case, hook.tensors)
            changed = {hook.tensors[0]: _changed(name, hook, values, changes[name])}
            if name in self._norms:
                read[name] = hook.make({**values, **changed})
                changed = values_of(self._index, replace(case, feeds={**case.feeds, **changed}), [self._norms[name]])
            case = replace(case, feeds={**case.feeds, **changed})
        hooks, ends = {name: self._hooks[name] for name in capture}, view.outputs[: int(return_logits)]
        values = values_of(self._index, case, [*ends, *tensors_of(hooks.values())])
        captured = {name: _tensor(read.get(name, hook.make(values))) for name, hook in hooks.items()}
        return ForwardResult(logits=_tensor(values[ends[0]]) if ends else None, captured=captured)

    def _norm_of(self, hook: Hook) -> str:
        """The output of the normalisation that reads the stream at a hook for a sublayer alone; empty without one."""
        view = self._index.view
        norms, at = [self._index.folded(each.data) for each in self._index.sublayers], view.before(hook.tensors[0])
        return next((norm.output for norm in norms if norm is not None and view.before(norm.data) == at), "")


def _array(tensor: Any) -> Array:
    if isinstance(tensor, Tensor):
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    return np.asarray(tensor)


def _tensor(array: Array) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return to_torch(array)


def _changed(name: str, hook: Hook, values: Mapping[str, Array], change: Any) -> Array:
    """The hook's first tensor after an intervention on the hook. Raises UsageError."""
    held = values[hook.tensors[0]]

    def shown(entries: Array) -> Array:
        return hook.make({**values, hook.tensors[0]: entries.reshape(held.shape)})

    value = shown(held)
    wanted = _array(change(_tensor(value))) if callable(change) else _specified(name, value, change)
    if wanted.shape != value.shape:
        raise UsageError(f"the function for {name} {[*value.shape]} gives {[*wanted.shape]}")
    # Most hooks show entries of their tensor, each times a factor and with a constant added.
    with np.errstate(all="ignore"):
        start = shown(np.zeros(held.size))
        factor = shown(np.ones(held.size)) - start
        places = np.nan_to_num((shown(np.arange(held.size, dtype=np.float64)) - start) / factor)
        result = held.astype(np.float64).reshape(-1)
        result[places.round().astype(np.int64).clip(0, held.size - 1)] = (wanted - start) / factor
        again = shown(result)
    if not np.allclose(again, wanted, rtol=1e-9, atol=1e-9 * np.abs(start).max(), equal_nan=True):
        raise UsageError(f"{name} cannot have this value: no tensor of the file gives it")
    return result.astype(held.dtype).reshape(held.shape)


def _specified(name: str, value: Array, change: Any) -> Array:
    """A hook's value after an intervention in TransformerLens's words. Raises UsageError."""
    by_query = name.endswith((".attn.hook_attn_scores", ".attn.hook_pattern"))  # [batch, heads, tokens, ...]
    made = value.copy() if by_query else value.reshape(*value.shape[:2], -1).copy()
    try:
        spec = validate_spec(name, change)
        rows = np.atleast_1d(np.arange(made.shape[-2]) if spec.get("pos") is None else spec["pos"])
        part, operand = made[..., rows, :], _array(spec.get("value", spec.get("factor", 0.0)))
        made[..., rows, :] = {"scale": part * operand, "add": part + operand}.get(spec["op"], operand)
    except (IndexError, ValueError) as error:
        raise UsageError(f"{name} {[*value.shape]} cannot be changed: {error}") from None
    return made.reshape(value.shape)
