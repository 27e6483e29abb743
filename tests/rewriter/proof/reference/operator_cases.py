"""Examples of operators that compute, as text, in the variants that the float64 evaluation supports.

A line is a node on operands of `OPERANDS`, perhaps with the opsets that it is meant for and how many outputs it gives;
`{a|b}` stands for either. Indented lines continue the one before, which ends at a space or a bar. An operator is tried
at every opset where its definition changed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, parser

Array = NDArray[Any]

LATEST = 28
"""The newest opset that onnxruntime loads."""

_RANDOM = np.random.default_rng(8)


def _normal(*shape: int) -> Array:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def _between(low: float, high: float, *shape: int) -> Array:
    return _RANDOM.uniform(low, high, shape).astype(np.float32)


def _floats(*values: float) -> Array:
    return np.array(values, np.float32)


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


OPERANDS: dict[str, Array] = {
    # elementwise: signs, large and small, inside the domains of functions
    "x": _normal(2, 3, 4), "x2": _normal(2, 3, 4), "x4": _normal(2, 3, 4, 5), "big": 5 * _normal(2, 3, 4),
    "ends": _floats(-200, -50, -20, -3, 0, 3, 20, 50, 200), "unit": _between(-0.99, 0.99, 2, 3, 4),
    "over1": _between(1.01, 9, 2, 3, 4), "pos": _between(0.1, 3, 2, 3, 4), "row": _normal(4), "row2": _normal(4),
    "col": _normal(3, 1) + 3, "one": _normal(1), "two": _floats(2)[0], "three": _floats(3)[0], "lo": _floats(-0.5)[0],
    "hi": _floats(0.7)[0], "yes": _RANDOM.random((2, 3, 4)) < 0.5, "i": _ints(5, -5, 7), "j": _ints(3, 3, -2),
    "cube": _ints(3), "large": _ints(2**24 + 1, 2**53 + 1),
    # axes, shapes, counts
    "a1": _ints(1), "a02": _ints(-1, 0), "none": _ints(), "n0": _ints(0)[0], "n1": _ints(1)[0], "shape": _ints(2, 3, 4),
    # normalisation
    "c3": _normal(3), "c3b": _normal(3), "mean": _normal(3), "var": _between(0.5, 2, 3), "s34": _normal(3, 4),
    "m34": _normal(3, 4), "v34": _between(0.5, 2, 3, 4), "flat": _normal(2, 3), "nchw": _normal(2, 3, 4, 5),
    # convolution
    "img": _normal(2, 4, 9, 8), "w": _normal(6, 4, 3, 2), "w2": _normal(6, 2, 3, 2), "b6": _normal(6),
    "sound": _normal(2, 4, 9), "w1": _normal(6, 4, 3), "deep": _normal(4, 1, 3), "volume": _normal(2, 4, 5, 6, 4),
    "w3": _normal(6, 4, 3, 2, 2),
    # matrices
    "sq": _normal(3, 3), "at": _ints(0, 2, 1, -1, 0, 0).reshape(2, 3), "p34": _normal(3, 4),
    # products
    "q": _normal(2, 4, 5, 8), "k": _normal(2, 2, 5, 8), "val": _normal(2, 2, 5, 8), "causal": np.tri(5) > 0,
    "bias55": _normal(5, 5), "bias4": _normal(2, 1, 5, 5), "pk": _normal(2, 2, 3, 8), "pv": _normal(2, 2, 3, 8),
    "q3": _normal(2, 5, 32), "k3d": _normal(2, 6, 16), "v3d": _normal(2, 6, 16),
    "norow": np.array([[True] * 5] + [[False] * 5] + [[True] * 5] * 3), "m45": _normal(4, 5), "m43": _normal(4, 3),
    "m54": _normal(5, 4), "m31": _normal(3, 1), "b5": _normal(5), "b245": _normal(2, 4, 5), "b243": _normal(2, 4, 3),
    "b254": _normal(2, 5, 4), "k4": _normal(2, 4, 6, 8),
    # so small that what normalisations add to a variance shows
    "faint": 1e-6 * _normal(2, 3, 4), "faint2": 1e-6 * _normal(2, 3, 4),
}  # fmt: skip

LINES = """
{Abs|Asinh|Atan|Ceil|Cos|Cosh|Erf|Exp|Floor|Gelu|HardSwish|Identity|Mish|Neg|Relu|Round|Sigmoid|Sign|Sin|Sinh|
    Softplus|Softsign|Swish|Tanh}(big)
{Celu|Elu|Erf|Gelu|HardSwish|Mish|Selu|Sigmoid|Softplus|Softsign|Swish|Tanh}(ends)
{Acos|Asin|Atanh|Tan}(unit)
Acosh(over1)
{Log|Reciprocal|Sqrt}(pos)
{Celu|Elu|LeakyRelu|ThresholdedRelu}<alpha = {0.3|0.01}>(x)
{LeakyRelu|ThresholdedRelu}(x)
Selu<alpha = 1.3, gamma = 0.7>(x)
HardSigmoid(big)
HardSigmoid<alpha = 0.3, beta = 0.4>(big)
Gelu<approximate = "tanh">(big)
Swish<alpha = 0.5>(x)
SwiGLU<alpha = {0.5|1.0}>(x, x)
Shrink<lambd = 0.4, bias = 0.1>(x)
Clip<min = -0.5, max = 0.7>(x) until 10
Clip<min = 0.1>(x) until 10
Clip(x, {lo|}, {hi|}) since 11
PRelu(x, {one|row|x2})
PRelu(x, col) since 7
{Add|Sub|Mul|Div}(x, {x2|col|row})
Pow(pos, {row|two|x2})
Pow(x, {two|three})
Pow(pos, cube) since 12
Mod<fmod = 1>(x, pos)
Mod<fmod = {0|1}>(i, j)
{Max|Min|Sum|Mean}(x, x2, big)
{Max|Min|Sum|Mean}(x)
{Max|Min|Sum|Mean}(x, col, row) since 8
Equal(i, j)
Equal(x, x2) since 11
{Less|Greater}(x, row)
{Less|Greater}(i, j) since 9
{LessOrEqual|GreaterOrEqual}(x, row)
Where(yes, x, row)
{Softmax|LogSoftmax}({x|x4|big|flat})
{Softmax|LogSoftmax}<axis = {0|1}>(x)
{Softmax|LogSoftmax}<axis = -1>(x4) since 11
{ReduceL1|ReduceL2|ReduceLogSumExp|ReduceMax|ReduceMean|ReduceMin|ReduceProd|ReduceSum|ReduceSumSquare}{|
    <keepdims = 0>}(x)
{ReduceL1|ReduceL2|ReduceLogSumExp|ReduceMax|ReduceMean|ReduceMin|ReduceProd|ReduceSumSquare}<axes = [1]>(x)
    until 17
{ReduceL1|ReduceL2|ReduceLogSumExp|ReduceMax|ReduceMean|ReduceMin|ReduceProd|ReduceSumSquare}<axes = [-1, 0],
    keepdims = 0>(x) since 11 until 17
{ReduceL1|ReduceL2|ReduceLogSumExp|ReduceMax|ReduceMean|ReduceMin|ReduceProd|ReduceSumSquare}{|<keepdims =
    0>}(x, {a1|a02|none}) since 18
{ReduceL1|ReduceL2|ReduceLogSumExp|ReduceMax|ReduceMean|ReduceMin|ReduceProd|
    ReduceSumSquare}<noop_with_empty_axes = 1>(x, {none|}) since 18
ReduceLogSum(pos)
ReduceLogSum<axes = [1]>(pos) until 17
ReduceLogSum(pos, a02) since 18
ReduceSum<axes = [1]>(x) until 12
ReduceSum{|<keepdims = 0>}(x, {a1|a02|none}) since 13
ReduceSum<noop_with_empty_axes = 1>(x, {none|}) since 13
BatchNormalization{|<epsilon = 0.001>|<momentum = 0.9>|<momentum = 0.8, epsilon = 0.001>}({nchw|flat}, c3, c3b,
    mean, var)
BatchNormalization<spatial = 0>(x, s34, m34, m34, v34) until 8
InstanceNormalization{|<epsilon = 0.001>}({nchw|x}, c3, c3b)
LayerNormalization<epsilon = 0.001>(x, row, {row2|})
LayerNormalization<axis = 1>(x, s34)
LayerNormalization(x, row, row2) gives 3
RMSNormalization<epsilon = 0.001>(x, row)
RMSNormalization<axis = 1>(x, s34)
SimplifiedLayerNormalization<epsilon = 0.001>(x, row)
Conv{|<strides = [2, 1], pads = [1, 0, 2, 1]>|<dilations = [2, 2]>|<auto_pad = "SAME_UPPER", strides = [2, 2]>|
    <auto_pad = "SAME_LOWER", strides = [2, 2]>|<auto_pad = "VALID">}(img, w, {b6|})
Conv<group = 2{|, strides = [2, 1], pads = [1, 0, 2, 1]|, auto_pad = "SAME_LOWER"}>(img, w2)
Conv<pads = [1, 1]>(sound, w1, b6)
Conv<group = 4, pads = [1, 1], kernel_shape = [3]>(sound, deep)
Conv(volume, w3, b6)
GlobalAveragePool({img|sound})
CumSum(p34, n1)
CumSum<exclusive = 1, reverse = 1>(p34, n0)
GatherElements(sq, at)
Einsum<equation = "ij,jk->ik">(m54, m45)
Einsum<equation = "bhqd,bhkd->bhqk">(q, k4)
Einsum<equation = "{ii->i|ij->|ij->ji}">(sq)
Einsum<equation = "i,j->ij">(row, c3)
Einsum<equation = "ij,jk,kl->il">(m54, m45, m54)
MatMul(x, {m45|row})
MatMul(row, m45)
Gemm(p34, m45, b5)
Gemm<alpha = 0.5, beta = -0.3, transA = 1, transB = 1>(m43, m54, m31)
Gemm(p34, m45) since 11
ConstantOfShape(shape)
Cast<to = {1|6|7|9}>(big)
Cast<to = {1|11}>(large)
CastLike(i, one)
Attention{|<is_causal = 1>|<scale = 0.3>|<softcap = 2.0>}(q, k, val, {|causal|bias55|bias4})
Attention(q, k, val, norow)
Attention{|<is_causal = 1>}(q, k, val, , pk, pv) gives 3
Attention<q_num_heads = 4, kv_num_heads = 2>(q3, k3d, v3d)
com.microsoft.{Gelu|FastGelu|QuickGelu}({big|ends})
com.microsoft.QuickGelu<alpha = 1.0>(big)
com.microsoft.{FastGelu|BiasGelu}(x, row)
com.microsoft.FusedGemm<activation = "{Relu|Sigmoid}">(p34, m45, b5)
com.microsoft.FusedMatMul<alpha = 0.5>(x, b245)
com.microsoft.FusedMatMul<transA = 1, transB = 1>(b243, b254)
com.microsoft.SkipLayerNormalization<epsilon = 0.001>(x, x2, row, {row2|}, {row|})
com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.001>(x, x2, row, {row2|})
com.microsoft.{SkipLayerNormalization|SkipSimplifiedLayerNormalization}(faint, faint2, row)
"""


@dataclass(frozen=True)
class Case:
    """A node, the opsets that it is meant for, and how many outputs it gives."""

    domain: str
    op_type: str
    node: str
    since: int
    until: int
    outputs: int

    @property
    def operands(self) -> list[str]:
        return [name for name in re.split(r"[ ,]+", self.node[self.node.rindex("(") + 1 : -1]) if name]

    @property
    def opsets(self) -> list[int]:
        """Where the definition changed, from opset 7 on, which is the first that onnxruntime promises to know."""
        if self.domain or not _HISTORY.get(self.op_type):
            return [17]
        versions = {max(version, 7) for version in _HISTORY[self.op_type]} | {self.since}
        first = max(self.since, min(_HISTORY[self.op_type]), 7)
        return sorted(version for version in versions if first <= version <= min(self.until, LATEST))


_HISTORY: dict[str, set[int]] = {}
for _schema in onnx.defs.get_all_schemas_with_history():
    if not _schema.domain:
        _HISTORY.setdefault(_schema.name, set()).add(_schema.since_version)

_LINE = re.compile(
    r"(?P<node>(?P<op>[\w.]+).*?\))(?: since (?P<since>\d+))?(?: until (?P<until>\d+))?(?: gives (?P<n>\d))?"
)


def _spelled(line: str) -> Iterator[str]:
    """A line with each choice of alternatives."""
    parts = [part.split("|") if index % 2 else [part] for index, part in enumerate(re.split(r"[{}]", line))]
    return ("".join(choice) for choice in itertools.product(*parts))


def _cases() -> Iterator[Case]:
    lines = re.sub(r"\n +", " ", re.sub(r"\|\n +", "|", LINES.strip())).splitlines()
    for line in itertools.chain.from_iterable(map(_spelled, lines)):
        found = _LINE.fullmatch(line)
        assert found, line
        domain, _, name = found["op"].rpartition(".")
        yield Case(
            domain, name, found["node"], int(found["since"] or 0), int(found["until"] or 99), int(found["n"] or 1)
        )


CASES = tuple(_cases())
OPERATORS = tuple(dict.fromkeys((case.domain, case.op_type) for case in CASES))


def cases_of(key: tuple[str, str]) -> dict[int, list[Case]]:
    found: dict[int, list[Case]] = {}
    for case in CASES:
        for opset in case.opsets if (case.domain, case.op_type) == key else ():
            found.setdefault(opset, []).append(case)
    return found


def model_of(cases: list[Case], opset: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """All of these cases as one model with all their outputs, and its inputs."""
    names = sorted({name for case in cases for name in case.operands})
    body = "\n".join(
        f"{', '.join(f'out_{number}_{index}' for index in range(case.outputs))} = {case.node}"
        for number, case in enumerate(cases)
    )
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]> operators (float x) => () {{ {body} }}'
    )
    del model.graph.input[:]
    for name in names:
        kind = helper.np_dtype_to_tensor_dtype(OPERANDS[name].dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, kind, OPERANDS[name].shape))
    outputs = [name for node in model.graph.node for name in node.output]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return model, {name: np.asarray(OPERANDS[name]) for name in names}
