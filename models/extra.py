"""Groups of the coverage matrix whose files are not exports of the table, each file with what it contains."""

import importlib
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import numpy as np
import onnx

from models.export import export_model
from models.mobius import builds
from models.registry import get
from models.tools.merged import merge_decoders


@dataclass(frozen=True)
class Extra:
    """One file.

    Attributes:
        name: its row, unique among all groups.
        activation: of its MLP blocks, in the spelling of transformers.
        blocks: number of MLP blocks.
        attention: number of attention layers.
        create: writes the file; what it raises is the reason why there is none.
        column: its column in the table of its group.
        variants: what tools make of it as well.
    """

    name: str
    activation: str
    blocks: int
    attention: int
    create: Callable[[Path], None]
    column: str = "file"
    variants: tuple[str, ...] = ()


# -- decoders as optimum merges them ---------------------------------------------------------------------------------


def _merged() -> list[Extra]:
    return [_merged_decoder(name) for name in ("gpt2", "llama", "t5", "marian", "whisper")]


def _merged_decoder(name: str) -> Extra:
    pair = [get(f"{name}-first"), get(f"{name}-cache")]

    def create(path: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            files = [Path(scratch, f"{entry.name}.onnx") for entry in pair]
            for entry, file in zip(pair, files, strict=True):
                export_model(entry, file)
            onnx.save(merge_decoders(*map(onnx.load, files)), path)

    blocks = sum(entry.mlp_blocks("tiny") for entry in pair)
    attention = sum(entry.attention_layers("tiny") for entry in pair)
    return Extra(f"{name}-merged", pair[0].activation, blocks, attention, create, variants=("ort-extended", "onnxslim"))


# -- models that come with onnxscript --------------------------------------------------------------------------------

_SCRIPTS = (
    ("phi2lm", "gelu_new", 1, 1),
    ("smollm_1", "silu", 1, 1),
    ("smollm_2", "silu", 1, 1),
    ("bart_encoder", "gelu", 2, 2),
    ("whisper_encoder", "gelu", 1, 1),
    ("whisper_decoder", "gelu", 1, 2),
)
"""Module, activation, MLP blocks and attention layers."""

_SMALLER = dict.fromkeys((8192, 10240, 49152, 51200, 51865), 256)
"""Sizes of vocabularies and MLPs; nothing else depends on them, except shapes."""


def _scripts() -> list[Extra]:
    return [
        Extra(f"onnxscript-{name.replace('_', '-')}", activation, blocks, attention, partial(_script, name))
        for name, activation, blocks, attention in _SCRIPTS
    ]


def _script(name: str, path: Path) -> None:
    random = np.random.default_rng(0)

    def rand(*shape: int) -> np.ndarray:
        smaller = [_SMALLER.get(size, size) for size in shape]
        return random.normal(size=smaller) / math.sqrt(smaller[-1] if len(smaller) > 1 else 1)

    module = importlib.import_module(f"onnxscript.rewriter.models._{name}")
    with patch("numpy.random.rand", rand):
        model = module.make_model_with_random_weights()
    del model.graph.value_info[:]
    for tensor in (attribute.t for node in model.graph.node for attribute in node.attribute):
        if tensor.data_type == onnx.TensorProto.INT64 and len(tensor.dims) == 1:  # a shape
            shape = [_SMALLER.get(size, size) for size in onnx.numpy_helper.to_array(tensor).tolist()]
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(shape, np.int64), tensor.name))
    for output in model.graph.output:
        for dim in output.type.tensor_type.shape.dim:
            if dim.dim_value in _SMALLER:
                dim.dim_value = _SMALLER[dim.dim_value]
    onnx.save(model, path)


# -- all of them -----------------------------------------------------------------------------------------------------

GROUPS: Mapping[str, Callable[[], list[Extra]]] = MappingProxyType(
    {"merged": _merged, "onnxscript": _scripts, "mobius": lambda: [Extra(*each) for each in builds()]}
)
"""Group to its files. Listing them needs neither PyTorch nor the package that builds them."""


def extras() -> dict[str, Extra]:
    """Name to file."""
    return {each.name: each for listed in GROUPS.values() for each in listed()}
