"""Weights that differ: how many elements, by how much, where, and how large they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rewriter.compare.weights import TensorChange, Weight, compared, kind_of, only
from rewriter.errors import ModelError
from rewriter.files.load import LoadedModel

INF, NAN = float("inf"), float("nan")


def loaded(tensor: onnx.TensorProto, base: Path | None = None) -> Weight:
    return Weight(LoadedModel(onnx.ModelProto(), None, base, (), 0), tensor)


def change_of(a: Any, b: Any, dtype: Any = np.float32) -> TensorChange | None:
    given = (loaded(numpy_helper.from_array(np.asarray(each, dtype), "w")) for each in (a, b))
    return compared("w", *given)


@pytest.mark.parametrize(
    ("elem_type", "dims", "kind"),
    [
        (TensorProto.FLOAT, [768, 3072], "float32[768, 3072]"),
        (TensorProto.DOUBLE, [], "double[]"),
        (TensorProto.BFLOAT16, [3], "bfloat16[3]"),
        (TensorProto.STRING, [0], "string[0]"),
        (0, [2], "?[2]"),
        (999, [2], "?[2]"),
    ],
)
def test_kinds(elem_type: int, dims: list[int], kind: str) -> None:
    assert kind_of(TensorProto(data_type=elem_type, dims=dims)) == kind


@pytest.mark.parametrize(
    ("elem_type", "dims", "size"),
    [
        (TensorProto.FLOAT, [3, 5], 60),
        (TensorProto.DOUBLE, [], 8),
        (TensorProto.INT4, [3], 2),
        (TensorProto.BOOL, [7], 7),
        (TensorProto.FLOAT16, [0, 3], 0),
        (TensorProto.STRING, [4], 0),
    ],
)
@pytest.mark.parametrize("status", ["only in A", "only in B"])
def test_a_weight_of_one_model_only(elem_type: int, dims: list[int], size: int, status: Any) -> None:
    tensor = TensorProto(name="t", data_type=elem_type, dims=dims)
    kind = kind_of(tensor)
    kinds = (kind, "") if status == "only in A" else ("", kind)
    assert only("w", loaded(tensor), status) == TensorChange("w", status, kinds, size)


@pytest.mark.parametrize(
    ("a", "b", "elements", "difference", "index"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 3.0], 1, 0.5, (1,)),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.5, 2.0], [3.0, 2.0]], 2, 2.0, (1, 1)),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [7.0, 6.0]], 2, 4.0, (1, 0)),
        ([1.0, 0.0], [1.0, -0.0], 1, 0.0, (1,)),  # bits differ, values do not
        ([1.0, 2.0, 3.0], [9.0, NAN, 3.0], 2, INF, (1,)),  # a NaN in one of them
        ([1.0, INF], [1.0, -INF], 1, INF, (1,)),
        ([1.0, 2.0], [1.0, INF], 1, INF, (1,)),
        ([1.0, NAN], [1.0, NAN], None, None, None),  # the same NaN
        (3.0, 4.0, 1, 1.0, ()),
    ],
)
def test_how_they_differ(a: Any, b: Any, elements: int | None, difference: float, index: tuple[int, ...]) -> None:
    change = change_of(a, b)
    if elements is None:
        assert change is None
        return
    kind = f"float32[{', '.join(map(str, np.shape(a)))}]"
    assert change == TensorChange("w", "changed", (kind, kind), 4 * np.size(a), elements, difference, index)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "difference"),
    [
        (np.int8, [-128], [127], 255.0),
        (np.uint8, [0, 200], [255, 200], 255.0),
        (np.int64, [5], [2**40], 2.0**40 - 5),
        (np.bool_, [True], [False], 1.0),
        (np.float16, [1.0], [1.5], 0.5),
    ],
)
def test_differences_are_those_of_numbers(dtype: Any, a: Any, b: Any, difference: float) -> None:
    """Neither wrapped around nor rounded to the element type."""
    change = change_of(a, b, dtype)
    assert change is not None
    assert change.max_difference == difference
    assert change.index == (0,)


def test_complex_numbers_and_packed_ones_are_not_measured() -> None:
    assert change_of([1.0], [2.0], np.complex64) == TensorChange("w", "changed", ("complex64[1]",) * 2, 8)
    packed = [helper.make_tensor("w", TensorProto.INT4, [3], values) for values in ([1, 2, 3], [1, 2, 4])]
    change = compared("w", loaded(packed[0]), loaded(packed[1]))
    assert change == TensorChange("w", "changed", ("int4[3]",) * 2, 2)


def test_strings_of_other_lengths() -> None:
    words = [numpy_helper.from_array(np.asarray(pair, object), "w") for pair in (("a", "b"), ("a", "bcd"))]
    change = compared("w", loaded(words[0]), loaded(words[1]))
    assert change == TensorChange("w", "changed", ("string[2]",) * 2, 18)
    assert change is not None
    assert change.elements is None


def test_another_kind_is_not_measured() -> None:
    ours = numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
    theirs = numpy_helper.from_array(np.zeros((3, 2)), "w")
    change = compared("w", loaded(ours), loaded(theirs))
    assert change == TensorChange("w", "changed", ("float32[2, 3]", "double[3, 2]"), 24)


def external(path: Path, values: Any, offset: int = 0) -> Weight:
    """A weight in a file of its own."""
    array = np.asarray(values, np.float32)
    path.write_bytes(b"\x07" * offset + array.tobytes())
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", path.name), ("offset", str(offset)), ("length", str(array.nbytes))):
        tensor.external_data.add(key=key, value=value)
    return loaded(tensor, path.parent)


def test_data_may_lie_elsewhere(tmp_path: Path) -> None:
    values = np.arange(10.0)
    changed = values + np.array([0, 0.5, 0, 0, 0, -3, 0, 0, 0, 1.0])
    one, same, other = external(tmp_path / "a", values, 8), external(tmp_path / "b", values), loaded(inline(changed))
    assert one.same(same)
    assert not one.same(other)
    assert compared("w", one, same) is None
    assert compared("w", one, other) == TensorChange("w", "changed", ("float32[10]",) * 2, 40, 3, 3.0, (5,))
    (tmp_path / "b").write_bytes(b"short")
    with pytest.raises(ModelError, match="the data file is incomplete"):
        compared("w", one, external_again(same))


def inline(values: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, np.float32), "w")


def external_again(weight: Weight) -> Weight:
    """Without what was read before."""
    return Weight(weight.model, weight.tensor)


def test_what_follows_a_weight_does_not_count(tmp_path: Path) -> None:
    ours, theirs = external(tmp_path / "a", [1.0, 2.0, 3.0]), external(tmp_path / "b", [1.0, 2.0, 9.0])
    for weight in (ours, theirs):
        weight.tensor.dims[0] = 2
        weight.tensor.external_data[2].value = "8"
    assert compared("w", ours, theirs) is None
    assert ours.digest == theirs.digest


def test_the_same_bytes_of_the_same_file_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = external(tmp_path / "a", np.zeros(100))
    monkeypatch.setattr(Weight, "data", lambda _: pytest.fail("it was read"))
    assert compared("w", one, external_again(one)) is None
    assert one.same(external_again(one))


def test_raw_and_typed_fields_hold_the_same() -> None:
    typed = loaded(helper.make_tensor("w", TensorProto.FLOAT, [1, 2], [1.5, -2.0]))
    assert compared("w", loaded(inline([[1.5, -2.0]])), typed) is None
    assert loaded(inline([[1.5, -2.0]])).same(typed)


def test_places_in_one_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(np.array([1.0, 2.0], np.float32).tobytes())
    made = []
    for offset in ("0", "4"):
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "data"), ("offset", offset), ("length", "4")):
            tensor.external_data.add(key=key, value=value)
        made.append(loaded(tensor, tmp_path))
    change = compared("w", *made)
    assert change is not None
    assert change.max_difference == 1.0


def test_digests_cover_type_dims_and_all_data() -> None:
    arrays = [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), np.zeros((2, 3), np.int32)]
    arrays += [np.asarray([[0, 0, 0], [0, 1, 0]], np.float32), np.asarray([[-0.0, 0, 0], [0, 0, 0]], np.float32)]
    assert len({loaded(numpy_helper.from_array(each, "w")).digest for each in arrays}) == len(arrays)
    words = [numpy_helper.from_array(np.asarray(pair, object), "w") for pair in (("a", "bc"), ("ab", "c"))]
    assert len({loaded(each).digest for each in words}) == 2
