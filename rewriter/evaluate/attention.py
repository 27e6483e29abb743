"""Attention of ONNX and onnxruntime, and rotary embeddings.

    z = Softmax(scores) V,  scores = scale q k  [capped, plus a bias, and -infinity where a query does not see a key]

Keys and values are those of the cache, then the new ones. Attention is composed of the rows of its parts,
which track masking constants.
"""

from __future__ import annotations

import functools
import math
from operator import itemgetter
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Unsupported, Value, integers, plain
from rewriter.evaluate.moves import concatenated, parts, where
from rewriter.evaluate.products import matmul
from rewriter.evaluate.reductions import softmax
from rewriter.evaluate.scalar import add, div, mul
from rewriter.evaluate.table import MICROSOFT, Call, operator

_NOWHERE = 2**31  # a position that no query sees
_HEADED, _PACKED = 4, 5  # axes of [batch, heads, tokens, channels], and of [batch, tokens, heads, 2 or 3, channels]


def by_head(call: Call, x: Any, heads: int) -> Any:
    """[batch, tokens, heads * channels] as [batch, heads, tokens, channels]."""
    batch, tokens, width = x.shape
    return call.move(x, lambda t: t.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3))


def joined(call: Call, x: Any) -> Any:
    """[batch, heads, tokens, channels] as [batch, tokens, heads * channels]."""
    batch, heads, tokens, channels = x.shape
    return call.move(x, lambda t: t.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * channels))


def _cached(call: Call, past: Any, new: Any) -> Any:
    return new if past is None else concatenated(call, [past, new], 2)


def _attended(
    call: Call, query: Any, key: Any, value: Any, *biases: Any, seen: Array | None = None, tail: Any = None
) -> tuple[Any, list[Any]]:
    """The output of heads, and the stages of their scores: products, capped, biased, and the pattern.

    Operands are [batch, heads, tokens, channels]; heads of queries may share heads of keys. `seen`: whether a query
    sees a key. `tail`: entries of an additional score.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (call.move(each, lambda t: np.repeat(t, shared, 1)) for each in (key, value))
    scale = np.float32(call.get("scale", 0)) or call.f.real(1 / math.sqrt(query.shape[-1]))
    product = capped = mul(call, matmul(call, query, call.move(key, lambda t: np.swapaxes(t, -1, -2))), scale)
    if cap := np.float32(call.get("softcap", 0.0)):
        capped = mul(call, call.apply("Tanh", div(call, product, cap)), cap)
    scores = functools.reduce(functools.partial(add, call), (each for each in biases if each is not None), capped)
    if seen is not None:
        scores = where(call, seen, scores, np.float32(-np.inf))
    pattern = softmax(call, scores, -1, tail)
    if seen is not None:  # a row may see nothing
        pattern = where(call, seen, pattern, np.float32(0))
    return matmul(call, pattern, value), [product, capped, scores, pattern]


def _earlier(tokens: int, keys: int, before: Any) -> Any:
    """Whether a query sees a key of its position or an earlier one; `before`: keys in front of the first query."""
    return np.arange(keys) <= np.arange(tokens)[:, None] + np.asarray(before)


def _kept(call: Call, mask: Any, batch: int, keys: int) -> Array | None:
    """A mask of keys, in any of onnxruntime's shapes, as an addend of scores."""
    if mask is None:
        return None
    if isinstance(mask, Value):
        raise Unsupported("data decides a mask")
    places = np.arange(keys)
    if mask.ndim == 1 and mask.size in (batch, 2 * batch):
        kept = places < mask[:batch, None]
        kept = kept & (places >= mask[batch:, None]) if mask.size > batch else kept
        kept = kept[:, None, None]
    elif mask.ndim in (2, 3):
        kept = np.expand_dims(mask != 0, (1, 2) if mask.ndim == 2 else 1)
    else:
        raise Unsupported("a mask of this shape")
    return np.where(kept, np.float32(0), np.float32(call.get("mask_filter_value", -10000.0)))


def _refuse(**given: Any) -> None:
    """Raise Unsupported for operands and attributes that the row does not read."""
    for name, each in given.items():
        if each is not None and (not isinstance(each, int) or each):
            raise Unsupported(f"{name} is not supported")


# -- onnxruntime -------------------------------------------------------------------------------------------------------


def _masked(call: Call, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> Any:
    (batch, _, tokens, _), keys = query.shape, key.shape[2]
    seen = _earlier(tokens, keys, keys - tokens) if call.get("unidirectional") else None
    return joined(call, _attended(call, query, key, value, _kept(call, mask, batch, keys), bias, seen=seen)[0])


@operator("Attention", domain=MICROSOFT)
def _packed(
    call: Call, x: Any, weight: Any, offset: Any = None, mask: Any = None, past: Any = None, bias: Any = None,
    length: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    _refuse(
        past_sequence_length=length, **{each: call.get(each) for each in ("do_rotary", "past_present_share_buffer")}
    )
    made = matmul(call, x, weight)
    made = made if offset is None else add(call, made, offset)
    heads, sizes = call.get("num_heads"), call.get("qkv_hidden_sizes") or [made.shape[-1] // 3] * 3
    query, key, value = (by_head(call, each, heads) for each in parts(call, made, sizes, -1))
    if past is not None:
        key, value = (_cached(call, call.move(past, itemgetter(i)), x) for i, x in enumerate((key, value)))
    z = _masked(call, query, key, value, mask, bias)
    if not any(call.node.output[1:]):
        return z, None
    return z, call.apply("Concat", *(call.move(each, lambda t: t[None]) for each in (key, value)), axis=0)


@operator("MultiHeadAttention")
def _multi_head(
    call: Call, query: Any, key: Any = None, value: Any = None, offset: Any = None, mask: Any = None, bias: Any = None,
    past_key: Any = None, past_value: Any = None, length: Any = None, indirection: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    _refuse(past_sequence_length=length, cache_indirection=indirection)
    heads = call.get("num_heads")
    packed = query if query.ndim == _PACKED else key if key is not None and key.ndim == _PACKED else None
    if packed is not None:
        flat = call.move(packed, lambda t: np.moveaxis(t, 3, 0).reshape(t.shape[3], *t.shape[:2], -1))
        sides = [call.move(flat, itemgetter(place)) for place in range(packed.shape[3])]
        query, key, value = sides if packed is query else (query, *sides)
    if offset is not None:
        width = query.shape[-1]
        offsets = parts(call, offset, [width, width, offset.shape[0] - 2 * width], -1)
        pairs = zip((query, key, value), offsets, strict=True)
        query, key, value = (x if x.ndim == _HEADED else add(call, x, each) for x, each in pairs)
    query, key, value = (x if x.ndim == _HEADED else by_head(call, x, heads) for x in (query, key, value))
    key, value = _cached(call, past_key, key), _cached(call, past_value, value)
    return _masked(call, query, key, value, mask, bias), key, value


@operator("GroupQueryAttention", table=True)
def _grouped(
    call: Call, query: Any, key: Any, value: Any, past_key: Any, past_value: Any, lengths: Any, longest: Any,
    cos: Any = None, sin: Any = None, positions: Any = None, bias: Any = None, sink: Any = None,
    key_scale: Any = None, value_scale: Any = None, query_norm: Any = None, key_norm: Any = None, *more: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Keys have positions: a cache may be longer than what is in it, or hold the last ones only."""
    _refuse(
        k_scale=key_scale, v_scale=value_scale, causal=1 - call.get("causal", 1), query_seqlens=next(iter(more), None)
    )
    heads, groups = call.get("num_heads"), call.get("kv_num_heads")
    if key is None:
        width = query.shape[-1] // (heads + 2 * groups)
        query, key, value = parts(call, query, [heads * width, groups * width, groups * width], -1)
    query, key, value = (by_head(call, x, n) for x, n in ((query, heads), (key, groups), (value, groups)))
    query, key = _normed(call, query, query_norm, "q"), _normed(call, key, key_norm, "k")
    batch, _, tokens, _ = query.shape
    total = np.array(integers(lengths)) + 1
    before = np.zeros_like(total) if integers(longest)[0] == tokens else total - tokens
    places = before[:, None] + np.arange(tokens)
    if call.get("do_rotary"):
        pairs, at = call.get("rotary_interleaved"), places if positions is None else positions
        if positions is not None and integers(longest)[0] == tokens:  # of a prompt, the kernel reads the first one
            at = np.broadcast_to(np.asarray(positions).flat[0] + np.arange(tokens), (batch, tokens))
        query, key = (_turned(call, x, cos, sin, at, pairs) for x in (query, key))
    held_at, presents = _positions(call, past_key, before, total, tokens, integers(longest)[0])
    key, value = _cached(call, past_key, key), _cached(call, past_value, value)
    key_places = np.concatenate([held_at, places], 1)
    cached = [key, value]
    if presents is not None:
        index = presents[:, None, :, None]
        cached = [call.move(x, lambda t: np.take_along_axis(t, index, 2)) for x in cached]
        bias = None if bias is None else call.move(bias, lambda t: _columns(t, batch, key_places))
    seen = key_places[:, None, None] <= places[:, None, :, None]
    window = call.get("local_window_size", -1)
    if window >= 0:
        seen = seen & (key_places[:, None, None] > places[:, None, :, None] - window)
    tail = None
    if sink is not None or call.get("smooth_softmax", 0) > 0:
        tail = call.entries(np.zeros(1, np.float32) if sink is None else sink).reshape(1, -1, 1, 1)
    return joined(call, _attended(call, query, key, value, bias, seen=seen, tail=tail)[0]), *cached


def _normed(call: Call, x: Any, scale: Any, side: str) -> Any:
    if scale is None:
        return x
    epsilon = call.get(f"{side}_norm_epsilon", call.get("qk_norm_epsilon", 1e-6))
    return call.apply("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=epsilon)


def _columns(bias: Array, batch: int, places: Array) -> Array:
    """Columns of a bias by the positions of keys; arbitrary where the bias has none."""
    bias = np.broadcast_to(bias, (batch, *bias.shape[1:]))
    return np.asarray(np.take_along_axis(bias, np.where(places < bias.shape[-1], places, 0)[:, None, None], -1))


def _positions(
    call: Call, past: Any, before: Array, total: Array, tokens: int, longest: int
) -> tuple[Array, Array | None]:
    """The positions of the keys in a cache [batch, keys], and which of them and the new ones the next cache holds."""
    space, windows = 0 if past is None else past.shape[2], call.get("sliding_window_cache", 0)
    if not space:
        return np.zeros((len(before), 0), np.int64), None

    def resident(count: Array) -> Array:
        if not windows:
            return np.minimum(count, space)
        step = space - (call.get("local_window_size", -1) - 1)
        return np.asarray(count - -(-np.maximum(count - space, 0) // step) * step)

    held, places = resident(before)[:, None], np.arange(space)
    held_at = np.where(places < held, before[:, None] - held + places, _NOWHERE)
    gone = held + tokens - resident(total)[:, None] if windows else 0
    index = np.arange(space if windows else max(space, longest)) + gone
    behind = np.where(index < space, index, space + tokens - 1)  # the unused tail of the cache is unchanged
    index = np.where(index < held, index, np.where(index < held + tokens, index + space - held, behind))
    return held_at, index


# -- ONNX --------------------------------------------------------------------------------------------------------------


@operator("Attention")
def _attention(
    call: Call, query: Any, key: Any, value: Any, mask: Any = None, past_key: Any = None, past_value: Any = None,
    lengths: Any = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    flat = query.ndim < _HEADED
    if flat:
        query = by_head(call, query, call.get("q_num_heads"))
        key, value = (by_head(call, x, call.get("kv_num_heads")) for x in (key, value))
    before = 0 if past_key is None else past_key.shape[2]
    key, value = _cached(call, past_key, key), _cached(call, past_value, value)
    tokens, keys = query.shape[2], key.shape[2]
    seen: Any = None
    if lengths is not None:
        counts = np.array(integers(lengths)).reshape(-1, 1, 1, 1)
        seen, before = np.arange(keys) < counts, counts - tokens
    if call.get("is_causal"):
        earlier = _earlier(tokens, keys, before)
        seen = earlier if seen is None else seen & earlier
    bias = None
    if mask is not None:
        boolean, missing = isinstance(mask, np.ndarray) and mask.dtype.kind == "b", keys - mask.shape[-1]
        if missing > 0:  # keys behind the mask are not seen
            filler = np.full((*mask.shape[:-1], missing), False if boolean else np.float32(-np.inf))
            mask = call.apply("Concat", mask, filler, axis=mask.ndim - 1)
        if boolean:
            seen = mask if seen is None else seen & mask
        else:
            bias = mask
    z, stages = _attended(call, query, key, value, bias, seen=seen)
    stage = stages[call.get("qk_matmul_output_mode", 0)]
    return joined(call, z) if flat else z, key, value, stage


# -- rotary embeddings -------------------------------------------------------------------------------------------------


def _turned(call: Call, x: Any, cos: Any, sin: Any, positions: Any, interleaved: Any, width: int = 0) -> Value:
    """Queries or keys [batch, heads, tokens, channels], of which the first `width` channels are turned.

    Tables are by position, or [batch, tokens, width / 2] without positions.
    """
    f, x = call.f, call.entries(x)
    if positions is not None:
        at = plain(positions)
        cos, sin = (call.move(table, lambda t: t[at]) for table in (cos, sin))
    cos, sin = (call.entries(table)[:, None] for table in (cos, sin))
    width = width or 2 * cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    one, two = (part[..., ::2], part[..., 1::2]) if interleaved else np.split(part, 2, -1)
    made = f.sub(f.mul(one, cos), f.mul(two, sin)), f.add(f.mul(one, sin), f.mul(two, cos))
    part = np.stack(made, -1).reshape(part.shape) if interleaved else np.concatenate(made, -1)
    return Value(np.concatenate([part, rest], -1))


@operator("RotaryEmbedding", domain=MICROSOFT, table=True)
def _rotary_of_onnxruntime(call: Call, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
    _refuse(is_packed_batching=call.get("is_packed_batching"))
    if np.size(positions) == 1:
        positions = positions.reshape(-1, 1) + np.arange(x.shape[-2])
    return _rotary(call, x, cos, sin, positions)


@operator("RotaryEmbedding")
def _rotary(call: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    flat = x.ndim < _HEADED
    data = by_head(call, x, call.get("num_heads") or x.shape[-1] // (2 * cos.shape[-1])) if flat else x
    made = _turned(call, data, cos, sin, positions, call.get("interleaved"), call.get("rotary_embedding_dim", 0))
    return joined(call, made) if flat else made
