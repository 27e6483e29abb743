"""Check that two models accept the same inputs and have comparable outputs.

Names and element types must agree, and so must sizes that both declare; names of symbolic dimensions do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from rewriter.text import quoted

Dims = tuple[str | int, ...] | None


def signature_differences(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[str, ...]:
    """Differences in the inputs and outputs of two models, such as `output 'logits': float16 in A, float in B`."""
    return (*_differences("input", _inputs(a), _inputs(b)), *_differences("output", _outputs(a), _outputs(b)))


def _inputs(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    defaults = {tensor.name for tensor in model.graph.initializer}
    return {value.name: value for value in model.graph.input if value.name not in defaults}


def _outputs(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    return {value.name: value for value in model.graph.output}


def _differences(
    what: str, a: Mapping[str, onnx.ValueInfoProto], b: Mapping[str, onnx.ValueInfoProto]
) -> Iterator[str]:
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            yield f"{what} {quoted(name)} is only in {'A' if name in a else 'B'}"
            continue
        types = [_element(value[name]) for value in (a, b)]
        if types[0] != types[1] and "undefined" not in types:
            yield f"{what} {quoted(name)}: {types[0]} in A, {types[1]} in B"
        elif not _agree(*(_dims(value[name]) for value in (a, b))):
            texts = [f"[{', '.join(map(str, _dims(value[name]) or ()))}]" for value in (a, b)]
            yield f"{what} {quoted(name)}: {texts[0]} in A, {texts[1]} in B"


def _element(value: onnx.ValueInfoProto) -> str:
    held = value.type.WhichOneof("value")
    if held != "tensor_type":
        return (held or "undefined").removesuffix("_type")
    number = value.type.tensor_type.elem_type
    return next((key.lower() for key, code in onnx.TensorProto.DataType.items() if code == number), str(number))


def _dims(value: onnx.ValueInfoProto) -> Dims:
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim)


def _agree(a: Dims, b: Dims) -> bool:
    if a is None or b is None:
        return True
    numbers = ((x, y) for x, y in zip(a, b, strict=False) if isinstance(x, int) and isinstance(y, int))
    return len(a) == len(b) and all(x == y for x, y in numbers)
