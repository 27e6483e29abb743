"""What onnxruntime makes of a model: the file that it writes at a level of optimisation, and which optimisers acted.

It logs their names to standard error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.providers import load_onnxruntime, quiet_stderr
from rewriter.ort.sessions import EXTERNAL_FOLDER
from rewriter.text import one_line

LEVELS = ("basic", "extended", "all")
_ACTED = re.compile(rb"GraphTransformer (\w+) modified: 1 ")
RULES = {
    "Level1_RuleBasedTransformer": (
        "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout", "ExpandElimination",
        "CastElimination", "CastChainElimination", "PreShapeNodeElimination", "NoopElimination", "DivMulFusion",
        "FuseReluClip", "GemmSumFusion", "GemmTransposeFusion", "NotWhereFusion", "ConvAddFusion", "ConvMulFusion",
        "ConvBNFusion", "Pad_Fusion", "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion",
    ),
    "Level2_RuleBasedTransformer": ("ClipQuantRewrite", "ReluQuantRewrite", "GemmTransposeFusion"),
}  # fmt: skip
"""The rules of rule-based optimisers, whose names are not logged."""


def write_optimised(
    model: LoadedModel, level: str, folder: Path, disabled: Sequence[str] = (), *, severity: int = 4
) -> Path:
    """Write what onnxruntime makes of a model, its weights beside it. Raises ValidationError if it does not load."""
    path, ort = folder / "optimised.onnx", load_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = severity
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{path.name}.data")
    if model.base_dir is not None:
        options.add_session_config_entry(EXTERNAL_FOLDER, str(model.base_dir.resolve()))
    how: dict[str, Any] = {"providers": ["CPUExecutionProvider"], "enable_fallback": 0}
    try:
        source = str(model.path) if model.path is not None else model.proto.SerializeToString()
        ort.InferenceSession(source, options, disabled_optimizers=[*disabled], **how)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ValidationError(f"onnxruntime could not load the model at level {level}: {one_line(error)}") from error
    return path


def optimisers(model: LoadedModel, level: str) -> list[str]:
    """The optimisers that change a model at a level; a rule-based one comes after its rules."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with quiet_stderr(log):
            write_optimised(model, level, Path(folder), severity=0)
        names = dict.fromkeys(name.decode() for name in _ACTED.findall(log.read_bytes()))
    return list(dict.fromkeys(part for name in names for part in (*RULES.get(name, ()), name)))
