"""Work by several processes: backends, order, what is missing; a local Dask cluster where dask is installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import ExitStatus, UsageError, ValidationError, rewrite
from rewriter.proof.run import jobs
from rewriter.proof.run.jobs import Backend, parse_backend, run_jobs
from tests.textmodels import SILU, mlp, text_model, values

TWO = (
    f"f = MatMul(x, W1) y = Add(f, b1) {SILU} g = MatMul(h, W2) out1 = Add(g, b2) "
    "f2 = MatMul(out1, W1) y2 = Add(f2, b1) s2 = Sigmoid(y2) h2 = Mul(y2, s2) g2 = MatMul(h2, W2) out = Add(g2, b2)"
)


def two_blocks() -> onnx.ModelProto:
    return text_model(TWO, constants={"W1": values("W1"), "W2": values("W2")})


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        (None, Backend()),
        ("loky", Backend("loky")),
        ("dask:scheduler_host=tcp://127.0.0.1:8786", Backend("dask", {"scheduler_host": "tcp://127.0.0.1:8786"})),
        ("dask:a=1,b=2", Backend("dask", {"a": "1", "b": "2"})),
    ],
)
def test_backends_by_name(text: str | None, backend: Backend) -> None:
    assert parse_backend(text) == backend


@pytest.mark.parametrize("text", ["", ":a=1", "dask:", "dask:a", "dask:a=", "dask:=1"])
def test_backends_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is not NAME or NAME:KEY=VALUE"):
        parse_backend(text)


def test_one_job_runs_here_and_needs_no_joblib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert run_jobs(square, iter([3, 1, 2]), 1, None) == [(9, os.getpid()), (1, os.getpid()), (4, os.getpid())]


@pytest.mark.parametrize(
    ("options", "missing", "message"),
    [
        ({"jobs": 2}, "joblib", r"needs joblib, which is not installed: pip install 'attnonly\[parallel\]'"),
        ({"joblib_backend": "threading"}, "joblib", "needs joblib"),
        ({"joblib_backend": "dask"}, "distributed", r"needs distributed, .*: pip install 'dask\[distributed\]'"),
        ({"joblib_backend": "ray"}, "ray", "needs ray, .*: pip install ray"),
        ({"jobs": 0}, "", "the number of jobs cannot be 0"),
        ({"jobs": -2}, "", "jobs is -2; it must be an integer of at least -1"),
    ],
)
def test_what_is_missing_is_said_before_any_work(
    options: dict[str, Any], missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ours = importlib.util.find_spec, {"joblib", "distributed", "ray"}

    def spec(name: str) -> object:
        """All of joblib, distributed and ray are installed but the missing one, whatever is here."""
        return None if name == missing else found("json" if name in ours else name)

    monkeypatch.setattr(importlib.util, "find_spec", spec)
    told: list[str] = []
    with pytest.raises(UsageError, match=message):
        rewrite(mlp(SILU), progress=lambda what, _done, _total: told.append(what), **options)
    assert told == []


def test_results_come_in_the_order_of_the_items() -> None:
    pytest.importorskip("joblib")
    found = run_jobs(square, (number for number in range(7)), 2, "loky")
    assert [value for value, _ in found] == [0, 1, 4, 9, 16, 25, 36]
    assert os.getpid() not in {pid for _, pid in found}


def test_a_backend_that_joblib_does_not_know() -> None:
    pytest.importorskip("joblib")
    with pytest.raises(UsageError, match="joblib backend 'nonsense' cannot be used: "):
        run_jobs(square, [1], 2, "nonsense")


def die(_number: int) -> None:
    os._exit(3)


def test_a_worker_that_dies_is_one_clear_line() -> None:
    pytest.importorskip("joblib")
    with pytest.raises(
        ValidationError, match=r"a worker failed \(TerminatedWorkerError: .*\); run with --option jobs=1"
    ):
        run_jobs(die, [1, 2], 2, "loky")


def test_a_backend_registers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    joblib = pytest.importorskip("joblib")

    class Module:
        @staticmethod
        def register_threads() -> None:
            joblib.register_parallel_backend("threads-of-ours", joblib._parallel_backends.ThreadingBackend)

    monkeypatch.setitem(jobs._REGISTERED_BY, "threads-of-ours", ("its.module", "register_threads"))
    monkeypatch.setattr("importlib.import_module", lambda name: {"its.module": Module}[name])
    assert [value for value, _ in run_jobs(square, [2, 3], 2, "threads-of-ours")] == [4, 9]


@pytest.mark.parametrize("where", ["memory", "file"])
def test_blocks_in_parallel_give_the_same_proof(where: str, tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    path = tmp_path / "model.onnx"
    onnx.save(two_blocks(), path)
    source: Any = two_blocks() if where == "memory" else path
    alone, together = (rewrite(source, jobs=count).validation for count in (1, 2))
    assert alone is not None
    assert together is not None
    assert [block.name for block in together.blocks] == ["mlp", "mlp_2"]
    assert together.blocks == alone.blocks


@pytest.fixture
def cluster() -> Iterator[str]:
    """A scheduler's address; its worker is a process of its own, with two threads: joblib sends no single job away."""
    pytest.importorskip("joblib")
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": True, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options, silence_logs=50) as local:
        yield local.scheduler_address


def test_a_dask_cluster_proves_the_blocks(cluster: str, tmp_path: Path) -> None:
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(two_blocks(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    backend = f"dask:scheduler_host={cluster}"
    assert os.getpid() not in {pid for _, pid in run_jobs(square, range(3), -1, backend)}
    report = rewrite(path, out, joblib_backend=backend)
    assert report.exit_status is ExitStatus.CONVERTED
    assert report.validation is not None
    assert report.validation.blocks == getattr(rewrite(path).validation, "blocks", None)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Two workers on this machine; joblib's backend uses the cluster that is there."""
    pytest.importorskip("joblib")
    ray = pytest.importorskip("ray", reason="ray is not installed")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # for the functions of this file
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def die_once(given: tuple[int, str]) -> tuple[int, int]:
    """The square of a number; the first worker that gets 2 is killed, as by a machine that fails."""
    number, marker = given
    if number == 2 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return square(number)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("default")
def test_ray_proves_the_blocks(tmp_path: Path) -> None:
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(two_blocks(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert os.getpid() not in {pid for _, pid in run_jobs(square, range(3), -1, "ray")}
    report = rewrite(path, out, joblib_backend="ray")
    assert report.exit_status is ExitStatus.CONVERTED
    assert report.validation is not None
    assert report.validation.blocks == getattr(rewrite(path).validation, "blocks", None)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("jobs", [3])
def test_ray_retries_what_a_lost_worker_did(jobs: int, tmp_path: Path) -> None:
    marker = tmp_path / "died"
    found = run_jobs(die_once, ((number, str(marker)) for number in range(6)), jobs, "ray")
    assert marker.exists()
    assert [value for value, _ in found] == [0, 1, 4, 9, 16, 25]
