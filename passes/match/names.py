"""Names of blocks, such as `model.layers.0.mlp`: the module path that the exporter left in the graph.

Sources, best first: the dynamo exporter's `pkg.torch.onnx.name_scopes` metadata, the TorchScript exporter's scoped node
names, the names of the weights, the nodes of the activation. For quantised linear operators the addition of the bias
shows the module, so that a block has one name in float32, float16 and int8. A block without any path is called `mlp`,
`mlp_2`, ..., or `conv`, `conv_2`, ... if a linear operator is a convolution.
"""

from __future__ import annotations

import ast
import re
from itertools import takewhile

import onnx

from passes.match.linear import Operators
from rewriter.graph.view import GraphView

_SPECIAL_CHARACTERS = re.compile(r"[^A-Za-z0-9_.\-]+")
_TRAILING_NUMBER = re.compile(r"_\d+$")
_SCALING = ("Cast", "Mul", "DequantizeLinear", "Reshape")  # nodes between a product and its bias


class Namer:
    """Gives each block a unique name; a name that is taken, also by tensors `<name>/heads/...`, gets a number."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        self._taken: dict[str, int] = dict.fromkeys(reserved, 1)

    def name(self, view: GraphView, first: Operators, second: Operators, region: tuple[int, ...]) -> str:
        """The common module path of the block's nodes. A lone operator is named by its own module."""
        operators = (*first, *second[:1])
        paths = [path for op in operators if (path := _module_path(view.nodes[op.node]) or _bias_path(view, op.output))]
        if len(paths) < len(operators) or not paths:
            # A partial list would name a block after one operator (`mlp.fc1`), so weights replace it altogether.
            paths = [path for op in operators if (path := _weight_path(op.weight))]
        common = _common(paths)
        if not common and region:
            common = _common([path for index in region if (path := _module_path(view.nodes[index]))])
        name = unique = common or ("conv" if any("Conv" in op.kind for op in operators) else "mlp")
        while unique in self._taken:
            self._taken[name] += 1
            unique = f"{name}_{self._taken[name]}"
        self._taken[unique] = 1
        return unique


def _module_path(node: onnx.NodeProto) -> list[str]:
    """Module path as parts; empty where the exporter left none."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            return _dynamo_path(entry.value)
    return [part for part in re.split(r"[/.]", node.name) if part][:-1] if node.name.startswith("/") else []


def _bias_path(view: GraphView, output: str) -> list[str]:
    """Module path of a linear operator by the addition of its bias, past nodes that scale its output."""
    while len(readers := view.consumers.get(output, ())) == 1:
        node = view.nodes[readers[0]]
        if node.op_type == "Add":
            bias = next((name for name in node.input if name in view.initializers), None)
            return [] if bias is None else _module_path(node) or _weight_path(bias)
        if node.op_type not in _SCALING or _module_path(node):
            break
        output = node.output[0]
    return []


def _dynamo_path(value: str) -> list[str]:
    try:
        scopes = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    # From the root module down to the operator itself; the last but one is the operator's own module.
    own = str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
    return [part for part in own.split(".") if part]


def _weight_path(weight: str) -> list[str]:
    # TorchScript numbers folded weights, as in `onnx::MatMul_1234`; the numbers differ within a block.
    parts = weight.split(".")[:-1]
    return [_TRAILING_NUMBER.sub("", part) if part.startswith("onnx::") else part for part in parts]


def _common(paths: list[list[str]]) -> str:
    """The longest common prefix, without characters that are special in a glob."""
    parts = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*paths, strict=False))]
    return ".".join(cleaned for part in parts if (cleaned := _SPECIAL_CHARACTERS.sub("_", part)))[:200]
