"""optimum's export of a tiny GPT-2, with one change to the file before optimum validates it; for optimum's own Python.

`python patched_optimum.py CHANGE OUT`. CHANGE is a key of `benchmarks.tools.wrong.VARIANTS`, or `same`.
OUT/reference is the PyTorch model.
"""

import sys
from pathlib import Path
from typing import Any

import onnx
import torch
from optimum.exporters.onnx import convert, main_export
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.tools.wrong import VARIANTS

_, _change, _out = sys.argv
_validate = convert.validate_models_outputs


def _validate_changed(*arguments: Any, **named: Any) -> None:
    path = Path(_out) / "model.onnx"
    if _change != "same":
        model = onnx.load(path)
        VARIANTS[_change][1](model)
        onnx.save(model, path)
    _validate(*arguments, **named)


def _export() -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    config = GPT2Config(**sizes, activation_function="silu", bos_token_id=0, eos_token_id=0, initializer_range=0.3)
    reference = Path(_out) / "reference"
    GPT2LMHeadModel(config).save_pretrained(reference)
    main_export(str(reference), _out, task="text-generation", no_post_process=True)


convert.validate_models_outputs = _validate_changed
if __name__ == "__main__":
    _export()
