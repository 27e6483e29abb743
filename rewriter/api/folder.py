"""`rewrite FOLDER -o OUT`: all ONNX files of a folder, such as optimum writes, with what lies beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from passes.options import Options
from rewriter.api.rewriting import rewrite
from rewriter.api.run import RewriteKeywords, describe, silent
from rewriter.errors import ExitStatus, RewriteError, UsageError
from rewriter.files.atomic import check_new_folder, copied_folder, files_of, publish
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Progress
from rewriter.report.folder import FolderReport
from rewriter.report.report import Report, write_json
from rewriter.text import quoted

REPORT = "attnonly-report.json"
"""The reports of all models, in the folder that is written."""

_ONE_MODEL = ("inputs", "expose")
"""Options that only make sense for one model."""


def rewrite_folder(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    validate: bool = True,
    progress: Progress = silent,
    **options: Unpack[RewriteKeywords],
) -> FolderReport:
    """Convert and prove every ONNX file of a folder, and copy the others beside them.

    The folder `output` appears, complete, only if every proof passed: a copy of `folder` in which the converted models
    have replaced the originals. `attnonly-report.json` in it holds the reports.

    Args:
        folder: the folder; links in it are refused.
        output: the folder to write, which must not exist. Without it nothing is written.
        dry_run: stop after the plans.
        validate: run the proofs.
        progress: called with (current activity, steps done, total steps).
        **options: those of `rewriter.rewrite`, except inputs and expose, which are for one model; listed below.

    Returns:
        The reports. After a proof that failed, the models after it are only planned. `exit_status` is 3 if no model has
        a block to convert.

    Raises:
        UsageError: an option is invalid, the output exists, or the folder has no ONNX file, or links.
        ModelError: a model is unreadable, malformed or unsafe; the message begins with its name.
        ProviderError: as for `rewrite`.
        ValidationError: as for `rewrite`.
    """
    source, out = Path(folder), None if output is None else Path(output)
    one = next((name for name in _ONE_MODEL if options.get(name) not in (None, (), [], "")), None)
    if one is not None:
        raise UsageError(f"{one} is for one model, not for a folder; convert its files one by one")
    if not source.is_dir():
        raise UsageError(f"{quoted(source)} is not a folder")
    if out is None and not dry_run:
        raise UsageError("a folder needs an output; pass one, or --dry-run")
    if out is not None:
        check_new_folder(out, source)
    files = files_of(source)
    names = [path for path in files if path.suffix.lower() == ".onnx"]
    if not names:
        raise UsageError(
            f"there is no .onnx file in {quoted(source)}; export the model first (optimum-cli export onnx)"
        )
    models = {
        str(name): _tried(source / name, None, name, progress, {**options, "dry_run": True, "validate": validate})
        for name in names
    }
    wanted = [name for name in names if models[str(name)].converted]
    status = ExitStatus.CONVERTED if wanted else ExitStatus.NOTHING_TO_CONVERT
    if out is None or dry_run or not wanted:
        return FolderReport(str(folder), None, models, (), status)
    with copied_folder(source, files, out) as staged:
        for name in wanted:
            made = staged / name.with_name(f"{name.name}.new")
            report = _tried(staged / name, made, name, progress, {**options, "validate": validate})
            models[str(name)] = replace(report, model=str(source / name))
            if report.exit_status is not ExitStatus.CONVERTED:
                return FolderReport(str(folder), None, models, (), report.exit_status)
            made.replace(staged / name)
            models[str(name)] = replace(models[str(name)], output=str(out / name), files=(str(out / name),))
        others = tuple(str(path) for path in files if path not in names)
        result = FolderReport(str(folder), str(out), models, others, status)
        write_json(staged / REPORT, result.to_json())
        publish(staged, out)
    return result


describe(rewrite_folder, Options, Settings)


def _tried(path: Path, output: Path | None, name: Path, progress: Progress, options: Mapping[str, Any]) -> Report:
    """The report of one model; errors begin with its name."""

    def named(what: str, done: int, total: int) -> None:
        progress(f"{name}: {what}", done, total)

    try:
        return rewrite(path, output, progress=named, **options)
    except RewriteError as error:
        raise type(error)(f"{quoted(name)}: {error.args[0]}") from error
