"""Element types: how wide they are, where their values stand, and how many there must be."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from rewriter.errors import ModelError
from rewriter.files.tensors import ELEMENT_TYPES, MAX_BYTES, byte_count, check_inline, count_elements

PACKED = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}
"""Element types of less than a byte, and their bits."""

KNOWN = [kind for kind in ELEMENT_TYPES if kind in TensorProto.DataType.values()]
COUNT = 37


def test_all_element_types_of_onnx_are_known() -> None:
    assert {*TensorProto.DataType.values()} - {TensorProto.UNDEFINED} == {*KNOWN}
    assert len(KNOWN) > 20


@pytest.mark.parametrize("kind", KNOWN, ids=TensorProto.DataType.Name)
def test_names_widths_and_fields_are_those_of_onnx(kind: int) -> None:
    element = ELEMENT_TYPES[kind]
    assert element.name == TensorProto.DataType.Name(kind)
    assert element.field == helper.tensor_dtype_to_field(kind)
    if kind != TensorProto.STRING:
        width = PACKED.get(kind) or 8 * helper.tensor_dtype_to_np_dtype(kind).itemsize
        assert element.bits == width
        assert byte_count(TensorProto(data_type=kind, dims=[COUNT])) == -(-COUNT * width // 8)


@pytest.mark.parametrize("kind", KNOWN, ids=TensorProto.DataType.Name)
def test_typed_values_are_counted(kind: int) -> None:
    none: list[Any] = [b"" if kind == TensorProto.STRING else 0] * COUNT
    tensor = helper.make_tensor("w", kind, [COUNT], none)
    check_inline(tensor)
    values = getattr(tensor, ELEMENT_TYPES[kind].field)
    for wrong in (values[:-1], [*values, values[0]]):
        other = onnx.TensorProto(data_type=kind, dims=[COUNT])
        getattr(other, ELEMENT_TYPES[kind].field).extend(wrong)
        with pytest.raises(ModelError, match="where its dimensions need"):
            check_inline(other)


@pytest.mark.parametrize("kind", KNOWN, ids=TensorProto.DataType.Name)
def test_raw_values_are_counted(kind: int) -> None:
    if kind == TensorProto.STRING:
        return
    size = byte_count(TensorProto(data_type=kind, dims=[COUNT]))
    check_inline(TensorProto(data_type=kind, dims=[COUNT], raw_data=bytes(size)))
    for wrong in (size - 1, size + 1):
        with pytest.raises(ModelError, match="bytes of raw data where its dimensions need"):
            check_inline(TensorProto(data_type=kind, dims=[COUNT], raw_data=bytes(wrong)))


@pytest.mark.parametrize(
    ("dims", "bits", "count"),
    [
        ([MAX_BYTES], 8, MAX_BYTES),
        ([MAX_BYTES], 4, MAX_BYTES),  # a byte each when it is read
        ([2**62 - 1], 16, 2**62 - 1),
        ([0, 2**62, 1], 8, 0),
        ([1] * 64, 8, 1),
        ([], 8, 1),
    ],
)
def test_the_largest_dimensions(dims: list[int], bits: int, count: int) -> None:
    assert count_elements(dims, "w", bits) == count


@pytest.mark.parametrize(
    ("dims", "bits"), [([2**63], 8), ([2**63], 4), ([2**62], 16), ([0, 2**62, 2**62], 8), ([1] * 65, 8)]
)
def test_dimensions_too_large_to_exist(dims: list[int], bits: int) -> None:
    with pytest.raises(ModelError, match="tensor 'w' has dimensions too large to exist"):
        count_elements(dims, "w", bits)


def test_a_negative_dimension() -> None:
    with pytest.raises(ModelError, match="tensor 'w' has the negative dimension -1"):
        count_elements([2, -1], "w")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"segment": TensorProto.Segment(begin=0, end=2)}, "is stored in segments"),
    (
        {"raw_data": bytes(8), "float_data": [1.0, 2.0]},
        "(FLOAT) holds values in float_data, raw_data where ",
    ),
    (
        {"data_type": TensorProto.STRING, "raw_data": b"a"},
        "(STRING) holds values in raw_data where string_data ",
    ),
    ({"int32_data": [1, 2]}, "(FLOAT) holds values in int32_data where float_data or raw_data belongs;"),
    (
        {"float_data": [1.0, 2.0], "uint64_data": [1]},
        "(FLOAT) holds values in float_data, uint64_data where ",
    ),
    ({"float_data": [1.0]}, "(FLOAT) holds 1 entries of float_data where its dimensions need 2;"),
    ({}, "(FLOAT) holds 0 entries of float_data where its dimensions need 2;"),
    ({"raw_data": bytes(7)}, "(FLOAT) holds 7 bytes of raw data where its dimensions need 8;"),
    ({"data_type": 99}, "has the unknown element type 99;"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_what_is_wrong_with_a_tensor(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_inline(TensorProto(**{"name": "w", "data_type": TensorProto.FLOAT, "dims": [2], **fields}))
    assert str(caught.value).startswith(f"tensor 'w' {said}")


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(name="w", data_type=TensorProto.STRING, dims=[1], string_data=[b"a"], raw_data=b""),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0]),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0], raw_data=b""),
        TensorProto(name="w", data_type=TensorProto.COMPLEX64, dims=[2], float_data=[1.0] * 4),
        TensorProto(name="w", data_type=TensorProto.INT4, dims=[3], int32_data=[1, 2]),
        TensorProto(name="w", data_type=TensorProto.INT4, dims=[3], raw_data=b"ab"),
    ],
)
def test_sound_tensors(tensor: TensorProto) -> None:
    check_inline(tensor)
