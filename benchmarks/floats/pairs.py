"""An activation and the heads in its place, cut out of two models of one block, ready to run in onnxruntime."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from benchmarks.floats.errors import Floats, Kind
from benchmarks.floats.subjects import Subject
from rewriter import rewrite
from rewriter.errors import ValidationError
from rewriter.ort import open_session
from rewriter.report.report import BlockRow

Run = Callable[[Floats], Floats]

WIDTH = 1024
"""Neurons of the block: with 64 tokens, the numbers of a run stay in the processor's cache.

What heads give does not depend on where in a tensor a number stands. onnxruntime's own Softplus, Mish, Elu, Selu and
Celu may differ by an ulp or two in rows whose length is no multiple of its vectors', which are not measured.
"""


@dataclass(frozen=True)
class Pair:
    """Both functions of y, and what is claimed of the second.

    Attributes:
        original: from pre-activations [n], n a multiple of `WIDTH`, to the activation [n]; or why it does not run.
        rewritten: the same, by heads.
        block: the row of the report.
        digest: sha256 of both models.
    """

    original: Run | str
    rewritten: Run
    block: BlockRow
    digest: str


def model_of(subject: Subject, kind: Kind) -> onnx.ModelProto:
    """A block with one input feature x and `WIDTH` neurons."""
    linear = ["y = MatMul (x, UP)", *(["u = MatMul (x, VALUE)"] if subject.gated else [])]
    graph = onnx.parser.parse_graph(
        f"block (float[n, 1] x) => (float[n, 1] z) {{ {' '.join(linear)} {subject.nodes} z = MatMul (f, DOWN) }}"
    )
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = kind.elem_type
    weights = {"UP": np.ones((1, WIDTH)), "VALUE": np.ones((1, WIDTH)), "DOWN": np.ones((WIDTH, 1))}
    tensors = {name: np.asarray(value) for name, value in subject.constants.items()} | weights
    used = {name for node in graph.node for name in node.input}
    for name, array in tensors.items():
        if name in used:
            graph.initializer.append(onnx.numpy_helper.from_array(array.astype(kind.dtype), name))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def between(model: onnx.ModelProto, kind: Kind) -> onnx.ModelProto:
    """The part of a block between its linear operators, from y (and u) to f."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    graph = part.graph
    (last,) = (node for node in graph.node if "z" in node.output)
    kept = [node for node in graph.node if not {"y", "u", "z"}.intersection(node.output)]
    used = {name for node in kept for name in node.input}
    stored = [tensor for tensor in graph.initializer if tensor.name in used]
    for field in ("node", "input", "output", "initializer", "value_info"):
        graph.ClearField(field)
    graph.node.extend(kept)
    graph.initializer.extend(stored)
    for name in ("y", "u"):
        if name in used:
            graph.input.append(_stream(name, kind))
    graph.output.append(_stream(last.input[0], kind))
    return part


def _stream(name: str, kind: Kind) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind.elem_type, ["n", WIDTH])


def runner(part: onnx.ModelProto, provider: str = "cpu") -> Run:
    """Runs the part in one thread; gates with the value 1.

    Raises:
        ValidationError: onnxruntime cannot load it, or leaves a node to the CPU.
    """
    session = open_session(part, provider, threads=1, spin=True)
    if session.cpu_nodes:
        raise ValidationError(f"on {provider} it leaves {', '.join(session.cpu_nodes)} to the CPU")
    gated = any(value.name == "u" for value in part.graph.input)

    def run(y: Floats) -> Floats:
        rows = y.reshape(-1, WIDTH)
        feeds = {"y": rows, **({"u": np.ones_like(rows)} if gated else {})}
        found: Floats
        (found,) = session.run(feeds).values()
        return found.reshape(-1)

    return run


def pair(subject: Subject, kind: Kind, provider: str = "cpu") -> Pair | str:
    """Both functions on an execution provider, or why the second is missing."""
    block = model_of(subject, kind)
    report = rewrite(block, form="local", validate=False)
    if not report:
        return "; ".join(str(row.reason) for row in report.blocks) or "no block found"
    (row,) = report.blocks
    parts = between(block, kind), between(report.rewritten, kind)
    try:
        original: Run | str = runner(parts[0], provider)
    except ValidationError as error:
        original = str(error)
    together = b"".join(part.SerializeToString(deterministic=True) for part in parts)
    try:
        rewritten = runner(parts[1], provider)
    except ValidationError as error:
        return str(error)
    return Pair(original, rewritten, row, hashlib.sha256(together).hexdigest())
