"""`doctor`: everything that can be wrong before a model is read, each with the step that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rewriter.health.findings import Diagnosis, ModelNeeds, Problem, ProviderState
from rewriter.health.libraries import DRIVER
from rewriter.health.machine import machine_at, machine_problems
from rewriter.health.packages import onnxruntimes, package_problems, packages
from rewriter.health.probe import ask
from rewriter.ort.providers import PROVIDERS, Provider

Progress = Callable[[str, int, int], None]


def doctor(
    model: Path | None = None,
    needs: ModelNeeds | None = None,
    *,
    progress: Progress = lambda _what, _done, _total: None,
) -> Diagnosis:
    """What `rewriter.doctor` finds.

    Args:
        model: the model whose folder is looked at; None for the current one.
        needs: what the model needs.
        progress: called with (current activity, steps done, total steps).
    """
    progress("onnxruntime", 0, 1)
    built = ask(None)
    states = tuple(_states(built, progress))
    found, runtimes = packages(), onnxruntimes()
    machine = machine_at(Path.cwd() if model is None else model.absolute().parent)
    problems = (
        *package_problems(found, runtimes),
        *_runtime_problems(built, states),
        *machine_problems(machine, needs),
    )
    others = tuple(name for name in built.get("providers", ()) if name not in {each.kernel_set for each in PROVIDERS})
    return Diagnosis(found, runtimes, states, others, built.get("libraries", {}), machine, needs, problems)


def _states(built: Mapping[str, Any], progress: Progress) -> Iterator[ProviderState]:
    names = built.get("providers", ())
    for number, provider in enumerate(PROVIDERS):
        if provider.kernel_set in names:
            progress(f"execution provider {provider.name}", number, len(PROVIDERS))
            yield _state(provider, ask(provider.name))
        else:
            parts = (
                f"it is in the package {provider.package}" if provider.package != "onnxruntime" else "",
                f"needs {provider.needs}" if provider.asked and provider.needs else "",
            )
            yield ProviderState(provider.name, built=False, reason=", ".join(filter(None, parts)))


def _state(provider: Provider, answer: Mapping[str, Any]) -> ProviderState:
    crash = answer.get("crash", "")
    reason = f"starting it crashes: {crash}" if crash else str(answer.get("reason", ""))
    return ProviderState(
        provider.name,
        built=True,
        works=not reason,
        float64=None if reason else bool(answer.get("float64")),
        reason=reason,
        wanted=not provider.asked,
    )


def _runtime_problems(built: Mapping[str, Any], states: tuple[ProviderState, ...]) -> Iterator[Problem]:
    if "providers" not in built:
        why = built.get("crash") or built.get("reason") or "no answer"
        yield Problem(f"onnxruntime cannot be imported ({why})", "pip install --force-reinstall onnxruntime")
        return
    missing = [name for name, loads in built.get("libraries", {}).items() if not loads]
    for state in states:
        if not (state.built and state.wanted and not state.works):
            continue
        # The names of missing libraries say more than what onnxruntime makes of them.
        reason = f"not found: {', '.join(missing)}" if state.name == "cuda" and missing else state.reason
        yield Problem(f"execution provider {state.name} does not start ({reason})", _advice(state, missing))


def _advice(state: ProviderState, missing: list[str]) -> str:
    if state.name == "cuda" and missing:
        pip = [name for name in missing if name != DRIVER]
        extras = ",".join(sorted({"cudnn" if name.startswith("libcudnn") else "cuda" for name in pip}))
        driver = "install an NVIDIA driver ('nvidia-smi' shows whether it works)"
        steps = ((driver, DRIVER in missing), (f"pip install 'onnxruntime-gpu[{extras}]'", bool(pip)))
        return ", then ".join(step for step, wanted in steps if wanted)
    needs = next(each.needs for each in PROVIDERS if each.name == state.name)
    return f"it needs {needs}" if needs else "pip install --force-reinstall onnxruntime"
