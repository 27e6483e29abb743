"""Measure the subjects: one row per model, element type and length; finished rows are kept, so that a run can go on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from benchmarks.common import environment, write_json
from benchmarks.decoder import decoder, random_weights
from benchmarks.kinds import KindTime, kind_times, nodes_of
from benchmarks.performance.subjects import Subject
from rewriter import bench, rewrite
from rewriter.api.benching import Benchmark, inputs_of
from rewriter.proof.settings import Settings

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
        for length in tokens:
            found = bench(
                original, heads, tokens=length, repeat=setting.repeat, threads=setting.threads, providers=["cpu"]
            )
            pair = {"original": original, "rewritten": heads}
            model = onnx.load(original, load_external_data=False)
            feeds = inputs_of(model, Settings(), (length,))[0].feeds
            nodes = {name: nodes_of(path, "cpu", feeds, setting.threads) for name, path in pair.items()}
            kinds = {
                "original": kind_times("original", nodes["original"], [nodes["rewritten"]]),
                "rewritten": kind_times("rewritten", nodes["rewritten"], [nodes["original"]]),
            }
            yield _row(subject, len(report.converted), found, kinds, half=half)


def _row(
    subject: Subject, blocks: int, found: Benchmark, kinds: Mapping[str, Sequence[KindTime]], *, half: bool
) -> Row:
    original, rewritten, control = found.times
    if rewritten.over_original is None or control.over_original is None:
        raise RuntimeError(f"{subject.name}: no ratios")
    return {
        "model": subject.name,
        "group": subject.group,
        "type": type_name(half=half),
        "tokens": int(found.options["tokens"][0]),
        "layers": subject.shape.layers,
        "blocks": blocks,
        "milliseconds": {"original": original.milliseconds, "rewritten": rewritten.milliseconds},
        "rewritten": asdict(rewritten.over_original),
        "control": asdict(control.over_original),
        "load_seconds": [row.load_seconds for row in found.times],
        "peak_mb": [row.peak_mb for row in found.times],
        "kinds": {name: [_kind(time) for time in times] for name, times in kinds.items()},
    }


def _kind(time: KindTime) -> Row:
    return {key: value for key, value in asdict(time).items() if key != "model"}
