"""Random weights that exercise an MLP block as trained weights do.

Pre-activations (inputs of the MLP activation function) spread over about -3 to 3 with outliers near 20. The usual
initialisation (standard deviation 0.02, zero biases) keeps every activation in its linear range, where a wrong
activation function goes unnoticed. Needs PyTorch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from models.entry import Entry

BIAS_STD = 0.3
NORM_STD = 0.2
LOGIT_STD = 3.0
EXPERT_STD = 3.0  # of pre-activations of experts, which are not calibrated one by one
NEURON_MEDIAN = 1.5  # median over neurons of the root mean square of a pre-activation
NEURON_SIGMA = 0.5  # of its lognormal distribution
OUTLIER = 18.0  # largest pre-activation of a block on the calibration batch; other inputs reach further

Run = Callable[[], object]


def randomise(model: Any, entry: Entry, generator: torch.Generator) -> None:
    """Fill the parameters: linear maps preserve the variance, norms are around 1, and biases are never zero.

    Frozen parameters (sinusoidal positions) and those that transformers has randomised already stay as they are.
    """
    width = _embedding_width(model)
    embedding_std = entry.embedding_std or LOGIT_STD / math.sqrt(width)
    done: set[int] = set()  # tied weights are filled once, as embeddings, which come first
    with torch.no_grad():
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in done or not parameter.requires_grad:
                    continue
                done.add(id(parameter))
                std = embedding_std if isinstance(module, nn.Embedding) else _weight_std(module, key, parameter)
                if std is not None:
                    if name.endswith(entry.unscaled_queries or ("\0",)):
                        std /= math.sqrt(parameter.shape[0] / model.config.num_heads)
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                elif parameter.ndim == 1 and parameter[0] != 0 and bool((parameter == parameter[0]).all()):
                    spread = 1 + NORM_STD * torch.randn(parameter.shape, generator=generator)
                    parameter.mul_(spread)  # norms start at 1, scaled branches at another constant
                elif not parameter.any():
                    parameter.copy_(BIAS_STD * torch.randn(parameter.shape, generator=generator))
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.copy_(NORM_STD * torch.randn(module.num_features, generator=generator))
                module.running_var.copy_(torch.exp(NORM_STD * torch.randn(module.num_features, generator=generator)))


def calibrate(model: Any, entry: Entry, blocks: int, run: Run, generator: torch.Generator) -> None:
    """Rescale, neuron by neuron, the linear maps that feed an MLP activation function.

    One forward pass finds them; a second one corrects each, from inputs that are already corrected.

    Raises:
        RuntimeError: Their number is not the number of MLP blocks that the configuration defines.
    """
    if not blocks:
        return
    feeding: list[Any] = []
    with watch_activations(model, entry, lambda linear, _: feeding.append(linear)):
        run()
    if len(feeding) != blocks:
        raise RuntimeError(f"{entry.name}: {len(feeding)} MLP activations ran, the table says {blocks}")

    def correct(linear: Any, _: Any, output: Tensor) -> Tensor:
        return _spread(linear, output, generator)

    hooks = [linear.register_forward_hook(correct) for linear in dict.fromkeys(feeding)]  # once where layers are shared
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def watch_activations(model: Any, entry: Entry, seen: Callable[[Any, Tensor], object]) -> Iterator[None]:
    """Call `seen(linear, pre_activation)` whenever an activation function reads the output of a linear map.

    It may read a part of it. This tells MLP blocks from the activations of convolutions and from a pooler's tanh.
    """
    activation = entry.activation_class or type(ACT2FN[entry.activation]).__name__
    last: list[Any] = [None, None]

    def remember(linear: Any, _: Any, output: Tensor) -> None:
        last[:] = [linear, output] if isinstance(output, Tensor) else [None, None]  # a router may be a Linear

    def compare(_: Any, inputs: tuple[Tensor, ...]) -> None:
        if last[1] is not None and inputs[0].untyped_storage().data_ptr() == last[1].untyped_storage().data_ptr():
            seen(last[0], inputs[0])

    hooks = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            hooks.append(module.register_forward_hook(remember))
        elif type(module).__name__ == activation:
            hooks.append(module.register_forward_pre_hook(compare))
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _spread(linear: Any, output: Tensor, generator: torch.Generator) -> Tensor:
    bias = 0.0 if linear.bias is None else linear.bias
    raw = (output - bias).flatten(0, -2)
    size = raw.square().mean(0).sqrt().clamp_min(1e-6)
    peak = raw.abs().amax(0) / size
    target = NEURON_MEDIAN * torch.exp(NEURON_SIGMA * torch.randn(size.shape, generator=generator))
    target = torch.minimum(target, OUTLIER / peak)
    loudest = int(torch.argmax(target * peak))
    target[loudest] = OUTLIER / peak[loudest]
    factor = target / size
    linear.weight.mul_(factor if isinstance(linear, Conv1D) else factor[:, None])
    return (output - bias) * factor + bias


def _weight_std(module: Any, key: str, parameter: Tensor) -> float | None:
    if parameter.ndim == 3 and hasattr(module, "num_experts"):
        fan_in = parameter.shape[1 if module.is_transposed else 2]
        return (1.0 if key.startswith("down") else EXPERT_STD) / math.sqrt(fan_in)
    if not isinstance(module, (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)):
        return None
    if key == "bias":
        return BIAS_STD
    fan_in = parameter.shape[0] if isinstance(module, Conv1D) else parameter[0].numel()
    return 1 / math.sqrt(fan_in)


def _embedding_width(model: Any) -> int:
    return next((module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)), 1)
