"""docs/performance.md and its figure, from the rows of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.figures import Curve, Panel, drawing
from benchmarks.performance.measure import Row
from benchmarks.performance.subjects import SUBJECTS
from rewriter.timing.profile import OTHERS

_GROUPS = {
    "known": (
        "Widths of known models",
        "onnxruntime fuses the activation of each of these originals into one operator where it can.",
    ),
    "unfused": (
        "Activations that onnxruntime does not fuse",
        "Here the original runs several operators per activation as well.",
    ),
}
_PACKAGES = ("onnxruntime", "onnx", "numpy")


def text_of(content: Mapping[str, Any], rows: Sequence[Row], figure: str) -> str:
    """The text of the page; `figure` is the path of the drawing from there."""
    return "\n".join(_lines(content, rows, figure)) + "\n"


def _lines(content: Mapping[str, Any], rows: Sequence[Row], figure: str) -> Iterator[str]:
    environment, settings = content["environment"], content["settings"]
    versions = ", ".join(f"{name} {environment[name]}" for name in _PACKAGES if name in environment)
    threads = f"{settings['threads'] or 'all'} of them used"
    yield from (
        "# Performance",
        "",
        "Written by `python -m benchmarks all`; all numbers are in `benchmarks/results/performance.json`.",
        "`rewrite bench` measures models of your own in the same way ([reference](reference.md#rewrite-bench),",
        "[decision 0025](decisions/0025-one-process-per-model.md)).",
        "",
        f"Measured on {environment['date']}: {environment['cpu']}, {environment['cores']} cores, {threads},",
        f"{environment['system']}, {versions}; CPU execution provider, batch 1, random",
        f"weights, {settings['repeat']} rounds. The load average at the end was {environment['load_average']}.",
        "",
        "*ratio* is the time of the rewritten model over that of the original: median over the rounds, and quartiles.",
        "*control* is the same for the original against itself: a ratio no further from 1 than the control is noise.",
        "*load s* and *peak MB* are of the original and the rewritten model. *blocks* is the share of a run of the",
        "rewritten model that the nodes in place of activations take, by onnxruntime's profiler.",
        "",
        f"![Ratio against tokens]({figure})",
        "",
    )
    for group, (title, about) in _GROUPS.items():
        found = [row for row in rows if row["group"] == group]
        if found:
            yield from (f"## {title}", "", about, "", *_models(found), "", *_table(found), "")
    yield from ("## Kinds of nodes", "", *_kinds(rows))


def _models(rows: Sequence[Row]) -> Iterator[str]:
    for subject in SUBJECTS:
        layers = {row["layers"] for row in rows if row["model"] == subject.name and row["group"] == subject.group}
        if layers:
            fewer = "" if layers == {subject.shape.layers} else f" (here {max(layers)} layers)"
            yield f"- `{subject.name}`: {subject.about}{fewer}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| model | type | tokens | original ms | rewritten ms | ratio | control | load s | peak MB | blocks |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        times, over, control = row["milliseconds"], row["rewritten"], row["control"]
        cells = (
            f"`{row['model']}`",
            row["type"],
            row["tokens"],
            f"{times['original']:.1f}",
            f"{times['rewritten']:.1f}",
            f"{over['paired']:.2f} ({over['low']:.2f} to {over['high']:.2f})",
            f"{control['paired']:.2f} ({control['low']:.2f} to {control['high']:.2f})",
            _pair(row["load_seconds"], 1),
            _pair(row["peak_mb"], 0),
            f"{100 * sum(each['share'] for each in row['kinds']['rewritten'] if each['kind'] != OTHERS):.0f} %",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _pair(values: Sequence[float | None], digits: int) -> str:
    """Original and rewritten."""
    return ", ".join("-" if each is None else f"{each:.{digits}f}" for each in values[:2])


def _kinds(rows: Sequence[Row]) -> Iterator[str]:
    yield "The nodes that only one of the two models runs, in the shortest run of each model: number and kind."
    yield ""
    yield "| model | type | original | rewritten |"
    yield "| --- | --- | --- | --- |"
    seen: set[tuple[str, str, str]] = set()
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        key = (row["group"], row["model"], row["type"])
        if key not in seen:
            seen.add(key)
            sides = (_listed(row["kinds"][side]) for side in ("original", "rewritten"))
            yield f"| `{row['model']}` | {row['type']} | {' | '.join(sides)} |"


def _listed(kinds: Sequence[Row]) -> str:
    named = sorted((each for each in kinds if each["kind"] != OTHERS), key=lambda each: str(each["kind"]))
    return ", ".join(f"{each['nodes']} {each['kind']}" for each in named) or "none"


def figure_of(rows: Sequence[Row]) -> str:
    """Ratio against tokens: one panel per group and type, with the control as a dashed line."""
    panels = []
    for group, (title, _) in _GROUPS.items():
        for kind in ("float32", "float16"):
            found = [row for row in rows if row["group"] == group and row["type"] == kind]
            if found:
                panels.append(_panel(f"{title}, {kind}", found))
    return drawing(panels, "Time of the rewritten model over the original")


def _panel(title: str, rows: Sequence[Row]) -> Panel:
    names = dict.fromkeys(row["model"] for row in rows)
    tokens = sorted({float(row["tokens"]) for row in rows})
    curves = [
        _curve(name, [row for row in rows if row["model"] == name], "rewritten", number)
        for number, name in enumerate(names)
    ]
    worst = [max(row["control"]["paired"] for row in rows if row["tokens"] == length) for length in tokens]
    noise = Curve(np.asarray(tokens), np.asarray(worst), "largest control", dashed=True, colour=8)
    return Panel(title, (*curves, noise), low=0.0, labels=("tokens", "ratio"), ticks=tuple(tokens))


def _curve(name: str, rows: Sequence[Row], side: str, colour: int) -> Curve:
    ordered = sorted(rows, key=lambda row: int(row["tokens"]))
    x = np.asarray([row["tokens"] for row in ordered], np.float64)
    return Curve(x, np.asarray([row[side]["paired"] for row in ordered], np.float64), name, colour=colour)
