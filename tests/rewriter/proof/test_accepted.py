"""Sizes that a model fixes by its constants are found; text is among the inputs where a tokenizer lies beside it."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rewriter import ExitStatus, ValidationError, rewrite
from rewriter.files.load import load_model
from rewriter.files.tokenizer import sample_tokens
from rewriter.inputs.cases import Case, Maker
from rewriter.proof.accepted import run_accepted
from rewriter.proof.run import ModelRuns, Way
from rewriter.proof.settings import Settings
from tests.committed import FOLDER as MODELS
from tests.textmodels import filled

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'


def model_of(text: str) -> onnx.ModelProto:
    return filled(onnx.parser.parse_model(f"{HEAD} {text}"), np.random.default_rng(0).standard_normal)


def accepted(model: onnx.ModelProto | Path, *, few: bool = False, dims: Mapping[str, int] | None = None) -> ModelRuns:
    settings = Settings(providers=("cpu",), dims=dims or {})
    return run_accepted(load_model(model), [Way("cpu", optimise=False)], settings, few=few)


SOUND, IMAGE = "float[batch, 4, frames] x", "float[batch, 3, height, width] x"
PATCHES = "c = Conv<strides=[{0}, {0}]>(x, k) f = Reshape(c, flat) t = Transpose<perm=[0, 2, 1]>(f)"
FLAT = "int64[3] flat = {0, 8, -1}"
TRACED = "t = Transpose<perm=[0, 2, 1]>(x) y = Reshape(t, s)"
CASES: Mapping[str, tuple[str, str, str, set[tuple[int, ...]]]] = {
    "positions of sound": (
        SOUND, "c = Conv<strides=[2], pads=[1, 1]>(x, k) y = Add(c, p)", "float[8, 4, 3] k, float[8, 100] p",
        {(1, 4, 200), (3, 4, 200)},
    ),
    "positions of an image": (
        IMAGE, PATCHES.format(8) + " y = Add(t, p)", f"float[8, 3, 8, 8] k, float[16, 8] p, {FLAT}",
        {(1, 3, 32, 32), (3, 3, 32, 32)},
    ),
    "a token more, and patches of 14": (
        IMAGE, PATCHES.format(14) + " b = Shape<start=0, end=1>(x) e = Concat<axis=0>(b, rest) g = Expand(cls, e)"
        " z = Concat<axis=1>(g, t) y = Add(z, p)",
        f"float[8, 3, 14, 14] k, float[50, 8] p, float[1, 1, 8] cls, int64[2] rest = {{1, 8}}, {FLAT}",
        {(1, 3, 99, 99), (3, 3, 99, 99)},
    ),
    "a batch that was traced": (SOUND, TRACED, "int64[3] s = {2, 31, 4}", {(1, 4, 62)}),
    "a length that was traced": (SOUND, TRACED, "int64[3] s = {-1, 31, 4}", {(1, 4, 62), (3, 4, 62)}),
    "frames of a prime number of samples": (
        "float[batch, samples] x", "y = Reshape(x, s)", "int64[3] s = {0, -1, 1009}", {(1, 4036), (3, 4036), (1, 2018)},
    ),
    # One token fits positions of any length, by broadcasting; more is tried.
    "positions of which a single token fits any": (
        "float[batch, sequence, 4] x", "y = Add(x, p)", "float[1, 60, 4] p",
        {(1, 1, 4), (1, 60, 4), (3, 60, 4)},
    ),
    # Where only single rows run, few cases are not only a single token.
    "one row": ("float[batch, sequence, 4] x", "y = Concat<axis=1>(e, x)", "float[1, 2, 4] e", {(1, 17, 4)}),
    "features": ("float[batch, some, more] x", "y = Add(x, p)", "float[6] p", {(1, 17, 6), (3, 17, 6)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_sizes_that_constants_fix(case: str) -> None:
    inputs, body, weights, shapes = CASES[case]
    model = model_of(f"g ({inputs}) => (float y) <{weights}> {{ {body} }}")
    for few in (False, True):
        runs = accepted(model, few=few)
        found = {run.feeds["x"].shape for run in runs.cases}
        assert shapes <= found, runs.skipped


def test_a_limit_leaves_several_sizes() -> None:
    """As relative positions in a table of 31 have: up to 16 frames, with 48 to begin with."""
    model = model_of(
        """g (float[batch, samples] x) => (float y) <int64[1] z = {0}, int64[1] one = {1},
            int64[1] two = {2}, float[1] one_float, int64[1] wide = {16},
            int64[1] k = {100}, float[16] table>
        { s = Shape(x) m = Slice(s, one, two) n = Div(m, k) end = Min(n, wide) t = Slice(table, z, end)
          e = Expand(one_float, n) y = Add(t, e) }"""
    )
    lengths = {run.feeds["x"].shape[1] // 100 for run in accepted(model).cases}
    assert len(lengths) == 2
    assert max(lengths) <= 16


def test_no_inputs_of_gigabytes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few tokens: each may have many features."""
    tried, case = [0], Maker.case

    def counted(self: Maker, *given: Any, **further: Any) -> Case:
        tried.append(sum(math.prod(shape) for shape in self.sizes(given[0])[0].values()))
        assert max(tried) < 10**8
        return case(self, *given, **further)

    monkeypatch.setattr(Maker, "case", counted)
    text = "g (float[batch, sequence, 4096] x) => (float y) <int64[1] one = {1}, int64[1] two = {2}, float[1000000] p>"
    accepted(
        model_of(text + "{ s = Shape(x) n = Slice(s, one, two) f = Cast<to=1>(n) e = Expand(f, n) y = Add(e, p) }")
    )


def test_what_no_size_satisfies() -> None:
    text = "g (float[batch, samples] x) => (float y) <int64[2] s = {0, 7}, int64[2] u = {0, 5}>"
    model = model_of(text + "{ a = Reshape(x, s) b = Reshape(x, u) y = Concat<axis=1>(a, b) }")
    with pytest.raises(
        ValidationError, match=r"runs on none of the 5 inputs tried, nor at other sizes; give some with"
    ):
        accepted(model)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "most"), [("whole", 16), ("staged", 20)])
def test_the_inputs_keep_to_max_tokens(form: str, most: int) -> None:
    report = rewrite(MODELS / "silu-decoder.onnx", form=form, max_tokens=most)
    assert report.exit_status is ExitStatus.CONVERTED
    assert max(int(case.rsplit(" ", 1)[1]) for case in report.validation.cases) == most


# -- text ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers")
    (tmp_path / "onnx").mkdir()
    shutil.copy(MODELS / "trained" / "docstrings-silu.onnx", tmp_path / "onnx" / "model.onnx")
    shutil.copy(MODELS / "trained" / "docstrings-tokenizer.json", tmp_path / "tokenizer.json")
    return tmp_path


def test_three_texts_are_among_the_inputs(folder: Path) -> None:
    """Prose, code and a list: in three rows, or in three cases of one row. Numbers of cases and shapes stay."""
    from tokenizers import Tokenizer

    path = folder / "onnx" / "model.onnx"
    texts = sample_tokens(path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    starts = [tokenizer.decode(list(ids))[:11] for ids in texts]
    assert starts == ["The harbour", "def mean(va", "1. 3 kg flo"]
    runs, plain = accepted(path), accepted(onnx.load(path))
    assert [run.name.removesuffix(", text") for run in runs.cases] == [run.name for run in plain.cases]
    ids = {run.name: run.feeds["input_ids"] for run in runs.cases}
    assert [tuple(row) for row in ids["batch 3, sequence 17, text"]] == [text[:17] for text in texts]
    assert "batch 1, sequence 1" in ids  # random numbers take their turn
    rows = {tuple(run.feeds["input_ids"][0]) for run in accepted(path, few=True, dims={"batch": 1}).cases}
    assert {text[: len(row)] for text in texts for row in rows if len(row) > 1} & rows


def test_a_tokenizer_of_another_model_changes_nothing(folder: Path) -> None:
    path = folder / "onnx" / "model.onnx"
    shutil.copy(MODELS / "silu-decoder.onnx", path)
    assert max(max(ids) for ids in sample_tokens(path)) > 99
    runs, plain = accepted(path), accepted(onnx.load(path))
    for run, other in zip(runs.cases, plain.cases, strict=True):
        assert run.name == other.name
        for name, values in run.feeds.items():
            np.testing.assert_array_equal(values, other.feeds[name])


def test_a_damaged_tokenizer_changes_nothing(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert sample_tokens(folder / "onnx" / "model.onnx") == ()


def test_a_decoder_gets_what_the_encoder_beside_it_makes_of_text(folder: Path) -> None:
    ids = "int64[batch, encoder_sequence] input_ids"
    encoder = model_of(
        f"g ({ids}) => (float[batch, encoder_sequence, 8] h) <float[500, 8] t> {{ h = Gather(t, input_ids) }}"
    )
    decoder = model_of(
        """g (int64[batch, sequence] input_ids, float[batch, encoder_sequence, 8] encoder_hidden_states)
        => (float y, float z) <float[500, 8] t> { y = Gather(t, input_ids) z = Identity(encoder_hidden_states) }"""
    )
    onnx.save(encoder, folder / "encoder_model.onnx")
    onnx.save(decoder, folder / "decoder_model_merged.onnx")
    table = numpy_helper.to_array(encoder.graph.initializer[0])
    first = accepted(folder / "decoder_model_merged.onnx").cases[0].feeds["encoder_hidden_states"]
    for row, text in zip(first, sample_tokens(folder / "encoder_model.onnx"), strict=True):
        np.testing.assert_array_equal(row, table[list(text[: len(row)])])
