"""`python -m benchmarks.providers`: kinds of nodes that we emit, and who has them: a table of docs/performance.md.

The kinds are those of the committed models, converted in every form. What a provider has was looked up in its published
list of operators; `LISTS` says where. `--check` only compares.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import onnx
from onnx import inliner

from benchmarks.common import ROOT
from passes.forms import FORMS
from rewriter import rewrite
from rewriter.graph.walk import all_graphs

PAGE = ROOT / "docs" / "performance.md"
_TABLE = re.compile(r"(<!-- generated: kinds -->\n).*?(<!-- end -->)", re.DOTALL)

_DATA = "Cast Concat Expand Gather Identity Pad Reshape Shape Slice Split Transpose Unsqueeze Where"
_LOGIC = "And Not Or"
_ARITHMETIC = "Add Clip Div Equal Exp Less MatMul Max Mul Neg Range Reciprocal Softmax Sub Sum"


@dataclass(frozen=True)
class Published:
    """What a provider's list of operators says.

    Attributes:
        double: operators that it has, in float64 too or without a statement about types.
        single: operators that it has, but not in float64.
    """

    double: frozenset[str]
    single: frozenset[str] = frozenset()


def _names(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


LISTS: Mapping[str, Published] = {
    # docs/OperatorKernels.md of microsoft/onnxruntime at 8f063305aacd23aadf77cda4c52e0592a02a7161.
    "CUDA": Published(_names(_DATA, _LOGIC, _ARITHMETIC, "Loop")),
    "DirectML": Published(_names(_DATA, _LOGIC), _names(_ARITHMETIC)),
    # docs/operators.md of onnx/onnx-tensorrt at 96e7811 (TensorRT 10.0). It casts float64 down to float32.
    "TensorRT": Published(frozenset(), _names(_DATA, _LOGIC, _ARITHMETIC, "Loop")),
    # tools/ci_build/github/apple/coreml_supported_mlprogram_ops.md of microsoft/onnxruntime at 04f568d8; no types.
    "CoreML": Published(
        _names(
            "Add Cast Clip Concat Div Exp Identity MatMul Max Mul Range Reciprocal Reshape Shape Slice Softmax Split",
            "Sub Transpose Unsqueeze",
        )
    ),
    # js/web/docs/webgpu-operators.md of microsoft/onnxruntime at 51f61772; no types.
    "WebGPU": Published(
        _names(
            "Add Cast Clip Concat Div Equal Exp Expand Gather Less MatMul Mul Neg Not Pad Range Reciprocal Reshape",
            "Shape Slice Softmax Split Sub Transpose Unsqueeze Where",
        )
    ),
}


def emitted() -> dict[str, dict[str, bool]]:
    """Kind to form to whether it reads or writes float64, over the committed models; functions are inlined."""
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for path in sorted((ROOT / "models").glob("*.onnx")):
        kept = {node.name for node in onnx.load(path).graph.node if node.name}
        for form in FORMS:
            report = rewrite(path, form=form, validate=False)
            if not report:
                continue
            typed = onnx.shape_inference.infer_shapes(inliner.inline_local_functions(report.rewritten))
            for graph in all_graphs(typed.graph):
                doubles = _doubles(graph)
                for node in graph.node:
                    if node.op_type != "Constant" and node.name not in kept:
                        wide = not doubles.isdisjoint((*node.input, *node.output))
                        found[node.op_type][form] = found[node.op_type].get(form, False) or wide
    return found


def _doubles(graph: onnx.GraphProto) -> set[str]:
    double = onnx.TensorProto.DOUBLE
    values = (*graph.value_info, *graph.input, *graph.output)
    names = {value.name for value in values if value.type.tensor_type.elem_type == double}
    return names | {tensor.name for tensor in graph.initializer if tensor.data_type == double}


def table() -> str:
    """The kinds that are emitted, and those missing in each provider; kinds of form `local` are bold."""
    kinds = dict(sorted(emitted().items()))
    wide = [kind for kind, forms in kinds.items() if any(forms.values())]
    rows = {"emitted": (list(kinds), wide)}
    for name, has in LISTS.items():
        missing = [kind for kind in kinds if kind not in has.double | has.single]
        rows[f"{name} lacks"] = (missing, [kind for kind in wide if kind in has.single - has.double])
    lines = ["| | kinds | in float64 |", "| --- | --- | --- |"]
    for name, lists in rows.items():
        cells = (", ".join(f"**{kind}**" if "local" in kinds[kind] else kind for kind in each) for each in lists)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its table made anew."""
    return _TABLE.sub(lambda found: found[1] + table() + found[2], text)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; fail if the table is not what the emitters give.")
@click.option("--page", "path", type=click.Path(path_type=Path), default=PAGE, help="Default: docs/performance.md")
def main(*, check: bool, path: Path) -> None:
    """Write the table of kinds of nodes in docs/performance.md."""
    text = path.read_text(encoding="utf-8")
    made = page(text)
    if check and made != text:
        raise click.ClickException("docs/performance.md is out of date: run python -m benchmarks.providers")
    path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
