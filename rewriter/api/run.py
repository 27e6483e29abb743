"""What every call of the API shares: timing, progress, options as keywords, the environment of results.

The keywords repeat names and types of the dataclasses that declare options for type checkers; a test compares them.
"""

import inspect
import os
import platform
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_type_hints

from passes.options import EXPOSED, Options
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.inputs import Inputs, as_given
from rewriter.options import Made, build, options_of, unknown_option
from rewriter.proof.run import Progress, silent
from rewriter.proof.settings import Settings
from rewriter.report.report import Report
from rewriter.text import clean

_Function = TypeVar("_Function", bound=Callable[..., Any])


def name_of(model: Source) -> str:
    """The name of a model in reports: its path as given."""
    return os.fspath(model) if isinstance(model, (str, os.PathLike)) else "<memory>"


class Run:
    """The clock and the progress of one call."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress or silent
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Time one step; if it runs more than once, its times add up."""
        self.progress(what, 0, 1)
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def finish(self, report: Report) -> Report:
        return replace(report, seconds=self.seconds(), environment=environment())

    def seconds(self) -> dict[str, float]:
        return {**self._seconds, "total": time.perf_counter() - self._start}


def check_exposed(options: Options) -> None:
    """Raise UsageError for tensors that the heads cannot expose."""
    for text in options.expose:
        names, colon, glob = text.partition(":")
        odd = next((name for name in names.split(",") if name not in EXPOSED), None)
        if odd is not None or (colon and not glob):
            what = f"unknown tensor '{odd}'" if odd is not None else "no blocks behind the colon"
            raise UsageError(f"expose is '{text}': {what}; write {', '.join(EXPOSED)}, or pattern:GLOB for some blocks")
    if options.expose and options.form not in ("compact", "masked"):
        raise UsageError(f"only the forms compact and masked can expose tensors, not {options.form}")


class RunKeywords(TypedDict, total=False):
    """The options of commands that run models on inputs: `rewrite`, `validate`, `diff` and `bench`."""

    providers: str | Sequence[str] | None
    inputs: Inputs | None
    dims: Mapping[str, int] | None
    seed: int


class RewriteKeywords(RunKeywords, total=False):
    """The options of `rewriter.rewrite`."""

    form: str
    scope: str
    inline: bool
    only: str | Sequence[str]
    skip: str | Sequence[str]
    gate: str
    fit: bool
    lower_experts: bool
    neurons: str
    accuracy: float | None
    domain: float | None
    max_tokens: int | None
    expose: str | Sequence[str]
    proof: str


class CompareKeywords(RunKeywords, total=False):
    """The options of `rewriter.validate` and `rewriter.diff`."""

    names: Mapping[str, str] | None
    atol: float | None
    rtol: float | None
    accuracy: float | None


def options_among(given: Mapping[str, Any], kind: type[Made]) -> tuple[Made, Settings]:
    """The options of a dataclass among some keywords, and those of the proof, without default providers.

    Raises TypeError for a keyword that is neither, UsageError for an unfit value.
    """
    known = [each.name for each in (*options_of(kind), *options_of(Settings))]
    if unknown := [name for name in given if name not in known]:
        raise TypeError(unknown_option(unknown[0], known))
    inputs, dims = given.get("inputs"), dict(given.get("dims") or {})
    proof = {**given, "inputs": None if inputs is None else as_given(inputs), "dims": dims}
    return build(kind, given), build(Settings, proof)


def described(keywords: type, *declared: type) -> Callable[[_Function], _Function]:
    """Spell out `**options` in a function's signature and docstring: the options of dataclasses in `keywords`."""

    def decorated(function: _Function) -> _Function:
        types, signature = get_type_hints(keywords), inspect.signature(function, eval_str=True)
        found = [each for kind in declared for each in options_of(kind) if each.name in types]
        parts = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        lines = []
        for each in found:
            kind = inspect.Parameter.KEYWORD_ONLY
            parts.append(inspect.Parameter(each.name, kind, default=each.default, annotation=types[each.name]))
            choices = f" One of {', '.join(each.choices)}." if each.choices else ""
            text = f"{each.name} ({each.default!r}): {each.help}{choices}"
            lines.append(textwrap.fill(text, 120, initial_indent=" " * 8, subsequent_indent=" " * 12))
        function.__signature__ = signature.replace(parameters=parts)  # type: ignore[attr-defined]
        function.__doc__ = "\n".join([f"{function.__doc__ or ''}\n    Options:", *lines, ""])
        return function

    return decorated


# -- the environment of a result ---------------------------------------------------------------------------------------

_PACKAGES = ("attnonly", "onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")
_VARIANTS = {"onnxruntime": ("onnxruntime-gpu", "onnxruntime-openvino")}  # packages that replace another

_CPUINFO = Path("/proc/cpuinfo")


def environment() -> dict[str, str]:
    """Versions, processor and operating system; without names of hosts and users, and paths: reports are shared."""
    text = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.exists() else ""
    named = (line.partition(":")[2].strip() for line in text.splitlines() if line.lower().startswith("model name"))
    return {
        **{name: _version(name) for name in _PACKAGES},
        "Python": platform.python_version(),
        "operating system": f"{platform.system()} {platform.machine()}".strip(),
        "processor": clean(next(named, "") or platform.processor() or platform.machine() or "unknown"),
        "logical cores": str(os.cpu_count() or "unknown"),
    }


def _version(name: str) -> str:
    for package in (name, *_VARIANTS.get(name, ())):
        with suppress(PackageNotFoundError):
            return version(package) if package == name else f"{version(package)} ({package})"
    return "unknown"  # such as a checkout on PYTHONPATH that is not installed
