"""Build new nodes with onnx-graphsurgeon, for `rewriter.graph.edit` to splice into a model.

This is the only module that imports graphsurgeon. Only new nodes go through it: a round trip of a whole model would
lose metadata, doc strings and the IR version, so the model itself remains a protobuf (docs/decisions/0001). The traps
avoided here: nodes are compared with `is`, never `==`; `Graph.layer` is not used (quadratic, float32 constants); no
LazyValues; no TensorProto is shared with the model.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

Tensor = gs.Tensor  # a tensor of a fragment: one of the model, a new one, or a constant
Tensors = Sequence[gs.Tensor]
Constant = gs.Constant
Variable = gs.Variable


class Fragment:
    """New nodes that refer to tensors of a model by name; a new tensor and its producer are `<prefix>/<name>`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._tensors: dict[str, gs.Variable] = {}
        self._nodes: list[gs.Node] = []
        self._constants: dict[str, gs.Constant] = {}

    def tensor(self, name: str) -> gs.Variable:
        """A tensor of the model, or the output of a later node of this fragment, by its full name."""
        return self._tensors.setdefault(name, gs.Variable(name))

    def constant(self, name: str, values: NDArray[np.generic]) -> gs.Constant:
        """A constant, created once per name."""
        name = self.qualified(name)
        return self._constants.setdefault(name, gs.Constant(name, np.asarray(values, order="C")))

    def node(
        self, operator: str, inputs: Tensors, name: str, *, output: str = "", domain: str | None = None, **given: object
    ) -> gs.Variable:
        """Append a node with attributes; its output is called `output` in full, or `<prefix>/<name>`."""
        result = self.tensor(output or self.qualified(name))
        self._nodes.append(gs.Node(operator, self.qualified(name), given, list(inputs), [result], domain=domain))
        return result

    def qualified(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def nodes(self, metadata: Mapping[str, str]) -> list[onnx.NodeProto]:
        protos = [OnnxExporter.export_node(node) for node in self._nodes]
        for proto in protos:
            onnx.helper.set_metadata_props(proto, dict(metadata))
        return protos

    def initializers(self) -> list[onnx.TensorProto]:
        return [OnnxExporter.export_tensor_proto(constant) for constant in self._constants.values()]

    def function(self, domain: str, name: str, inputs: Sequence[str], *, opset: int, doc: str) -> onnx.FunctionProto:
        """The fragment as a model-local function of its tensor `output`; its constants become Constant nodes."""
        nodes, held = self.nodes({}), {each.name: each for each in self.initializers()}
        read = dict.fromkeys(each for node in nodes for each in node.input)
        constants = [onnx.helper.make_node("Constant", [], [each], value=held[each]) for each in read if each in held]
        imports = [onnx.helper.make_opsetid("", opset)]
        return onnx.helper.make_function(domain, name, inputs, ["output"], constants + nodes, imports, doc_string=doc)
