"""Rewrites the MLP blocks of an ONNX transformer as attention heads, and proves that the outputs stay the same.

>>> import rewriter
>>> result = rewriter.rewrite("model.onnx", "attnonly.onnx")
>>> if result:
...     print(result.output, len(result.converted), result.validation.error_ratio)

Models:
    rewrite            replace MLP blocks by attention heads, and prove it; of one model, or of a folder
    inspect            the blocks of a model, their size and their heads
    certify            prove for every input that one model computes what another does
    validate, diff     judge a rewritten model; compare any two
    bench              how long models take beside the original
    doctor             versions, execution providers, memory and disk

Heads:
    heads              all heads of a model, and their weights
    run_with_cache     what heads compute on inputs; Text makes inputs of text
    attribute          a logit as a sum over heads, tokens and biases
    why                why a neuron or an attention score is what it is
    attribution_graph  the graph of a logit
    compositions       which heads work together; head_tokens: on what
    changed_heads      which heads a quantisation changed most
    head_pictures      the data of the page about heads
    ablate, patch, freeze    models in which heads are changed

Results are true if all is well: Report, FolderReport, Inspection, Certification, Comparison, Benchmark. What goes
wrong before there is a result is a RewriteError: ModelError, UsageError, ProviderError, ValidationError,
NothingToConvertError, each with its ExitStatus. help(rewriter.rewrite) lists arguments and options.
"""

import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).resolve().parent
_STUB = (_FOLDER / "__init__.pyi").read_text(encoding="utf-8")
_HOMES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}
"""Public name to the module that it is imported from when it is used, since `passes` imports `rewriter.graph`."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attnonly")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rewriter' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]


def _join_passes() -> None:
    """Let a user's package or module `passes` that Python finds before ours hold our modules too, ours first."""
    ours = _FOLDER.parent / "passes"
    try:
        passes = import_module("passes")
    except (Exception, SystemExit):  # noqa: BLE001 - whatever it needs, we do not need it
        passes = sys.modules["passes"] = ModuleType("passes")
    theirs = list(getattr(passes, "__path__", ()))
    if ours in [Path(each).resolve() for each in theirs]:
        return
    passes.__path__ = [str(ours), *theirs]
    names = {each.name for each in iter_modules(theirs)} & {each.name for each in iter_modules([str(ours)])}
    for name in [each for each in sys.modules if each.startswith("passes.") and each.split(".")[1] in names]:
        del sys.modules[name]
    if names:
        told = f"rewriter hides {', '.join(sorted(names))} of the package passes in {theirs[0]}; rename what is there"
        warnings.warn(told, stacklevel=3)


_join_passes()
