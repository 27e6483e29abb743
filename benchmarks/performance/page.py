"""The measured part of docs/performance.md and its figure, from the rows of a run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.figures import Curve, Panel, drawing
from benchmarks.performance.measure import Row
from benchmarks.performance.subjects import SUBJECTS

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
_MARKED = re.compile(r"(<!-- made by python -m benchmarks all -->\n).*?(<!-- end -->)", re.DOTALL)


def text_of(page: str, content: Mapping[str, Any], rows: Sequence[Row], figure: str) -> str:
    """The page with its measured part made anew; `figure` is the path of the drawing from there."""
    made = "\n".join(_lines(content, rows, figure))
    return _MARKED.sub(lambda found: f"{found[1]}{made}\n{found[2]}", page)


def _lines(content: Mapping[str, Any], rows: Sequence[Row], figure: str) -> Iterator[str]:
    environment, settings = content["environment"], content["settings"]
    versions = ", ".join(f"{name} {environment[name]}" for name in _PACKAGES if name in environment)
    threads = f"{settings['threads'] or 'all'} of them used"
    yield from (
        f"Measured on {environment['date']}: {environment['cpu']}, {environment['cores']} cores, {threads},",
        f"{environment['system']}, {versions}; CPU execution provider, batch 1, random weights,",
        f"{settings['repeat']} rounds.",
        "",
        f"![Ratio against tokens]({figure})",
        "",
    )
    for group, (title, about) in _GROUPS.items():
        found = [row for row in rows if row["group"] == group]
        if found:
            yield from (f"### {title}", "", about, "", *_models(found), "", *_table(found), "")


def _models(rows: Sequence[Row]) -> Iterator[str]:
    for subject in SUBJECTS:
        layers = {row["layers"] for row in rows if row["model"] == subject.name and row["group"] == subject.group}
        if layers:
            fewer = "" if layers == {subject.shape.layers} else f" (here {max(layers)} layers)"
            yield f"- `{subject.name}`: {subject.about}{fewer}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each model and type; figures for numbers of tokens are in their order."""
    yield "| model | type | tokens | original ms | ratio | control | load s | peak MB |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["type"]), []).append(row)
    for (model, kind), found in groups.items():
        cells = (
            f"`{model}`",
            kind,
            ", ".join(str(row["tokens"]) for row in found),
            ", ".join(f"{row['milliseconds']['original']:.1f}" for row in found),
            ", ".join(f"{row['rewritten']['paired']:.2f}" for row in found),
            ", ".join(f"{row['control']['paired']:.2f}" for row in found),
            _pair(found[-1]["load_seconds"], 1),
            _pair(found[-1]["peak_mb"], 0),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _pair(values: Sequence[float | None], digits: int) -> str:
    """Original and rewritten."""
    return ", ".join("-" if each is None else f"{each:.{digits}f}" for each in values[:2])


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
