"""The lines that `rewrite` prints: names folded, everything within 80 columns, nothing claimed that is not there."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import onnx
import pytest

from rewriter import rewrite
from rewriter.report.html import render
from rewriter.report.sections import converted_table, folded, summary
from tests.committed import FOLDER
from tests.conftest import Ran
from tests.textmodels import ERF_GELU, SILU, mlp


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["out"], "out"),
        ([f"h.{i}.mlp" for i in range(12)], "h.{0..11}.mlp"),
        (["h.0.mlp", "h.1.mlp"], "h.{0,1}.mlp"),
        ([f"h.{i}" for i in (0, 1, 2, 5, 7, 8)], "h.{0..2,5,7,8}"),
        (["a.01", "a.02"], "a.01, a.02"),
        (["a.1", "b.2"], "a.1, b.2"),
        (["a", "b", "c", "d", "e"], "a, b and 3 more"),
        ([f"s.{i}.b.{j}" for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))], "s.0.b.{0,1}, s.1.b.{0,1}"),
        (["x.1.1", "x.2.2"], "x.1.1, x.2.2"),
    ],
)
def test_folded(names: list[str], text: str) -> None:
    assert folded(names) == text


def test_a_range_never_names_what_is_not_there() -> None:
    grid = [f"s{i}.b{j}" for i, j in product(range(3), range(2))]
    for mask in range(1, 2 ** len(grid)):
        names = [name for place, name in enumerate(grid) if mask >> place & 1]
        text = folded(names)
        if "more" in text:
            continue
        unfolded = []
        for part in re.split(r", (?![^{]*})", text):
            found = re.fullmatch(r"(.*)\{(.*)\}(.*)", part)
            if found is None:
                unfolded.append(part)
                continue
            before, numbers, after = found.groups()
            for run_ in numbers.split(","):
                first, _, last = run_.partition("..")
                unfolded += [f"{before}{number}{after}" for number in range(int(first), int(last or first) + 1)]
        assert sorted(unfolded) == sorted(names)


@pytest.mark.sample(0)
@pytest.mark.parametrize("model", sorted(FOLDER.glob("*.onnx")), ids=lambda path: path.stem)
def test_a_screen_of_80_columns(model: Path) -> None:
    report = rewrite(model)
    lines = [*summary(report, 80)]
    assert len(lines) < 20
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    text = "\n".join(lines)
    assert f"{report.after.nodes:,} nodes" in text if report.after else False
    assert all(label in text for label in ("blocks", "proved", "only run", "graph", "seconds"))


def test_alike_blocks_share_a_line_and_the_worst_output_counts() -> None:
    report = rewrite(mlp(SILU))
    proof = report.validation.providers["cpu"]
    (stats,) = proof.compared.values()
    proof = replace(proof, compared={name: replace(stats, max_abs=value) for name, value in (("a", 2e-6), ("b", 1e-6))})
    validation = replace(report.validation, providers={"cpu": proof, "cuda": proof})
    rows = tuple(replace(report.blocks[0], name=f"h.{i}.mlp") for i in range(12))
    rows += (replace(rows[0], name="other", heads=16),)
    lines = "\n".join(summary(replace(report, proof=validation, blocks=rows), 200))
    assert "on cpu, cuda: the outputs differ by at most 2.0e-06" in lines
    assert "h.{0..11}.mlp: 12 blocks, each silu as 8 heads over 1 bias token, exact" in lines
    assert "other: silu as 16 heads over 1 bias token, exact" in lines


def test_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    onnx.save(mlp(SILU), "in/model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    report = rewrite("in/model.onnx", "out.onnx")
    assert {str(path) for path in Path().iterdir() if path.is_file()} == set(report.files)
    assert len(report.files) == 2
    assert f"files     {', '.join(report.files)}" in ran(0, ["in/model.onnx", "-o", "out.onnx", "--force"]).out


SOURCES = {
    "fitted": ("h = Softsign(y)", "measured to be within", "each activation within"),
    "certified": (ERF_GELU, "claimed to be within", "each activation within"),
    "exact": (SILU, "exact", "each activation equal; all else identical"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SOURCES)
def test_where_an_error_is_known_from(kind: str) -> None:
    """A fit at run time has no proof; summary, tables, JSON and page say so, and nothing else is called measured."""
    body, known, more = SOURCES[kind]
    report = rewrite(mlp(body), accuracy=1e-3 if kind == "fitted" else None, validate=True)
    lines = " ".join(" ".join(summary(report, 80)).split())
    assert known in lines
    where = "|pre-activation| <= 32 and" if kind == "fitted" else "every input of"
    assert f"proved for {where} every size, over the reals: {more}" in lines
    (row,) = report.blocks
    assert row.measured is (kind == "fitted")
    assert (row.domain is not None) is (kind == "fitted")
    assert ("(measured)" in str(converted_table("", report.blocks))) is (kind == "fitted")
    assert ("(measured)" in render(report)) is (kind == "fitted")
