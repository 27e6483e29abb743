"""The model table and the command line, without PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models.__main__ import main
from models.entry import DYNAMIC_DIMS, EXPORTERS, SIZES, Entry
from models.registry import COMMITTED, ENTRIES

ROOT = Path(__file__).resolve().parents[2]


def each_entry(entry: Entry) -> str:
    return entry.name


@pytest.mark.parametrize("entry", ENTRIES, ids=each_entry)
def test_entry_is_well_formed(entry: Entry) -> None:
    assert entry.sizes
    assert set(entry.sizes) <= set(SIZES)
    assert set(entry.refusals) <= set(EXPORTERS)
    assert entry.exporters, "every entry has an exporter"
    assert entry.inputs
    assert entry.outputs
    known = {*DYNAMIC_DIMS, *entry.fixed}
    for spec in entry.inputs:
        assert set(spec.dims) <= known
        assert spec.dims[0] == "batch" or spec.kind == "positions"
    for size in entry.sizes:
        assert entry.mlp_blocks(size) > 0 or entry.name == "segformer"
        assert entry.gated_blocks(size) == (entry.mlp_blocks(size) if entry.gated else 0)


def test_names_are_unique() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert len({committed.file for committed in COMMITTED}) == len(COMMITTED)
    assert {committed.entry for committed in COMMITTED} <= set(names)


def test_list_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, transformers=None, onnxscript=None);"
        "from models.__main__ import main; sys.exit(main(['list']))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for entry in ENTRIES:
        assert entry.name in run.stdout
        assert entry.architecture in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope", "-o", "x.onnx"], "error: unknown model 'nope'; known: gpt2-silu, "),
        (["gpt2", "-o", "missing/x.onnx"], "does not exist; create it first"),
        (["gpt2", "-o", "."], "name a file"),
        (["minilm", "--size", "small", "-o", "x.onnx"], "error: minilm has no size 'small', only: full"),
        (["gpt2", "--size", "huge", "-o", "x.onnx"], "'huge' is not one of 'tiny', 'small', 'full'"),
        (["gpt2"], "error: Missing option '-o' / '--output'."),
    ],
)
def test_an_error_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments]) == 2
    written = capsys.readouterr()
    assert message in written.err
    assert written.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
