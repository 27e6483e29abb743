"""Optimisers: onnxruntime's own levels, its transformers optimizer, onnxslim and onnxsim."""

import importlib
from collections.abc import Callable
from pathlib import Path

import onnx

from models.tools.common import Hints, Refused, require_float32

MODEL_TYPES = {
    "gpt2": "gpt2",
    "gpt2-silu": "gpt2",
    "gpt2-relu": "gpt2",
    "gpt2-cache": "gpt2",
    "qwen3": "qwen3",
    "phi2": "phi",
    "pythia": "gpt_neox",
    "bert": "bert",
    "roberta": "bert",
    "distilbert": "bert",
    "minilm": "bert",
    "electra": "bert",
    "xlm-roberta": "bert",
    "mpnet": "bert",
    "albert": "bert",
    "vit": "vit",
    "deit": "vit",
    "dinov2": "vit",
    "swin": "swin",
    "clip-text": "clip",
    "clip-vision": "clip",
    "t5": "t5",
    "flan-t5": "t5",
    "bart": "bart",
    "wav2vec2-conformer": "conformer",
}
"""Table entry to the model type of onnxruntime's transformers optimizer."""


def runtime_level(level: str) -> Callable[[Path, Path, Hints], None]:
    """The model that an onnxruntime session saves on the CPU; level basic, extended or all."""

    def run(source: Path, target: Path, _: Hints) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
        options.optimized_model_filepath = str(target)
        options.log_severity_level = 4
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])

    return run


def transformers_optimizer(
    *, level: int = 1, approximate: bool = False, half: bool = False
) -> Callable[[Path, Path, Hints], None]:
    """`onnxruntime.transformers.optimizer`, for the model types that it supports."""

    def run(source: Path, target: Path, hints: Hints) -> None:
        from onnxruntime.transformers.fusion_options import FusionOptions
        from onnxruntime.transformers.optimizer import optimize_model

        kind = MODEL_TYPES.get(hints.family)
        if kind is None:
            raise Refused("onnxruntime's transformers optimizer has no model type for this architecture")
        require_float32(onnx.load(source))
        options = FusionOptions(kind)
        options.enable_gelu_approximation = approximate
        done = optimize_model(
            str(source), kind, hints.heads, hints.width, optimization_options=options, opt_level=level, use_gpu=False
        )
        if half:
            done.convert_float_to_float16(keep_io_types=True)
        done.save_model_to_file(str(target))

    return run


def slim(source: Path, target: Path, _: Hints) -> None:
    """The model simplified by onnxslim."""
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(source)), target)


def simplify(source: Path, target: Path, _: Hints) -> None:
    """The model simplified by onnxsim."""
    onnxsim = importlib.import_module("onnxsim")  # untyped

    model, same = onnxsim.simplify(onnx.load(source))
    if not same:
        raise Refused("onnxsim finds its own result different")
    onnx.save(model, target)
