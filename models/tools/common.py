"""Shared helpers of the tools: refusals, hints about a model, random inputs, topological order."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

ONNX_DOMAINS = ("", "ai.onnx")


class Refused(Exception):  # noqa: N818 - a refusal is a result here
    """The tool cannot handle this model; the message says why."""


def first_line(error: Exception) -> str:
    """The first line of an error, without traces and paths of this machine."""
    line = (str(error).strip() or repr(error)).splitlines()[0]
    line = re.sub(r"\s*\[Caused by.*|/onnxruntime_src/\S+\s", "", line)
    return re.sub(r"\S*/(?=[\w.-]+\.onnx)", "", line)


@dataclass(frozen=True)
class Hints:
    """What a tool needs to know about a model.

    Attributes:
        family: name of the table entry.
        heads: attention heads; 0 where unknown.
        width: width of the residual stream; 0 where unknown.
        lengths: lengths of the dynamic dimensions, by name, for calibration runs.
        vocabulary: upper bound of token numbers.
    """

    family: str = ""
    heads: int = 0
    width: int = 0
    lengths: Mapping[str, int] = field(
        default_factory=lambda: {
            **dict.fromkeys(("batch", "batch_size"), 2),
            **dict.fromkeys(("sequence", "sequence_length", "encoder_sequence_length"), 7),
            **dict.fromkeys(("decoder_sequence", "decoder_sequence_length"), 5),
            **dict.fromkeys(("past", "past_sequence_length", "past_decoder_sequence_length"), 4),
            **dict.fromkeys(("total", "past_sequence_length + sequence_length"), 11),
        }
    )
    vocabulary: int = 128


def opset(model: onnx.ModelProto) -> int:
    """The opset of the standard domain."""
    return next((item.version for item in model.opset_import if item.domain in ONNX_DOMAINS), 1)


def elem_types(model: onnx.ModelProto) -> set[int]:
    """The element types of the weights."""
    return {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) >= 2}


def require_float32(model: onnx.ModelProto) -> None:
    """Raise `Refused` if the weights are not float32."""
    if not elem_types(model) <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}:
        raise Refused("it takes float32 models only")


def random_feeds(model: onnx.ModelProto, hints: Hints, seed: int) -> dict[str, np.ndarray]:
    """Random inputs of a model; dynamic dimensions are set by name, and masks are all ones."""
    random = np.random.default_rng(seed)
    initialised = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name in initialised:
            continue
        dims = value.type.tensor_type.shape.dim
        shape = [hints.lengths.get(dim.dim_param, 1) if dim.dim_param else dim.dim_value for dim in dims]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if "mask" in value.name:
            feeds[value.name] = np.ones(shape, dtype)
        elif "position" in value.name:
            feeds[value.name] = np.arange(shape[-1], dtype=dtype)
        elif np.issubdtype(dtype, np.integer):
            feeds[value.name] = random.integers(3, hints.vocabulary, shape).astype(dtype)
        else:
            feeds[value.name] = random.normal(size=shape).astype(dtype)
    return feeds


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the prints, logs and warnings of tools; errors are exceptions and pass through."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def topological(nodes: list[onnx.NodeProto], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes in topological order, stable.

    Raises:
        Refused: the graph has a cycle.
    """
    ready = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input} | {""}
    ready |= {tensor.values.name for tensor in graph.sparse_initializer}
    order: list[onnx.NodeProto] = []
    pending = nodes
    while pending:
        later: list[onnx.NodeProto] = []
        for node in pending:
            if all(name in ready for name in _reads(node)):
                order.append(node)
                ready.update(node.output)
            else:
                later.append(node)
        if len(later) == len(pending):
            raise Refused("the nodes depend on each other in both directions")
        pending = later
    return order


def _reads(node: onnx.NodeProto) -> Iterable[str]:
    """The tensors that a node reads, including captures of its subgraphs."""
    yield from node.input
    for attribute in node.attribute:
        if attribute.g.node:
            inner = {name for body in attribute.g.node for name in body.output}
            inner |= {value.name for value in attribute.g.input} | {tensor.name for tensor in attribute.g.initializer}
            yield from (name for body in attribute.g.node for name in _reads(body) if name not in inner)
