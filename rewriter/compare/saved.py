"""A saved run of two models: their outputs in every case, so that they can be judged again by other tolerances.

An npz file of plain arrays, with `run` as JSON; nothing is unpickled. bfloat16 is saved as its bits.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from rewriter.arrays import Array
from rewriter.compare.expected import ROUNDOFF, Expected
from rewriter.compare.outputs import Results, within
from rewriter.compare.verdicts import OutputVerdict, PairProof, Rules
from rewriter.errors import UsageError
from rewriter.files.atomic import atomically
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.statistics import compare, merge, top_k_share, uncompared
from rewriter.text import one_line, quoted

_VERSION = 1
_KEY = "run"
_BITS = "bfloat16"


@dataclass
class Recording:
    """What is kept while two models are compared."""

    runs: list[tuple[str, bool, Results, Results]] = field(default_factory=list)

    def keep(self, provider: str, optimise: bool, a: Results, b: Results) -> None:
        """Keep the outputs of both models on one provider."""
        self.runs.append((provider, optimise, a, b))

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write them, atomically; `about` is what else there is to say, as JSON-ready data. Raises UsageError."""
        arrays: dict[str, Array] = {}
        runs = []
        for number, (provider, optimise, a, b) in enumerate(self.runs):
            names = list(a[0])
            types = {name: str(a[0][name].dtype) for name in names}
            others = {name: str(b[0][name].dtype) for name in names}
            runs.append({"provider": provider, "optimise": optimise, "cases": len(a), "a": types, "b": others})
            for letter, results in (("a", a), ("b", b)):
                for case, outputs in enumerate(results):
                    for place, name in enumerate(names):
                        arrays[f"{number}/{letter}/{case}/{place}"] = _plain(outputs[name])
        text = json.dumps({"version": _VERSION, **about, "runs": runs}, allow_nan=False)
        arrays[_KEY] = np.frombuffer(text.encode("utf-8"), np.uint8)
        # numpy before 2.1 takes allow_pickle= for an array. There is nothing to pickle.
        atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def _plain(array: Array) -> Array:
    if array.dtype.kind == "O":
        return array.astype(str)
    return array.view(np.uint16) if array.dtype.name == _BITS else array


@dataclass(frozen=True)
class Saved:
    """A run that was read.

    Attributes:
        about: names of the models, cases, reference, number of linear operators.
        runs: provider, whether graphs were optimised, outputs of A and of B.
    """

    about: Mapping[str, Any]
    runs: tuple[tuple[str, bool, Results, Results], ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(self.runs[0][2][0])

    def expected(self, name: str) -> Expected:
        """What is expected of a conversion to a type."""
        return Expected(name, self.about["operators"])

    def judged(self, rules: Rules) -> dict[str, PairProof]:
        """The verdicts by tolerances, by provider; the worse of the runs without and with optimisation."""
        found: dict[str, PairProof] = {}
        for provider, _, a, b in self.runs:
            before = found.get(provider)
            now = {name: _verdict(name, provider, a, b, rules) for name in self.outputs}
            if before is not None:
                # As in a comparison, statistics are those of the last run; the verdict is the worse one.
                now = {name: _worse(before.outputs[name], each) for name, each in now.items()}
            found[provider] = PairProof(now, (0.0, 0.0), ())
        return found


def _worse(one: OutputVerdict, other: OutputVerdict) -> OutputVerdict:
    worse = one if (not one.passed, one.error_b) > (not other.passed, other.error_b) else other
    return replace(worse, stats=other.stats, top_k=other.top_k)


def _verdict(name: str, provider: str, a: Results, b: Results, rules: Rules) -> OutputVerdict:
    old, new = ([case[name] for case in results] for results in (a, b))
    stats = merge([compare(name, x, y) for x, y in zip(old, new, strict=True)])
    tolerance = rules.tolerance_on(name, old)
    if tolerance is None and is_float(old[0].dtype):
        raise UsageError(f"output {quoted(name)} has no tolerance; give --atol NUMBER, --rtol NUMBER or --expect TYPE")
    if tolerance is None:
        equal = stats.comparable and stats.max_abs == 0
        reason = None if equal else "differs"
        allowed, error, rule = 0.0, stats.max_abs, "equal"
    else:
        judged = within(old, new, tolerance)
        reason, allowed, error, rule = judged.reason, judged.allowed, judged.error_b, "tolerance"
    nothing = uncompared(stats)
    if reason is None and nothing is not None:
        reason, rule = nothing, "nothing"
    return OutputVerdict(
        name=name,
        rule=rule,  # type: ignore[arg-type]  # one of the three above
        passed=reason is None,
        stats=stats,
        top_k=None if rules.top_k is None else top_k_share(old, new, rules.top_k),
        error_a=None,
        error_b=error,
        allowed=allowed,
        error_ratio=None,
        where=provider,
        reason=reason,
    )


def read_run(path: Path) -> Saved:
    """Read a saved run.

    Raises:
        UsageError: it is not one, or is damaged.
    """
    try:
        with path.open("rb") as file, _opened(file) as archive:
            about = json.loads(bytes(archive[_KEY]))
            if about["version"] != _VERSION:
                raise UsageError(f"{quoted(path)} was saved by another version of this tool; run the comparison again")
            runs = tuple(_read(archive, number, each) for number, each in enumerate(about["runs"]))
            if not runs or not all(isinstance(about[key], str) for key in ("a", "b", "reference")):
                raise ValueError("no run")
            if not isinstance(about["operators"], int) or not all(isinstance(each, str) for each in about["cases"]):
                raise ValueError("no number of operators, or no cases")
        return Saved(about, runs)
    except FileNotFoundError:
        raise UsageError(f"{quoted(path)}: no such file") from None
    except (
        *(OSError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError),
        *(zipfile.BadZipFile, zlib.error, MemoryError, NotImplementedError, RecursionError),
    ) as error:
        raise UsageError(
            f"{quoted(path)} is not a run that --save-run wrote, or is damaged ({one_line(error, 100)})"
        ) from error


def _opened(file: BinaryIO) -> np.lib.npyio.NpzFile:
    archive = np.load(file, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise TypeError("a single array")
    return archive


def _read(archive: Any, number: int, entry: Mapping[str, Any]) -> tuple[str, bool, Results, Results]:
    sides = []
    for letter in "ab":
        types = dict(entry[letter])
        if not types or list(types) != list(entry["a"]) or not 0 < int(entry["cases"]) < 10**6:
            raise ValueError("no outputs or no cases")
        sides.append(
            [
                {
                    name: _restored(archive[f"{number}/{letter}/{case}/{place}"], kind)
                    for place, (name, kind) in enumerate(types.items())
                }
                for case in range(int(entry["cases"]))
            ]
        )
    return str(entry["provider"]), bool(entry["optimise"]), sides[0], sides[1]


def _restored(array: Array, kind: str) -> Array:
    if kind == _BITS:
        return array.view(ml_dtypes.bfloat16)
    if kind == "object":
        return array.astype(object)
    if str(array.dtype) != kind:
        raise ValueError(f"an array is of type {array.dtype} instead of {one_line(kind, 20)}")
    return array


EXPECTED = tuple(ROUNDOFF)
"""The types that may be expected."""
