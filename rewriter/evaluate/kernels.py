"""Nodes on plain arrays, by the runtime's own kernel, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Unsupported
from rewriter.graph.constants import elem_type_of
from rewriter.text import one_line

_KEPT = 2**20
"""Results of at most this many entries are kept."""
_MAX_IR = 11


class Kernels:
    """Runs single nodes in sessions of their own, and keeps small results."""

    def __init__(self, opsets: Mapping[str, int], ir_version: int) -> None:
        self._imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self._ir_version = min(ir_version, _MAX_IR)
        self._kept: dict[bytes, tuple[Any, ...]] = {}

    def run(self, node: onnx.NodeProto, operands: Sequence[Array | None]) -> tuple[Any, ...]:
        """The outputs of a node. Raises Unsupported where neither onnxruntime nor onnx's evaluator computes it."""
        key = _key(node, operands)
        if key in self._kept:
            return self._kept[key]
        inputs = [f"i{place}" if each is not None else "" for place, each in enumerate(operands)]
        outputs = [f"o{place}" if name else "" for place, name in enumerate(node.output)]
        single = helper.make_node(node.op_type, inputs, outputs, node.name, domain=node.domain)
        single.attribute.extend(node.attribute)
        feeds = {name: each for name, each in zip(inputs, operands, strict=True) if name and each is not None}
        infos = [helper.make_tensor_value_info(name, elem_type_of(each), each.shape) for name, each in feeds.items()]
        graph = helper.make_graph([single], "node", infos, [onnx.ValueInfoProto(name=name) for name in outputs if name])
        model = helper.make_model(graph, opset_imports=self._imports, ir_version=self._ir_version)
        made = iter(_computed(model, feeds))
        result = tuple(next(made) if name else None for name in outputs)
        if sum(np.size(each) for each in result if each is not None) <= _KEPT:
            self._kept[key] = result
        return result


def _computed(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> Sequence[Any]:
    import onnxruntime
    from onnx.reference import ReferenceEvaluator

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(feeds)))
    except Exception as error:  # noqa: BLE001 - onnxruntime raises its own of many kinds
        try:
            return list(ReferenceEvaluator(model).run(None, dict(feeds)))
        except Exception:  # noqa: BLE001 - and onnx's evaluator any
            raise Unsupported(f"no kernel computes it: {one_line(str(error), 120)}") from None


def _key(node: onnx.NodeProto, operands: Sequence[Array | None]) -> bytes:
    digest = hashlib.blake2b(node.op_type.encode() + node.domain.encode(), digest_size=16)
    for each in sorted(attribute.SerializeToString() for attribute in node.attribute):
        digest.update(each)
    digest.update(repr([bool(name) for name in node.output]).encode())
    for operand in operands:
        if operand is None:
            digest.update(b"|none")
            continue
        content = repr(operand).encode() if operand.dtype.kind in "OUS" else np.ascontiguousarray(operand).tobytes()
        digest.update(f"|{operand.dtype}{operand.shape}".encode() + content)
    return digest.digest()
