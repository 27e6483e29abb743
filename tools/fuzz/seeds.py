"""What is damaged: the committed models, and small models of one MLP in every spelling that is known."""

from functools import cache

import onnx

from tests.committed import FILES
from tests.spellings import FIRSTS, GATES, OPERATORS, SPELLINGS
from tests.textmodels import FIRST, SILU, mlp


@cache
def small() -> tuple[onnx.ModelProto, ...]:
    """Models of a few nodes; one in a branch of an If."""
    return (
        *(mlp(body) for _, _, body in SPELLINGS),
        *(mlp(body, **options) for _, _, body, options in OPERATORS),
        *(mlp("s = Sigmoid(y) h = Mul(s, u)", first=first) for _, first, _ in GATES),
        *(mlp(SILU, first=first, **options) for _, first, _, options in FIRSTS),
        mlp(
            "c = Constant<value_ints = [1]>() k = Cast<to = 9>(c) h = If(k) <then_branch = t () => (float[b, t, 8] a)"
            " { a = Relu(y) }, else_branch = e () => (float[b, t, 8] a) { a = Sigmoid(y) }>",
            first=FIRST,
        ),
    )


@cache
def committed() -> tuple[onnx.ModelProto, ...]:
    """The models of the folder `models`."""
    return tuple(onnx.load(str(path)) for path in FILES)
