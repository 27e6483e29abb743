"""Products: matrices, Einsum, convolutions and rotary embeddings."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from onnx import parser

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import FAR, Unsupported, Value, ends, is_float, plain
from rewriter.evaluate.moves import masks_of
from rewriter.evaluate.nodes import run_model
from rewriter.evaluate.scalar import activated, add, mul
from rewriter.evaluate.table import MICROSOFT, NCHWC, Call, operator

_LARGEST_COUNT = 2**16  # counts of masking constants beyond this are not believed
_BLOCK_OF_8 = 8
_BLOCKED = f"""<ir_version: 8, opset_import: ["": 13, "{NCHWC}": 1]>
    one (float[1, 16, 1, 1] x, float[16, 16, 1, 1] w) => (float[1, 16, 1, 1] y) {{
        a = {NCHWC}.ReorderInput(x) b = {NCHWC}.Conv(a, w) y = {NCHWC}.ReorderOutput<channels = 16>(b) }}"""


# -- matrices ---------------------------------------------------------------------------------------------------------


def _whole(*operands: Any) -> bool:
    return all(x.whole if isinstance(x, Value) else x.dtype.kind in "biu" for x in operands)


def _has_masks(call: Call, x: Any) -> bool:
    if isinstance(x, Value):
        return x.masks is not None
    return is_float(x) and not ends(x)[0] > call.f.low


def _small(call: Call, x: Value, axis: int) -> Array:
    """Entries as the integers of the least magnitude; 0 at places of an axis where one is large, as of data."""
    negative = call.f.neg(x.entries)
    factors = np.where(x.entries < negative, x.entries, -negative).astype(np.float64)
    others = tuple(each for each in range(x.ndim) if each != axis % x.ndim)
    return np.where((np.abs(factors) <= _LARGEST_COUNT).all(axis=others, keepdims=True), factors, 0.0)


def _masks_of_product(call: Call, x: Any, y: Any) -> Array | None:
    """How many masking constants each entry of x @ y contains; None where that is not known, too.

    It is known where it does not depend on data: only then are all residues at a random point small integers.
    """
    if not call.f.reads_masks or min(x.ndim, y.ndim) < 2 or not (_has_masks(call, x) or _has_masks(call, y)):
        return None
    x, y, made = call.lift(x, scalar=False), call.lift(y, scalar=False), np.zeros(())
    made = made if x.masks is None else made + x.masks @ _small(call, y, -2)
    made = made if y.masks is None else made + _small(call, x, -1) @ y.masks
    few = any(((masks_of(each) > 0) & (masks_of(each) < FAR)).any() for each in (x, y))
    if few and made.max(initial=0) >= FAR:
        return None  # many small numbers are not one below every score
    return made.astype(np.int64) if made.any() and (np.abs(made) < 2.0**53).all() else None


@operator("MatMul", product=True)
def matmul(call: Call, x: Any, y: Any) -> Value:
    row, column = x.ndim == 1, y.ndim == 1
    x = call.move(x, lambda t: t[None]) if row else x
    y = call.move(y, lambda t: t[:, None]) if column else y
    made = Value(call.f.matmul(x, y), _masks_of_product(call, x, y), whole=_whole(x, y))
    return call.move(made, lambda t: np.squeeze(t, (-2,) * row + (-1,) * column)) if row or column else made


def _scaled(call: Call, x: Any, factor: float) -> Any:
    return x if factor == 1.0 else mul(call, x, np.float32(factor))


@operator("Gemm", "FusedGemm", product=True)
def _gemm(call: Call, x: Any, y: Any, z: Any = None) -> Any:
    x, y = (call.move(t, np.transpose) if call.get(name) else t for t, name in ((x, "transA"), (y, "transB")))
    made = _scaled(call, matmul(call, x, y), call.get("alpha", 1.0))
    beta = call.get("beta", 1.0)
    if z is not None and beta != 0.0:
        made = add(call, made, _scaled(call, z, beta))
    return activated(call, made)


@operator("Einsum")
def _einsum(call: Call, *operands: Any) -> Value:
    """Two operands at a time; of their labels, those are kept that the result or a later operand has."""
    left, arrow, result = call.text("equation").replace(" ", "").partition("->")
    if not arrow:
        once = sorted(each for each in left if each.isalpha() and left.count(each) == 1)
        result = "..." * ("." in left) + "".join(once)
    (made, *others), (term, *terms) = map(call.entries, operands), left.split(",")
    for place, (other, right) in enumerate(zip(others, terms, strict=True), 1):
        labels, later = sorted({*term, *right} - {"."}), result + "".join(terms[place:])
        kept = "..." * ("." in term + right) + "".join(each for each in labels if each in later)
        multiply = partial(np.einsum, f"{term},{right}->{kept}", optimize=True)
        count = multiply(*(np.broadcast_to(1.0, each.shape) for each in (made, other))).max(initial=0)  # of terms
        made, term = call.f.product(made, other, multiply, int(count)), kept
    return Value(call.f.reduced(np.einsum(f"{term}->{result}", made)), whole=_whole(*operands))


# -- convolutions ------------------------------------------------------------------------------------------------------


def _windows(call: Call, x: Array, kernel: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """For every offset in a kernel, the entries under it at all places; 0 in the padding."""
    count, mode = len(kernel), call.text("auto_pad", "NOTSET")
    strides, dilations = (call.get(name) or [1] * count for name in ("strides", "dilations"))
    extents = [step * (size - 1) + 1 for size, step in zip(kernel, dilations, strict=True)]
    pads = (mode == "NOTSET" and call.get("pads")) or [0] * 2 * count
    edges = list(zip(pads[:count], pads[count:], strict=True))
    if mode.startswith("SAME"):
        sizes = zip(x.shape[-count:], strides, extents, strict=True)
        needed = [max((-(-size // step) - 1) * step + extent - size, 0) for size, step, extent in sizes]
        edges = [(each // 2, each - each // 2)[:: 1 if mode == "SAME_UPPER" else -1] for each in needed]
    x = np.pad(x, [(0, 0)] * (x.ndim - count) + edges)
    windows: Any = np.lib.stride_tricks.sliding_window_view(x, extents, tuple(range(-count, 0)))
    windows = windows[(..., *(slice(None, None, step) for step in (*strides, *dilations)))]
    for offset in np.ndindex(*kernel):
        yield offset, windows[(..., *offset)]


@operator("Conv", "FusedConv", product=True)
def _conv(call: Call, x: Any, weight: Any, bias: Any = None, skip: Any = None) -> Any:
    f, entries, weights = call.f, call.entries(x), call.lift(weight, scalar=False).entries
    groups, kernel = call.get("group", 1), weights.shape[2:]
    batch, channels = x.shape[0], weights.shape[0]
    weights = weights.reshape(groups, channels // groups, *weights.shape[1:])
    total: Any = 0
    for offset, part in _windows(call, entries, kernel):
        columns = Value(part.reshape(batch, groups, x.shape[1] // groups, -1))
        total = total + f.matmul(Value(weights[(None, ..., *offset)]), columns)
        shape = part.shape[2:]
    made = Value(f.reduced(total).reshape(batch, channels, *shape))
    if bias is not None:  # for each channel
        made = Value(f.add(made.entries, call.lift(bias, scalar=False).entries.reshape(-1, *[1] * len(kernel))))
    return activated(call, made if skip is None else add(call, made, skip))


@cache
def _block() -> int:
    """Channels that onnxruntime keeps together in weights on this processor: the place of its second input channel."""
    feeds = {"x": np.eye(16, dtype=np.float32)[1].reshape(1, 16, 1, 1), "w": np.arange(256.0, dtype=np.float32)}
    feeds["w"].shape = (16, 16, 1, 1)
    return int(run_model(parser.parse_model(_BLOCKED), feeds)[0][0, 0, 0, 0])


def _unblocked(weights: Array, block: int, *, inputs: bool) -> Array:
    """Weights of a convolution in blocks of channels, as [out, in, ...]."""
    out, into, *kernel = weights.shape
    if inputs:  # OIHWBiBo
        weights = np.moveaxis(weights.reshape(out // block, into // block, *kernel, block, block), -2, 2)
    return np.moveaxis(weights.reshape(out // block, into, *kernel, block), -1, 1).reshape(out, into, *kernel)


@operator("Conv", domain=NCHWC)
def _conv_in_blocks(call: Call, x: Any, weight: Any, bias: Any = None, skip: Any = None) -> Any:
    """Data is kept in the usual layout, as if there were no blocks; only weights are reordered."""
    groups, (out, into, *_) = call.get("group", 1), weight.shape
    block = _BLOCK_OF_8 if out % 16 else _block()
    missing = into * groups - x.shape[1]
    if missing > 0:  # channels are filled up to a block
        x = call.move(x, lambda t: np.pad(t, [(0, 0), (0, missing)] + [(0, 0)] * (t.ndim - 2)))
    by_channel = groups == out and into == 1
    if out % block or not (by_channel or (groups == 1 and x.shape[1] == into)):
        raise Unsupported("this layout in blocks")
    inputs = not by_channel and into >= block and into % block == 0
    return _conv(call, x, call.move(weight, lambda t: _unblocked(t, block, inputs=inputs)), bias, skip)


@operator("ReorderInput", "ReorderOutput", domain=NCHWC)
def _reordered(call: Call, x: Any) -> Any:
    way = (-1, 1) if call.kind == "ReorderInput" else (1, -1)
    kept = call.move(x, lambda t: t[:, : call.get("channels")])
    return call.move(kept, lambda t: np.moveaxis(t, *way)) if call.get("channels_last") else kept


# -- rotary embeddings -------------------------------------------------------------------------------------------------

_HEADED = 4  # axes of [batch, heads, tokens, channels]


@operator("RotaryEmbedding", domain=MICROSOFT, table=True)
def _rotary_of_onnxruntime(call: Call, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
    if call.get("is_packed_batching"):
        raise Unsupported("is_packed_batching is not supported")
    if np.size(positions) == 1:
        positions = positions.reshape(-1, 1) + np.arange(x.shape[-2])
    return _rotary(call, x, cos, sin, positions)


@operator("RotaryEmbedding")
def _rotary(call: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    """Tables are by position, or [batch, tokens, width / 2] without positions; the first `width` channels turn."""
    f, shape = call.f, x.shape
    if len(shape) < _HEADED:
        heads = call.get("num_heads") or shape[-1] // (2 * cos.shape[-1])
        x = call.move(x, lambda t: t.reshape(*shape[:2], heads, shape[2] // heads).swapaxes(1, 2))
    if positions is not None:
        at, chosen = plain(positions), call.node.input[1 if call.node.domain else 3] in call.evaluator.decided
        read = call.evaluator.rows if chosen else lambda _, table, index: call.move(table, lambda t: t[index])
        cos, sin = (read(call, table, at) for table in (cos, sin))
    entries, cos, sin = call.entries(x), call.entries(cos)[:, None], call.entries(sin)[:, None]
    width, interleaved = call.get("rotary_embedding_dim", 0) or 2 * cos.shape[-1], call.get("interleaved") == 1
    part, rest = entries[..., :width], entries[..., width:]
    one, two = (part[..., ::2], part[..., 1::2]) if interleaved else np.split(part, 2, -1)
    made = f.sub(f.mul(one, cos), f.mul(two, sin)), f.add(f.mul(one, sin), f.mul(two, cos))
    part = np.stack(made, -1).reshape(part.shape) if interleaved else np.concatenate(made, -1)
    turned = np.concatenate([part, rest], -1)
    return Value(turned.swapaxes(1, 2).reshape(shape) if len(shape) < _HEADED else turned)
