"""Execution providers: options, and what is reported of one that is not the CPU; its sessions are faked."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rewriter import ExitStatus, ProviderError, UsageError, diff, rewrite
from rewriter.ort import Session, chosen_providers, load_onnxruntime, open_session, parse_provider
from rewriter.report.sections import warnings
from tests.textmodels import FIRST, SILU, mlp, text_model


@pytest.mark.parametrize(
    ("text", "spelled", "settings"),
    [
        ("cpu", "cpu", {}),
        ("cuda", "cuda", {"use_tf32": "0"}),
        ("openvino", "openvino", {"device_type": "CPU", "precision": "ACCURACY"}),
        ("CUDAExecutionProvider:device_id=1", "cuda:device_id=1", {"use_tf32": "0", "device_id": "1"}),
        ("cuda: device_id = 1 , use_tf32=1", "cuda:device_id=1,use_tf32=1", {"use_tf32": "1", "device_id": "1"}),
    ],
)
def test_options(text: str, spelled: str, settings: dict[str, str]) -> None:
    provider = parse_provider(text)
    assert (provider.text, provider.onnxruntime) == (spelled, [(provider.kernel_set, settings)])
    assert parse_provider(spelled) == provider


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("npu", ProviderError, "unknown execution provider 'npu': choose among cpu, cuda, openvino"),
        (":device_id=1", ProviderError, "unknown execution provider ''"),
        ("cpu:threads=2", UsageError, "execution provider cpu does not have the option 'threads'; it has none"),
        (
            "cuda:devise_id=1",
            UsageError,
            "cuda does not have the option 'devise_id'; it has arena_extend_strategy, .*, use_tf32",
        ),
        ("cuda:device_id=٣", UsageError, "option device_id of cuda must be a word or a number"),
        ("openvino:device_type=/dev/x", UsageError, "device_type of openvino must be a word or a number, not '/dev/x'"),
        ("cuda:", UsageError, "'' in provider 'cuda:' is not KEY=VALUE"),
        ("cuda:device_id", UsageError, "'device_id' in provider 'cuda:device_id' is not KEY=VALUE"),
        ("cuda:device_id=1,device_id=2", UsageError, "has the option device_id twice"),
    ],
)
def test_options_that_cannot_be_followed(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_provider(text)


def test_each_provider_once() -> None:
    assert chosen_providers(["cpu", "cpu"]) == ("cpu",)
    assert "cpu" in chosen_providers([])


@pytest.mark.skipif("cuda" in chosen_providers([]), reason="CUDA works here")
def test_cuda_that_is_missing() -> None:
    with pytest.raises(ProviderError, match=r"'cuda:device_id=1' is not available: .*onnxruntime-gpu"):
        chosen_providers(["cuda:device_id=1"])


Left = Mapping[bool, Sequence[str] | None]


def fake_cuda(monkeypatch: pytest.MonkeyPatch, cpu_nodes: Left, noise: float) -> list[str]:
    """Sessions on `cuda` run on the CPU, rewritten models off by `noise`; `cpu_nodes` says what remains there."""
    asked: list[str] = []

    def opened(model: Any, provider: str = "cpu", **options: Any) -> Session:
        asked.append(provider)
        session = open_session(model, "cpu", **options)
        if not provider.startswith("cuda"):
            return session
        rewritten = any("attnonly" in node.domain or "/heads/" in node.name for node in model.graph.node)
        names = cpu_nodes[rewritten]
        left = None if names is None else tuple(names)
        return _Noisy(**{**vars(session), "cpu_nodes": left}, noise=noise * rewritten)

    monkeypatch.setattr("rewriter.proof.run.open_session", opened)
    monkeypatch.setattr("rewriter.ort._obstacle", lambda _provider: None)
    return asked


@dataclass(frozen=True, eq=False)
class _Noisy(Session):
    """A session whose floats are a little off."""

    noise: float = 0.0

    def run(self, *given: Any, **options: Any) -> dict[str, Any]:
        found = super().run(*given, **options)
        noise = np.float32(self.noise)
        return {name: value + noise if value.dtype == np.float32 else value for name, value in found.items()}


def test_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ("Shape 'shape'",)
    asked = fake_cuda(monkeypatch, {False: there, True: (*there, "Exp 'mlp/heads/exp'")}, noise=2.0**-20)
    report = rewrite(mlp(SILU), providers=["cuda:device_id=1"])
    proof = report.validation.providers["cuda:device_id=1"]
    assert set(asked) == {"cuda:device_id=1"}
    assert (proof.cpu_nodes, proof.cpu_nodes_of_original) == (("Exp 'mlp/heads/exp'",), 1)
    assert "fell back to the CPU on cuda:device_id=1: Exp 'mlp/heads/exp'" in warnings(report)
    assert "on cuda:device_id=1, 1 node of the original ran on the CPU" in warnings(report)


@pytest.mark.sample(0)
@pytest.mark.parametrize(("form", "coarse"), [("compact", True), ("local", False)])
def test_a_provider_with_coarse_kernels(monkeypatch: pytest.MonkeyPatch, form: str, coarse: bool) -> None:
    model = mlp(f"{SILU} g = Mul(h, u)", second="out = MatMul(g, W2)", first=f"{FIRST} u = MatMul(x, V1)")
    made = rewrite(model, form=form, validate=False).rewritten
    fake_cuda(monkeypatch, {False: (), True: [f"{node.op_type} '{node.name}'" for node in made.graph.node]}, noise=1.0)
    report = rewrite(model, form=form, providers=["cuda"])
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    said = "cuda rounds Softmax in float64 to float32, which these heads do not tolerate: use form local, or --gate "
    said += "product"
    assert any(said in failure for failure in report.problems) == coarse
    left = report.validation.providers["cuda"].cpu_nodes
    assert any(node.startswith("Softmax") for node in left) == coarse
    assert not any(node.startswith(("Shape", "Slice", "Concat")) and "shape" in node for node in left)


def test_an_onnxruntime_that_does_not_tell_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, {False: None, True: None}, noise=0.0)
    report = rewrite(mlp(SILU), providers=["cpu", "cuda"])
    cpu, cuda = (report.validation.providers[name] for name in ("cpu", "cuda"))
    assert cpu.cpu_nodes_of_original == 0
    assert (cuda.cpu_nodes, cuda.cpu_nodes_of_original) == ((), None)
    assert "this onnxruntime cannot tell which nodes cuda left to the CPU" in warnings(report)


def test_an_output_that_two_providers_cannot_compare_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, {False: (), True: ()}, noise=0.0)
    nothing = text_model("z = Sub(x, x) out = Div(z, z)")
    assert diff(nothing, nothing, providers=["cpu", "cuda"]).summary.endswith("nothing could be compared")


@pytest.mark.cuda
@pytest.mark.skipif("cuda" not in chosen_providers([]), reason="no CUDA")
def test_a_real_gpu_measures_its_noise() -> None:
    report = rewrite(mlp(SILU), providers=["cpu", "cuda:device_id=0"])
    assert report.exit_status is ExitStatus.CONVERTED
    proof = report.validation.providers["cuda:device_id=0"]
    assert proof.cpu_nodes == ()
    assert proof.compared["out"].max_abs < 1e-4
    assert open_session(mlp(SILU), "cuda:use_tf32=0").outputs == ("out",)


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ("libx.so: failed to map segment from shared object", MemoryError, "map segment"),
        ("Exception caught: std::bad_alloc", MemoryError, "bad_alloc"),
        ("No module named 'onnxruntime'", ProviderError, "cannot be imported .*; pip install --force-reinstall"),
    ],
)
def test_onnxruntime_that_cannot_be_imported(
    said: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "onnxruntime":
                raise ImportError(said)

    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises(kind, match=message):
        load_onnxruntime.__wrapped__()
