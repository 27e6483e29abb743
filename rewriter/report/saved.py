"""A report that was saved as JSON, read back: strictly, because the file may come from anybody."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rewriter.errors import ExitStatus, UsageError
from rewriter.estimate.formula import Estimate
from rewriter.pipeline import Timing
from rewriter.plain import from_plain
from rewriter.proof.statistics import BINS, OutputStats
from rewriter.proof.validate import Validation
from rewriter.report.report import SCHEMA_VERSION, BlockRow, Report, Shape
from rewriter.text import one_line, quoted

_LARGEST = 256 * 10**6
_MOST = 2**63
_STATUSES = (ExitStatus.CONVERTED, ExitStatus.VALIDATION_FAILED, ExitStatus.NOTHING_TO_CONVERT)
_SIGNED = ("cosine",)
"""Numbers that may be negative."""


def read_report(path: Path) -> Report:
    """The report that `rewrite --report` wrote.

    Raises:
        UsageError: the file cannot be read, or is not such a report; the message says what is wrong.
    """
    data = _json(path)
    if not isinstance(data, dict) or "blocks" not in data or "form" not in data:
        raise UsageError(f"{quoted(path)} is not a report of `rewrite --report`{_hint(data)}")
    if data.get("version") != SCHEMA_VERSION or isinstance(data.get("version"), bool):
        version = one_line(str(data.get("version")), 20)
        raise UsageError(
            f"{quoted(path)} has version {version}, and this tool reads {SCHEMA_VERSION}; use another version"
        )
    try:
        report = _report(data)
        _check(report)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{quoted(path)} is not a sound report ({one_line(str(error), 160)}); write it again with --report"
        ) from error
    return report


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > _LARGEST:
            raise UsageError(f"{quoted(path)} has more than {_LARGEST // 10**6} MB; no report is that large")
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise UsageError(f"{quoted(path)} cannot be read: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        what = one_line(str(error), 120) if isinstance(error, json.JSONDecodeError) else "not plain JSON text"
        raise UsageError(f"{quoted(path)} is not JSON ({what}); give a file that --report wrote") from error


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _hint(data: Any) -> str:
    """What the file is instead, if that can be told."""
    keys = data.keys() if isinstance(data, dict) else ()
    if "models" in keys:
        return ", but of a folder; give the report of one model"
    if "same" in keys:
        return ", but of a comparison, which has no page"
    return "; give the JSON of one conversion"


def _report(data: Mapping[str, Any]) -> Report:
    """The dataclass of the JSON, entry by entry. Raises ValueError, TypeError and LookupError."""
    validation, estimate = data["validation"], data.get("estimate")
    return Report(
        model=_of(str, data["model"]),
        output=None if data["output"] is None else _of(str, data["output"]),
        form=_of(str, data["form"]),
        blocks=_of(tuple[BlockRow, ...], data["blocks"]),
        before=_shape(data, "before"),
        after=None if data["operators"]["after"] is None else _shape(data, "after"),
        validation=None if validation is None else _of(Validation, validation),
        seconds=_of(Mapping[str, float], data["seconds"]),
        notes=_of(tuple[str, ...], data["notes"]),
        exit_status=_status(data["exit_status"]),
        environment=_of(Mapping[str, str], data["environment"]),
        options=dict(data.get("options", {})),
        passes=_of(tuple[Timing, ...], data.get("passes", [])),
        files=_of(tuple[str, ...], data.get("files", [])),
        estimate=None if estimate is None else _of(Estimate, estimate),
    )


def _status(value: object) -> ExitStatus:
    status = ExitStatus(_of(int, value))
    if status not in _STATUSES:
        raise ValueError(f"a report never has exit status {value}")
    return status


def _of(kind: Any, value: object) -> Any:
    return from_plain(kind, value, saved=True)


def _shape(data: Mapping[str, Any], side: str) -> Shape:
    return Shape(
        _of(Mapping[str, int], data["operators"][side]), _of(int, data["nodes"][side]), _of(int, data["bytes"][side])
    )


def _check(report: Report) -> None:
    """What types do not say. Raises ValueError."""
    for row in report.blocks:
        needed = (
            (row.program, row.exact, row.bias_tokens, row.max_error) if row.status == "converted" else (row.reason,)
        )
        if not row.name or any(each is None for each in needed):
            raise ValueError(f"block {row.name} lacks what a block that is {row.status} has")
    if report.exit_status is ExitStatus.NOTHING_TO_CONVERT and report.converted:
        raise ValueError("blocks were converted, and the exit status says that there are none")
    if report.validation is not None:
        proved = report.exit_status is ExitStatus.CONVERTED
        if report.validation.passed != proved:
            raise ValueError("the proof and the exit status contradict each other")
        if report.after is None or not report.converted:
            raise ValueError("it has a proof, and nothing was converted")
    for name, number in _numbers(report):
        if (number < 0 and name not in _SIGNED) or (isinstance(number, int) and number >= _MOST):
            raise ValueError(f"{name} is {number:.3g}" if isinstance(number, float) else f"{name} is out of range")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number with the name of its field."""
    if isinstance(value, OutputStats) and any(len(each) not in (0, BINS) for each in _histograms(value)):
        raise ValueError(f"a histogram of {value.name} does not have {BINS} bins")
    if is_dataclass(value):
        for each in fields(value):
            if each.name != "options":
                yield from _numbers(getattr(value, each.name), each.name)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _numbers(entry, name)
    elif isinstance(value, tuple):
        for entry in value:
            yield from _numbers(entry, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


def _histograms(stats: OutputStats) -> tuple[tuple[int, ...], ...]:
    return stats.ulps, stats.original_ulps, stats.rewritten_ulps
