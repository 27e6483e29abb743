"""The truth: a model evaluated in float64.

`open_reference` returns a `Reference`, which runs the original's inputs in double precision, or raises `NoReference`
with the reason. Each operator is computed by the first of these that can: onnxruntime's double kernel, a definition in
numpy, onnx's reference evaluator. A node with bodies needs double kernels for everything inside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ModelError, ValidationError
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.files.walk import is_external, iter_tensors
from rewriter.graph.functions import inlined
from rewriter.graph.segments import bytes_of
from rewriter.graph.view import attributes, key_of, opsets
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.reference.evaluator import EVALUATED, Evaluated
from rewriter.proof.reference.kernels import double_kernel
from rewriter.proof.reference.operators.table import NUMPY_OPERATORS, Operator
from rewriter.proof.reference.parts import Node, NoKernelError, Part, Value
from rewriter.proof.reference.widen import (
    NoReference,
    check_type,
    check_values,
    constant_of,
    widened,
    widened_node,
)
from rewriter.text import one_line

__all__ = ["NoReference", "Reference", "open_reference", "widened"]

LARGEST = 2**31
"""Maximum size of the weights, in bytes; in float64 they take two or four times as much."""

Values = dict[str, Value]


@dataclass(frozen=True, eq=False)
class Reference:
    """A model in float64: steps in order, each with the names that nothing behind it reads."""

    constants: Mapping[str, Array]
    steps: Sequence[tuple[_Step, Sequence[str]]]
    outputs: Sequence[str]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model on the original's inputs, whose floats are widened.

        Returns:
            Maps an output to its array; float64 where the original gives floats.

        Raises:
            NoReference: an operator cannot be computed on these feeds.
        """
        # An input may override the initializer of its name.
        values: Values = {**self.constants, **{name: widened(array) for name, array in feeds.items()}}
        for step, dead in self.steps:
            made = step.run(values)
            for name, value in made.items():
                # A kernel that silently computes in float32 would make the truth as inexact as the model.
                if isinstance(value, np.ndarray) and is_float(value.dtype) and value.dtype != np.float64:
                    raise NoReference(f"the evaluator computes '{one_line(name, 80)}' in {value.dtype} only")
            values.update(made)
            for name in dead:
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}


def open_reference(model: onnx.ModelProto, base_dir: Path | None = None) -> Reference:
    """Load the float64 evaluation of `model`.

    Args:
        model: the model; its external data may be loaded or not. It is not changed.
        base_dir: directory of its external data.

    Raises:
        NoReference: an operator or a tensor has no float64 form, or the model is too large.
    """
    if sum(bytes_of(tensor) for tensor in iter_tensors(model)) > LARGEST:
        raise NoReference(f"larger than {round(LARGEST / 1e9)} GB")
    if model.functions:
        model = inlined(model)
    if model.graph.sparse_initializer:
        raise NoReference("the model has sparse initializers")
    check_values((*model.graph.input, *model.graph.output))
    read = partial(_values, LoadedModel(model, None, base_dir, (), 0))
    constants = {tensor.name: read(tensor) for tensor in model.graph.initializer}
    outputs = [value.name for value in model.graph.output]
    versions, nodes = opsets(model.opset_import), list[Node]()
    for proto in _needed(model.graph.node, outputs):
        if key_of(proto) == ("", "Constant"):
            constants[proto.output[0]] = constant_of(proto, read)
        else:
            wide = widened_node(proto, read)
            nodes.append(Node(wide, versions.get(wide.domain, 1)))
    steps = _steps(nodes, {name: len(nodes) for name in outputs}, constants)
    last = {
        name: place for place, step in enumerate(steps) for node in step.nodes for name in (*node.reads, *node.gives)
    }
    dead: list[list[str]] = [[] for _ in steps]
    for name, place in last.items():
        if name not in outputs:
            dead[place].append(name)
    return Reference(constants, list(zip(steps, dead, strict=True)), outputs)


def _values(model: LoadedModel, tensor: onnx.TensorProto) -> Array:
    """The values of a tensor, widened."""
    check_type(tensor.data_type, f"tensor '{tensor.name}'")
    if is_external(tensor) and model.base_dir is None:
        raise NoReference("weights lie outside the model file and were not loaded")
    try:
        return widened(read_tensor(model, tensor))
    except ModelError as error:
        what = "external data" if is_external(tensor) else "a weight"
        raise NoReference(f"{what} cannot be loaded: {one_line(error, 160)}") from error


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """The operators that the outputs depend on. A dead operator without a float64 form does not matter."""
    wanted, kept = set(outputs), []
    for proto in reversed(nodes):
        if wanted.intersection(proto.output):
            kept.append(proto)
            wanted.update(Node(proto, 0).reads)
    return kept[::-1]


def _steps(nodes: Sequence[Node], readers: Mapping[str, int], constants: Mapping[str, Array]) -> list[_Step]:
    """Consecutive operators with double kernels form one step, every other operator a step of its own."""
    last = {name: place for place, node in enumerate(nodes) for name in node.reads} | dict(readers)
    steps: list[_Step] = []
    group: list[tuple[Node, Node]] = []

    def close(end: int) -> None:
        if group:
            gives = [name for node, _ in group for name in node.gives if last.get(name, -1) >= end]
            steps.append(_Kernels([node for node, _ in group], [worded for _, worded in group], gives, constants))
            group.clear()

    for place, node in enumerate(nodes):
        worded = double_kernel(node)
        # A model imports each domain in one version, and an operator may be worded in a later one than others.
        if worded is None or any(other.key[0] == worded.key[0] and other.opset != worded.opset for _, other in group):
            close(place)
        if worded is None:
            steps.append(_single(node))
        else:
            group.append((node, worded))
    close(len(nodes))
    return steps


@dataclass(eq=False)
class _Kernels:
    """Operators that should have a kernel. If onnxruntime lacks one after all, the step is halved.

    Whether a kernel exists depends on the types that flow in, which are known only at run time. Halving finds the
    operator without one in a logarithmic number of attempts; it is then computed in another way.
    """

    nodes: Sequence[Node]
    worded: Sequence[Node]
    gives: Sequence[str]
    constants: Mapping[str, Array]
    part: Part = field(init=False)
    finer: Sequence[_Step] = ()

    def __post_init__(self) -> None:
        self.part = Part(tuple(self.worded), tuple(self.gives), self.constants)

    def run(self, values: Values) -> Values:
        if not self.finer:
            try:
                return self.part.run(values)
            except NoKernelError:
                self.finer = self._halves()
            except ValidationError as error:
                raise NoReference(f"onnxruntime cannot run it in float64: {one_line(error, 160)}") from error
        known = dict(values)
        for step in self.finer:
            known.update(step.run(known))
        return {name: known[name] for name in self.gives}

    def _halves(self) -> Sequence[_Step]:
        if len(self.nodes) == 1:
            return [_single(self.nodes[0])]
        middle = len(self.nodes) // 2
        read = {name for node in self.nodes[middle:] for name in node.reads}
        early = [name for node in self.nodes[:middle] for name in node.gives if name in read or name in self.gives]
        late = [name for node in self.nodes[middle:] for name in node.gives if name in self.gives]
        return [
            _Kernels(self.nodes[:middle], self.worded[:middle], early, self.constants),
            _Kernels(self.nodes[middle:], self.worded[middle:], late, self.constants),
        ]


@dataclass(frozen=True, eq=False)
class _Single:
    """An operator by itself."""

    node: Node
    way: str
    compute: Callable[[Values], Values]

    @property
    def nodes(self) -> Sequence[Node]:
        return [self.node]

    def run(self, values: Values) -> Values:
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.compute(values)
        except MemoryError:
            raise  # not the operator's fault: reporting that it has no float64 form would be wrong
        except Exception as error:
            raise NoReference(f"{self.way} cannot run {one_line(self.node, 120)}: {one_line(error, 160)}") from error


_Step = _Kernels | _Single


def _single(node: Node) -> _Single:
    """An operator in numpy or by onnx's evaluator. Raises NoReference."""
    if (form := NUMPY_OPERATORS.get(node.key)) is not None:
        return _Single(node, "numpy", partial(_in_numpy, node, form))
    if node.key[0] == "" and node.key[1] in EVALUATED:
        return _Single(node, "onnx's reference evaluator", Evaluated(node).run)
    raise NoReference(f"{one_line(node, 120)} has no known float64 form")


def _in_numpy(node: Node, form: Operator, values: Values) -> Values:
    made = form(attributes(node.proto), *(values[name] if name else None for name in node.proto.input))
    outputs = made if isinstance(made, tuple) else (made,)
    found = {name: value for name, value in zip(node.proto.output, outputs, strict=False) if name}
    if len(found) < len(node.gives) or any(value is None for value in found.values()):
        raise NotImplementedError("not all of its outputs")
    return {name: np.asarray(value) for name, value in found.items()}
