"""Heads in the forms compact, masked and maskless: right ones are certified, and planted errors are refused.

`tests/sabotage/rows.txt` has more: none of these stands there.
"""

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest

import rewriter
from rewriter import rewrite
from rewriter.proof.records import Certificate
from tests import changes
from tests.changes import add_weight, insert, maker
from tests.committed import FOLDER
from tests.textmodels import ERF_GELU, SILU, mlp, text_model

FORMS = ("masked", "maskless")
GATED = f"u = MatMul(x, V1) {SILU.replace('h =', 'f =')} h = Mul(f, u)"
INVERSE = "n = Neg(y) e = Exp(n) d = Add(one, e) r = Reciprocal(d) f = Mul(y, r) u = MatMul(x, V1) h = Mul(f, u)"
TYPES = ("float", "float16", "bfloat16", "double")


def judged(a: onnx.ModelProto, b: onnx.ModelProto) -> Certificate:
    return rewriter.certify(a, b).certificate


def converted(model: onnx.ModelProto, form: str, **options: Any) -> onnx.ModelProto:
    return rewrite(model, form=form, validate=False, **options).rewritten


THREE, TWO = "float[batch, tokens, 4]", "float[tokens, 4]"
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"SiLU in {elem}": (SILU, {"elem": elem}) for elem in TYPES},
    **{f"GELU in opset {opset}": (ERF_GELU, {"opset": opset}) for opset in (13, 17, 21)},
    "a gate": (GATED, {}),
    "a gate that divides by 1 + exp(-y)": (INVERSE, {"constants": {"one": 1.0}}),
    "a gate behind a Dropout": ("s = Sigmoid(y) m = Mul(y, s) f = Dropout(m) u = MatMul(x, V1) h = Mul(f, u)", {}),
    "ReLU": ("h = Relu(y)", {}),
    "tanh": ("h = Tanh(y)", {}),
    "leaky ReLU": ("h = LeakyRelu(y)", {}),
    "values that are y and a constant": ("s = Mul(y, k) t = HardSigmoid(s) h = Mul(t, k)", {"constants": {"k": -0.6}}),
    "a clip": ("h = Clip(y, low, high)", {"constants": {"low": -0.5, "high": 2.0}}),
    "without biases": (SILU, {"first": "y = MatMul(x, W1)", "second": "out = MatMul(h, W2)"}),
    "no axis of sequences": (SILU, {"inputs": f"{TWO} x", "outputs": f"{TWO} out"}),
    "four axes": (SILU, {"inputs": "float[a, b, c, 4] x", "outputs": "float[a, b, c, 4] out"}),
    "four axes, behind a cast": (ERF_GELU, {"inputs": "float[a, b, c, 4] x", "outputs": "float[a, b, c, 4] out"}),
    "one token": (ERF_GELU, {"inputs": "float[batch, 1, 4] x", "outputs": "float[batch, 1, 4] out"}),
    "one length": (SILU, {"inputs": "float[2, 7, 4] x", "outputs": "float[2, 7, 4] out"}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "form"), [*product(RIGHT, ("local", *FORMS))])
def test_right_heads_are_certified(name: str, form: str) -> None:
    text, options = RIGHT[name]
    given = {key: value.replace("float[", f"{options.get('elem', 'float')}[") if key in ("inputs", "outputs") else value
             for key, value in {"inputs": f"{THREE} x", "outputs": f"{THREE} out", **options}.items()}  # fmt: skip
    model = mlp(text, **given)
    found = judged(model, converted(model, form))
    assert found.certified, [each.text for each in found.refusals]


# -- planted errors ---------------------------------------------------------------------------------------------------


class Planted:
    """A file in which something is changed, by the last part of a tensor's name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model

    def name(self, ending: str) -> str:
        made = (str(name) for node in self.model.graph.node for name in node.output)
        return next(name for name in made if name.endswith(f"/{ending}"))

    def node(self, ending: str) -> onnx.NodeProto:
        return maker(self.model, self.name(ending))

    def nodes(self, ending: str) -> list[onnx.NodeProto]:
        return [node for node in self.model.graph.node if node.output[0].endswith(f"/{ending}")]

    def weight(self, ending: str, statement: str) -> None:
        changes.change_values(changes.weight(self.model, f"*/{ending}"), statement)

    def operand(self, ending: str, place: int, values: Any) -> None:
        """Another constant in the place of an operand."""
        node = self.node(ending)
        add_weight(self.model, f"other_{ending}_{place}", values)
        node.input[place] = f"other_{ending}_{place}"

    def reads(self, ending: str, place: int, other: str) -> None:
        self.node(ending).input[place] = self.name(other)

    def behind(self, ending: str, operator: str, inputs: str, **attributes: Any) -> None:
        """A tensor is replaced by what is computed from it (`@`) and from constants or other tensors."""
        name, node = self.name(ending), self.node(ending)
        node.output[list(node.output).index(name)] = raw = f"{name}_raw"
        names = [raw if each == "@" else self.name(each[1:]) if each[0] == "/" else each for each in inputs.split()]
        insert(self.model, raw, operator, " ".join(names), name, **attributes)

    def before(self, ending: str, place: int, operator: str, inputs: str, **attributes: Any) -> None:
        """A node makes something else of an operand, `@`, for one reader only."""
        node = self.node(ending)
        operand, changed = node.input[place], f"changed_{len(self.model.graph.node)}"
        names = [operand if each == "@" else self.name(each[1:]) if each[0] == "/" else each for each in inputs.split()]
        made = onnx.helper.make_node(operator, names, [changed], changed, **attributes)
        self.model.graph.node.insert(list(self.model.graph.node).index(node), made)
        node.input[place] = changed

    def number(self, *values: Any, dtype: Any = np.int64) -> str:
        """The name of a constant, a vector, or of one number without axes."""
        name = f"number_{len(self.model.graph.initializer)}"
        add_weight(self.model, name, np.asarray(values[0] if len(values) == 1 else values, dtype))
        return name


HALVED = (
    'p.before("z", 1, "Mul", f"@ {p.number(0.5, dtype=np.float32)}"); '
    'p.behind("z", "Mul", f"@ {p.number(2, dtype=np.float32)}")'
)
ROLLED = "f = p.number([0]); o = p.number([1]); e = p.number([2**40]); "
BOTH = {
    "other tokens: the values are those of the next token": ROLLED
    + (
        'p.before("v_all", 0, "Slice", f"@ {o} {e} {o}"); p.before("v_all", 0, "Concat", f"@ /stream", axis=1); '
        'p.before("v_all", 0, "Slice", f"@ {f} /row_count1 {o}")'
    ),
    "sequences: the values are those of the first": ROLLED + 'p.before("v_all", 0, "Slice", f"@ {f} {o} {f}")',
    "sequences: the keys are those of the sequences in reverse": ROLLED
    + ('m = p.number([-1]); n = p.number([-2**40]); p.before("v_all", 0, "Slice", f"@ {m} {n} {f} {m}")'),
    "sequences: a mean over them is added": ('p.behind("v_all", "ReduceMean", "@", axes=[0], keepdims=1)'),
    "the slice begins behind the first token": 'p.operand("tokens_only", 1, [1])',
    "the slice is one of sequences": 'p.operand("tokens_only", 3, [0])',
    "the slice ends at as many tokens as there are sequences": 'p.reads("tokens_only", 2, "batch")',
    "the slice ends at 19 tokens": 'p.operand("tokens_only", 2, [19])',
    "indicators are twos": 'p.weight("token_indicator", "v *= 2")',
    "indicators are off by a part of 1e-9": 'p.weight("token_indicator", "v *= 1 + 1e-9")',
    "indicators for as many tokens as there are sequences": 'p.reads("indicators_shape", 1, "batch")',
    "two bias tokens are one": 'p.weight("bias_token", "v[0, 1] = v[0, 0]")',
    "a bias token is a token as well": 'p.weight("bias_token", "v[0, 0, 4] = 1")',
    "a bias token reads x": 'p.weight("bias_token", "v[0, 0, 0] = 1")',
    "bias tokens of the second sequence": 'p.operand("bias_tokens", 1, [2, 1, 1])',
    "a key off by 1e-6": 'p.weight("W_K", "v *= 1 + 1e-6")',
    "an offset of one bias token": 'p.weight("W_K", "v[0, -1, 1] += 1e-5")',
    "the sign of a key": 'p.weight("W_K", "v[0, -1, 0] *= -1")',
    "tokens have a key": 'p.weight("W_K", "v[0, 4, 0] = 0.01")',
    "keys read x": 'p.weight("W_K", "v[0, 0, 0] = 1e-3")',
    "a value of tokens": 'p.weight("W_V_constants", "v[0, 4] += 1e-4")',
    "one head has another value": (
        'p.behind("W_V", "Mul", f"@ {p.number(np.where(np.arange(8) == 3, 1.001, 1)[:, None, None], dtype=float)}")'
    ),
    "one head's bias token has another value": (
        'w = np.ones((8, 13, 1)); w[3, -1] = 1.001; p.behind("W_V", "Mul", f"@ {p.number(w, dtype=float)}")'
    ),
    "one head's queries have another offset": (
        'w = np.ones((8, 13, 2)); w[3, 4, 1] = 1.001; p.behind("W_Q", "Mul", f"@ {p.number(w, dtype=float)}")'
    ),
    "heads are those of other columns": ('p.behind("q_flat", "Gather", f"@ {p.number(np.arange(16)[::-1])}", axis=1)'),
    "queries beyond 5 are clipped": 'p.weight("highest_finite_q", "v[...] = 5")',
    "queries through float16": (
        'p.behind("finite_q", "Cast", "@", to=11); p.before("finite_q", 0, "Cast", "@", to=10); '
        'p.before("finite_q", 0, "Cast", "@", to=11)'
    ),
    "scores are halved": 'p.before("pattern", 0, "Mul", f"@ {p.number(0.5, dtype=float)}")',
    "1 % of what every token attends to is the mean of all": (
        'p.behind("pattern", "Add", f"@ {p.number(1e-9, dtype=float)}")'
    ),
    "z is larger where there are 41 tokens": (
        'p.before("z_by_token", 0, "Where", f"/is_41 {p.number(1.001, dtype=float)} @")'
    ),
    "z is larger where there is one token": (
        'p.before("z_by_token", 0, "Where", f"/is_1 {p.number(1.001, dtype=float)} @")'
    ),
    "values are for ten rows, two tokens and eight bias tokens": (
        'p.before("z", 1, "Mul", f"@ {p.number(np.ones((1, 1, 10, 1)), dtype=float)}")'
    ),
    "heads and tokens change places": (
        'p.behind("z_by_token", "Transpose", "@", perm=[0, 2, 1, 3]); p.behind("z", "Identity", "@")'
    ),
    "heads and rows change places": 'p.behind("z_side_by_side", "Transpose", "@", perm=[0, 2, 1])',
    "as many rows as there are heads": 'p.operand("z_side_by_side", 1, [0, 8, -1])',
    "no bias behind the heads": 'changes.becomes(p.node("attn_out_biased"), "Identity")',
    "W_O is off by 1e-7": 'p.behind("W_O_flat", "Mul", f"@ {p.number(1 + 1e-7, dtype=float)}")',
}
POSITIONS = {
    "masked": {
        "beyond 40 tokens only bias tokens are seen": 'p.before("scores", 0, "Where", "/many /is_bias @")',
        "a part of 1e-9 of all other tokens' values is added": (
            'p.behind("pattern", "Where", f"/mask @ {p.number(1e-9, dtype=float)}")'
        ),
        "the next token is seen as well": 'p.before("before_bias", 1, "Sub", f"@ {p.number([1])}")',
        "none is seen but bias tokens": 'p.before("scores", 0, "And", "@ /is_bias")',
        "bias tokens are seen beyond 40 rows only": 'p.before("scores", 0, "Where", f"/many @ /diagonal")',
        "positions begin at 1": 'p.operand("positions", 0, 1)',
        "positions are even": 'p.operand("positions", 2, 2)',
        "positions of another tensor": 'p.reads("stream_shape", 0, "tokens")',
        "positions are those of sequences": 'p.operand("row_count", 1, 0)',
        "forbidden scores are 0": 'p.weight("forbidden", "v[...] = 0")',
        "forbidden scores are infinite": 'p.weight("forbidden", "v[...] = np.inf")',
        "the mask is negated": 'p.before("scores", 0, "Not", "@")',
        "what is masked is the query": 'p.before("scores", 0, "Transpose", "@", perm=[1, 0])',
    },
    "maskless": {
        "omega is 150, for values that may be half the largest number": (
            'p.weight("position_scores_minus_omega", "v[...] = -150"); ' + HALVED
        ),
        "what others add is within a function": 'p.behind("z", "Tanh", "@")',
        "omega is 100": 'p.weight("position_scores_minus_omega", "v[...] = -100")',
        "omega is 0": 'p.weight("position_scores_minus_omega", "v[...] = 0")',
        "one pair of tokens sees each other": (
            "w = np.full((24, 24), -1024.0); w[12, 20] = 0; p.operand('position_scores_W_QK', 2, w)"
        ),
        "one token has another score": (
            "w = np.zeros((24, 24)); w[20, 20] = -1; p.operand('position_scores_W_QK', 1, w)"
        ),
        "one token sees a bias token less": (
            "w = np.zeros((24, 24)); w[20, 3] = -1; p.operand('position_scores_W_QK', 1, w)"
        ),
        "bias tokens have another score": (
            "w = np.zeros((24, 24)); w[8:, 3] = -1; p.operand('position_scores_W_QK', 1, w)"
        ),
        "tokens have the positions of bias tokens": (
            'p.operand("one_hot_positions", 1, [7]); p.operand("one_hot_positions", 2, [23])'
        ),
        "columns of positions are off by one": 'p.operand("positions", 1, [4]); p.operand("positions", 2, [28])',
        "positions of the second sequence": (
            'p.operand("position_scores_rows", 1, [1]); p.operand("position_scores_rows", 2, [2])'
        ),
        "positions of the last sequences": 'p.operand("position_scores_rows", 2, [2])',
        "positions are not turned": 'changes.attribute(p.node("position_scores_keys"), perm=[0, 1, 2])',
        "keys of positions are not turned": 'p.reads("position_scores_pairs", 1, "position_scores_rows")',
        "positions as their own scores": 'p.reads("position_scores_pairs", 0, "position_scores_rows")',
        "scores of positions are halved": 'p.behind("position_scores", "Mul", f"@ {p.number(0.1, dtype=float)}")',
        "no scores of positions": 'changes.becomes(p.node("scores"), "Identity")',
        "positions count from the end": (
            'p.behind("one_hot_positions", "Gather", f"@ {p.number(np.arange(16) // 2)}", axis=0)'
        ),
    },
}


HARMLESS = {
    "allowed scores are 1, which softmax does not see": (
        "maskless",
        'p.weight("position_scores_zero", "v[...] = 1"); p.weight("position_scores_minus_omega", "v += 1")',
    ),
    "values are halved, and their products doubled": ("maskless", HALVED),
    "bias tokens that are not there are allowed": ("masked", 'p.operand("end_bias", 1, [9])'),
}


COMPACT = {
    "the heads attend by another block's pre-activations": (
        'first, second = p.nodes("unbounded_q"); second.input[0] = first.input[0]'
    ),
    "keys of bias tokens are laid out for [tokens, batch]": 'changes.swap_inputs(p.node("each_token"))',
    "the indicators are those of all but one token": 'p.node("token_count").input[0] = p.name("batch")',
    "the indicators are twos": (
        'changes.change_values(changes.weight(p.model, p.node("indicators").input[0]), "v *= 2")'
    ),
    "ones in front of the tokens": 'changes.swap_inputs(p.node("stream"))',
    "as many columns of ones as there are sequences": 'p.reads("indicators_shape", 2, "batch")',
    "no bias behind the heads": 'changes.becomes(p.node("attn_out_biased"), "Identity")',
    "W_O is another block's": 'first, second = p.nodes("W_O_flat"); second.input[0] = first.input[0]',
    "heads and tokens change places before z is put side by side": (
        'p.before("z_side_by_side", 0, "Transpose", "@", perm=[0, 2, 1, 3])'
    ),
    # two rows along the batch widen a batch of one, and only that
    "a constant widens the batch": (
        'p.before("z_side_by_side", 0, "Mul", f"@ {p.number(np.ones((2, 1, 1, 1)), dtype=np.float32)}")'
    ),
    "scores are negated": 'p.before("pattern", 0, "Neg", "@")',
    "scores are those of the sequences in reverse": 'p.before("pattern", 0, "Gather", f"@ {p.number([-1])}", axis=0)',
    "values are those of the first head": 'p.before("z_self", 1, "Gather", f"@ {p.number([0])}", axis=2)',
    "one key is off by 1e-5": 'p.weight("k_bias", "v[-1, 0] *= 1 + 1e-5")',
    "self and a bias token change places": (
        'p.before("scores", 0, "Gather", f"@ {p.number([1, 0, *range(2, 9)])}", axis=3)'
    ),
}


@cache
def right(form: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    if form == "compact":  # two blocks
        made = rewrite(str(FOLDER / "gelu-encoder.onnx"), form=form, validate=False).rewritten
        return onnx.load(FOLDER / "gelu-encoder.onnx"), onnx.inliner.inline_local_functions(made)
    model = mlp(ERF_GELU)
    return model, converted(model, form, **({"max_tokens": 16} if form == "maskless" else {}))


def with_sizes(p: Planted) -> None:
    """Conditions on the number of tokens, for errors that read them."""
    tokens = p.name("token_count")
    insert(p.model, tokens, "Equal", f"{tokens} {p.number([41])}", "sizes/is_41")
    insert(p.model, tokens, "Equal", f"{tokens} {p.number([1])}", "sizes/is_1")
    insert(p.model, tokens, "Less", f"{p.number([40])} {tokens}", "sizes/many")
    insert(p.model, tokens, "Add", f"{tokens} {p.number([9])}", "sizes/row_count1")


PLANTED: Mapping[str, Mapping[str, str]] = {
    "masked": BOTH | POSITIONS["masked"], "maskless": BOTH | POSITIONS["maskless"], "compact": COMPACT,
}  # fmt: skip
SIZES = {"z is larger where there are 41 tokens", "positions of the last sequences"}
"""The same at the sizes tried, as their certificate says; the second fails to run for more than two sequences."""


@pytest.mark.sample(1, turns=False)
@pytest.mark.parametrize(
    ("form", "name"),
    [pytest.param(form, name, id=f"{form}: {name}") for form, errors in PLANTED.items() for name in errors],
)
def test_planted_errors_are_refused(form: str, name: str) -> None:
    original, model = right(form)
    p = Planted(changes.copied(model))
    if form != "compact":
        with_sizes(p)
    before = p.model.SerializeToString()
    changes.run(PLANTED[form][name], p=p, changes=changes)
    assert p.model.SerializeToString() != before
    found = judged(original, p.model)
    assert not found.certified or (name in SIZES and found.sizes)


HARMLESS["nothing is changed"] = ("masked", "with_sizes(p)")


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_the_same_function_is_certified(name: str) -> None:
    form, statement = HARMLESS[name]
    original, model = right(form)
    p = Planted(changes.copied(model))
    changes.run(statement, p=p, with_sizes=with_sizes)
    assert judged(original, p.model).certified


@pytest.mark.slow
def test_what_many_tokens_may_add_up_to_is_not_counted_once() -> None:
    """Values that are the same for all tokens: one more of weight 1e-17 is within the limit, 2^63 more are not."""
    original = mlp("h = Sigmoid(y)")
    p = Planted(changes.copied(converted(original, "masked")))
    p.behind("pattern", "Where", f"/mask @ {p.number(1e-17, dtype=np.float32)}")
    assert not judged(original, p.model).certified


@pytest.mark.sample(0)
@pytest.mark.parametrize("form", FORMS)
def test_what_heads_write_has_three_axes(form: str) -> None:
    """The product of one head with W_O runs with an axis more too, and its result has that axis."""
    weights = {"in": np.full((4, 1), 0.7), "back": np.full((1, 4), 0.3)}
    body = f"y = MatMul(x, in) {ERF_GELU} out = MatMul(h, back)"
    original = text_model(body, inputs=f"{THREE} x", outputs=f"{THREE} out", constants=weights)
    p = Planted(changes.copied(converted(original, form)))
    changes.becomes(p.node("z_side_by_side"), "Identity")
    assert not judged(original, p.model).certified


HEADS_OF_BOTH = {
    "a key": ("masked", 'p.weight("W_K", "v[0, -1, 0] *= 1 + 1e-5")'),
    "a key over static keys": ("compact", 'p.weight("k_bias", "v *= 1 + 1e-5")'),
    "a value": ("maskless", 'p.weight("W_V_constants", "v[0, -1] *= 1 + 1e-5")'),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", HEADS_OF_BOTH)
def test_two_models_with_heads_are_told_apart(name: str) -> None:
    """Heads of the same operands, in both models, are the same only if they compute the same."""
    form, statement = HEADS_OF_BOTH[name]
    model = converted(mlp(ERF_GELU), form)
    p = Planted(changes.copied(model))
    assert judged(model, p.model).certified
    changes.run(statement, p=p)
    assert not judged(model, p.model).certified


def test_one_position_is_not_that_of_many_tokens() -> None:
    """Where only one token has a position, there is no other; where all have the same, each sees all."""
    original = mlp(ERF_GELU)
    p = Planted(changes.copied(converted(original, "maskless", max_tokens=1)))
    assert judged(original, p.model).certified
    p.reads("token_positions_each", 1, "indicators_shape")
    assert not judged(original, p.model).certified
