"""Choose the tensors at which two models are compared: the ends of blocks, the residual stream, the outputs.

A boundary has the same name in both models. Boundaries are in the order in which A computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rewriter.graph.constants import Constants
from rewriter.graph.extract import upstream
from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView
from rewriter.proof.noise import QUANTISERS

_FLOATS = {*FLOATS, 0}
"""Element types that are compared; 0 stands for a type that inference does not know."""

_SUMS = {"Add", "Sum", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
_FAR = 2000
"""Maximum number of tensors in a branch beside the residual stream; bounds the search behind each sum."""

_MANY = 64
"""Number of evenly spaced boundaries if neither blocks nor a residual stream are found."""


@dataclass(frozen=True)
class Landmark:
    """A block of A, with its own ends and those of its activation.

    Attributes:
        name: the block.
        inputs: its inputs.
        outputs: its outputs.
        starts: the pre-activations, where the first linear operators end.
        end: the activation's output, where the second linear operators begin.
        program: the head program that computes the activation in B; None if none does.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    starts: tuple[str, ...]
    end: str
    program: str | None = None


@dataclass(frozen=True)
class Boundary:
    """One tensor that both models have.

    Attributes:
        tensor: its name.
        label: its name in reports: `h.3.mlp`, `input of h.3.mlp`, `after h.3.mlp`, or the tensor's name.
        kind: `block` (the end of a block), `stream` or `output`.
        block: the block that ends there.
    """

    tensor: str
    label: str
    kind: Literal["block", "stream", "output"]
    block: Landmark | None = None


def boundaries(a: GraphView, b: GraphView, landmarks: Sequence[Landmark]) -> tuple[Boundary, ...]:
    """The boundaries of two models in the order of A's nodes; graph outputs are always among them."""
    # Ends of blocks take precedence over the stream, so that every block keeps its name in reports.
    shared = frozenset(common(a, b))
    found: dict[str, Boundary] = {}
    inside: set[str] = set()
    for mark in landmarks:
        inside |= _inside(a, mark)
        for output in mark.outputs:
            name = _with_bias(a, output)
            label = mark.name if len(mark.outputs) == 1 else f"{mark.name} ({output})"
            found[name] = Boundary(name, label, "block", mark)
    for mark in landmarks:
        for name in mark.inputs:
            found.setdefault(name, Boundary(name, f"input of {mark.name}", "stream"))
    for index, name in _residual(a):
        if name in inside:
            continue  # a sum within a block, such as the one in a polynomial of the activation
        # A sum that adds the output of a block is named for it.
        read = next((found[i].label for i in a.nodes[index].input if i in found and found[i].kind == "block"), "")
        found.setdefault(name, Boundary(name, f"after {read}" if read else name, "stream"))
    # Only what nodes of both models compute: a graph input is not, and B may have replaced a tensor.
    found = {name: boundary for name, boundary in found.items() if name in shared}
    if not found:
        spaced = sorted(shared.difference(a.outputs), key=a.producer.__getitem__)
        step = max(len(spaced) // _MANY, 1)
        found = {name: Boundary(name, name, "stream") for name in spaced[step - 1 :: step]}
    for name in a.outputs:
        if name in a.producer and name in b.producer:
            found.setdefault(name, Boundary(name, f"output {name}", "output"))
    return tuple(sorted(found.values(), key=lambda boundary: a.producer[boundary.tensor]))


def rounded(a: GraphView, b: GraphView, landmarks: Sequence[Landmark]) -> tuple[Boundary, ...]:
    """The tensors that quantisers of both models read, as boundaries.

    Nothing is quantised between one and the next, so the result of a part does not depend on the side of a quantisation
    step on which a value happens to fall.
    """
    read = [{name for node in view.nodes if node.op_type in QUANTISERS for name in node.input} for view in (a, b)]
    ends = {mark.end: mark for mark in landmarks}
    return tuple(
        Boundary(name, f"{ends[name].name}, activation" if name in ends else name, "stream", ends.get(name))
        for name in common(a, b)
        if all(name in names for names in read)
    )


def common(a: GraphView, b: GraphView, within: Sequence[int] | None = None) -> Iterator[str]:
    """The float tensors that nodes of both graphs compute under the same name, without constants.

    `within` restricts them to outputs of these nodes of A.
    """
    constants = Constants(a)
    for index in range(len(a.nodes)) if within is None else within:
        for name in a.nodes[index].output:
            if name in b.producer and name not in constants and a.type_of(name).elem_type in _FLOATS:
                yield name


def _inside(view: GraphView, mark: Landmark) -> set[str]:
    """The tensors of a block between its ends."""
    part = upstream(view, frozenset(mark.inputs), [name for name in mark.outputs if name in view.producer])
    return {name for index in part.nodes for name in view.nodes[index].output}.difference(mark.outputs)


def _with_bias(view: GraphView, tensor: str) -> str:
    """The tensor after its bias was added, if it is read by that addition alone: B may have fused the two."""
    readers = view.consumers.get(tensor, ())
    if len(readers) != 1 or tensor in view.outputs or view.nodes[readers[0]].op_type != "Add":
        return tensor
    node = view.nodes[readers[0]]
    others = [name for name in node.input if name != tensor]
    return node.output[0] if others and all(name in view.initializers for name in others) else tensor


def _residual(view: GraphView) -> Iterator[tuple[int, str]]:
    """The sums x + f(x): one operand has another consumer, and the other operand depends on it.

    The dependency must not pass through an earlier sum of the stream; otherwise every addition in a later layer would
    qualify, since everything depends on the stream.
    """
    constants = Constants(view)
    passed: set[str] = set()
    for index, node in enumerate(view.nodes):
        if node.op_type not in _SUMS:
            continue
        data = [name for name in node.input[:2] if name and name not in constants]
        if len(data) != 2:
            continue
        for kept, added in (data, data[::-1]):
            if len(view.consumers.get(kept, ())) > 1 and _depends(view, added, kept, passed):
                # A fused SkipLayerNormalization returns the sum itself as its fourth output, which may be absent.
                sums = [name for name in (*node.output[3:], node.output[0]) if name]
                passed.update(sums)
                yield index, sums[0]
                break


def _depends(view: GraphView, tensor: str, on: str, without: set[str]) -> bool:
    """Whether `tensor` depends on `on`, without passing through `without`; the search ends after `_FAR` tensors."""
    # Nodes before the producer of `on` cannot depend on it.
    floor = view.producer.get(on, -1)
    pending, seen = [tensor], {tensor}
    while pending and len(seen) < _FAR:
        index = view.producer.get(pending.pop(), -1)
        if index <= floor:
            continue
        for name in view.nodes[index].input:
            if name == on:
                return True
            if name and name not in seen and name not in without:
                seen.add(name)
                pending.append(name)
    return False
