"""Attention and rotary embeddings: rows that `test_defined_rows.py` evaluates too, written out, and with caches."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from rewriter.graph.attention import with_plain
from tests.rewriter.evaluate import single
from tests.rewriter.evaluate.judged import BOTH, MICROSOFT, Case, any_of, contrib, normal

_RNG = np.random.default_rng(42)
_ORT = ("onnxruntime",)
_x = partial(normal, _RNG)
_any = partial(any_of, _RNG)


def _mask(*shape: int) -> np.ndarray:
    """A boolean mask in which every row keeps its first key."""
    mask = _RNG.random(shape) < 0.7
    mask[..., 0] = True
    return mask


def _onnx() -> Iterator[Case]:
    for number in range(20):
        heads, groups = _any((4, 2), (4, 1), (3, 3))
        batch, tokens, new, before = 2, _any(1, 3, 4), _any(4, 5), _any(0, 2)
        flat, opset = _any(True, False), _any(23, 24)
        total, width, wide = new + before, 6, 4
        operands: list[Any] = [
            _x(batch, tokens, count * size) if flat else _x(batch, count, tokens if place == 0 else new, size)
            for place, (count, size) in enumerate([(heads, width), (groups, width), (groups, wide)])
        ]
        if flat:
            operands[1:] = [_x(batch, new, groups * width), _x(batch, new, groups * wide)]
        shape = _any((tokens, total), (batch, 1, tokens, total), (1, heads, tokens, total))
        operands.append(_any(None, _mask(*shape), _x(*shape)))
        if before:
            operands += [_x(batch, groups, before, width), _x(batch, groups, before, wide)]
        attributes: dict[str, Any] = {"is_causal": _any(0, 1), "softcap": _any(0.0, 2.0)}
        attributes |= {"q_num_heads": heads, "kv_num_heads": groups} if flat else {}
        attributes |= {"scale": 0.3} if number % 3 == 0 else {}
        yield Case("Attention", operands, attributes, outputs=3 if before else 1, opset=opset)
    for mode in range(4):
        operands = [_x(2, 4, 3, 6), _x(2, 2, 3, 6), _x(2, 2, 3, 6), _x(3, 5), _x(2, 2, 2, 6), _x(2, 2, 2, 6)]
        attributes = {"qk_matmul_output_mode": mode, "softcap": 2.0, "is_causal": mode == 3}
        judges = _ORT if mode == 0 else BOTH  # onnx's evaluator caps the products in place
        yield Case("Attention", operands, attributes, outputs=4, opset=24, judges=judges)
    for causal, covered in ((0, 6), (1, 6), (0, 5), (1, 5)):  # caches of several lengths, and a mask that is shorter
        operands = [_x(2, 4, 2, 6), _x(2, 2, 6, 6), _x(2, 2, 6, 6), _x(2, covered), None, None, np.array([3, 5])]
        judges = BOTH if covered == 6 else ("onnx",)
        yield Case("Attention", operands, {"is_causal": causal}, opset=24, judges=judges)
    # a query that sees nothing
    mask = np.array([[False, False, False], [True, False, True]])
    yield Case("Attention", [_x(1, 2, 2, 6), _x(1, 2, 3, 6), _x(1, 2, 3, 6), mask], opset=24)


def _packed() -> Iterator[Case]:
    batch, tokens, heads = 2, 3, 2
    for before in (0, 2):
        total = tokens + before
        masks = [
            None, np.array([2, total]), np.array([total, total - 1, 0, 1]), _mask(batch, total),
            _mask(batch, tokens, total),
        ]  # fmt: skip
        for mask in masks:
            sizes = _any(None, [8, 8, 4]) if not before else None
            width = sum(sizes) if sizes else 24
            operands = [_x(batch, tokens, 8), _x(8, width), _x(width), None if mask is None else mask.astype(np.int32)]
            operands.append(_x(2, batch, heads, before, 4) if before else None)
            operands.append(_any(None, _x(batch, heads, tokens, total)) if not before else None)
            attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": _any(0, 1)}
            attributes |= {"qkv_hidden_sizes": sizes} if sizes else {}
            attributes |= {"mask_filter_value": -50.0} if mask is not None and mask.ndim == 3 else {}
            yield contrib("Attention", operands, attributes, outputs=2 if before else 1)


def _multi_head() -> Iterator[Case]:
    batch, tokens, keys, heads = 2, 3, 5, 2
    sides: list[Any] = [_x(batch, tokens, 8), _x(batch, keys, 8), _x(batch, keys, 8)]
    headed = [sides[0], _x(batch, heads, keys, 4), _x(batch, heads, keys, 4)]
    for operands in [
        sides, [*sides, _x(24)], [*sides, None, np.array([4, 2], np.int32)], headed,
        [*sides, None, _mask(batch, keys).astype(np.int32)], [*sides, None, None, _x(1, heads, tokens, keys)],
        [*sides, _x(24), _mask(batch, tokens, keys).astype(np.int32), _x(batch, 1, tokens, keys)],
    ]:  # fmt: skip
        yield contrib("MultiHeadAttention", operands, {"num_heads": heads, **_any({}, {"scale": 0.3})})
    past = [_x(batch, heads, 2, 4), _x(batch, heads, 2, 4)]
    new = [_x(batch, tokens, 8) for _ in range(3)]
    for causal, bias in ((0, None), (1, None), (1, _x(batch, heads, tokens, tokens + 2))):
        operands = [*new, _any(None, _x(24)), None, bias, *past]
        yield contrib("MultiHeadAttention", operands, {"num_heads": heads, "unidirectional": causal}, outputs=3)


def _tables(width: int) -> list[np.ndarray]:
    angles = _x(16, width // 2)
    return [np.cos(angles), np.sin(angles)]


def _grouped() -> Iterator[Case]:
    width = 16
    for number in range(24):
        heads, groups = _any((4, 2), (4, 1), (2, 2))
        batch, tokens, before = _any((2, 3, 0), (2, 1, 4), (2, 1, 4), (1, 3, 4))
        space = before + _any(0, 3)  # a cache may be longer than what is in it
        held = np.full(batch, before)
        if tokens == 1 and space > before:
            held[0] -= 2
        longest, total = before + tokens, held + tokens
        sides: list[Any] = [_x(batch, tokens, count * width) for count in (heads, groups, groups)]
        if number % 3 == 0:
            sides = [_x(batch, tokens, (heads + 2 * groups) * width), None, None]
        filled = np.arange(space)[:, None] < held[:, None, None, None]
        caches = [np.where(filled, _x(batch, groups, space, width), 0).astype(np.float32) for _ in range(2)]
        operands = [*sides, *caches, total.astype(np.int32) - 1, np.array(longest, np.int32)]
        turned = _any(0, 1)
        operands += _tables(width) if turned else [None, None]
        operands += [None, _any(None, _x(batch, 1, tokens, longest)), _any(None, _x(heads))]
        attributes = {
            "num_heads": heads, "kv_num_heads": groups, "do_rotary": turned, "rotary_interleaved": _any(0, 1),
            "local_window_size": _any(-1, 2, 3), "softcap": _any(0.0, 2.0),
        }  # fmt: skip
        if operands[-1] is None:
            attributes["smooth_softmax"] = _any(0, 1)
        yield contrib("GroupQueryAttention", operands, attributes, outputs=3)


def _step(batch: int, tokens: int, before: int, space: int, positions: Any = None, **attributes: Any) -> Case:
    """New tokens behind a cache that has space for more, or for the last ones only; all sequences are as long."""
    caches = [_x(batch, 2, space, 16) for _ in range(2)]
    operands = [_x(batch, tokens, 64), _x(batch, tokens, 32), _x(batch, tokens, 32), *caches]
    operands += [np.full(batch, before + tokens - 1, np.int32), np.array(before + tokens, np.int32), *_tables(16)]
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, **attributes}
    operands.append(positions)
    return contrib("GroupQueryAttention", operands, attributes, outputs=3)


def _placed() -> Iterator[Case]:
    yield _step(2, 1, 4, 4, np.array([[3], [7]]))
    yield _step(2, 3, 0, 0, np.array([[3, 9, 5], [7, 1, 2]]))  # of which the kernel reads the first one


def _rotary() -> Iterator[Case]:
    for interleaved, width in ((0, 0), (1, 0), (0, 4), (1, 4)):
        table = _tables(width or 8)
        attributes = {"interleaved": interleaved, "rotary_embedding_dim": width}
        positions = _RNG.integers(0, 16, (2, 3))
        counted = attributes | {"num_heads": 4}
        yield Case("RotaryEmbedding", [_x(2, 4, 3, 8), *table, positions], attributes, opset=23)
        yield Case("RotaryEmbedding", [_x(2, 3, 32), *table, positions], counted, opset=23)
        rows = [_x(2, 3, (width or 8) // 2) for _ in range(2)]
        yield Case("RotaryEmbedding", [_x(2, 4, 3, 8), *rows], attributes, opset=23)
        first = np.array([5])
        for place in (positions, first):
            yield contrib("RotaryEmbedding", [_x(2, 3, 32), place, *table], counted)
            yield contrib("RotaryEmbedding", [_x(2, 4, 3, 8), place, *table], counted)


CASES = [*_onnx(), *_packed(), *_multi_head(), *_grouped(), *_placed(), *_rotary()]


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", [case for case in CASES if case.operator != "RotaryEmbedding"], ids=str)
def test_written_out_it_computes_the_same(case: Case) -> None:
    model, feeds = case.made
    plain = with_plain(model)
    assert not any(node.op_type.endswith("Attention") for node in plain.graph.node)
    single.assert_near(single.in_floats(plain, feeds), single.in_floats(model, feeds), 1e-7, 1e-6)
    single.assert_near(single.by_onnxruntime(plain, feeds), single.in_floats(model, feeds), 1e-7, 1e-5)


_SLIDING = [
    (4, 6, 3, 1, 4), (4, 6, 6, 1, 4), (4, 6, 7, 1, 5), (4, 6, 8, 1, 6), (4, 6, 9, 1, 4), (4, 4, 9, 1, 4),
    (4, 8, 0, 3, 3), (4, 6, 4, 3, 4), (4, 6, 7, 2, 6), (4, 6, 0, 9, 6),
]  # fmt: skip


@pytest.mark.parametrize(("window", "space", "before", "tokens", "held"), _SLIDING)
def test_cache_that_holds_the_last_keys(window: int, space: int, before: int, tokens: int, held: int) -> None:
    model, feeds = _step(1, tokens, before, space, local_window_size=window, sliding_window_cache=1).made
    made, *presents = single.in_floats(model, feeds)
    wanted, *others = single.by_onnxruntime(model, feeds)
    np.testing.assert_allclose(made, wanted, atol=1e-5)
    for one, other in zip(presents, others, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one[:, :, :held], other[:, :, :held], atol=1e-6)  # nothing is known of the rest


PARTS = [
    (
        Case("MultiHeadAttention", [_x(2, 3, 2, 3, 4)], {"num_heads": 2}, domain=MICROSOFT),
        """q, k, v = Split <axis=3, num_outputs=3> (x0) dims = Constant <value_ints=[2, 3, 8]> ()
        a = Reshape(q, dims) b = Reshape(k, dims) c = Reshape(v, dims)
        y0 = Attention <q_num_heads=2, kv_num_heads=2> (a, b, c)""",
    ),
    (
        Case("MultiHeadAttention", [_x(2, 3, 8), _x(2, 5, 2, 2, 4)], {"num_heads": 2}, domain=MICROSOFT),
        """k, v = Split <axis=3, num_outputs=2> (x1) dims = Constant <value_ints=[2, 5, 8]> ()
        b = Reshape(k, dims) c = Reshape(v, dims) y0 = Attention <q_num_heads=2, kv_num_heads=2> (x0, b, c)""",
    ),
    (
        Case("RotaryEmbedding", [_x(2, 2, 3, 4), np.array([[1, 2, 3], [0, 5, 7]]), *_tables(4)], domain=MICROSOFT),
        """c = Gather(x2, x1) s = Gather(x3, x1) axis = Constant <value_ints=[1]> () cos = Unsqueeze(c, axis)
        sin = Unsqueeze(s, axis) a, b = Split <axis=-1, num_outputs=2> (x0) ac = Mul(a, cos) bs = Mul(b, sin)
        as = Mul(a, sin) bc = Mul(b, cos) one = Sub(ac, bs) two = Add(as, bc) y0 = Concat <axis=-1> (one, two)""",
    ),
]
