"""Element types: how wide they are, where their values stand, and how many there must be."""

from contextlib import nullcontext
from typing import Any

import pytest
from onnx import TensorProto, helper

from rewriter.errors import ModelError
from rewriter.files.tensors import ELEMENT_TYPES, MAX_BYTES, byte_count, check_inline, count_elements

PACKED = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}
"""Element types of less than a byte, and their bits."""

KNOWN = [kind for kind in TensorProto.DataType.values() if kind != TensorProto.UNDEFINED]
COUNT = 37
TOO_LARGE = "has dimensions too large to exist"


def test_all_element_types_of_onnx_are_known() -> None:
    assert {*ELEMENT_TYPES} == {*KNOWN}


@pytest.mark.parametrize("kind", KNOWN, ids=TensorProto.DataType.Name)
def test_values_are_counted(kind: int) -> None:
    text = kind == TensorProto.STRING
    none: list[Any] = [b"" if text else 0] * COUNT
    tensor = helper.make_tensor("w", kind, [COUNT], none)
    values: list[Any] = list(getattr(tensor, helper.tensor_dtype_to_field(kind)))
    for given, right in ((values, True), (values[:-1], False), ([*values, values[0]], False)):
        fields: dict[str, Any] = {"data_type": kind, "dims": [COUNT], helper.tensor_dtype_to_field(kind): given}
        tensor = TensorProto(**fields)
        with nullcontext() if right else pytest.raises(ModelError, match="where its dimensions need"):
            check_inline(tensor)
    if text:
        return
    size = -(-COUNT * (PACKED.get(kind) or 8 * helper.tensor_dtype_to_np_dtype(kind).itemsize) // 8)
    assert byte_count(tensor) == size
    for by in (0, -1, 1):
        with pytest.raises(ModelError, match="bytes of raw data where its") if by else nullcontext():
            check_inline(TensorProto(data_type=kind, dims=[COUNT], raw_data=bytes(size + by)))


@pytest.mark.parametrize(
    ("dims", "bits", "count"),
    [
        ([MAX_BYTES], 8, MAX_BYTES),
        ([MAX_BYTES], 4, MAX_BYTES),  # a byte each when it is read
        ([2**62 - 1], 16, 2**62 - 1),
        ([0, 2**62, 1], 8, 0),
        ([1] * 64, 8, 1),
        ([], 8, 1),
        ([2**63], 8, TOO_LARGE),
        ([2**63], 4, TOO_LARGE),
        ([2**62], 16, TOO_LARGE),
        ([0, 2**62, 2**62], 8, TOO_LARGE),
        ([1] * 65, 8, TOO_LARGE),
        ([2, -1], 8, "has the negative dimension -1"),
    ],
)
def test_dimensions(dims: list[int], bits: int, count: int | str) -> None:
    if isinstance(count, int):
        assert count_elements(dims, "w", bits) == count
        return
    with pytest.raises(ModelError, match=f"tensor 'w' {count}"):
        count_elements(dims, "w", bits)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"segment": TensorProto.Segment(begin=0, end=2)}, "is stored in segments"),
        ({"raw_data": bytes(8), "float_data": [1.0, 2.0]}, "(FLOAT) holds values in float_data, raw_data where "),
        ({"data_type": TensorProto.STRING, "raw_data": b"a"}, "(STRING) holds values in raw_data where string_data "),
        ({"int32_data": [1, 2]}, "(FLOAT) holds values in int32_data where float_data or raw_data belongs;"),
        ({"float_data": [1, 2], "uint64_data": [1]}, "(FLOAT) holds values in float_data, uint64_data where "),
        ({"float_data": [1.0]}, "(FLOAT) holds 1 entries of float_data where its dimensions need 2;"),
        ({}, "(FLOAT) holds 0 entries of float_data where its dimensions need 2;"),
        ({"raw_data": bytes(7)}, "(FLOAT) holds 7 bytes of raw data where its dimensions need 8;"),
        ({"data_type": 99}, "has the unknown element type 99;"),
        ({"data_type": TensorProto.STRING, "dims": [1], "string_data": [b"a"], "raw_data": b""}, None),
        ({"dims": [0]}, None),
        ({"dims": [0], "raw_data": b""}, None),
    ],
)
def test_what_a_tensor_holds(fields: dict[str, Any], said: str | None) -> None:
    tensor = TensorProto(**{"name": "w", "data_type": TensorProto.FLOAT, "dims": [2], **fields})
    if said is None:
        check_inline(tensor)
        return
    with pytest.raises(ModelError) as caught:
        check_inline(tensor)
    assert str(caught.value).startswith(f"tensor 'w' {said}")
