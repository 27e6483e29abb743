"""Tensors are the same when their bytes are, whichever file these stand in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.options import Options
from passes.plan import apply, make_plan
from rewriter.api.rows import claim_of
from rewriter.files.load import LoadedModel, load_model
from rewriter.proof.claims import Side
from rewriter.proof.unchanged.model import unexplained_changes
from rewriter.proof.unchanged.same import same_attributes, same_node, same_tensors
from tests.rewriter.compare.edits import maker, weight
from tests.rewriter.proof.unchanged.house import BLOCK, NODE, WEIGHT, side
from tests.textmodels import text_model


def stored(folder: Path, name: str = "data", *, values: tuple[float, float] = (0.5, 2.0), at: int = 0) -> LoadedModel:
    """A model with a block whose weight `gain` and whose node `filled` have their values in a file."""
    model = text_model(f"{BLOCK} filled = ConstantOfShape(size) scaled = Mul(m, filled) out = Mul(scaled, gain)")
    maker(model, "filled").attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.ones(1))))
    model.graph.initializer.append(numpy_helper.from_array(np.asarray([4]), "size"))
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"?" * at + np.asarray(values, np.float32).tobytes())
    for number, tensor in enumerate((model.graph.initializer.add(), maker(model, "filled").attribute[0].t)):
        tensor.CopyFrom(TensorProto(name="gain" if number == 0 else "", data_type=TensorProto.FLOAT, dims=[1]))
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", at + 4 * number), ("length", 4)):
            tensor.external_data.add(key=key, value=str(value))
    onnx.save(model, folder / "model.onnx")
    return load_model(folder / "model.onnx")


GAIN, FILLED = WEIGHT.format("gain"), NODE.format("ConstantOfShape 'filled'")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"folder": "other"}, set()),
        ({"folder": "other", "name": "other"}, set()),
        ({"folder": "source", "name": "other", "at": 16}, set()),
        ({"folder": "other", "values": (0.25, 2.0)}, {GAIN}),
        ({"folder": "other", "values": (0.5, 1.0)}, {FILLED}),
        ({"folder": "source", "name": "other", "values": (2.0, 0.5)}, {GAIN, FILLED}),
    ],
    ids=["moved", "moved and renamed", "rearranged", "another weight", "another attribute", "another file"],
)
def test_values_in_files(where: dict[str, Any], expected: set[str], tmp_path: Path) -> None:
    source = stored(tmp_path / "source")
    plan = make_plan(source.proto, Options())
    rewritten = apply(plan)
    claims = [claim_of(conversion) for conversion in plan.conversions]
    other = stored(tmp_path / where["folder"], **{key: value for key, value in where.items() if key != "folder"})
    for tensor, new in (
        (weight(rewritten, "gain"), weight(other.proto, "gain")),
        (maker(rewritten, "filled").attribute[0].t, maker(other.proto, "filled").attribute[0].t),
    ):
        tensor.CopyFrom(new)
    assert set(unexplained_changes(Side.of(source), side(rewritten, other.base_dir), claims)) == expected


def test_the_same_bytes_of_the_same_file_are_not_read(tmp_path: Path) -> None:
    source = stored(tmp_path / "source")
    plan = make_plan(source.proto, Options())
    claims = [claim_of(conversion) for conversion in plan.conversions]
    (tmp_path / "source" / "data").unlink()
    assert unexplained_changes(Side.of(source), side(apply(plan), source.base_dir), claims) == []


TWO = np.asarray([[1.0, 0.0]], np.float32)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (TWO, TWO, True),
        (TWO, TWO.T, False),
        (TWO, TWO.view(np.int32), False),
        (TWO, np.asarray([[1.0, -0.0]], np.float32), False),
        (TWO * np.float32("nan"), TWO * np.float32("nan"), True),
        (np.asarray(["a", "bc"], object), np.asarray(["a", "bc"], object), True),
        (np.asarray(["a", "bc"], object), np.asarray(["ab", "c"], object), False),
    ],
    ids=["equal", "shape", "type", "sign of zero", "NaN", "equal strings", "strings"],
)
def test_bit_for_bit(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], same: bool) -> None:
    loaded = LoadedModel(onnx.ModelProto(), None, None, (), 0)
    tensors = [numpy_helper.from_array(values, name) for values, name in ((old, "w"), (new, "v"))]
    assert same_tensors(tensors[:1], tensors[1:], (loaded, loaded)) == same
    assert not same_tensors(tensors[:1], [], (loaded, loaded))
    before, after = ([helper.make_attribute("value", tensor)] for tensor in tensors)
    assert same_attributes(before, after, (loaded, loaded)) == same


def sparse(values: list[float], indices: list[int], size: int) -> onnx.SparseTensorProto:
    held, places = numpy_helper.from_array(np.asarray(values, np.float32)), numpy_helper.from_array(np.asarray(indices))
    return helper.make_sparse_tensor(held, places, [size])


SPARSE = sparse([1.0], [2], 4)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (sparse([1.0], [2], 4), True),
        (sparse([2.0], [2], 4), False),
        (sparse([1.0], [3], 4), False),
        (sparse([1.0], [2], 8), False),
    ],
    ids=["equal", "values", "indices", "dims"],
)
def test_sparse_attributes(other: onnx.SparseTensorProto, same: bool) -> None:
    loaded = LoadedModel(onnx.ModelProto(), None, None, (), 0)
    for old, new in ((SPARSE, other), ([SPARSE], [other])):
        before, after = ([helper.make_attribute("value", value)] for value in (old, new))
        assert same_attributes(before, after, (loaded, loaded)) == same


def test_a_list_of_bodies_has_a_length() -> None:
    """The bodies themselves are compared as graphs of their own."""
    loaded = LoadedModel(onnx.ModelProto(), None, None, (), 0)
    graphs = [onnx.GraphProto(name=name) for name in "abc"]
    one, two, other = (
        helper.make_node("Switch", ["x"], ["y"], domain="d", bodies=bodies)
        for bodies in ([*graphs[:1]], graphs[:2], graphs[1:])
    )
    assert same_node(two, other, (loaded, loaded))
    assert not same_node(one, two, (loaded, loaded))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 24])
def test_tensors_are_compared_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.proof.unchanged.same._PIECE", 8)
    models = (side(text_model(f"{BLOCK} out = Identity(m)")).model,) * 2
    values = np.arange(size, dtype=np.uint8)
    same = numpy_helper.from_array(values, "same"), numpy_helper.from_array(values, "other name")
    assert same_tensors(same[:1], same[1:], models)
    for place in range(size):
        changed = values.copy()
        changed[place] ^= 1
        assert not same_tensors(same[:1], [numpy_helper.from_array(changed, "same")], models)
