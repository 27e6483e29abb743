"""Measure the subjects: one row per model, element type and length; finished rows are kept, so that a run can go on."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.common import environment, feeds_of, write_json
from benchmarks.decoder import decoder, random_weights
from benchmarks.kinds import KindTime, kind_times, nodes_of
from benchmarks.performance.subjects import Subject
from benchmarks.timing import measure, ratio, started
from rewriter import rewrite

Row = dict[str, Any]
KEY = ("model", "type", "tokens", "layers")
"""What names a row."""

_VERSIONS = ("onnxruntime", "onnx", "numpy", "cpu", "cores")


@dataclass(frozen=True)
class Setting:
    """How to measure.

    Attributes:
        repeat: rounds.
        threads: threads per operator; 0 for one per core.
        rewriting: keywords of `rewrite`.
    """

    repeat: int = 5
    threads: int = 0
    rewriting: dict[str, Any] = field(default_factory=dict)


def type_name(*, half: bool) -> str:
    """The element type as tables show it."""
    return "float16" if half else "float32"


def stored(path: Path, setting: Setting) -> list[Row]:
    """The rows of an earlier run with the same setting, versions and processor; empty if there is none."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    now = environment()
    same = content["settings"] == asdict(setting) and all(
        content["environment"].get(name) == now.get(name) for name in _VERSIONS
    )
    return list(content["rows"]) if same else []


def measured(
    subjects: Sequence[Subject], setting: Setting, rows: Sequence[Row], path: Path, told: Callable[[str], None]
) -> list[Row]:
    """All rows of the subjects; those in `rows` are not measured again. Each new one is written at once."""
    found = {_key(row): row for row in rows}
    wanted: list[tuple[Any, ...]] = []
    for subject in subjects:
        for half in subject.halves:
            keys = {
                tokens: (subject.name, type_name(half=half), tokens, subject.shape.layers) for tokens in subject.tokens
            }
            wanted += keys.values()
            missing = tuple(tokens for tokens, key in keys.items() if key not in found)
            for row in _rows(subject, missing, setting, half=half) if missing else ():
                told(f"{row['model']} {row['type']} {row['tokens']} tokens: {row['rewritten']['paired']:.3f}")
                found[_key(row)] = row
                write_json(path, "performance", asdict(setting), list(found.values()))
    write_json(path, "performance", asdict(setting), list(found.values()))
    return [found[key] for key in wanted]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def _rows(subject: Subject, tokens: Sequence[int], setting: Setting, *, half: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="attnonly-performance-") as folder:
        original, heads = Path(folder) / "original.onnx", Path(folder) / "heads.onnx"
        made = decoder(replace(subject.shape, half=half), random_weights())
        onnx.save(made, original, save_as_external_data=True, location="weights.data", size_threshold=1024)
        del made
        report = rewrite(original, heads, validate=False, **setting.rewriting)
        if not report.converted:
            raise RuntimeError(f"{subject.name}: {[row.reason for row in report.left]}")
        pair, model = {"original": original, "rewritten": heads}, onnx.load(original, load_external_data=False)
        for length in tokens:
            feeds = feeds_of(model, length)
            with started({**pair, "control": original}, "cpu", setting.threads) as processes:
                seconds = measure(processes, feeds, setting.repeat)
                known = [process.known for process in processes.values()]
            nodes = {name: nodes_of(path, "cpu", feeds, setting.threads) for name, path in pair.items()}
            kinds = {
                "original": kind_times("original", nodes["original"], [nodes["rewritten"]]),
                "rewritten": kind_times("rewritten", nodes["rewritten"], [nodes["original"]]),
            }
            peaks = [each["peak_bytes"] for each in known]
            yield {
                "model": subject.name,
                "group": subject.group,
                "type": type_name(half=half),
                "tokens": length,
                "layers": subject.shape.layers,
                "blocks": len(report.converted),
                "milliseconds": {name: 1e3 * float(np.median(seconds[name])) for name in pair},
                **{name: asdict(ratio(seconds[name], seconds["original"])) for name in ("rewritten", "control")},
                "load_seconds": [each["load_seconds"] for each in known],
                "peak_mb": [None if each is None else 1e-6 * each for each in peaks],
                "kinds": {name: [_kind(time) for time in times] for name, times in kinds.items()},
            }


def _kind(time: KindTime) -> Row:
    return {key: value for key, value in asdict(time).items() if key != "model"}
