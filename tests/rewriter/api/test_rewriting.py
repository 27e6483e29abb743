"""`rewriter.rewrite`: the whole way, and what it must not let through."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import ExitStatus, UsageError, ValidationError, rewrite
from tests.cases import plant
from tests.changes import change_values, weight
from tests.passes.test_apply import TWO_BLOCKS
from tests.textmodels import ERF_GELU, SILU, mlp, text_model


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(mlp(SILU), path)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_file_in_file_out(model_file: Path) -> None:
    out = model_file.with_name("out.onnx")
    before = model_file.read_bytes()
    report = rewrite(model_file, out)
    assert (report.exit_status, report.model, report.output) == (ExitStatus.CONVERTED, str(model_file), str(out))
    assert report.rewritten == onnx.load(out)
    assert report.rewritten is report.rewritten, "the file is read once"
    assert set(contents(model_file.parent)) == {"model.onnx", "out.onnx"}
    assert model_file.read_bytes() == before


def test_dry_run_writes_nothing(model_file: Path) -> None:
    before = contents(model_file.parent)
    report = rewrite(model_file, model_file.with_name("out.onnx"), dry_run=True)
    assert (report.exit_status, len(report.converted), report.output) == (ExitStatus.CONVERTED, 1, "")
    for part in ("after", "validation", "rewritten"):
        with pytest.raises(UsageError, match=r"there is no .* in this result: PLANNED  1 block"):
            getattr(report, part)
    assert contents(model_file.parent) == before


@pytest.mark.parametrize(
    ("options", "converted", "reason"),
    [
        ({}, ["mlp", "mlp_2"], ""),
        ({"only": ["mlp"]}, ["mlp"], "not chosen by --only"),
        ({"only": ["*_2", "nothing"]}, ["mlp_2"], "not chosen by --only"),
        ({"skip": ["mlp"]}, ["mlp_2"], "left by --skip"),
        ({"only": ["mlp*"], "skip": ["*2"]}, ["mlp"], "left by --skip"),
        ({"only": ["MLP"]}, [], "not chosen by --only"),
    ],
)
def test_only_and_skip(options: dict[str, Any], converted: list[str], reason: str) -> None:
    report = rewrite(text_model(TWO_BLOCKS), validate=False, **options)
    assert [row.name for row in report.converted] == converted
    assert {row.reason for row in report.left} == ({reason} if reason else set())
    assert len(report.blocks) == 2
    unknown = [each for globs in options.values() for each in globs if each in ("nothing", "MLP")]
    assert [note for note in report.notes if note.startswith("no block is called")] == [
        f"no block is called '{each}'; `rewrite inspect` lists all" for each in unknown
    ]
    assert report.exit_status is (ExitStatus.CONVERTED if converted else ExitStatus.NOTHING_TO_CONVERT)


@pytest.mark.slow
def test_dims_and_seed_reach_the_proof() -> None:
    report = rewrite(mlp(SILU), dims={"tokens": 5})
    assert report.validation.cases == ("batch 3, sequence 5", "batch 1, sequence 5")
    stats = [
        proof.compared["out"].max_abs
        for seed in (0, 1)
        for proof in rewrite(mlp(ERF_GELU), seed=seed).validation.providers.values()
    ]
    assert stats[0] != stats[-1]


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    rewrite(mlp(SILU), progress=lambda *step: told.append(step))
    steps = [what for what, _, _ in told]
    assert steps[0] == "loading"
    assert "certifying" in steps
    assert all(0 <= done <= total for _, done, total in told)


def test_model_that_does_not_run(tmp_path: Path) -> None:
    model = mlp(f"{SILU} never = strange.Op(h)", domains={"strange": 1}, second="out = MatMul(h, W2)")
    model.graph.output.add(name="never").type.tensor_type.elem_type = 1
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, path)
    with pytest.raises(ValidationError, match="the original model does not run"):
        rewrite(path, out)
    assert set(contents(tmp_path)) == {"model.onnx"}


SWIGLU = "u = MatMul(x, V1) s = Sigmoid(y) g = Mul(y, s) h = Mul(g, u)"


def test_planted_bug_gives_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda model: change_values(weight(model, "mlp/heads/key"), "v.flat[0] += 1e-3"))
    report = rewrite(mlp(SILU))
    with pytest.raises(ValidationError, match=r"^FAILED  1 block, .*; mlp: refuted: "):
        _ = report.rewritten


def test_changed_signature_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(result: onnx.ModelProto) -> None:
        result.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "renamed"

    plant(monkeypatch, renamed)
    with pytest.raises(ValidationError, match="changed inputs, outputs, opset or IR version; this is a bug"):
        rewrite(mlp(SILU))


@pytest.mark.slow
def test_a_note_says_how_far_heads_hold() -> None:
    (note,) = rewrite(mlp(SWIGLU)).notes
    assert note == (
        "the heads of 1 block (mlp) hold for |pre-activation| up to 508; that the model stays "
        "there is checked only on the inputs of the run"
    )
    assert rewrite(mlp(SWIGLU), gate="product").notes == ()
