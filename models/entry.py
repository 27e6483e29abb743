"""One entry of the model table: its configuration, inputs and outputs, and how many MLP blocks it has.

Needs neither PyTorch nor transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from rewriter.errors import UsageError

Size = Literal["tiny", "small", "full"]
Exporter = Literal["torchscript", "dynamo"]
Dtype = Literal["fp32", "fp16", "bf16"]

SIZES: tuple[Size, ...] = ("tiny", "small", "full")
DEFAULT_OPSETS: Mapping[Exporter, int] = MappingProxyType({"torchscript": 17, "dynamo": 18})
EXPORTERS: tuple[Exporter, ...] = ("torchscript", "dynamo")
DTYPES: tuple[Dtype, ...] = ("fp32", "fp16", "bf16")
DYNAMIC_DIMS: tuple[str, ...] = ("batch", "sequence", "decoder_sequence", "past", "total")

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Input:
    """One graph input: its contents and the names of its dimensions.

    Attributes:
        name: Name of the graph input, and keyword of the model's `forward`.
        kind: `tokens` (integers below the vocabulary size), `mask` (ones, zeros where padded), `positions` (0, 1, ...)
            or `normal`.
        dims: One name per axis, either in `DYNAMIC_DIMS` or a key of `Entry.fixed`.
        declared: Axis to the name that the file declares, where it is not that of `dims`, or another axis is declared
            dynamic.
    """

    name: str
    kind: Literal["tokens", "mask", "positions", "normal"]
    dims: tuple[str, ...]
    declared: Mapping[int, str] = field(default_factory=dict)

    @property
    def dynamic_axes(self) -> dict[int, str]:
        """Axis to dimension name, for the axes that change from run to run."""
        return {**{axis: dim for axis, dim in enumerate(self.dims) if dim in DYNAMIC_DIMS}, **self.declared}


@dataclass(frozen=True)
class Output:
    """One graph output: a field of the model's result, and the names of its dynamic axes (None: fixed)."""

    name: str
    dims: tuple[str | None, ...]

    @property
    def dynamic_axes(self) -> dict[int, str]:
        """Axis to dimension name, for the axes that change from run to run."""
        return {axis: dim for axis, dim in enumerate(self.dims) if dim is not None}


def attention_layers(config: Config) -> int:
    """One per layer, and one more for each layer of a decoder that reads an encoder."""

    def of(*keys: str) -> int:
        return int(next((config[key] for key in keys if key in config), 0))

    layers = of("encoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return layers + 2 * of("decoder_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Entry:
    """One architecture of the model table.

    Attributes:
        name: What `python -m models export` calls it.
        description: One line for the table.
        activation: Activation function of the MLP blocks, in the spelling of transformers.
        gated: Whether every MLP block multiplies the activation by a second projection.
        config_class: Name of the configuration class, in `transformers` or dotted below it, or in `models.plain`.
        model_class: Name of the model class, the same way.
        common: Configuration of all sizes.
        sizes: Configuration of each size, to be added to `common`.
        inputs: Graph inputs in order.
        outputs: Graph outputs in order, fields of the model's result.
        blocks: Number of MLP blocks, read from the configuration.
        fixed: Lengths of the input dimensions that the configuration fixes.
        full_masks: Masks of ones computed in the graph, each with the input whose shape it has; without its
            mask a decoder looks for packed sequences, in operators that TorchScript cannot export.
        vocabulary: Key of the configuration that bounds token numbers.
        embedding_std: Standard deviation of random embeddings; None: such that tied logits have about 3.
        unscaled_queries: Name endings of query projections whose attention does not scale by head size.
        package: Python package with trained weights; empty: random weights.
        activation_class: Class of the activation modules, where it is not the one that transformers has for
            `activation`.
        refusals: Exporters that cannot do this entry, each with the reason.
        routed: Number of MLP blocks, among `blocks`, whose weights are those of all experts in one tensor.
        attention: Number of attention layers, read from the configuration.
    """

    name: str
    description: str
    activation: str
    gated: bool
    config_class: str
    model_class: str
    common: Config
    sizes: Mapping[str, Config]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    blocks: Callable[[Config], int]
    fixed: Mapping[str, Callable[[Config], int]] = field(default_factory=dict)
    full_masks: Mapping[str, str] = field(default_factory=dict)
    vocabulary: str = "vocab_size"
    embedding_std: float | None = None
    unscaled_queries: tuple[str, ...] = ()
    package: str = ""
    activation_class: str = ""
    refusals: Mapping[str, str] = field(default_factory=dict)
    routed: Callable[[Config], int] = lambda _: 0
    attention: Callable[[Config], int] = attention_layers

    @property
    def architecture(self) -> str:
        """Name of the model class without its module."""
        return self.model_class.rpartition(".")[2]

    @property
    def exporters(self) -> tuple[Exporter, ...]:
        """The exporters that support this entry."""
        return tuple(exporter for exporter in EXPORTERS if exporter not in self.refusals)

    @property
    def default_size(self) -> str:
        """The smallest size of the entry."""
        return next(size for size in SIZES if size in self.sizes)

    def config(self, size: str) -> dict[str, Any]:
        """Keyword arguments of the configuration class.

        Raises:
            UsageError: The entry does not have this size; trained weights have only one.
        """
        if size not in self.sizes:
            raise UsageError(f"{self.name} has no size {size!r}, only: {', '.join(self.sizes)}")
        return {**self.common, **self.sizes[size]}

    def mlp_blocks(self, size: str) -> int:
        """The number of MLP blocks that the configuration defines."""
        return self.blocks(self.config(size))

    def attention_layers(self, size: str) -> int:
        """The number of attention layers that the configuration defines."""
        return self.attention(self.config(size))

    def gated_blocks(self, size: str) -> int:
        """The number of gated blocks among `mlp_blocks(size)`."""
        return self.mlp_blocks(size) if self.gated else 0

    def shape(self, spec: Input, size: str, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of an example input, given the lengths of the dynamic dimensions."""
        config = self.config(size)
        return tuple(lengths[dim] if dim in lengths else self.fixed[dim](config) for dim in spec.dims)
