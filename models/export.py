"""Exporting one table entry to a verified ONNX file.

The file passes onnx's checker, agrees with PyTorch in onnxruntime at several batch sizes and lengths, and is the same
for the same seed; on an error no file is left. Importing this module does not need PyTorch, exporting does.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from models.entry import DEFAULT_OPSETS, Dtype, Entry, Exporter
from models.registry import COMMITTED, get
from rewriter.errors import UsageError
from rewriter.files.atomic import write_text


@dataclass(frozen=True)
class Exported:
    """The result of an export: the file, its opset, and its largest difference from PyTorch (relative)."""

    path: Path
    opset: int
    size_bytes: int
    difference: float


def export_model(
    entry: Entry,
    output: Path,
    *,
    size: str = "tiny",
    exporter: Exporter = "torchscript",
    opset: int | None = None,
    dtype: Dtype = "fp32",
    seed: int = 0,
) -> Exported:
    """Build, calibrate, export, clean, check and save one model.

    Weights above 1.8 GB go to `output` + `.data`, beside the file. Both are written to a temporary folder first.
    Trained weights come with `tokenizer.json`, beside the file too; one of another model is not overwritten.

    Raises:
        UsageError: An option is not supported, a package is missing, or a `tokenizer.json` would be overwritten.
        ValidationError: The exported file does not compute what PyTorch does; no file is left.
    """
    entry.config(size)
    if exporter in entry.refusals:
        raise UsageError(f"{exporter} cannot export {entry.name}: {entry.refusals[exporter]}")
    check_place(output)
    require_packages()
    from models.build import build, tokenizer
    from models.trace import quiet

    beside = output.with_name("tokenizer.json")
    text = tokenizer(entry) if entry.package else ""
    if text and os.path.lexists(beside) and not (beside.is_file() and beside.read_bytes() == text.encode()):
        raise UsageError(f"{beside} is another model's, and would be overwritten; choose an output in another folder")
    with quiet():
        module = build(entry, size, dtype, seed)
    done = export_module(module, entry, output, size=size, exporter=exporter, opset=opset, dtype=dtype)
    if text and not beside.exists():
        write_text(beside, text)
    return done


def export_module(
    module: Any,
    entry: Entry,
    output: Path,
    *,
    size: str = "tiny",
    exporter: Exporter = "torchscript",
    opset: int | None = None,
    dtype: Dtype = "fp32",
) -> Exported:
    """The same for a module of `models.build` that is there already, such as a trained one.

    Raises:
        UsageError: The file cannot be written there, or the exporter cannot export the module.
        ValidationError: The exported file does not compute what PyTorch does; no file is left.
    """
    check_place(output)
    from models.build import example_inputs
    from models.trace import trace
    from models.verify import TRACED, verify

    output = output.absolute()
    opset = opset or DEFAULT_OPSETS[exporter]
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as scratch:
        inputs = example_inputs(entry, size, TRACED, dtype)
        results = module(*inputs)
        shapes = [tuple(tensor.shape) for tensor in (results if isinstance(results, tuple) else (results,))]
        raw = Path(scratch, "raw.onnx")
        trace(module, entry, inputs, exporter, opset, raw)
        _rewrite(raw, Path(scratch, output.name), entry, opset, shapes)
        difference = verify(Path(scratch, output.name), module, entry, size, dtype)
        total = _install(Path(scratch), output)
    return Exported(output, opset, total, difference)


def regenerate(folder: Path) -> list[Exported]:
    """Regenerate the committed example files from the table, in order."""
    return [
        export_model(get(committed.entry), folder / committed.file, exporter=committed.exporter)
        for committed in COMMITTED
    ]


def check_place(output: Path) -> None:
    """Raises UsageError if no file can be written there."""
    output = output.absolute()
    if not output.parent.is_dir():
        raise UsageError(f"the folder {output.parent} does not exist; create it first")
    if output.is_dir():
        raise UsageError(f"{output} is a folder; name a file")


def _rewrite(raw: Path, path: Path, entry: Entry, opset: int, shapes: list[tuple[int, ...]]) -> None:
    """Load the exporter's file, clean it, and save it under its final name."""
    from models.clean import clean
    from models.trace import INLINE_LIMIT

    model = onnx.load(raw)
    found = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    if found != opset:
        raise UsageError(f"the exporter wrote opset {found} instead of {opset}; choose --opset {found}")
    clean(model, entry.outputs, shapes)
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > INLINE_LIMIT:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    else:
        onnx.save(model, path)


def _install(scratch: Path, output: Path) -> int:
    """Move the data file, then the model, to their final names; returns the size of both in bytes."""
    names = [name for name in (f"{output.name}.data", output.name) if (scratch / name).exists()]
    total = sum((scratch / name).stat().st_size for name in names)
    mode = (scratch / output.name).stat().st_mode
    for name in names:
        (scratch / name).chmod(mode)  # onnx makes the data file readable by its owner only
        (scratch / name).replace(output.with_name(name))
    return total


def require_packages(*further: str) -> None:
    """Raises UsageError, with the extra, if PyTorch, transformers, onnxscript or a further package is missing."""
    import importlib.util

    needed = ("torch", "transformers", "onnxscript", *further)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extras = ".[models,text]" if further else ".[models]"
        verb = "training" if further else "exporting"
        raise UsageError(f"{verb} needs {' and '.join(missing)}: pip install {extras}")
