"""Rewrites the MLP blocks of an ONNX transformer as attention heads, and proves that the outputs stay the same.

>>> import rewriter
>>> result = rewriter.rewrite("model.onnx", "attnonly.onnx")
>>> if result:
...     print(result.output, len(result.converted), result.validation.error_ratio)

Models:
    rewrite            replace MLP blocks by attention heads, and prove it; of one model, or of a folder
    inspect            the blocks of a model, their size and their heads
    certify            prove that one model computes what another does, or what onnxruntime makes of it
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

Results are true if all is well: Report, FolderReport, Inspection, Certification, RuntimeCertification, Comparison,
Benchmark. What goes wrong before there is a result is a RewriteError: ModelError, UsageError, ProviderError,
ValidationError, NothingToConvertError, each with its ExitStatus. help(rewriter.rewrite) lists arguments and options.
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent
_STUB = ast.parse((_FOLDER / "__init__.pyi").read_text(encoding="utf-8"))
_MODULES = {each.name: str(of.module) for of in _STUB.body if isinstance(of, ast.ImportFrom) for each in of.names}
"""Public name to the module that it is imported from when it is used, since `passes` imports `rewriter.graph`."""


def require_own_passes() -> None:
    """Raise ImportError where Python finds another package or module `passes` before the one beside this package."""
    found = find_spec("passes")
    where = None if found is None else found.origin or ", ".join(found.submodule_search_locations or ())
    if where is None or Path(where).resolve().parent != _FOLDER.parent / "passes":
        fault = f"Python finds {where} in place of the package passes of attnonly"
        raise ImportError(f"{fault}: rename it, or change the path")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attnonly")
    if name in _MODULES:
        require_own_passes()
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'rewriter' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*_MODULES, "__version__"]
