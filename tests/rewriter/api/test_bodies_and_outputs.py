"""Names that several graphs use, and outputs that are not one tensor each, through every command."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from rewriter import ExitStatus, ValidationError, certify, diff, heads, inspect, rewrite, validate
from tests.textmodels import integers, text_model, values

C = "float[batch, tokens, 4] x, bool c"
OUT = "float[batch, tokens, 4] out"


def branches(then: str, other: str, *, then_out: str = "p", other_out: str = "q", out: str = "out") -> str:
    shape = "float[batch, tokens, 4]"
    return (
        f"{out} = If(c) <then_branch = t () => ({shape} {then_out}) {{ {then} }}, "
        f"else_branch = e () => ({shape} {other_out}) {{ {other} }}>"
    )


def block(activation: str, out: str, x: str = "x") -> str:
    return f"y = MatMul({x}, W1) {activation} {out} = MatMul(h, W2)"


SOFTPLUS, RELU, SILU = "h = Softplus(y)", "h = Relu(y)", "s = Sigmoid(y) h = Mul(y, s)"
MLP, HIDDEN, ZIP = block(RELU, "out"), "float[batch, tokens, 8] h", "ai.onnx.ml.ZipMap"
BETWEEN = (
    f"{block(SILU, 'z')} sq = SplitToSequence<axis = 1>(z) k = MatMul(x, V1) w = ConcatFromSequence<axis = 1>(sq) "
    "l = Tanh(k) v = MatMul(l, W2) out = Add(v, w)"
)

MODELS: dict[str, tuple[int, onnx.ModelProto]] = {
    # A body may define a name that a graph around it defines later; here with another shape.
    "output of its If": (
        2,
        text_model(branches(block(RELU, "out"), block(SILU, "out"), then_out="out", other_out="out"), inputs=C),
    ),
    "a later name": (
        2,
        text_model(
            f"{branches(block(SILU, 'p'), block(SOFTPLUS, 'q'), out='z')} "
            "f = Flatten<axis = 2>(z) h = MatMul(f, W1) out = Identity(z)",
            inputs=C, outputs=f"{OUT}, float[rows, 8] h",
        ),
    ),
    "initializers of a body": (
        2,
        text_model(
            "out = If(c) <then_branch = t () => (float[batch, tokens, 4] p) <float[8] b = {1, -1, 2, 0, 1, 3, -2, 1}> "
            f"{{ k = MatMul(x, W1) y = Add(k, b) {SILU} p = MatMul(h, W2) }}, "
            "else_branch = e () => (float[batch, tokens, 4] q) "
            f"{{ k = MatMul(x, W1) y = Add(k, b) {RELU} q = MatMul(h, W2) }}>",
            inputs=C, constants={"b": values("b1")},
        ),
    ),
    "equal names in siblings": (2, text_model(branches(block(SOFTPLUS, "p"), block(SOFTPLUS, "q")), inputs=C)),
    "equal names, other activations": (2, text_model(branches(block(SILU, "p"), block(SOFTPLUS, "q")), inputs=C)),
    "equal names in two Ifs": (
        3,
        text_model(
            f"{branches(block(SOFTPLUS, 'p'), 'q = Identity(x)', out='u')} "
            f"{branches('q = Identity(x)', block(SOFTPLUS, 'p'), then_out='q', other_out='p', out='v')} "
            f"w = Add(u, v) {block(SILU, 'out', 'w')}",
            inputs=C,
        ),
    ),
    "a loop's state": (
        1,
        text_model(
            "n = Constant<value_int = 2>() e = MatMul(x, A1) out = Loop(n, c, x) "
            "<body = g (int64 i, bool d, float[batch, tokens, 4] s) => (bool o, float[batch, tokens, 4] t) "
            f"{{ o = Identity(d) {block(RELU, 'z', 's')} t = Add(z, s) }}> e2 = Identity(e)",
            inputs=C, outputs=f"{OUT}, float[batch, tokens, 2] e2",
        ),
    ),
    "outputs of every kind": (
        1,
        text_model(
            f"{MLP} sq = SequenceConstruct(out, h) parts = SplitToSequence<axis = 1>(out) "
            f"f = Flatten<axis = 2>(out) p = Softmax<axis = 1>(f) maps = {ZIP}<classlabels_int64s = [3, 1, 2, 0]>(p) "
            f'words = {ZIP}<classlabels_strings = ["d", "b", "c", "a"]>(p)',
            outputs=f"{OUT}, {HIDDEN}, {OUT}, {HIDDEN}, seq(float[a, b, d]) sq, seq(float[a, b, d]) parts, "
            "seq(map(int64, float[])) maps, seq(map(string, float[])) words",
            domains={"ai.onnx.ml": 1},
        ),
    ),
    "optional output": (1, text_model(f"{MLP} o = Optional(out)", outputs="optional(float[a, b, d]) o")),
    "a sequence between blocks": (2, text_model(BETWEEN)),
    "mask of a Dropout, read by nothing alive": (1, text_model(
        "y = MatMul(x, W1) r = Relu(y) h, mask = Dropout(r) dead = Not(mask) out = MatMul(h, W2)")),
    "mask of a Dropout": (
        1,
        text_model(
            "y = MatMul(x, W1) s = Sigmoid(y) r = Mul(y, s) h, mask = Dropout(r, ratio, train) out = MatMul(h, W2)",
            outputs=f"{OUT}, bool[batch, tokens, 8] mask",
            constants={"ratio": np.array(0.4), "train": onnx.numpy_helper.from_array(np.array(False), "train")},
        ),
    ),
    "mask of a Dropout inside": (
        1,
        text_model(
            "y = MatMul(x, W1) s = Sigmoid(y) d, mask = Dropout(s) h = Mul(y, d) out = MatMul(h, W2)",
            outputs=f"{OUT}, bool[batch, tokens, 8] mask",
        ),
    ),
}  # fmt: skip


def tensors(value: Any) -> list[np.ndarray]:
    if isinstance(value, list):
        return [each for part in value for each in tensors(part)]
    return tensors([*value.keys(), *value.values()]) if isinstance(value, dict) else [np.asarray(value)]


def ran(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return tensors(session.run(None, {each.name: feeds[each.name] for each in session.get_inputs()}))


HIDES = "initializers of a body"
"""In form compact onnxruntime's optimiser takes the outer initializer of that name: the run refuses the result."""


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("case", "form"),
    [(case, "local" if case == HIDES or place % 2 else "compact") for place, case in enumerate(MODELS)],
)
def test_every_command_agrees(case: str, form: str) -> None:
    count, model = MODELS[case]
    planned = rewrite(model.SerializeToString(), form=form, dry_run=True)
    report = rewrite(model, form=form)
    assert (report.exit_status, len(report.converted)) == (ExitStatus.CONVERTED, count), report.problems
    assert len(planned.converted) == count
    made = report.rewritten
    for same in (validate(model, made), diff(model, made)):
        assert (same.exit_status, same.validation.certified) == (ExitStatus.CONVERTED, True), same.problems
        assert not [note for note in same.notes if "plan" in note]
    certificate = certify(model, made)
    assert certificate.exit_status is ExitStatus.CONVERTED, certificate.problems
    assert len(certificate.certificate.regions) <= count, "activations that are equal by value are not listed"
    again = rewrite(made, form=form)
    assert again.exit_status is ExitStatus.NOTHING_TO_CONVERT
    for rows in (again.blocks, inspect(made).report.blocks):
        assert [row.reason for row in rows].count("it is attention heads already") == count
    # Each block is either heads or named with its reason, in both files.
    for each, rows in ((heads(model), planned.blocks), (heads(made), again.blocks)):
        blocks = [named for named in each.sublayers if "mlp_heads" in named.name]
        assert len(blocks) + sum(miss.reason.startswith("block ") for miss in each.missed) == len(rows)
    rng = np.random.default_rng(1)
    for turn in (True, False):
        feeds = {"x": rng.normal(0, 2, (2, 5, 4)).astype(np.float32), "c": np.array(turn)}
        before, after = ran(model, feeds), ran(made, feeds)
        assert len(before) == len(after) > 0
        for a, b in zip(before, after, strict=True):
            assert (a.dtype.kind, a.shape) == (b.dtype.kind, b.shape)
            if a.dtype.kind == "f":
                np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)
            else:
                assert (a == b).all()


def test_a_wrong_run_of_the_outer_initializer_is_refused() -> None:
    report = rewrite(MODELS[HIDES][1], form="compact")
    assert (report.exit_status, report.in_memory) == (ExitStatus.VALIDATION_FAILED, None)


def test_segments_pass_sequences_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.proof.run.SEGMENT", 1)
    report = rewrite(text_model(BETWEEN), proof="blocks")
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert report.validation.segments[0] > 2


SEQUENCE = "a = Abs(x) b = Mul(a, $0.001) out = SequenceConstruct(a, b)"
ZIPPED = f"f = Flatten<axis = 2>(x) p = Softmax<axis = 1>(f) out = {ZIP}<classlabels_int64s = [3, 1, 2, 0]>(p)"
WRONG = [
    (SEQUENCE, ("$0.001", "$0.001001"), "output out[1] is off by 0.001 of its norm"),
    (SEQUENCE, ("(a, b)", "(a, b, b)"), "output out[2] is an element of a sequence that has another length"),
    (SEQUENCE, ("(a, b)", "(b, a)"), "output out[0] is off by 0.999 of its norm"),
    (ZIPPED, ("3, 1", "1, 3"), "output out[0][1] is off by"),
    (ZIPPED, ("3, 1", "4, 1"), "output out[0][0] differs in 5 of 20 entries"),
    ("out = Optional(x)", ("Optional(x)", "Optional<type = float[a, b, d]>()"), "output out has shape [] instead of"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("body", "change", "message"), WRONG)
def test_elements_are_compared_one_by_one(body: str, change: tuple[str, str], message: str) -> None:
    kind = "seq(map(int64, float[])) out" if "ZipMap" in body else "seq(float[a, b, d]) out"
    kind = "optional(float[a, b, d]) out" if "Optional" in body else kind
    one, two = (text_model(text, outputs=kind, domains={"ai.onnx.ml": 1}) for text in (body, body.replace(*change)))
    assert validate(one, one).same
    found = validate(one, two)
    assert found.exit_status is ExitStatus.VALIDATION_FAILED
    assert any(each.startswith(message) for each in found.failures), found.failures


def test_a_sequence_and_a_tensor_under_one_name_are_refused() -> None:
    model = text_model(
        "a = Abs(x) s = SequenceConstruct(a, x) t = Neg(a)", outputs="seq(float[a, b, d]) s, float[a, b, d] t"
    )
    model.graph.output[1].name = model.graph.node[2].output[0] = "s[1]"
    with pytest.raises(ValidationError, match=r"output 's\[1\]' has the name of an element of another; rename it"):
        validate(model, model)


RANK = (
    "shape = Shape(x) four = Concat<axis = 0>(one, shape) s = Compress<axis = 0>(four, keep) "
    f"{block(RELU, 'z')} out = Reshape(z, s)"
)
"""Inference does not know how many sizes `Compress` keeps."""


@pytest.mark.parametrize(("body", "declared"), [(MLP, "float[99, tokens, 4] out"), (RANK, OUT)], ids=["size", "rank"])
def test_outputs_of_other_shapes_than_declared_are_run(body: str, declared: str) -> None:
    """onnxruntime refuses memory of such a shape for them."""
    constants = {**integers(one=[1]), "keep": onnx.numpy_helper.from_array(np.array([True] * 4), "keep")}
    report = rewrite(text_model(body, outputs=declared, constants=constants))
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert any("1 output (out) of the original, when run: shape [" in note for note in report.validation.notes)


@pytest.mark.parametrize(
    ("then", "listed"),
    [
        ("p = LeakyRelu<alpha = 0.3>(y)", True),
        ("i = Identity(y) s = Sigmoid(i) p = Mul(s, i)", True),
        ("p = If(c) <then_branch = v () => (float[a, b, d] r) { r = Tanh(y) }, "
         "else_branch = w () => (float[a, b, d] s) { s = Identity(y) }>", True),
        ("p = Neg(y)", False),
    ],
)  # fmt: skip
def test_an_activation_alone_in_a_body_is_listed(then: str, listed: bool) -> None:
    alone = branches(then, "q = Identity(y)", out="h").replace("tokens, 4]", "tokens, 8]")
    report = rewrite(text_model(f"y = MatMul(x, W1) {alone} out = MatMul(h, W2)", inputs=C), dry_run=True)
    reason = "its activation is inside If 'h', apart from its linear operators; move it out of the body"
    assert [row.reason for row in report.blocks] == [reason] * listed
