"""Text as inputs: ids, and what follows from them; the spelling of tokens; one line for what does not fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from numpy.typing import NDArray

from rewriter import heads
from rewriter.errors import UsageError
from rewriter.files.tokenizer import refusing
from rewriter.interpret.index import HeadIndex
from rewriter.interpret.run import Text, cases_of
from tests.committed import FOLDER
from tests.textmodels import word_tokenizer

tokenizers = pytest.importorskip("tokenizers")

WORDS = ("[UNK]", "the", "cat", "sat", "\u200bx", "a\tb")


def tokenizer() -> Any:
    return word_tokenizer(WORDS)


def looks_up(inputs: str, table: int = 6) -> HeadIndex:
    """Looks its ids up in a table with that many rows; the other inputs are read and no more."""
    names = [each.split()[-1].split("[")[0] for each in inputs.split(";")]
    others = "\n".join(f"{name}_out = Identity({name})" for name in names[1:])
    outputs = ", ".join(["float[b, s, 2] looked_up", *(f"{each.strip()}_out" for each in inputs.split(";")[1:])])
    zeros = ", ".join(["0"] * (2 * table))
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g ({inputs.replace(";", ", ")}) => ({outputs})
    <float[{table}, 2] table = {{{zeros}}}> {{ looked_up = Gather(table, {names[0]})
    {others} }}"""
    return heads(onnx.parser.parse_model(text))


def feeds(inputs: str, text: str = "the cat sat") -> Mapping[str, NDArray[Any]]:
    (case,) = cases_of(looks_up(inputs), Text(text, tokenizer())).cases
    return case.feeds


@pytest.mark.parametrize(
    ("further", "wanted"),
    [
        ("int64[b, s] attention_mask", np.ones((1, 3), np.int64)),
        ("bool[b, s] attention_mask", np.ones((1, 3), np.bool_)),
        ("float[b, 1, s, s] attention_mask", np.ones((1, 1, 3, 3), np.float32)),
        ("int64[b, s] position_ids", np.array([[0, 1, 2]])),
        ("int32[b, s] token_type_ids", np.zeros((1, 3), np.int32)),
        ("float[b, 4, past, 8] past_key_values_0_key", np.zeros((1, 4, 0, 8), np.float32)),
        ("int64[1] total_sequence_length", np.array([3])),
        ("bool[1] use_cache_branch", np.array([False])),
    ],
)
def test_inputs_beside_the_ids(further: str, wanted: NDArray[Any]) -> None:
    name = further.rsplit(maxsplit=1)[-1]
    given = feeds(f"int64[b, s] input_ids; {further}")
    np.testing.assert_array_equal(given["input_ids"], [[1, 2, 3]])
    assert given[name].dtype == wanted.dtype
    np.testing.assert_array_equal(given[name], wanted)


def test_every_text_is_a_case() -> None:
    index = looks_up("int32[b, s] input_ids; int64[b, s] attention_mask")
    found = cases_of(index, Text(["the cat", "sat"], tokenizer()))
    assert [case.feeds["input_ids"].tolist() for case in found.cases] == [[[1, 2]], [[3]]]
    assert [case.feeds["attention_mask"].shape for case in found.cases] == [(1, 2), (1, 1)]
    assert found.cases[0].feeds["input_ids"].dtype == np.int32
    assert found.spelled == (("the", "cat"), ("sat",))


def test_padding_and_truncation_of_the_file_do_not_count(tmp_path: Path) -> None:
    own = tokenizer()
    own.enable_padding(length=8)
    own.enable_truncation(1)
    own.save(str(tmp_path / "tokenizer.json"))
    index = looks_up("int64[b, s] input_ids")
    for place in (tmp_path, tmp_path / "tokenizer.json", own):
        assert cases_of(index, Text("the cat", place)).cases[0].feeds["input_ids"].tolist() == [[1, 2]]
    assert own.padding is not None, "the caller's own tokenizer changed"


def test_spellings() -> None:
    found = cases_of(looks_up("int64[b, s] input_ids"), Text("\u200bx", tokenizer()))
    assert found.spelled == (("\N{REPLACEMENT CHARACTER}x",),)
    assert found.entries((5, -1, 2), 6) == ("a\\tb", "a\\tb", "cat")
    assert found.entries([2], 4) == (), "an output with fewer entries than the tokenizer has tokens is something else"
    assert found.entries([2, 7], 8) == ()


def test_bytes_that_are_no_characters_have_the_tokenizers_name() -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = tokenizers.Tokenizer(tokenizers.models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    found = cases_of(looks_up("int64[b, s] input_ids", table=256), Text("é\n", own))
    assert found.spelled == (("Ã", "©", "\\n"),)


@pytest.mark.parametrize(
    ("inputs", "text", "message"),
    [
        ("int64[b, s] input_ids", "", "makes no tokens of ''"),
        ("int64[b, s] input_ids", [], "there is no text"),
        ("int64[b, 4] input_ids", "the cat", "has shape [1, 4], which one text does not fill"),
        ("int64[2, s] input_ids", "the cat", "has shape [2, 2], which one text does not fill"),
        ("int64[b, s] input_ids; int64[b, s] decoder_input_ids", "the", "one input of token ids, and there are 2"),
        ("int64[b, s] input_ids; float[b, 3, h, w] pixel_values", "the", "what input 'pixel_values' is"),
        ("int64[b, s] input_ids", "the \udcff", "the tokenizer cannot encode"),
    ],
)
def test_refusals(inputs: str, text: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        cases_of(looks_up(inputs), Text(text, tokenizer()))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_of_another_model() -> None:
    message = "gives token 3, and the model knows 3: the tokenizer belongs to another model"
    with pytest.raises(UsageError, match=message):
        cases_of(looks_up("int64[b, s] input_ids", table=3), Text("the cat sat", tokenizer()))


def test_more_tokens_than_positions() -> None:
    index = heads(FOLDER / "silu-decoder.onnx")
    assert cases_of(index, Text("the " * 64, tokenizer())).cases[0].feeds["input_ids"].shape == (1, 64)
    with pytest.raises(UsageError, match="the text has 65 tokens, and the model takes at most 64"):
        cases_of(index, Text("the " * 65, tokenizer()))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}', "\x00\xff"])
def test_files_that_are_no_tokenizer(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"is not a tokenizer\.json") as error:
        cases_of(looks_up("int64[b, s] input_ids"), Text("the", path))
    assert "\n" not in str(error.value)


def test_panics_are_refused_and_interrupts_are_not() -> None:
    class PanicError(BaseException):
        pass

    with pytest.raises(UsageError, match="cannot: a panic"), refusing("cannot"):
        raise PanicError("a panic\nof two lines")
    with pytest.raises(KeyboardInterrupt), refusing("cannot"):
        raise KeyboardInterrupt


def test_no_file(tmp_path: Path) -> None:
    for place, message in ((tmp_path, "no such file"), (tmp_path / "x", "no such file"), (3, "not a int")):
        with pytest.raises(UsageError, match=message):
            cases_of(looks_up("int64[b, s] input_ids"), Text("the", place))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'attnonly\[text\]'"):
        cases_of(looks_up("int64[b, s] input_ids"), Text("the", tmp_path))
