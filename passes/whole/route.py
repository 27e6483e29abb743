"""The route of the bias tokens through a graph: where it enters, which nodes it passes, where it leaves.

It enters at the residual stream after the embeddings: the last tensor [batch, N, D] that dominates everything that the
first attention and the blocks read. It leaves after the residual addition of the last converted block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from passes.forms.whole import PREFIX
from passes.match.blocks import Block
from passes.match.linear import Miss
from passes.sizes import BATCH, TOKENS, ShapeReader, Size, Sizes
from passes.whole.rules import Known, Step, apply_rule
from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView, captured_names, label

SMALLEST_OPSET = 13
"""From this opset on, Pad accepts booleans, Softmax normalises one axis and Squeeze takes its axes as an input."""

_TRANSPARENT = ("Reshape", "Cast", "Identity", "Dropout")
_RANK = 3


@dataclass(frozen=True)
class Route:
    """The nodes that a bias token passes.

    Attributes:
        entry: the residual stream after the embeddings, [batch, N, width].
        width: d_model.
        elem_type: element type of the entry.
        steps: node index to the edits of that node.
        sizes: sizes of every carried tensor, including the entry.
    """

    entry: str
    width: int
    elem_type: int
    steps: Mapping[int, Step]
    sizes: Mapping[str, Sizes]


def find_route(view: GraphView, blocks: Sequence[Block]) -> Route | Miss:
    """The route on which all `blocks` of `view` can read the bias token, or why there is none."""
    if view.opsets.get("", 1) < SMALLEST_OPSET:
        return Miss(
            f"opset {view.opsets.get('', 1)} is older than {SMALLEST_OPSET}; convert the model to a newer opset first",
            "",
        )
    if any(name.startswith(f"{PREFIX}/") for name in (*view.producer, *view.initializers)):
        return Miss("the model carries a bias token already; convert all of its blocks at once", "")
    constants = Constants(view)
    ends = tuple(_behind_residual(view, constants, block) for block in blocks)
    needed = _ancestors(view, ends)
    width = blocks[0].first[0].in_features
    entry = _entry(view, constants, needed, blocks, width)
    if entry is None or width is None:
        return Miss(
            "no tensor [batch, tokens, d_model] was found through which the token embeddings reach every attention "
            "and every block",
            blocks[0].output,
        )
    read = [operator.data for block in blocks for operator in block.first]
    return _walk(view, constants, entry, width, needed, read)


def _walk(
    view: GraphView, constants: Constants, entry: str, width: int, needed: frozenset[int], read: Sequence[str]
) -> Route | Miss:
    shape = view.type_of(entry).shape or ()
    known = Known(view, constants, ShapeReader(view, constants, symbols_of(view, entry)))
    known.static_tokens = shape[1] if isinstance(shape[1], int) else None
    known.shapes.carried[entry] = (BATCH, TOKENS, Size(width))
    steps: dict[int, Step] = {}
    for index, node in enumerate(view.nodes):
        carried = [name for name in node.input if name in known.shapes.carried]
        if any(name in known.shapes.carried for name in captured_names(node)):
            return Miss(f"{label(node)}: a subgraph of control flow reads the residual stream", label(node))
        # The route consists of ancestors of the last block's output; all other nodes read the tokens, cut off. A Shape
        # needs no cut, since m can be subtracted from it; the shape of the entry itself is right as it is.
        through = index in needed or (node.op_type == "Shape" and carried != [entry])
        if not through or not carried:
            continue
        step = apply_rule(known, node)
        if isinstance(step, Miss):
            return step
        steps[index] = step
        for name, sizes in zip(node.output, step.outputs, strict=False):
            known.shapes.carried[name] = sizes
            if step.pattern:
                known.patterns.add(name)
    lost = next((name for name in read if name not in known.shapes.carried), None)
    if lost is not None:
        return Miss(f"a block reads '{lost}', to which the stream does not lead", lost)
    return Route(entry, width, view.type_of(entry).elem_type, steps, known.shapes.carried)


def symbols_of(view: GraphView, entry: str) -> dict[str, Size]:
    """The sizes that symbolic dimensions stand for, by the entry and by integer inputs [batch, tokens]."""
    # Masks and position ids may name the dimensions otherwise than the embeddings. The entry comes last, so it wins.
    shape = view.type_of(entry).shape or ()
    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    shapes = [view.type_of(name).shape for name in view.inputs if view.type_of(name).elem_type in integers]
    pairs = [*(given for given in shapes if given is not None and len(given) == len((BATCH, TOKENS))), shape[:2]]
    return {
        dim: size for pair in pairs for dim, size in zip(pair, (BATCH, TOKENS), strict=True) if isinstance(dim, str)
    }


def _behind_residual(view: GraphView, constants: Constants, block: Block) -> str:
    """The sum of a block's output and the residual stream; the block's output, after b2, if no Add follows."""
    start = block.second[0].output
    tensor = start
    above = _ancestors(view, [start])
    while len(readers := view.consumers.get(tensor, ())) == 1:
        node = view.nodes[readers[0]]
        free = [name for name in node.input if name not in constants]
        output = str(node.output[0])
        others = [name for name in free if name != tensor]
        if node.op_type == "Add" and others:  # an Add with one constant operand is b2 instead
            # The block reads the stream. What it does not read is a parallel attention, and the stream is added later.
            if others[0] not in view.producer or view.producer[others[0]] in above:
                return output
        elif node.op_type not in (*_TRANSPARENT, "Add", "Mul") or free[:1] != [tensor]:
            break
        if node.op_type == "Add" and not others and tensor == start and tensor not in view.outputs:
            start = output  # the heads add b2 as well, so theirs is this tensor
        tensor = output
    return start


def _entry(
    view: GraphView,
    constants: Constants,
    needed: frozenset[int],
    blocks: Sequence[Block],
    width: int | None,
) -> str | None:
    """The last candidate that no other stream bypasses on its way to a sublayer."""
    # The bias token must be there before the first sublayer: the first softmax or the first block.
    starts = [operator.node for block in blocks for operator in block.first]
    first = min(starts)
    softmaxes = [index for index, node in enumerate(view.nodes) if node.op_type == "Softmax" and index in needed]
    stop = min([first, *softmaxes])
    candidates = [name for name in view.inputs if _is_stream(view, name, width)]
    # Constants are position embeddings of shape [1, N, d_model], for example, and not a stream.
    candidates += [
        name
        for index in sorted(needed)
        if index < stop
        for name in view.nodes[index].output
        if name not in constants and _is_stream(view, name, width)
    ]
    # The last one, so that as few operators as possible need a rule: embeddings and their norm stay before it.
    for name in reversed(candidates):
        below = _descendants(view, name) & needed
        if below.issuperset(starts) and not _passed(view, constants, below, name, width):
            return name
    return None


def _passed(view: GraphView, constants: Constants, below: frozenset[int], entry: str, width: int | None) -> bool:
    """Whether a stream that does not come from `entry` reaches one of its descendants."""
    # Another stream that joins after the entry would have N rows where the carried one has N + m.
    made = {name for index in below for name in view.nodes[index].output} | {entry}
    return any(
        name not in made and name not in constants and _is_stream(view, name, width)
        for index in below
        for name in view.nodes[index].input
    )


def _is_stream(view: GraphView, name: str, width: int | None) -> bool:
    known = view.type_of(name)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    return known.rank == _RANK and known.elem_type in floats and known.shape is not None and known.shape[-1] == width


def _ancestors(view: GraphView, tensors: Sequence[str]) -> frozenset[int]:
    """The nodes from which `tensors` are computed."""
    return _closure([view.producer[name] for name in tensors], lambda index: _makers(view, index))


def _descendants(view: GraphView, tensor: str) -> frozenset[int]:
    """The nodes that read `tensor`, directly or indirectly."""
    return _closure(
        list(view.consumers.get(tensor, ())),
        lambda index: (reader for name in view.nodes[index].output for reader in view.consumers.get(name, ())),
    )


def _makers(view: GraphView, index: int) -> Iterator[int]:
    node = view.nodes[index]
    return (view.producer[name] for name in (*node.input, *captured_names(node)) if name in view.producer)


def _closure(start: list[int], step: Callable[[int], Iterable[int]]) -> frozenset[int]:
    found: set[int] = set()
    pending = list(start)
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            pending.extend(step(index))
    return frozenset(found)
