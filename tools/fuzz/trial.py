"""One trial: what the rewriter makes of a model, as an exit status.

Errors that the rewriter foresees have the status of the command line. Everything else is a finding: an exception of
another kind (70), a result that is itself not a sound model (71), one that passes the proof although an evaluation
that knows nothing of the rewriter sees another function (72), an MLP that was not seen, or a sound model that is
refused (73), and a sound model that is rewritten rightly by that evaluation, but fails the proof (74).
"""

import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from passes.options import FORM_NAMES, WHOLE
from rewriter import inspect, rewrite
from rewriter.errors import ExitStatus, ModelError, RewriteError
from rewriter.files.load import load_model
from rewriter.interpret.index import heads
from tests.oracle import evaluate
from tests.sabotage.oracle import difference
from tools.fuzz.random_transformers import Feeds, Transformer

UNSOUND, WRONG, MISSED, ALARM = 71, 72, 73, 74
"""Statuses of trials that no command ends with: as said above."""

_FAR = 0.05
"""Difference of a damaged model and its rewrite, over the largest output, from which on the proof decides. Damage may
take pre-activations out of the range of a program, and quantised models are this far apart by rounding."""

_AMPLIFIED = 100.0
"""How many times a certified error may be at an output."""

_APART = {TensorProto.FLOAT: 1e-4, TensorProto.DOUBLE: 1e-8, TensorProto.FLOAT16: 0.05}
"""The same for random transformers, in exact arithmetic, by element type."""

Way = Mapping[str, Any]
"""A command, and the options of it."""

WAYS: tuple[Way, ...] = (
    *({"command": "rewrite", "form": form, "scope": scope} for form in FORM_NAMES for scope in ("mlp", "all")),
    {"command": "rewrite", "inline": True, "gate": "product"},
    {"command": "rewrite", "form": "compact", "expose": ("pattern,z:*",)},
    {"command": "inspect", "scope": "all"},
    {"command": "heads", "fold_ln": True},
)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        status: an `ExitStatus`, or `UNSOUND`.
        message: one line; for a finding the exception, and the places in this project, the innermost last.
    """

    status: int
    message: str = ""

    @property
    def finding(self) -> bool:
        """Whether the rewriter must be mended."""
        return self.status in (ExitStatus.INTERNAL_ERROR, UNSOUND, WRONG, MISSED, ALARM)


def a_way(
    rng: Random,
    commands: tuple[str, ...] = ("rewrite", "inspect", "heads"),
    *,
    proved: float = 0.02,
) -> Way:
    """One of `WAYS`, sometimes with fitting, which takes seconds.

    Args:
        rng: makes every choice.
        commands: those to choose from.
        proved: how often a rewritten model is proved.
    """
    way = dict(rng.choice([way for way in WAYS if way["command"] in commands]))
    if way["command"] == "rewrite":
        way |= {"validate": rng.random() < proved}
        way |= {"fit": rng.random() < 0.01}
    return way


def unproved(way: Way) -> Way:
    """The same without proof and fitting, which take seconds."""
    return {**way, "fit": False, "validate": False} if way["command"] == "rewrite" else way


def tried(data: bytes, way: Way, folder: Path) -> Outcome:
    """Run one command in this process; what it writes goes into `folder`."""
    path = folder / "case.onnx"
    path.write_bytes(data)
    return _outcome(lambda: _run(path, way, folder / "out.onnx"))


def tried_transformer(drawn: Transformer, way: Way, seed: int) -> Outcome:
    """Rewrite a random transformer, and compare both by the oracle of the tests."""
    return _outcome(lambda: _compared(drawn, way, seed))


def _outcome(run: Callable[[], int]) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Outcome(run())
    except RewriteError as error:
        return Outcome(int(error.exit_status), str(error))
    except MemoryError as error:
        return Outcome(int(ExitStatus.VALIDATION_FAILED), str(error))  # as the command line says it
    except Exception as error:  # noqa: BLE001 - exactly these are looked for
        frames = [
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
            if "/rewriter/" in frame.filename or "/passes/" in frame.filename
        ]
        status = error.status if isinstance(error, _FindingError) else ExitStatus.INTERNAL_ERROR
        return Outcome(int(status), f"{type(error).__name__}: {' '.join(str(error).split())[:400]} in {frames[-4:]}")


class _FindingError(Exception):
    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


def _run(path: Path, way: Way, out: Path) -> int:
    options = _options(way)
    if way["command"] == "inspect":
        return int(inspect(path, **options).report.exit_status)
    if way["command"] == "heads":
        return 0 if heads(path, **options).sublayers else int(ExitStatus.NOTHING_TO_CONVERT)
    out.unlink(missing_ok=True)
    report = rewrite(path, out, **{"validate": False, **options})
    if report.exit_status is ExitStatus.CONVERTED:
        try:
            load_model(out)
        except ModelError as error:
            raise _FindingError(UNSOUND, str(error)) from error
        gap = 0.0
        with suppress(KeyError, ValueError):  # inputs of an odd type or size, which cannot be made
            gap = difference(path, out.read_bytes(), out.parent, moderate=True)
        if gap > _FAR and rewrite(path, **{**options, "validate": True}).exit_status is ExitStatus.CONVERTED:
            raise _FindingError(WRONG, f"passes the proof, and differs by {gap:.2g}")
    return int(report.exit_status)


def _compared(drawn: Transformer, way: Way, seed: int) -> int:
    model, options = drawn.model, _options(way)
    try:
        report = rewrite(model, **{"validate": False, **options})
    except ModelError as error:
        raise _FindingError(MISSED, f"refused: {error}") from error
    if len(report.blocks) < drawn.mlps and options.get("form") != WHOLE:
        raise _FindingError(MISSED, f"{len(report.blocks)} of {drawn.mlps} MLPs")
    failures = report.problems
    if not report and not failures:
        return int(report.exit_status)
    rewritten = (report or rewrite(model, **{**options, "validate": False})).rewritten
    elem_type = model.graph.input[0].type.tensor_type.elem_type
    feeds = [each for each in (drawn.feeds(2 * seed + more) for more in (0, 1)) if _fits(model, each, elem_type)]
    gap = max((_gap(model, rewritten, each) for each in feeds), default=0.0)
    certified = max((row.max_error or 0.0 for row in report.converted), default=0.0)
    bound = max(_APART[elem_type], _AMPLIFIED * certified)
    believed = gap <= bound or rewrite(model, **{**options, "validate": True}).exit_status is not ExitStatus.CONVERTED
    # A program that holds on a domain is proved on the inputs of the proof, as a note says: on these it must fail.
    if not believed and not _leaves_a_domain(model, feeds, options):
        raise _FindingError(WRONG, f"passes the proof, and differs by {gap:.2g}, more than {bound:g}")
    # Advice of an option is not an alarm: a program that holds on a domain, and a certificate that grows on the way.
    advised = any(option in failure for failure in failures for option in ("--option domain", "--accuracy"))
    if gap <= bound and failures and not advised:
        raise _FindingError(ALARM, f"differs by {gap:.2g}, and fails the proof: {failures[0]}")
    return int(report.exit_status)


def _leaves_a_domain(model: onnx.ModelProto, feeds: Sequence[Feeds], options: Mapping[str, Any]) -> bool:
    """Whether pre-activations leave the domain of a program here, so that the proof fails, and a note warns of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "inputs.npz")
        values = {f"{place}/{name}": value for place, each in enumerate(feeds) for name, value in each.items()}
        np.savez(path, **values)  # type: ignore[arg-type]
        report = rewrite(model, **{**options, "validate": True, "inputs": path})
    failures = report.problems
    told = any("is checked only on the inputs of the run" in note for note in report.notes)
    return told and any("--option domain" in failure for failure in failures)


def _fits(model: onnx.ModelProto, feeds: Feeds, elem_type: int) -> bool:
    """Whether the outputs are numbers of the model's type: what overflows in the model is compared with nothing."""
    largest = float(np.finfo(onnx.helper.tensor_dtype_to_np_dtype(elem_type)).max)
    return all(bool((np.abs(value) <= largest).all()) for value in evaluate(model, feeds).values())


def _gap(original: onnx.ModelProto, rewritten: onnx.ModelProto, feeds: Feeds) -> float:
    """The largest difference over the largest entry, of the worst output, in float64."""
    old, new = evaluate(original, feeds), evaluate(rewritten, feeds)
    return max(float(np.abs(new[name] - old[name]).max() / max(np.abs(old[name]).max(), 1e-30)) for name in old)


def _options(way: Way) -> dict[str, Any]:
    return {name: value for name, value in way.items() if name != "command"}
