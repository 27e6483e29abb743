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
from rewriter.files.atomic import (
    check_new_folder,
    copy_file,
    files_of,
    os_errors,
    publish,
    staged_folder,
    write_text,
)
from rewriter.files.load import load_model
from rewriter.options import options_of
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Progress
from rewriter.report.folder import FolderReport, certificate
from rewriter.report.report import Report, write_json
from rewriter.text import quoted

CARD, DATA = "README.md", "attnonly-report.json"
"""The model card, and the reports of all models, in the folder that is written."""

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

    The folder `output` appears, complete, only if every proof passed. ONNX files without a block to convert are copied
    as they are, with their data files. `README.md` gets the certificate: what was converted and what the proofs found;
    the text of a card that is already there stays in front of it.

    Args:
        folder: the folder; links in it are refused.
        output: the folder to write, which must not exist. Without it nothing is written.
        dry_run: stop after the plans.
        validate: run the proofs.
        progress: called with (current activity, steps done, total steps).
        **options: those of `rewriter.rewrite`, except inputs and expose, which are for one model; listed below.

    Returns:
        The reports; after a proof that failed, the models after it were not tried. `exit_status` is 3 if no model has
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
        raise UsageError("a folder needs an output; pass one, or dry_run")
    if out is not None:
        check_new_folder(out, source)
    files = files_of(source)
    names = tuple(path for path in files if path.suffix.lower() == ".onnx")
    if not names:
        raise UsageError(
            f"there is no .onnx file in {quoted(source)}; export the model first (optimum-cli export onnx)"
        )
    if out is None or dry_run:
        plans = {str(name): _tried(source / name, None, name, progress, {**options, "dry_run": True}) for name in names}
        return FolderReport(str(folder), None, plans, (), _status(plans))
    with staged_folder(out) as staged:
        models: dict[str, Report] = {}
        for name in names:
            with os_errors("write", out):
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
            given = {**options, "validate": validate}
            report = _tried(source / name, staged / name, name, progress, given)
            models[str(name)] = _published(report, staged, out)
            if report.exit_status is ExitStatus.VALIDATION_FAILED:
                return FolderReport(str(folder), None, models, (), report.exit_status)
        if not any(each.converted for each in models.values()):
            return FolderReport(str(folder), None, models, (), ExitStatus.NOTHING_TO_CONVERT)
        copied = _copied(source, staged, files, models)
        result = FolderReport(str(folder), str(out), models, copied, _status(models))
        write_text(staged / CARD, _card(source / CARD, source.name, certificate(models, _changed(options))))
        write_json(staged / DATA, result.to_json())
        publish(staged, out)
    return result


describe(rewrite_folder, Options, Settings)


def _published(report: Report, staged: Path, out: Path) -> Report:
    """The report with the names that the files have once the folder has its own."""
    written = tuple(str(out / Path(each).relative_to(staged)) for each in report.files)
    return replace(report, output=None if report.output is None else written[0], files=written)


def _tried(path: Path, output: Path | None, name: Path, progress: Progress, options: Mapping[str, Any]) -> Report:
    """The report of one model; errors begin with its name."""

    def named(what: str, done: int, total: int) -> None:
        progress(f"{name}: {what}", done, total)

    try:
        return rewrite(path, output, progress=named, **options)
    except RewriteError as error:
        raise type(error)(f"{quoted(name)}: {error}") from error


def _status(models: Mapping[str, Report]) -> ExitStatus:
    found = any(each.converted for each in models.values())
    return ExitStatus.CONVERTED if found else ExitStatus.NOTHING_TO_CONVERT


def _changed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not at their defaults."""
    defaults = {each.name: each.default for kind in (Options, Settings) for each in options_of(kind)}
    return {name: value for name, value in options.items() if value != defaults.get(name) and value not in ((), {})}


def _copied(source: Path, staged: Path, files: tuple[Path, ...], models: Mapping[str, Report]) -> tuple[str, ...]:
    """Copy what the conversion did not write; the names of the files that are no models.

    Data files of converted models are left out, unless another model that was copied needs them.
    """
    data = {name: {ref.path for ref in load_model(source / name, mapped=True).external} for name in models}
    needed = {path for name, paths in data.items() if not models[name].converted for path in paths}
    dropped = {path for name, paths in data.items() if models[name].converted for path in paths} - needed
    others = []
    for path in files:
        name, report = str(path), models.get(str(path))
        if name in (CARD, DATA) or (report is not None and report.converted):
            continue
        absolute = (source / path).absolute()
        if absolute in dropped:
            continue
        if (staged / path).exists():
            raise UsageError(f"{quoted(name)} has the name of a data file that the conversion writes; rename it")
        copy_file(source / path, staged / path)
        if report is None:
            others.append(name)
    return tuple(others)


def _card(before: Path, name: str, text: str) -> str:
    """The model card: the text that is there, or a title, and the certificate."""
    try:
        known = before.read_text(encoding="utf-8").rstrip() if before.exists() else f"# {name}, attention only"
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the model card {quoted(before)} cannot be read: {type(error).__name__}; mend it") from error
    known = known.split("\n## Attention-only conversion\n", 1)[0].rstrip()
    return f"{known}\n\n{text}"
