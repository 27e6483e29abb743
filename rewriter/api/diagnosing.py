"""`rewrite doctor`: installed packages, execution providers that start, and whether memory and disk suffice."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from rewriter.api.run import environment
from rewriter.errors import RewriteError
from rewriter.files.load import load_model
from rewriter.ort import PROVIDERS, Provider, load_onnxruntime, require_provider
from rewriter.proof.settings import LARGE
from rewriter.report.report import Result
from rewriter.text import one_line, size

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The diagnosis: true without problems."""

    environment: Mapping[str, str]
    providers: Mapping[str, str]  # to why it cannot be used here; empty if it works
    memory: int | None  # available bytes, within a container's limit; None where the system does not report it
    disk: int  # free bytes in the model's folder, or the current one
    model_bytes: int | None  # with external data; None without a model
    problems: tuple[str, ...] = ()  # each with the step that fixes it
    also = ("exit_status",)

    @property
    def summary(self) -> str:
        return "see the problems above" if self.problems else "FINE  nothing is wrong"


def doctor(model: str | os.PathLike[str] | None = None) -> Diagnosis:
    """Look at packages, execution providers, memory and disk, compared with the size of a model. Raises ModelError."""
    source = None if model is None else load_model(model, mapped=True)
    folder = Path.cwd() if model is None else Path(model).absolute().parent
    states = [(each, *_state(each)) for each in PROVIDERS]
    memory, disk = _memory(), shutil.disk_usage(folder).free
    problems = [reason for each, built, reason in states if reason and built and each.float64]
    runtimes = sorted({each.name for each in distributions() if each.name.split("-")[0] == "onnxruntime"} - _ADD_ONS)
    if len(runtimes) > 1:
        advice = f"pip uninstall -y {' '.join(runtimes)}, then install the one you need"
        problems.append(f"{' and '.join(runtimes)} overwrite each other's files; {advice}")
    if source is not None and memory is not None and source.size <= LARGE and memory < source.size:
        advice = "prove it in parts with --option proof=blocks"
        problems.append(f"the model has {size(source.size)} and {size(memory)} of memory are available; {advice}")
    if source is not None and disk < source.file_size:
        problems.append(f"a result takes {size(source.file_size)} and {size(disk)} are free here; give -o another disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        problems.append("the folder is not writable; give -o a path in another one")
    reasons = {each.name: reason for each, _, reason in states}
    return Diagnosis(environment(), reasons, memory, disk, None if source is None else source.size, tuple(problems))


_ADD_ONS = {"onnxruntime-extensions", "onnxruntime-genai"}  # with separate folders


def _state(provider: Provider) -> tuple[bool, str]:
    """(whether onnxruntime was built with a provider, why it does not start)."""
    built = True
    try:
        built = provider.kernel_set in load_onnxruntime().get_available_providers()
        require_provider(provider.name)
    except (RewriteError, MemoryError) as error:
        return built, one_line(error, 300)
    return built, ""


def _memory() -> int | None:
    try:
        found = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        available = int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    limit = CGROUP.read_text(encoding="ascii").strip() if CGROUP.exists() else ""
    return min(available, int(limit)) if limit.isdigit() else available
