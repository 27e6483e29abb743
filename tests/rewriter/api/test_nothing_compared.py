"""`validate` and `diff` never say "same" when nothing was compared."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from rewriter import ExitStatus, UsageError, ValidationError, diff, validate
from tests.changes import becomes, changed, maker
from tests.conftest import Ran
from tests.textmodels import text_model

NONE = "zero = Constant<value_ints=[0]>() "
SECOND = "float[a, b, 4] other"
EMPTY, NOT_FINITE = "has no elements in any case", "is NaN or infinite throughout, in every case"

INCOMPARABLE = {
    "NaN": (text_model("z = Sub(x, x) out = Div(z, z)"), NOT_FINITE),
    "infinite": (text_model("a = Abs(x) b = Add(a, $1.0) z = Sub(x, x) out = Div(b, z)"), NOT_FINITE),
    "empty": (text_model(f"{NONE} out = Slice(x, zero, zero, zero)", outputs="float[a, b, c] out"), EMPTY),
    "empty integers": (text_model(f"{NONE} s = Shape(x) out = Slice(s, zero, zero)", outputs="int64[n] out"), EMPTY),
    "one of two": (
        text_model("other = Abs(x) z = Sub(x, x) out = Div(z, z)", outputs=f"{SECOND}, float[a, b, 4] out"),
        NOT_FINITE,
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", INCOMPARABLE)
@pytest.mark.parametrize("options", [{}, {"atol": 1.0}], ids=["rule", "tolerance"])
def test_an_output_of_which_nothing_was_compared_does_not_pass(what: str, options: dict[str, float]) -> None:
    model, reason = INCOMPARABLE[what]
    found = validate(model, model, **options)  # type: ignore[arg-type]
    assert found.exit_status is ExitStatus.VALIDATION_FAILED
    assert (found.verdict, found.undecided) == ("not proved", (f"nothing could be compared: output out {reason}",))
    assert not diff(model, model, **options)  # type: ignore[arg-type]


def test_some_finite_values_are_enough() -> None:
    model = text_model("out = Sqrt(x)")
    assert validate(model, model).same


def test_an_output_may_be_empty_in_some_cases() -> None:
    """As a cache is before the first token: a slice that only long inputs reach into."""
    body = "one = Constant<value_ints=[1]>() two = Constant<value_ints=[2]>() end = Constant<value_ints=[99]>() "
    model = text_model(f"{body} out = Slice(x, two, end, one)", outputs="float[a, b, 4] out")
    found = validate(model, model)
    assert found.same
    assert any("sequence 1" in case for case in found.validation.cases), "there it is empty"


def test_a_difference_elsewhere_goes_before_what_could_not_be_compared() -> None:
    model, _ = INCOMPARABLE["one of two"]
    found = validate(model, changed(model, lambda other: becomes(maker(other, "other"), "Neg")))
    assert any(each.startswith("output other is off by ") for each in found.failures)
    assert any(each.startswith("nothing could be compared: output out ") for each in found.undecided)


SAME = text_model("out = Abs(x)")
PICKY = text_model("shape = Constant<value_ints=[99, 7, 4]>() out = Reshape(x, shape)", outputs="float[a, b, 4] out")


def given(path: Path, **arrays: NDArray[np.float32]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def filled(*shape: int, value: float = 1.0) -> NDArray[np.float32]:
    return np.full(shape, value, np.float32)


@pytest.mark.parametrize(
    ("x", "reason"), [(filled(0, 3, 4), EMPTY), (filled(2, 3, 4, value=np.nan), NOT_FINITE)], ids=["empty", "NaN"]
)
def test_given_inputs_of_which_nothing_can_be_compared(tmp_path: Path, x: NDArray[np.float32], reason: str) -> None:
    found = validate(SAME, SAME, inputs=given(tmp_path / "given.npz", x=x))
    assert found.undecided == (f"nothing could be compared: output out {reason}",)


def test_given_inputs_of_which_one_case_holds_values(tmp_path: Path) -> None:
    path = given(tmp_path / "given.npz", **{"a/x": filled(0, 3, 4), "b/x": filled(2, 3, 4)})
    assert validate(SAME, SAME, inputs=path).same


def test_given_inputs_do_not_hide_a_difference(tmp_path: Path) -> None:
    inputs, outputs = "float[a, b, 4] x, float[c, d, 4] y", "float[a, b, 4] out, float[c, d, 4] second"
    a, b = (
        text_model(f"out = Abs(x) second = {operator}(y)", inputs=inputs, outputs=outputs)
        for operator in ("Abs", "Neg")
    )
    path = given(tmp_path / "given.npz", x=filled(0, 3, 4), y=filled(1, 3, 4))
    assert any(each.startswith("output second is off by ") for each in validate(a, b, inputs=path).failures)
    assert validate(a, a, inputs=path).undecided == (f"nothing could be compared: output out {EMPTY}",)


@pytest.mark.slow
def test_no_case_that_the_original_accepts(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="the original model runs on none of the 5 inputs tried, nor at other"):
        validate(PICKY, PICKY)
    path = given(tmp_path / "given.npz", x=filled(2, 3, 4))
    with pytest.raises(UsageError, match=r"^given.npz: the original model runs on none of these inputs: the given"):
        validate(PICKY, PICKY, inputs=path)


@pytest.mark.parametrize("command", ["validate", "diff"])
def test_the_command_line_says_so(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "180")
    for name, model in {"nan": INCOMPARABLE["NaN"][0], "two": INCOMPARABLE["one of two"][0], "same": SAME}.items():
        onnx.save(model, f"{name}.onnx")
    text = ran(1, [command, "nan.onnx", "nan.onnx"]).out
    assert text.splitlines()[-1].startswith("NOT PROVED  nan.onnx and nan.onnx: nothing could be compared, in ")
    row = next(line for line in text.splitlines() if NOT_FINITE in line)
    assert not any(character.isdigit() for character in row), "no numbers to report"
    assert "not every output could be compared" in ran(1, [command, "two.onnx", "two.onnx"]).out
    given(Path("given.npz"), x=filled(0, 3, 4))
    text = ran(1, [command, "same.onnx", "same.onnx", "--inputs", "given.npz"]).out
    assert "same.onnx: nothing could be compared" in text
