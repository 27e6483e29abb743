"""Files that are not the model that was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from tests.sabotage.harness import Part, Patch, SabotageError
from tests.sabotage.sabotages import Expect, Sabotage
from tests.sabotage.subjects import on


def written(change: Callable[[bytes], bytes]) -> Patch:
    """Other bytes are written."""

    def wrapper(right: Part) -> Part:
        def wrong(*arguments: Any, **options: Any) -> tuple[int, list[bytes]]:
            _, pieces = right(*arguments, **options)
            data = b"".join(pieces)
            changed = change(data)
            if changed == data:
                raise SabotageError("the bytes are the same")
            return len(changed), [changed]

        return wrong

    return {"serialise": wrapper}


def as_model(change: Callable[[onnx.ModelProto], None]) -> Patch:
    """Another model is written."""

    def changed(data: bytes) -> bytes:
        model = onnx.ModelProto.FromString(data)
        change(model)
        return bytes(model.SerializeToString(deterministic=True))

    return written(changed)


def _flipped(data: bytes) -> bytes:
    """One bit of the largest tensor, the lowest of a mantissa."""
    tensors = onnx.ModelProto.FromString(data).graph.initializer
    place = data.index(max((tensor.raw_data for tensor in tensors), key=len))
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def _shifted(model: onnx.ModelProto) -> None:
    """A reference to external data points one number further."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "offset":
                entry.value = str(int(entry.value) - 4 if int(entry.value) else 4)
                return
    raise SabotageError("no external data")


def _exchanged(model: onnx.ModelProto) -> None:
    """Two weights of the same shape read each other's external data."""
    by_shape: dict[tuple[int, ...], onnx.TensorProto] = {}
    for tensor in model.graph.initializer:
        other = by_shape.setdefault(tuple(tensor.dims), tensor)
        if tensor.external_data and other.external_data and other is not tensor:
            mine = list(tensor.external_data)
            theirs = [onnx.StringStringEntryProto.FromString(e.SerializeToString()) for e in other.external_data]
            del other.external_data[:]
            other.external_data.extend(mine)
            del tensor.external_data[:]
            tensor.external_data.extend(theirs)
            return
    raise SabotageError("no two weights of the same shape")


def _zeroed(model: onnx.ModelProto) -> None:
    tensor = max(model.graph.initializer, key=lambda found: len(found.raw_data))
    tensor.raw_data = bytes(len(tensor.raw_data))


def _without_node(model: onnx.ModelProto) -> None:
    del model.graph.node[-1]


def _halved(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2 and tensor.raw_data:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


_PAIR = ("silu-decoder", "gelu-encoder")
_OTHER = ("relu-decoder", "gelu-vision")

WRITTEN = (
    Sabotage("the file is cut by one byte", written(lambda data: data[:-1]), on(*_PAIR), Expect.REFUSED),
    Sabotage("the file is cut in half", written(lambda data: data[: len(data) // 2]), on(*_PAIR), Expect.REFUSED),
    Sabotage("the file is empty", written(lambda _: b""), on(*_OTHER), Expect.REFUSED),
    Sabotage("the file is zeros", written(lambda data: bytes(len(data))), on(*_OTHER), Expect.REFUSED),
    Sabotage("one bit of a weight is flipped", written(_flipped), on(*_PAIR, *_OTHER), Expect.MODEL),
    Sabotage("a weight is zeros", as_model(_zeroed), on(*_OTHER), Expect.MODEL),
    Sabotage("the last node is missing", as_model(_without_node), on(*_PAIR), Expect.REFUSED),
    Sabotage("the weights are rounded to float16", as_model(_halved), on(*_OTHER), Expect.MODEL),
    Sabotage("external data is read from another place", as_model(_shifted), on("external"), Expect.REFUSED),
    Sabotage("two weights' external data exchanged", as_model(_exchanged), on("external"), Expect.MODEL),
)
