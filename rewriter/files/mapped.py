"""Leave the large weights of a model file in place: the model refers to that file for external data.

A model of a gigabyte is then one of kilobytes in memory, whose passes, copies and sessions cost little: onnxruntime
maps the weights. `rewriter.files.save` puts them back (`inlined`). Only large initializers of the main graph stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy

import onnx

MIN_MAPPED_BYTES = 2**16  # no pass reads the values of constants this large
_GRAPH, _INITIALIZER, _RAW = 7, 5, 9  # field numbers of graph, initializer, raw_data
_OTHER_FIELDS = {1, 2, 8, _RAW, 12, 16}  # fields beside raw data: dims, type, name, doc string, metadata
_LOCATION, _DEFAULT = 14, b"\0"  # data_location, and its default, which onnx writes after loading external data
_VARINT, _BYTES = 0, 2  # wire types of protobuf; no message here has fields of another one, unless they are packed


class _UnusualError(Exception):
    """The bytes are not an ordinary message; protobuf will report the fault."""


def without_weights(data: bytes, location: str) -> bytes | None:
    """The model with references to the file `location` instead of large weights; None if it has none or is unusual."""
    try:
        small = _shrunk(memoryview(data), 0, len(data), location, (_GRAPH, _INITIALIZER))
    except _UnusualError:
        return None
    return small if len(small) < len(data) else None


def inlined(
    model: onnx.ModelProto, lengths: Mapping[str, int], read: Callable[[onnx.TensorProto], bytes | memoryview]
) -> tuple[int, Iterator[bytes | memoryview]]:
    """The size and the pieces of a model with initializers of these lengths inline, each read when it is due."""
    if not lengths:
        whole = model.SerializeToString(deterministic=True)
        return len(whole), iter([whole])
    rest, graph = deepcopy(model), deepcopy(model.graph)
    rest.ClearField("graph")
    graph.ClearField("initializer")
    head, bare = (each.SerializeToString(deterministic=True) for each in (rest, graph))
    heads, sizes = [], []
    for tensor in model.graph.initializer:
        length, inline = lengths.get(tensor.name), tensor
        if length is not None:
            inline = deepcopy(tensor)
            inline.ClearField("external_data")
            inline.ClearField("data_location")
        data = inline.SerializeToString(deterministic=True) + (b"" if length is None else _tag(_RAW, length))
        heads.append(data)
        sizes.append(len(data) + (length or 0))
    inside = len(bare) + sum(len(_tag(_INITIALIZER, size)) + size for size in sizes)

    def pieces() -> Iterator[bytes | memoryview]:
        yield head + _tag(_GRAPH, inside) + bare
        for data, size, tensor in zip(heads, sizes, model.graph.initializer, strict=True):
            yield _tag(_INITIALIZER, size) + data
            if tensor.name in lengths:
                yield read(tensor)

    return len(head) + len(_tag(_GRAPH, inside)) + inside, pieces()


def _shrunk(data: memoryview, first: int, last: int, location: str, way: tuple[int, ...]) -> bytes:
    """A message without its weights, which are behind the fields `way`."""
    pieces: list[bytes | memoryview] = []
    for number, begin, start, end in _fields(data, first, last, way[0]):
        small = None
        if number == way[0] and end - start >= MIN_MAPPED_BYTES:
            small = _shrunk(data, start, end, location, way[1:]) if way[1:] else _tensor(data, start, end, location)
        pieces += [data[begin:end]] if small is None else [_tag(number, len(small)), small]
    return b"".join(pieces)


def _tensor(data: memoryview, first: int, last: int, location: str) -> bytes | None:
    """The tensor with a reference to its raw data; None without raw data, or with unusual fields."""
    fields = list(_fields(data, first, last, _RAW))
    raw = [(start, end) for number, _, start, end in fields if number == _RAW]
    odd = (
        number not in _OTHER_FIELDS and not (number == _LOCATION and data[start:end] == _DEFAULT)
        for number, _, start, end in fields
    )
    if len(raw) != 1 or raw[0][1] - raw[0][0] < MIN_MAPPED_BYTES or any(odd):
        return None
    (start, end), reference = raw[0], onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": str(start), "length": str(end - start)}.items():
        reference.external_data.add(key=key, value=value)
    kept = [data[begin:stop] for number, begin, _, stop in fields if number not in (_RAW, _LOCATION)]
    return b"".join([*kept, reference.SerializeToString(deterministic=True)])


def _fields(data: memoryview, start: int, last: int, message: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, start, start and end of contents) of the fields of a message. Raises _UnusualError."""
    begin = start
    while begin < last:
        tag, start = _varint(data, begin, last)
        number, wire = tag >> 3, tag & 7
        if wire == _BYTES:
            length, start = _varint(data, start, last)
            end = start + length
        elif wire == _VARINT:
            end = _varint(data, start, last)[1]
        else:
            raise _UnusualError
        if end > last or (number == message and wire != _BYTES):
            raise _UnusualError
        yield number, begin, start, end
        begin = end


def _varint(data: memoryview, start: int, last: int) -> tuple[int, int]:
    """A number and its end. Raises _UnusualError."""
    value = 0
    for place in range(start, min(start + 10, last)):
        value |= (data[place] & 127) << 7 * (place - start)
        if data[place] < 128:
            return value, place + 1
    raise _UnusualError


def _tag(number: int, length: int) -> bytes:
    made = bytearray([number << 3 | _BYTES])
    while length > 127:
        made.append(length & 127 | 128)
        length >>= 7
    return bytes([*made, length])
