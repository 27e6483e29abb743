"""`python -m benchmarks.cuda`: rewritten over original on an NVIDIA GPU, the whole table in one call.

For each model and element type: prefill and decode, with and without CUDA graphs, the nodes that take the place of
activations, and where onnxruntime placed nodes. Inputs and outputs stay on the GPU. Sessions share one process: unlike
on the CPU (docs/decisions/0023) no idle thread disturbs them, because they have one thread that does not spin. Without
CUDA it says so and exits with 2. `--on cpu` runs the same table on the CPU, to test this file.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, demand, feeds_of, gpu_name, print_table, write_json
from benchmarks.decoder import decoder, random_weights
from benchmarks.kinds import OTHERS, kind_times, nodes_of
from benchmarks.performance.subjects import SUBJECTS, Subject
from benchmarks.timing import Feeds, Ratio, ratio, rounds, take
from passes.forms import FORMS
from rewriter import rewrite
from rewriter.files.load import load_model
from rewriter.ort import load_onnxruntime, require_provider
from rewriter.text import one_line

PAST = 128
"""Tokens in the key-value cache of a decoding step, for models that have one."""

_TURN = 0.05
_NAMES = ("original", "rewritten", "control")

Label = tuple[str, str, str]
"""Model, element type and form."""


@dataclass(frozen=True)
class Row:
    """One model in one setting.

    Attributes:
        mode: `prefill` or `decode`.
        graphs: whether CUDA graphs were captured.
        milliseconds: medians of `original`, `rewritten` and `control`.
        rewritten: ratio to the original; None if a session did not run.
        control: ratio of the original to itself.
        problem: why times are missing.
    """

    model: str
    type: str
    form: str
    mode: str
    tokens: int
    graphs: bool
    milliseconds: Mapping[str, float]
    rewritten: Ratio | None
    control: Ratio | None
    problem: str = ""


@dataclass(frozen=True)
class Placement:
    """Where the nodes of a model run, and what became of its blocks.

    Attributes:
        nodes: number of nodes by execution provider.
        per_block: kernels per converted block that the counterpart does not have, by kind.
    """

    model: str
    type: str
    form: str
    side: str
    nodes: Mapping[str, int]
    per_block: Mapping[str, float]


class Bound:
    """A session whose inputs and outputs stay on the device."""

    def __init__(self, path: Path, provider: str, *, graphs: bool) -> None:
        ort = load_onnxruntime()
        known = require_provider(provider)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 0 if provider == "cpu" else 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        ((kernels, settings),) = known.onnxruntime
        chosen = {**settings, **({"enable_cuda_graph": "1"} if graphs else {})}
        self._session = ort.InferenceSession(str(path), options, providers=[(kernels, chosen)], enable_fallback=0)
        self._device = "cpu" if provider == "cpu" else "cuda"
        self._ort = ort
        self._binding: Any = None

    def bind(self, feeds: Feeds) -> None:
        """Copy the inputs to the device; a run finds out the outputs' shapes, which then keep their places."""
        self._binding = self._session.io_binding()
        for name, array in feeds.items():
            self._binding.bind_ortvalue_input(name, self._ort.OrtValue.ortvalue_from_numpy(array, self._device, 0))
        for value in self._session.get_outputs():
            self._binding.bind_output(value.name, self._device, 0)
        self.run(feeds)
        outputs = self._binding.get_outputs()
        for value, result in zip(self._session.get_outputs(), outputs, strict=True):
            self._binding.bind_ortvalue_output(value.name, result)
        self.run(feeds)

    def run(self, _feeds: Feeds) -> None:
        """Run once, and wait for the end."""
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--on", type=click.Choice(("cuda", "cpu")), default="cuda", help="cpu: only to test this command.")
@click.option("--minutes", type=click.FloatRange(min=0.0, min_open=True), default=8.0, help="Begin no row after that.")
@click.option("--repeat", type=click.IntRange(min=3), default=15, help="Rounds per row.")
@click.option("--only", metavar="NAME", multiple=True, help="Only models of this name (repeatable).")
@click.option("--model", "files", type=click.Path(path_type=Path, exists=True), multiple=True, help="Only this file.")
@click.option("--form", "forms", type=click.Choice(tuple(FORMS)), multiple=True, default=("local",))
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, default=(128, 512), help="Lengths of a prefill.")
@click.option("--quick", is_flag=True, help="Two layers of each model.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "cuda.json", show_default=False)
def main(
    *,
    on: str,
    minutes: float,
    repeat: int,
    only: tuple[str, ...],
    files: tuple[Path, ...],
    forms: tuple[str, ...],
    tokens: tuple[int, ...],
    quick: bool,
    json_path: Path,
) -> None:
    """Measure models on a GPU: prefill and decode, float32 and float16, with and without CUDA graphs."""
    demand(on, "benchmarks.cuda")
    until = time.monotonic() + 60.0 * minutes
    found: list[Row] = []
    placed: list[Placement] = []
    with tempfile.TemporaryDirectory(prefix="attnonly-cuda-") as folder:
        subjects = [each.quick() if quick else each for each in SUBJECTS if not only or each.name in only]
        for name, kind, original in _models(subjects, files, Path(folder)):
            for form in forms:
                if time.monotonic() > until:
                    click.echo(f"{name} {kind} {form}: skipped, {minutes:g} minutes are over", err=True)
                    continue
                heads = Path(folder) / "heads.onnx"
                heads.unlink(missing_ok=True)
                report = rewrite(original, heads, form=form, validate=False)
                if not report.converted:
                    raise click.ClickException(f"{name}: no MLP block to convert")
                pair, label = (original, heads), (name, kind, form)
                for row in _rows(label, pair, on, tokens, repeat):
                    click.echo(f"{' '.join(label)} {row.mode} {row.tokens}: {row.rewritten or row.problem}", err=True)
                    found.append(row)
                placed += _placements(label, pair, on, len(report.converted))
    settings = {"on": on, "repeat": repeat, "quick": quick, "past": PAST, "device": gpu_name(on)}
    write_json(json_path, "cuda", settings, [*map(asdict, found), *map(asdict, placed)])
    _show(found, placed, on, repeat)


def _models(subjects: Sequence[Subject], files: Sequence[Path], folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Name, element type and file of each model, one at a time."""
    for file in files:
        yield file.name, "as given", file
    for subject in () if files else subjects:
        for half in subject.halves:
            path = folder / "original.onnx"
            (folder / "weights.data").unlink(missing_ok=True)
            model = decoder(replace(subject.shape, half=half), random_weights())
            onnx.save(model, path, save_as_external_data=True, location="weights.data", size_threshold=1024)
            del model
            yield subject.name, "float16" if half else "float32", path


def _rows(label: Label, pair: tuple[Path, Path], on: str, tokens: Sequence[int], repeat: int) -> Iterator[Row]:
    for mode, length, feeds in _settings(pair[0], tokens):
        for graphs in (False, True) if on == "cuda" else (False,):
            try:
                seconds = _measured(pair, on, feeds, repeat, graphs=graphs)
            except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base class
                yield Row(*label, mode, length, graphs, {}, None, None, one_line(error, 160))
                continue
            times = {side: 1e3 * float(np.median(each)) for side, each in seconds.items()}
            over, control = (ratio(seconds[side], seconds["original"]) for side in ("rewritten", "control"))
            yield Row(*label, mode, length, graphs, times, over, control)


def _settings(path: Path, tokens: Sequence[int]) -> Iterator[tuple[str, int, Feeds]]:
    """Mode, length and inputs: each prefill, and one decoding step, with a cache if the model takes one."""
    proto = load_model(path).proto
    for length in tokens:
        yield "prefill", length, feeds_of(proto, length)
    yield "decode", 1, feeds_of(proto, 1, PAST)


def _measured(pair: tuple[Path, Path], on: str, feeds: Feeds, repeat: int, *, graphs: bool) -> dict[str, list[float]]:
    """The median seconds of a run, per round."""
    sessions = {side: Bound(path, on, graphs=graphs) for side, path in zip(_NAMES, (*pair, pair[0]), strict=True)}
    for session in sessions.values():
        session.bind(feeds)
    found: dict[str, list[float]] = {side: [] for side in _NAMES}
    for order in rounds(_NAMES, repeat):
        for side in order:
            found[side].append(take(sessions[side], feeds, _TURN))
    return found


def _placements(label: Label, pair: tuple[Path, Path], on: str, blocks: int) -> Iterator[Placement]:
    _, _, feeds = next(_settings(pair[0], (16,)))
    profiles = [nodes_of(path, on, feeds) for path in pair]
    for side, own, other in zip(_NAMES, profiles, reversed(profiles), strict=False):
        kinds = {row.kind: row.nodes / blocks for row in kind_times(side, own, [other]) if row.kind != OTHERS}
        yield Placement(*label, side, dict(Counter(node.provider for node in own.values())), kinds)


def _show(found: Sequence[Row], placed: Sequence[Placement], on: str, repeat: int) -> None:
    header = ("model", "type", "form", "mode", "tokens", "graphs", "original ms", "rewritten ms", "ratio", "control")
    cells = []
    for row in found:
        times = [f"{row.milliseconds[side]:.3f}" if row.milliseconds else "-" for side in ("original", "rewritten")]
        ratios = [str(row.rewritten or row.problem[:60]), str(row.control or "-")]
        cells.append(
            (row.model, row.type, row.form, row.mode, str(row.tokens), "on" if row.graphs else "off", *times, *ratios)
        )
    print_table(f"On {on}, {repeat} rounds; ratio of medians (median of paired ratios, quartiles)", header, cells)
    rows = [
        (
            each.model,
            each.type,
            each.form,
            each.side,
            ", ".join(f"{count} {name.removesuffix('ExecutionProvider')}" for name, count in each.nodes.items()),
            f"{sum(each.per_block.values()):g}",
            ", ".join(f"{count:g} {name}" for name, count in each.per_block.items()),
        )
        for each in placed
    ]
    heads = ("model", "type", "form", "side", "nodes", "per block", "which")
    print_table("Placement of nodes, and kernels per block", heads, rows)


if __name__ == "__main__":
    main()
