"""Linear operators spelled as Einsum, and Gemm with data added to the product; a near miss beside each."""

import pytest

from rewriter.graph.fused import einsum_map
from tests.cases import planned, proved
from tests.errors import accurate
from tests.spellings import ROWS
from tests.textmodels import SILU, findings, mlp, only_block, only_left, text_model, values


@pytest.mark.parametrize(
    ("equation", "weight", "found"),
    [
        ("bsd,df->bsf", 1, (-1, 0, 1, 2)),
        ("bsd,fd->bsf", 1, (-1, 1, 0, 2)),
        ("df,bsd->bsf", 0, (-1, 0, 1, 2)),
        ("fd, bsd -> bsf", 0, (-1, 1, 0, 2)),
        ("...d,df->...f", 1, (-1, 0, 1, 2)),
        ("nd,df->nf", 1, (-1, 0, 1, 2)),
        ("fd,bds->bfs", 0, (-2, 1, 0, 2)),
        ("bsd,df->bfs", 1, None),  # input and output on different axes
        ("bsd,df->sbf", 1, None),  # tokens and batch change places
        ("bsd,df->bf", 1, None),  # a sum over tokens
        ("ecd,edf->ecf", 1, (-1, 1, 2, 3)),  # a matrix for each expert
        ("bsd,edf->bsef", 1, (-1, 1, 2, 3)),  # all experts of each token
        ("bsef,efd->bsd", 1, (-1, 1, 2, 3)),  # their sum
        ("ecd,edf->cf", 1, (-1, 1, 2, 3)),  # the same, by contraction
        ("ecd,edf->efc", 1, None),  # the neurons are not last
        ("ecd,edf->ef", 1, None),  # a sum over tokens
        ("d...,df->f...", 1, None),  # the axis cannot be counted from the end
        ("bsd,dd->bsd", 1, None),  # a diagonal
        ("bsd,df", 1, None),  # the output is implied
        ("bsd,ef->bsd", 1, None),  # nothing is contracted
        ("bsd,ds->bsd", 1, None),  # elementwise
        ("", 1, None),
    ],
)
def test_equations(equation: str, weight: int, found: tuple[int, ...] | None) -> None:
    assert einsum_map(equation, weight) == found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('"bsd,df->bsf">(x, W1)', '"bsf,fd->bsd">(h, W2)'),
        ('"bsd,fd->bsf">(x, W1t)', '"bsf,df->bsd">(h, W2t)'),
        ('"df,bsd->bsf">(W1, x)', '"fd,bsf->bsd">(W2, h)'),
        ('"...d,df->...f">(x, W1)', '"...f,fd->...d">(h, W2)'),
    ],
)
@pytest.mark.parametrize("form", ["local", "masked"])
def test_a_block_of_einsums_is_converted(first: str, second: str, form: str) -> None:
    model = mlp(
        SILU,
        first=f"first = Einsum<equation = {first} y = Add(first, b1)",
        second=f"second = Einsum<equation = {second} out = Add(second, b2)",
    )
    block = only_block(model)
    assert [operator.kind for operator in (*block.first, *block.second)] == ["Einsum", "Einsum"]
    assert (block.neurons, block.first[0].in_features, block.first[0].out_features) == (8, 4, 8)
    report = proved(model, form=form)
    assert ("W_Q" in "".join(node.name for node in report.rewritten.graph.node)) is (form == "masked")
    accurate(model, planned(model, form=form))


def test_an_einsum_of_data_is_no_linear_operator() -> None:
    first = 'z = Einsum<equation = "bsd,btd->bst">(x, x) y = Identity(z)'
    found = findings(mlp(SILU, first=first, second='out = Einsum<equation = "bst,btd->bsd">(h, x)'))
    assert not found.blocks


@pytest.mark.parametrize("form", ["local", "compact"])
def test_a_residual_fused_into_the_second_gemm(form: str) -> None:
    model = mlp(SILU, first="y = Gemm(x, W1, b1)", second="out = Gemm(h, W2, x)", **ROWS)
    block = only_block(model)
    assert block.second[0].added == "x"
    proved(model, form=form)
    accurate(model, planned(model, form=form))


def test_data_added_to_the_first_product_is_a_reason() -> None:
    model = text_model(
        f"z = MatMul(x, A1) c = MatMul(z, B1) n = Softmax(c) y = Gemm(x, W1, n) {SILU} out = Gemm(h, W2, b2)", **ROWS
    )
    left = only_left(model)
    assert left.miss.reason == "it adds 'n', which is not constant, to its product"


@pytest.mark.parametrize("rank", [3, 4])
def test_batch_axes_of_size_1_are_no_batch(rank: int) -> None:
    weight = values("W2").reshape((1,) * (rank - 2) + (8, 4))
    inputs = f"float[{'one, ' * (rank - 3)}batch, tokens, 4] x"
    second = "out = MatMul(h, w)"
    model = mlp(SILU, second=second, constants={"w": weight}, inputs=inputs, outputs=inputs.replace(" x", " out"))
    assert (only_block(model).second[0].in_features, only_block(model).second[0].out_features) == (8, 4)
