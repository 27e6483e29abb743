"""Small tensors in other files are read like inline ones, by every reader of constants; sparse ones are written out."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import rewriter
from rewriter.errors import ModelError
from rewriter.files.load import load_model
from rewriter.graph.walk import iter_tensors
from tests.committed import FOLDER
from tests.textmodels import ERF_GELU, SILU, mlp, tensor, values
from tools.snapshot import digests

TANH_GELU = (
    "p = Pow(y, $3.0) q = Mul(p, $0.044715) r = Add(y, q) s = Mul(r, $0.7978845608) t = Tanh(s) u = Add(t, $1.0) "
    "v = Mul(y, $0.5) h = Mul(u, v)"
)
RELU6, GELUS = "h = Clip(y, $0.0, $6.0)", (ERF_GELU, TANH_GELU)


def stored(model: onnx.ModelProto, path: Path) -> Path:
    """The model with all of its tensors in a data file, those of attributes too."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    onnx.save(copy, path, save_as_external_data=True, location="data", size_threshold=0, convert_attribute=True)
    return path


@pytest.mark.parametrize("activation", [RELU6, *(pytest.param(each, marks=pytest.mark.slow) for each in GELUS)])
def test_activations(activation: str, tmp_path: Path) -> None:
    model = mlp(activation)
    report = rewriter.rewrite(stored(model, tmp_path / "model.onnx"), tmp_path / "out.onnx")
    assert report.validation.certified
    assert [each.activation for each in report.converted] == [
        each.activation for each in rewriter.rewrite(model, dry_run=True).converted
    ]
    written = {each.name: each for each in onnx.load(tmp_path / "out.onnx", load_external_data=False).graph.initializer}
    for each in model.graph.initializer:
        if each.name in written:
            made = written[each.name]
            assert (made.data_location, made.raw_data) == (onnx.TensorProto.EXTERNAL, b"")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("relu-decoder", {}),
        ("relu-decoder", {"form": "masked"}),
        ("relu-decoder", {"form": "whole", "max_tokens": 16}),
        ("gelu-vision", {"form": "compact"}),
        ("conformer-encoder", {"form": "staged", "max_tokens": 16}),
    ],
)
def test_committed_models_become_the_same(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = onnx.load(FOLDER / f"{name}.onnx")
    path = stored(model, tmp_path / "model.onnx")
    made = rewriter.rewrite(path, tmp_path / "out.onnx", validate=False, **options)
    inline = onnx.load(made.output)
    for each in iter_tensors(inline):
        each.ClearField("data_location")
    assert digests(inline) == digests(rewriter.rewrite(model, validate=False, **options).rewritten)


def test_heads(tmp_path: Path) -> None:
    path = FOLDER / "relu-decoder.onnx"
    found = (rewriter.heads(each) for each in (path, stored(onnx.load(path), tmp_path / "model.onnx")))
    one, two = (sorted(index.layers) for index in found)
    assert one == two != []


def sparse(name: str, *, flat: bool) -> onnx.SparseTensorProto:
    array = values(name).astype(np.float32) * (np.arange(values(name).size).reshape(values(name).shape) % 3 == 1)
    places = np.argwhere(array)
    where = np.ravel_multi_index(tuple(places.T), array.shape) if flat else places
    numbers = numpy_helper.from_array(array[tuple(places.T)], name)
    return helper.make_sparse_tensor(numbers, numpy_helper.from_array(np.asarray(where), f"{name}_at"), array.shape)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("external", [True, False])
def test_sparse_weights(external: bool, flat: bool, tmp_path: Path) -> None:
    model = mlp(SILU)
    for weight in [each for each in model.graph.initializer if each.name in ("W1", "W2")]:
        model.graph.initializer.remove(weight)
    model.graph.sparse_initializer.append(sparse("W1", flat=flat))
    constant = helper.make_node("Constant", [], ["W2"], sparse_value=sparse("W2", flat=True))
    model.graph.node.insert(0, constant)
    path = tmp_path / "model.onnx"
    stored(model, path) if external else onnx.save(model, path)
    before = path.read_bytes()
    assert rewriter.rewrite(path, tmp_path / "out.onnx").validation.certified
    assert path.read_bytes() == before
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    ours, theirs = (
        onnxruntime.InferenceSession(each, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for each in (path, tmp_path / "out.onnx")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert rewriter.rewrite(model, validate=False).rewritten.graph.sparse_initializer == []
    assert len(model.graph.sparse_initializer) == 1


def with_sparse(activation: str, held: onnx.TensorProto, at: Any, dims: list[int]) -> onnx.ModelProto:
    model = mlp(activation, constants={"spare": tensor("spare", 1.0)})
    indices = numpy_helper.from_array(np.asarray(at), "at")
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=held, indices=indices, dims=dims))
    return model


def ones(count: int) -> onnx.TensorProto:
    return helper.make_tensor("S", onnx.TensorProto.FLOAT, [count], np.ones(count))


@pytest.mark.parametrize("indices", [[-1], [4], [0, 0], [[0, 0]], [[4]], [0.0]])
def test_indices_that_are_no_places(indices: Any) -> None:
    with pytest.raises(ModelError, match=r"indices of sparse tensor 'S' are not one place in \[4\] for each"):
        load_model(with_sparse("h = Mul(y, S)", ones(len(indices)), indices, [4]))


@pytest.mark.parametrize(("shape", "where"), [([], np.zeros((1, 0))), ([1] * 64, np.zeros((1, 64))), ([0], [])])
def test_sparse_tensors_of_odd_ranks(shape: list[int], where: Any) -> None:
    model = with_sparse("h = Mul(y, $1.0)", ones(len(where)), np.asarray(where, np.int64), shape)
    (dense,) = (each for each in load_model(model).proto.graph.initializer if each.name == "S")
    np.testing.assert_array_equal(numpy_helper.to_array(dense), np.ones(shape))


def test_small_tensors_over_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.files.load._MAX_SMALL_BYTES", 100)
    model = mlp("h = Mul(y, $1.0)", constants={f"c{number}": tensor(f"c{number}", np.ones(8)) for number in range(9)})
    path = stored(model, tmp_path / "model.onnx")
    loaded = onnx.load(path, load_external_data=False)
    (places,) = ({each.external_data[1].value for each in loaded.graph.initializer if each.name == "c0"},)
    for each in loaded.graph.initializer:
        if each.name.startswith("c"):
            each.external_data[1].value = next(iter(places))
    onnx.save(loaded, path)
    held = [each for each in load_model(path).proto.graph.initializer if each.raw_data]
    assert 0 < sum(len(each.raw_data) for each in held) <= 100


@pytest.mark.parametrize(("kind", "one"), [(onnx.TensorProto.FLOAT, 1.0), (onnx.TensorProto.STRING, b"a")])
def test_sparse_tensors_that_are_too_large(kind: int, one: Any) -> None:
    with pytest.raises(ModelError, match="more than 1 GiB when they are written out"):
        load_model(with_sparse("h = Mul(y, S)", helper.make_tensor("S", kind, [1], [one]), [1], [2**40]))
