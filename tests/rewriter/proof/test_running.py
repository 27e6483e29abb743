"""Running models as a whole and in segments gives the same; the proof by blocks finds the same faults."""

import signal
import time
import weakref
from pathlib import Path
from threading import Event, Timer, main_thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rewriter import ExitStatus, UsageError, ValidationError, rewrite, validate
from rewriter.files.load import load_model
from rewriter.inputs.cases import Case, Maker
from rewriter.ort import open_session
from rewriter.proof.rule import Results
from rewriter.proof.run import ModelRuns, Way, run_model
from rewriter.proof.settings import LARGE, Settings
from rewriter.proof.validate import Judge
from tests.cases import plant
from tests.changes import change_values, weight
from tests.committed import FOLDER as MODELS
from tests.textmodels import SILU, text_model, values

WAYS = (Way("cpu", optimise=False), Way("cpu", optimise=True))


def difference(left: Results, right: Results) -> float:
    assert [list(case) for case in left] == [list(case) for case in right]
    return max(
        float(np.max(np.abs(a[name] - b[name]), initial=0.0)) for a, b in zip(left, right, strict=True) for name in a
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("file", ["silu-decoder.onnx", "gelu-encoder.onnx"])
@pytest.mark.parametrize("limit", [4000, 20_000])
def test_same_as_the_whole(file: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(MODELS / file)
    cases = Maker(loaded.proto).usual()[1:4]
    taps = tuple(node.output[0] for node in loaded.views[()].nodes if node.op_type in {"Gemm", "Softmax"})[:2]
    monkeypatch.setattr("rewriter.proof.run.SEGMENT", limit)
    outputs = (*loaded.views[()].outputs, *taps)
    whole, parts = (
        run_model(loaded, cases, WAYS, outputs=outputs, may_refuse=True, by_blocks=by_blocks)
        for by_blocks in (False, True)
    )
    assert parts.segments > 5 > whole.segments == 1
    assert [case.name for case in parts.cases] == [case.name for case in whole.cases]
    for way in WAYS:
        assert difference(parts.ways[way].results, whole.ways[way].results) < 1e-5
        assert parts.ways[way].cpu_nodes == ()
    assert [*parts.ways[WAYS[0]].results[0]] == [*outputs]


PICKY = """<ir_version: 8, opset_import: ["": 17]>
g (int64[n] ids, float[m] x) => (float[n] out) <float[2] table = {1, 2}, float[1] one = {1}>
{ row = Gather(table, ids) twice = Add(row, row) out = Add(twice, x) }"""


def picky(ids: list[int], x: list[float]) -> Case:
    return Case(str(len(ids)), {"ids": np.asarray(ids), "x": np.asarray(x, np.float32)})


def run_picky(*cases: Case, may_refuse: bool) -> ModelRuns:
    loaded = load_model(onnx.parser.parse_model(PICKY))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("rewriter.proof.run.SEGMENT", 1)
        return run_model(loaded, cases, WAYS, outputs=("out", "twice"), may_refuse=may_refuse, by_blocks=True)


def test_cases_that_the_model_refuses_are_left_out_in_every_engine() -> None:
    runs = run_picky(
        picky([0, 1, 9], [1]), picky([0, 1], [1]), picky([1] * 4, [1, 2, 3]), picky([1], [5]), may_refuse=True
    )
    assert [case.name for case in runs.cases] == ["2", "1"]
    assert [text.partition(":")[0] for text in runs.skipped] == ["3", "4"]
    results: list[Results] = [runs.ways[way].results for way in WAYS]
    for found in results:
        assert [case["out"].tolist() for case in found] == [[3, 5], [9]]
    assert [case["twice"].tolist() for case in results[0]] == [[2, 4], [4]]


def test_cases_that_may_not_be_refused() -> None:
    with pytest.raises(ValidationError, match="input 'ids' holds 9, and the table it is for has 2 entries"):
        run_picky(picky([0, 1, 9], [1]), may_refuse=False)


def test_a_default_that_a_case_replaces_is_fed() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[n] x, float[1] b = {1}) => (float[n] y) { y = Add(x, b) }"""
    )
    loaded = load_model(model)
    case = Case("own", {"x": np.ones(2, np.float32), "b": np.asarray([2.0], np.float32)})
    runs: Any = run_model(loaded, [case], WAYS, wide=True)
    np.testing.assert_array_equal(runs.truth[0]["y"], [3.0, 3.0])


def test_one_session_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        assert all(reference() is None for reference in alive)
        session = open_session(*arguments, **options)
        alive.append(weakref.ref(session))
        return session

    monkeypatch.setattr("rewriter.proof.run.open_session", watched)
    loaded = load_model(MODELS / "silu-decoder.onnx")
    run_model(loaded, Maker(loaded.proto).usual()[:1], WAYS)
    assert len(alive) == len(WAYS)


@pytest.mark.slow
def test_a_model_that_refuses_the_usual_sizes() -> None:
    """It takes sound in whole frames of a prime number of samples, which its refusal tells."""
    model = text_model(
        f"cut = Reshape(audio, frames) y = MatMul(cut, W1) {SILU} out = MatMul(h, W2)",
        inputs="float[batch, samples] audio",
        constants={
            "frames": numpy_helper.from_array(np.array([0, -1, 1009]), "frames"),
            "W1": np.full((1009, 8), 0.01),
            "W2": values("W2"),
        },
    )
    assert rewrite(model).exit_status is validate(model, model).exit_status is ExitStatus.CONVERTED
    refused = rewrite(model, dims={"samples": 2019})
    assert refused.exit_status is ExitStatus.VALIDATION_FAILED
    assert "runs on none of the 2 inputs tried, nor at other sizes; give some with" in refused.problems[-1]


# -- the proof by blocks ---------------------------------------------------------------------------------------------


def decoder(folder: Path) -> Path:
    model, path = onnx.load(MODELS / "silu-decoder.onnx"), folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.proof.run.SEGMENT", 20_000)


def test_when_blocks_are_proved_alone() -> None:
    for proof, size, alone in (("whole", LARGE + 1, False), ("auto", LARGE, False), ("blocks", 1, True)):
        assert Settings(proof=proof).by_blocks(size) is alone
    assert Settings(proof="auto").by_blocks(LARGE + 1)


@pytest.mark.parametrize("finished", [False, True])
def test_no_run_goes_on_after_an_error_or_an_interrupt(finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, steps = Event(), list[int]()

    def endless(*_: object, progress: Any, **_options: object) -> None:
        for step in range(2000):
            progress("running", step, 2000)
            steps.append(step)
            begun.set()
            time.sleep(0.01)

    def certificate(*_: object, **_options: object) -> Any:
        assert begun.wait(60)
        if not finished:
            raise UsageError("no inputs")
        Timer(0.5, signal.pthread_kill, (main_thread().ident, signal.SIGINT)).start()  # while the runs are waited for
        return SimpleNamespace(certified=True)

    monkeypatch.setattr("rewriter.proof.validate.run_accepted", endless)
    monkeypatch.setattr("rewriter.proof.validate.prove", certificate)
    model = load_model(MODELS / "silu-decoder.onnx")
    with pytest.raises(KeyboardInterrupt if finished else UsageError):
        Judge(model, model, (), Settings(proof="blocks")).verdict()
    reached = len(steps)
    time.sleep(0.1)
    assert 0 < len(steps) == reached < 2000


@pytest.mark.slow
@pytest.mark.usefixtures("small_segments")
def test_proof_by_blocks_agrees_with_the_whole_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = decoder(tmp_path)
    whole = rewrite(path, proof="whole").validation
    monkeypatch.setattr("rewriter.proof.settings.LARGE", 1000)
    opened: list[int] = []
    loaded = open_session

    def watched(model: onnx.ModelProto, *arguments: Any, **options: Any) -> Any:
        opened.append(len(model.graph.node))
        return loaded(model, *arguments, **options)

    monkeypatch.setattr("rewriter.proof.run.open_session", watched)
    blocks = rewrite(path, tmp_path / "out.onnx").validation
    assert (whole.by_blocks, whole.segments, blocks.by_blocks) == (False, (1, 1), True)
    assert min(blocks.segments) > 5
    assert max(opened) < len(onnx.load(path, load_external_data=False).graph.node) / 2
    assert blocks.cases == whole.cases
    assert (whole.certified, blocks.certified) == (True, True)
    assert whole.providers["cpu"].error_ratio is not None
    assert blocks.providers["cpu"].error_ratio is None  # nothing is evaluated in float64
    assert blocks.providers["cpu"].compared["logits"].max_abs < 1e-4


@pytest.mark.sample(0)
@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize(
    ("pattern", "statement", "where"),
    [
        ("*/heads/key", "v.flat[0] *= 1.001", "mlp: "),
        ("*ln_f.bias", "v[3] += 1e-3", "first difference: LayerNormalization '/model/transformer/ln_f/"),
    ],
)
def test_planted_bugs_fail_the_proof_by_blocks(
    pattern: str, statement: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda model: change_values(weight(model, pattern), statement))
    path = decoder(tmp_path)
    report = rewrite(path, tmp_path / "out.onnx", proof="blocks")
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert any(where in failure for failure in report.problems)
    assert {entry.name for entry in tmp_path.iterdir()} == {"model.onnx", "weights.bin"}


def test_unknown_proofs_and_defaults_in_segments_are_refused(tmp_path: Path) -> None:
    model = text_model(f"f = MatMul(x, W1) y = Add(f, b1) {SILU} g = MatMul(h, W2) out = Add(g, b2)",
                       constants={"W1": values("W1"), "W2": values("W2")})  # fmt: skip
    bias = weight(model, "b2")
    model.graph.input.append(onnx.helper.make_tensor_value_info("b2", bias.data_type, list(bias.dims)))
    given = {"x": np.ones((1, 3, 4), np.float32), "b2": np.zeros(tuple(bias.dims), np.float32)}
    np.savez(tmp_path / "inputs.npz", **given)  # type: ignore[arg-type]
    assert rewrite(model, inputs=tmp_path / "inputs.npz").exit_status is ExitStatus.CONVERTED
    with pytest.raises(UsageError, match="input 'b2' has a default, which a proof by blocks cannot override"):
        rewrite(model, inputs=tmp_path / "inputs.npz", proof="blocks")
    with pytest.raises(UsageError, match="unknown proof 'quick'; known are: auto, whole, blocks"):
        rewrite(model, proof="quick")
