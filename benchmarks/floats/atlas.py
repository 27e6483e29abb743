"""Rows of the atlas: one activation in one type, measured block by block, kept as JSON."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from benchmarks.common import environment, gpu_name
from benchmarks.floats.errors import KINDS, REFERENCE, Errors, Floats, Points
from benchmarks.floats.pairs import WIDTH, Pair
from benchmarks.floats.subjects import Exact

_AT_ONCE = 1 << 16
"""Numbers per run: with more, temporaries leave the cache, and heads take five times as long."""


@dataclass(frozen=True)
class Source:
    """What the outputs depend on, besides the program.

    Attributes:
        onnxruntime: its version.
        build: what it says of its build.
        instructions: the widest vector instructions of the processor, or the name of the GPU.
    """

    onnxruntime: str
    build: str
    instructions: str

    @classmethod
    def here(cls, provider: str = "cpu") -> "Source":
        """Of this machine."""
        device = _instructions() if provider == "cpu" else gpu_name(provider)
        return cls(ort.__version__, ort.get_build_info(), device)


def _instructions() -> str:
    listing = Path("/proc/cpuinfo")
    flags = set(listing.read_text(encoding="utf-8").split()) if listing.exists() else set()
    return next((each for each in ("avx512f", "avx2", "avx", "sse2", "asimd") if each in flags), "unknown")


@dataclass
class Entry:
    """One activation in one type.

    Attributes:
        activation: a key of `SUBJECTS`.
        type: a key of `KINDS`.
        source: what the outputs depend on.
        models: sha256 of both.
        program: name of the head program, as in the report; so are `bias_tokens`, `max_error`, `measured` and `domain`.
        heads: per neuron.
        original_reason: why onnxruntime does not run the original; empty if it does.
        done: blocks so far.
        floats: finite pre-activations in the domain so far.
        overflow: of these, where f rounds to infinity; no error is counted there.
        disagreements: where one of the models gives a number and the other NaN or infinity.
        original: errors in the domain; None if it does not run.
        rewritten: errors in the domain.
        beyond: errors of the rewritten model at other finite pre-activations, of which nothing is claimed.
        beyond_floats: how many these are.
        seconds: of the processor.
    """

    activation: str
    type: str
    source: Source
    models: str
    program: str | None
    heads: int | None
    bias_tokens: int | None
    max_error: float | None
    measured: bool | None
    domain: float | None
    original_reason: str = ""
    done: int = 0
    floats: int = 0
    overflow: int = 0
    disagreements: int = 0
    original: Errors | None = None
    rewritten: Errors = field(default_factory=Errors)
    beyond: Errors | None = None
    beyond_floats: int = 0
    seconds: float = 0.0

    @classmethod
    def begun(cls, activation: str, kind: str, pair: Pair, source: Source) -> "Entry":
        """Before the first block."""
        row = pair.block
        heads = row.heads and row.heads // WIDTH
        claimed = (row.program, heads, row.bias_tokens, row.max_error, row.measured, row.domain)
        entry = cls(activation, kind, source, pair.digest, *claimed)
        if isinstance(pair.original, str):
            entry.original_reason = pair.original
        else:
            entry.original = Errors()
        if row.domain is not None:
            entry.beyond = Errors()
        return entry

    @classmethod
    def read(cls, stored: dict[str, Any]) -> "Entry":
        """As JSON has it."""
        found = {name: stored[name] and Errors(**stored[name]) for name in ("original", "rewritten", "beyond")}
        return cls(**{**stored, **found, "source": Source(**stored["source"])})

    @property
    def key(self) -> tuple[str, str, Source, str]:
        """What tells rows apart."""
        return self.activation, self.type, self.source, self.models

    @property
    def complete(self) -> bool:
        """Whether every number was measured."""
        return self.done == KINDS[self.type].blocks

    def extend(self, pair: Pair, exact: Exact) -> None:
        """Measure the next block."""
        kind, clock = KINDS[self.type], time.process_time()
        start, first, second = self.done * kind.block, list[bytes](), list[bytes]()
        for begin in range(start, start + kind.block, _AT_ONCE):
            y = kind.numbers(begin, min(begin + _AT_ONCE, start + kind.block))
            finite = _numbers(y)
            if not finite.any():
                continue
            one = None if isinstance(pair.original, str) else pair.original(y)
            two = pair.rewritten(y)
            if not finite.all():
                y, one, two = y[finite], None if one is None else one[finite], two[finite]
            self._add(y, one, two, exact)
            second.append(two.tobytes())
            if one is not None:
                first.append(one.tobytes())
        self.rewritten.sign(second)
        if self.original is not None:
            self.original.sign(first)
        self.done += 1
        self.seconds = round(self.seconds + time.process_time() - clock, 3)

    def _add(self, y: Floats, one: Floats | None, two: Floats, exact: Exact) -> None:
        with np.errstate(all="ignore"):
            wide = y.astype(np.float64)
            points = Points.of(KINDS[self.type], y, exact(wide))
            far = None if self.domain is None or np.abs(wide).max() <= self.domain else np.abs(wide) > self.domain
            if far is None:
                self._add_inside(points, one, two)
                return
            self.beyond_floats += int(far.sum())
            if self.beyond is not None and far.any():
                self.beyond.add(points.where(far), two[far])
            if not far.all():
                self._add_inside(points.where(~far), None if one is None else one[~far], two[~far])

    def _add_inside(self, points: Points, one: Floats | None, two: Floats) -> None:
        self.floats += len(two)
        if points.representable is not None:
            self.overflow += int((~points.representable).sum())
        self.rewritten.add(points, two)
        if self.original is not None and one is not None:
            self.original.add(points, one)
            self.disagreements += int((_numbers(one) != _numbers(two)).sum())


def _numbers(values: Floats) -> NDArray[np.bool_]:
    """Which are neither NaN nor infinite."""
    with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN
        finite: NDArray[np.bool_] = np.isfinite(values)
    return finite


def entries(path: Path) -> list[Entry]:
    """The rows in a file; none if it does not exist."""
    return [Entry.read(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []


def write(path: Path, rows: list[Entry]) -> None:
    """Write the rows, one a line, in place of a file that is there."""
    settings = {
        "inputs": "every finite number of the type; NaN and infinities are not measured",
        "value of a gate": 1.0,
        "form": "local",
        "error of the float64 reference over max(1, |f|)": REFERENCE,
    }
    head = {"benchmark": "floats", "environment": environment(), "settings": settings}
    lines = ",\n".join(json.dumps(_sorted(asdict(row)), allow_nan=False) for row in rows)
    fresh = path.with_suffix(".new")
    fresh.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    fresh.replace(path)


def _sorted(stored: Any) -> Any:
    """With the powers of each histogram in order."""
    if not isinstance(stored, dict):
        return stored
    if stored and all(name.lstrip("-").isdigit() for name in stored):
        return dict(sorted(stored.items(), key=lambda item: int(item[0])))
    return {name: _sorted(value) for name, value in stored.items()}
