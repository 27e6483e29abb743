"""The rewriting as a pass of Olive; needs the package olive-ai.

`python -m rewriter.adapters.olive_pass FILE.json` writes the package configuration that makes `AttentionOnly` known to
`olive run --package-config FILE.json`: Olive's own, and this pass.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from rewriter.api.rewriting import REPORT, rewrite
from rewriter.api.run import RewriteKeywords
from rewriter.errors import ExitStatus, UsageError
from rewriter.files.atomic import write_text

try:
    from olive.hardware import AcceleratorSpec
    from olive.model import ONNXModelHandler
    from olive.model.utils import resolve_onnx_path
    from olive.package_config import OlivePackageConfig
    from olive.passes import Pass
    from olive.passes.pass_config import BasePassConfig, PassConfigParam
except ImportError as error:
    raise UsageError("the pass for Olive needs the package olive-ai: pip install 'attnonly[olive]'") from error

DEFAULTS = {name: inspect.signature(rewrite).parameters[name].default for name in RewriteKeywords.__annotations__}


class AttentionOnly(Pass):  # type: ignore[misc]  # Olive has no types
    """Replace the MLP blocks of an ONNX model by attention heads, and prove it.

    A model without such blocks passes through. A failed proof raises. The options are those of `rewriter.rewrite`;
    `providers` is by default the workflow's execution provider, if the proof knows it.
    """

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        # `rewrite` checks all values, with messages that say what is allowed.
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in DEFAULTS.items()}
        told = {name: f"As {name} of rewriter.rewrite." for name in given}
        found = {name: PassConfigParam(type_=Any, default_value=given[name], description=told[name]) for name in given}
        if accelerator_spec.execution_provider is not None:
            found["providers"].default_value = [str(accelerator_spec.execution_provider)]
        return found

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        path = Path(resolve_onnx_path(output_model_path))
        path.parent.mkdir(parents=True, exist_ok=True)
        report = rewrite(model.model_path, path, force=True, **{name: getattr(config, name) for name in DEFAULTS})
        if report.exit_status is ExitStatus.NOTHING_TO_CONVERT:
            return model
        report.raise_for_status()
        written = path.with_name(REPORT)  # which Olive carries along as an additional file
        report.write(written)
        attributes = dict(model.model_attributes or {})
        attributes["additional_files"] = [*(attributes.get("additional_files") or []), str(written)]
        return ONNXModelHandler(
            model_path=str(path.parent),
            onnx_file_name=path.name,
            inference_settings=model.inference_settings,
            model_attributes=attributes,
        )


def package_config() -> dict[str, Any]:
    """Olive's package configuration with this pass, for `olive.workflows.run(..., package_config=...)`."""
    found: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    anything = {f"supported_{each}": ["*"] for each in ("providers", "accelerators", "precisions")}
    found["passes"][AttentionOnly.__name__] = {"module_path": f"rewriter.adapters.olive_pass.{AttentionOnly.__name__}"}
    found["passes"][AttentionOnly.__name__].update(anything)
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rewriter.adapters.olive_pass FILE.json")
    write_text(Path(sys.argv[1]), json.dumps(package_config(), indent=2) + "\n")
