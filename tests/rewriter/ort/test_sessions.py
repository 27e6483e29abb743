"""Sessions: results, bfloat16, errors in one line, silence, providers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import parser

from rewriter.errors import ValidationError
from rewriter.ort import chosen_providers, load_onnxruntime, open_session, parse_provider
from tests.textmodels import text_model

MODEL = text_model("y = Add(x, x) z = Identity(x)", inputs="float[n] x", outputs="float[n] y, float[n] z")
X = np.array([1, 2.5], np.float32)


@pytest.mark.parametrize("optimise", [True, False])
def test_run(tmp_path: Path, optimise: bool) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(MODEL, path)
    for source in (path, MODEL):
        session = open_session(source, optimise=optimise)
        assert session.outputs == ("y", "z")
        assert list(session.run({"x": X})) == ["y", "z"]
        np.testing.assert_array_equal(session.run({"x": X})["y"], 2 * X)
        assert session.cpu_nodes == ()


def test_bfloat16_goes_in_and_out() -> None:
    model = text_model(
        "y = Identity(x) a = Cast<to = 1>(x) z = Add(a, w)",
        inputs="bfloat16[n] x, float[n] w",
        outputs="bfloat16[n] y, float[n] z",
    )
    x = np.array([1, 2.5, -3, np.inf], ml_dtypes.bfloat16)
    results = open_session(model).run({"x": x, "w": np.ones(4, np.float32)})
    assert results["y"].dtype == ml_dtypes.bfloat16
    assert results["y"].astype(float).tolist() == [1, 2.5, -3, float("inf")]
    assert results["z"].tolist() == [2, 3.5, -2, float("inf")]


def test_sequences_maps_and_missing_values() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]>
        g (float[n, 2] x) => (seq(map(int64, float[])) maps, seq(float[n, 2]) s, optional(float[n, 2]) o, float[n, 2] z)
        { maps = ai.onnx.ml.ZipMap<classlabels_int64s = [7, 3]>(x) s = SequenceConstruct(x, x)
          o = Optional<type = float[n, 2]>() z = Identity(x) }"""
    )
    x, session = np.array([[1, 0.1]], np.float32), open_session(model)
    first = session.run({"x": x})
    for found in (first, session.run({"x": x}, over=first)):
        ((keys, values),) = found["maps"]
        assert (keys.tolist(), values.dtype, values.tolist()) == ([3, 7], np.float32, [np.float32(0.1), 1])
        assert [each.tolist() for each in found["s"]] == [x.tolist()] * 2
        assert found["o"] is None
        assert found["z"].tolist() == x.tolist()


def test_external_data_of_a_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("y = Add(x, w)", inputs="float[4] x", outputs="float[4] y", constants={"w": np.arange(4.0)})
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    session = open_session(proto, base_dir=tmp_path)
    assert session.run({"x": np.zeros(4, np.float32)})["y"].tolist() == [0, 1, 2, 3]

    # OpenVINO looks for the file in the working directory; such a provider gets the data with the model.
    monkeypatch.setattr("rewriter.ort.PROVIDERS", (replace(parse_provider("cpu"), finds_data=False),))
    given: list[bytes] = []
    session_class = load_onnxruntime().InferenceSession

    def opened(model: bytes, *args: Any, **options: Any) -> Any:
        given.append(model)
        return session_class(model, *args, **options)

    monkeypatch.setattr(load_onnxruntime(), "InferenceSession", opened)
    session = open_session(proto, base_dir=tmp_path)
    assert session.run({"x": np.zeros(4, np.float32)})["y"].tolist() == [0, 1, 2, 3]
    assert all(b"w.bin" not in each for each in given)
    assert b"w.bin" in proto.SerializeToString(), "the caller's model is unchanged"


def test_errors_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    broken = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float y) { y = Relu(x) }')
    broken.graph.node[0].op_type = "None\x1b[31m\nsuch"
    with pytest.raises(ValidationError, match="onnxruntime could not load the model: ") as caught:
        open_session(broken)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    with pytest.raises(ValidationError, match="onnxruntime could not run the model: ") as caught:
        open_session(MODEL).run({"x": np.zeros((2, 2), np.float32)})
    assert str(caught.value).isprintable()
    with pytest.raises(ValidationError, match="onnxruntime could not load the model: "):
        open_session(Path("no-such-file.onnx"))
    assert capfd.readouterr() == ("", "")


def test_an_operator_without_a_kernel_whose_definition_is_younger_than_the_model() -> None:
    """onnxruntime computes Softplus in float32 only; ONNX defines it by others since opset 18."""
    text = '<ir_version: 8, opset_import: ["": %d]> g (double[n] x) => (double[n] y) { y = Softplus(x) }'
    made = open_session(parser.parse_model(text % 18)).run({"x": np.zeros(1)})["y"]
    np.testing.assert_allclose(made, np.log(2.0))
    with pytest.raises(ValidationError, match=r"could not load the model: .*Softplus"):
        open_session(parser.parse_model(text % 17))


@pytest.mark.cuda
def test_cuda_runs() -> None:
    if "cuda" not in chosen_providers([]):
        pytest.skip("no CUDA")
    session = open_session(MODEL, "cuda")
    np.testing.assert_array_equal(session.run({"x": X})["y"], 2 * X)
    assert session.cpu_nodes in ((), None)


@pytest.mark.parametrize("timed", [False, True])
def test_memory_of_a_run_is_given_back_unless_it_is_timed(timed: bool) -> None:
    runs: list[Any] = []

    def run(*given: Any) -> list[Any]:
        runs.append(given[2])
        return [X, X]

    recorder = SimpleNamespace(run=run)
    replace(open_session(MODEL, spin=timed), _session=recorder).run({"x": X})
    key = "memory.enable_memory_arena_shrinkage"
    (options,) = runs
    assert (options.get_run_config_entry(key) if not timed else "") == ("" if timed else "cpu:0")
    if timed:
        with pytest.raises(Exception, match=key):
            options.get_run_config_entry(key)
