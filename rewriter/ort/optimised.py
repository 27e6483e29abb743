"""What onnxruntime makes of a model: the file that it writes at a level of optimisation, and which optimisers acted.

It logs their names to standard error, so a session is opened in another process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.providers import load_onnxruntime
from rewriter.ort.sessions import EXTERNAL_FOLDER
from rewriter.text import one_line

LEVELS = ("basic", "extended", "all")
_NAME = "optimised.onnx"
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


def write_optimised(model: LoadedModel, level: str, folder: Path, disabled: Sequence[str] = ()) -> Path:
    """Write what onnxruntime makes of a model, its weights beside it. Raises ValidationError if it does not load."""
    path = folder / _NAME
    source = str(model.path) if model.path is not None else model.proto.SerializeToString()
    try:
        _open(source, level, path, model.base_dir, disabled)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ValidationError(f"onnxruntime could not load the model at level {level}: {one_line(error)}") from error
    return path


def optimisers(model: LoadedModel, level: str) -> list[str]:
    """The optimisers that change a model at a level; a rule-based one comes after its rules."""
    with TemporaryDirectory() as folder:
        path = model.path or Path(folder, "model.onnx")
        if model.path is None:
            path.write_bytes(model.proto.SerializeToString())
        command = [sys.executable, "-m", __name__, str(path), level, folder, str(model.base_dir or "")]
        log = subprocess.run(command, capture_output=True, check=False).stderr  # noqa: S603
    names = dict.fromkeys(name.decode() for name in _ACTED.findall(log))
    return list(dict.fromkeys(part for name in names for part in (*RULES.get(name, ()), name)))


def _open(
    source: str | bytes, level: str, path: Path, data: Path | None, disabled: Sequence[str] = (), severity: int = 4
) -> None:
    ort = load_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = severity
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{path.name}.data")
    if data is not None:
        options.add_session_config_entry(EXTERNAL_FOLDER, str(data.resolve()))
    ort.InferenceSession(
        source, options, providers=["CPUExecutionProvider"], enable_fallback=0, disabled_optimizers=[*disabled]
    )


if __name__ == "__main__":
    _source, _level, _folder, _data = sys.argv[1:]
    _open(_source, _level, Path(_folder, _NAME), Path(_data) if _data else None, severity=0)
