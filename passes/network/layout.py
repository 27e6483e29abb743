"""Rules for operators that rearrange axes: where the token axis is afterwards.

They are entries of the table in `passes.network.rules`.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from passes.match.linear import Miss
from passes.network.sizes import KEYS, REST, TOKENS, Size, product
from passes.network.step import Known, Step, Target, token_axes
from rewriter.graph.view import attributes, label


def transpose(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Permute the axes."""
    sizes = known.carried(node.input[0]) or ()
    perm = attributes(node).get("perm") or list(range(len(sizes)))[::-1]
    return (
        Step((tuple(sizes[axis] for axis in perm),))
        if isinstance(perm, list) and sorted(perm) == list(range(len(sizes)))
        else Miss(f"{label(node)}: its axes are unknown", label(node))
    )


def _axes(known: Known, node: onnx.NodeProto, rank: int) -> list[int] | None:
    axes = known.shapes.integers(node.input[1]) if len(node.input) > 1 else attributes(node).get("axes")
    return sorted(axis % rank for axis in axes) if isinstance(axes, list) else None


def unsqueeze(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Insert axes of size 1."""
    sizes = list(known.carried(node.input[0]) or ())
    count = len(known.shapes.integers(node.input[1]) or ()) if len(node.input) > 1 else 1
    axes = _axes(known, node, len(sizes) + count)
    if axes is None:
        return Miss(f"{label(node)}: its axes are unknown", label(node))
    for axis in axes:
        sizes.insert(axis, Size(1))
    return Step((tuple(sizes),))


def squeeze(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Remove axes of size 1."""
    sizes = known.carried(node.input[0]) or ()
    axes = _axes(known, node, len(sizes))
    if axes is None:
        return Miss(f"{label(node)}: its axes are unknown", label(node))
    return Step((tuple(size for axis, size in enumerate(sizes) if axis not in axes),))


def reshape(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Find the token axis by the number of elements; a size of N becomes N + m, a merged axis becomes -1."""
    sizes = known.carried(node.input[0])
    total = None if sizes is None else product(sizes)
    elements = known.shapes.elements(node.input[1])
    unknown = Miss(f"{label(node)}: which axis of its shape holds the tokens is unknown", label(node))
    if sizes is None or total is None or elements is None:
        return unknown
    # 0 copies the size of the input. A single unknown size follows from the number of elements, as -1 does.
    copied = [sizes[i] if element == 0 and i < len(sizes) else element for i, element in enumerate(elements)]
    if copied.count(None) == 1 and REST not in copied:
        copied[copied.index(None)] = REST
    # With a static sequence length, exporters write N as a number; it means the tokens only if that fits the product.
    out = _filled(total, copied) or _filled(total, _with_tokens(copied, known.static_tokens))
    # A number of keys is computed from other shapes; 0 and -1 stay what they are.
    counted = [i for i, element in enumerate(elements) if element is None or isinstance(element, Size)]
    target = None if out is None else _target(out, counted)
    if out is None or target is None:
        return unknown
    # A pattern whose batch and heads are merged (BLOOM) is still one; its last two axes are those of the tokens.
    pattern = node.input[0] in known.patterns and out[-2:] in ((TOKENS, TOKENS), (TOKENS, KEYS))
    return Step((out,), target=target, pattern=pattern)


def _filled(total: Size, elements: list[Size | int | None]) -> tuple[Size, ...] | None:
    """The sizes, with `REST` resolved; None where they do not multiply to `total`."""
    sizes = [element for element in elements if isinstance(element, Size)]
    given = product(tuple(sizes))
    rest = None if given is None else total.over(given)
    if rest is None or len(sizes) + elements.count(REST) != len(elements) or elements.count(REST) > 1:
        return None
    if REST not in elements and rest != Size():
        return None
    return tuple(element if isinstance(element, Size) else rest for element in elements)


def _with_tokens(elements: list[Size | int | None], static: int | None) -> list[Size | int | None]:
    """The elements, with numbers equal to the static sequence length read as the tokens."""
    return [TOKENS if isinstance(element, Size) and element == Size(static or 0) else element for element in elements]


def _target(out: tuple[Size, ...], counted: Sequence[int]) -> Target | None:
    """How the shape operand changes; elements that contain the batch only stay as computed."""
    # An axis that merges tokens with others becomes the one -1 that a Reshape allows. A batch size stays as computed
    # and may be a -1 itself, so the two do not go together.
    rows = tuple(i for i, size in enumerate(out) if size == TOKENS)
    keys = tuple(i for i in counted if out[i] == KEYS)
    mixed = [i for i, size in enumerate(out) if size.rows and size not in (TOKENS, KEYS)]
    if len(mixed) > 1 or (mixed and any(size.batch and not size.rows for size in out)):
        return None
    fixed = [(i, size.number) for i, size in enumerate(out) if size.constant]
    return Target(rows, tuple([(i, REST) for i in mixed] + fixed), len(out), keys)


def expand(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Broadcast axes of size 1; N becomes N + m."""
    sizes, elements = known.carried(node.input[0]), known.shapes.elements(node.input[1])
    if sizes is None or elements is None or len(elements) < len(sizes):
        return Miss(f"{label(node)}: which axis of its shape holds the tokens is unknown", label(node))
    lead = len(elements) - len(sizes)
    if any(size is not None and size.keys for size in sizes):
        return Miss(f"{label(node)}: it repeats the keys of a cache", label(node))
    rows = tuple(lead + axis for axis, size in enumerate(sizes) if size is not None and size.tokens)
    out = [element if isinstance(element, Size) else None for element in elements]
    for axis, size in enumerate(sizes):
        out[lead + axis] = size if lead + axis in rows or size != Size(1) else out[lead + axis]
    return Step((tuple(out),), target=Target(rows, (), len(elements)))


def split(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Split an axis without tokens."""
    sizes = known.carried(node.input[0])
    axis = attributes(node).get("axis", 0)
    if sizes is None or not isinstance(axis, int) or axis % len(sizes) - len(sizes) in token_axes(sizes):
        return Miss(f"{label(node)}: it splits the tokens", label(node))
    lengths = known.shapes.integers(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    outs = []
    for number, name in enumerate(node.output):
        shape = known.view.type_of(name).shape
        part = shape[axis] if shape is not None else None
        if not isinstance(part, int) and lengths is not None:
            part = lengths[number]
        out = list(sizes)
        out[axis] = Size(part) if isinstance(part, int) else None
        outs.append(tuple(out))
    return Step(tuple(outs))


def part(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Slice axes without tokens."""
    sizes = known.carried(node.input[0])
    axes = known.shapes.integers(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    if sizes is None or axes is None:
        return Miss(f"{label(node)}: the axes that it slices are unknown", label(node))
    places = {axis % len(sizes) for axis in axes}
    if places & {axis % len(sizes) for axis in token_axes(sizes)}:
        return Miss(f"{label(node)}: it selects tokens before the last converted block", label(node))
    out = list(sizes)
    for number, axis in enumerate(axes):
        out[axis % len(sizes)] = _part(known, node, number, sizes[axis])
    return Step((tuple(out),))


def _part(known: Known, node: onnx.NodeProto, number: int, size: Size | None) -> Size | None:
    """What a Slice leaves of one axis, None where that cannot be told."""
    bounds = []
    for name in [*node.input[1:3], *node.input[4:5]]:
        elements = known.shapes.elements(name)
        element = elements[number] if elements is not None and number < len(elements) else None
        bounds.append(element.number if isinstance(element, Size) and element.constant else element)
    if size is None or not size.constant or not all(isinstance(bound, int) for bound in bounds):
        return None
    return Size(len(range(*slice(*bounds).indices(size.number))))


def gather(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Select along an axis without tokens, such as the query of a stacked projection."""
    sizes, axis = known.carried(node.input[0]), attributes(node).get("axis", 0)
    rows = known.constants.shape(node.input[1]) if node.input[1] in known.constants else None
    if sizes is None or rows is None or not isinstance(axis, int):
        return Miss(f"{label(node)}: it does not gather from the residual stream", label(node))
    # Behind the last converted block a pooler may select tokens; there the bias tokens have been cut off.
    if axis % len(sizes) - len(sizes) in token_axes(sizes):
        return Miss(f"{label(node)}: it selects tokens before the last converted block", label(node))
    place = axis % len(sizes)
    return Step(((*sizes[:place], *(Size(row) for row in rows), *sizes[place + 1 :]),))


def concat(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Concatenate carried tensors along an axis without tokens."""
    parts, axis = [known.carried(name) for name in node.input], attributes(node).get("axis", 0)
    known_parts = [part for part in parts if part is not None]
    first = known_parts[0]
    if not isinstance(axis, int) or axis % len(first) - len(first) in token_axes(first):
        # Keys and values of a decoder's cache come first: the rows of bias tokens stay the last ones.
        place = axis % len(first) if isinstance(axis, int) else 0
        cached = parts[:-1] == [None] * (len(parts) - 1) and first[place] == TOKENS
        if not cached or not isinstance(axis, int):
            return Miss(f"{label(node)}: it appends tokens", label(node))
        return Step(((*first[:place], KEYS, *first[place + 1 :]),))
    if len(known_parts) < len(parts):
        return Miss(f"{label(node)}: it concatenates the stream with another tensor", label(node))
    numbers = [part[axis].number if part[axis] and part[axis].constant else None for part in known_parts]  # type: ignore[union-attr]
    total = None if None in numbers else Size(sum(number or 0 for number in numbers))
    return Step(((*first[: axis % len(first)], total, *first[axis % len(first) + 1 :]),))


def shape(known: Known, node: onnx.NodeProto) -> Step | Miss:
    """Keep the original value of a shape by subtracting m."""
    sizes = known.carried(node.input[0]) or ()
    given = attributes(node)
    start, end = given.get("start", 0), given.get("end", len(sizes))
    part = sizes[start:end] if isinstance(start, int) and isinstance(end, int) else sizes
    if any(size is not None and size.rows and size not in (TOKENS, KEYS) for size in part):
        return Miss(f"{label(node)}: it reads the size of an axis that merges batch and tokens", label(node))
    return Step((), correct=tuple(size in (TOKENS, KEYS) for size in part))
