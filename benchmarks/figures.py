"""Line charts as SVG, drawn by matplotlib (extra `dev`): the same bytes at every run, for light and dark pages."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

_PAPER, _INK, _GRID = "#fffffe", "#1f2328", "#e4e7eb"
_DARK = {_PAPER: "#0d1117", _INK: "#e6edf3", _GRID: "#30363d"}
"""What these colours become on a dark page; those of the curves stand out on both."""

_COLOURS = ["#2f81d6", "#e0702b", "#3f9b57", "#d1495b", "#9065b0", "#b08a1e", "#1295a3", "#c2559d", "#7a8699"]
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "figure",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler('color', {_COLOURS})",
    "axes.facecolor": "none",
    "figure.facecolor": _PAPER,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "grid.color": _GRID,
    "legend.frameon": False,
    "path.simplify_threshold": 0.2,
    "lines.linewidth": 1.6,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


@dataclass(frozen=True)
class Curve:
    """One line; without a name it is not in the legend. A number chooses the colour, else it is the next one."""

    x: Array
    y: Array
    name: str = ""
    dashed: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: stands above it.
        curves: its lines.
        low: lower end of the vertical axis; values below, zeros too, lie on it.
        high: upper end.
        logarithmic: `y`, `xy`, or neither.
        labels: what the axes show.
        ticks: where the horizontal axis has marks, if the usual ones will not do.
    """

    title: str
    curves: tuple[Curve, ...]
    low: float | None = None
    high: float | None = None
    logarithmic: str = ""
    labels: tuple[str, str] = ("", "")
    ticks: tuple[float, ...] = ()


def drawing(panels: Sequence[Panel], label: str) -> str:
    """The panels side by side; a single one has its legend on the right."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    alone = len(panels) == 1
    with mpl.rc_context(_STYLE), io.StringIO() as file:
        figure = Figure(figsize=(max(3.6 * len(panels), 7.6), 4.0 if alone else 3.4), layout="constrained")
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels), sharex=True)), panels, strict=True):
            _draw(axes, panel)
            place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if alone else _below(panel)
            if any(curve.name for curve in panel.curves):
                axes.legend(**place)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": label})
        return _finished(file.getvalue())


def _below(panel: Panel) -> dict[str, object]:
    columns = min(max(30 // max(len(curve.name) for curve in panel.curves), 2), 4)
    height = -0.2 if panel.labels[0] else -0.1
    return {"loc": "upper center", "bbox_to_anchor": (0.5, height), "ncols": columns, "columnspacing": 1.2}


def _draw(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(title=panel.title, xlabel=panel.labels[0], ylabel=panel.labels[1])
    for number, curve in enumerate(panel.curves):
        y = curve.y if panel.low is None else np.maximum(curve.y, panel.low)
        (line,) = axes.plot(curve.x, y, "--" if curve.dashed else "-", label=curve.name or "_", gid=f"curve-{number}")
        if curve.colour is not None:
            line.set_color(_COLOURS[curve.colour % len(_COLOURS)])
    if "x" in panel.logarithmic:
        axes.set_xscale("log")
    if panel.ticks:
        axes.set_xticks(panel.ticks, [_shown(tick) for tick in panel.ticks])
        axes.set_xticks([], minor=True)
    if "y" in panel.logarithmic:
        low, high = np.log10([panel.low or axes.dataLim.minposy, panel.high or axes.dataLim.ymax])
        axes.set_yscale("log")
        if high - low > 1.0:
            axes.set_ylim(10.0 ** np.floor(low), 10.0 ** np.ceil(high))
        else:
            axes.set_ylim(10.0 ** (low - 0.1), 10.0 ** (high + 0.1))
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(lambda value, _place: _shown(value))
        axes.set_yticks([], minor=True)
    else:
        axes.locator_params(axis="y", nbins=6)
        axes.set_ylim(panel.low, panel.high)
    axes.margins(x=0.0)


def _shown(value: float) -> str:
    digits, power = f"{value:.0e}".split("e")
    if 0 <= int(power) < 4:
        return f"{value:g}"
    return f"{digits}·10{str(int(power)).translate(_SUPERSCRIPTS)}".removeprefix("1·")


def _finished(text: str) -> str:
    """With one decimal, and with colours for dark pages."""
    rules = [
        f'[style*="{part}: {light}"] {{ {part}: {dark} !important }}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    ]
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    text = re.sub(r"(\.\d)\d+", r"\1", text)
    return text.replace("<metadata>", f"{style}\n <metadata>", 1)
