"""What differs between two models as files: operators, weights by their bits, declarations; nothing is evaluated."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.types import TensorType, type_of
from rewriter.graph.view import constant_of, holder_name, key_of, operator_of, opsets
from rewriter.graph.walk import iter_all, iter_nodes, subgraphs, with_distinct_names
from rewriter.text import counted, decoded, quoted

_REMARKS = ("unused opset", "metadata", "model")  # entries that do not affect the computation
_SIGNATURE = ("input", "output")


@dataclass(frozen=True)
class Change:
    """One difference."""

    what: str  # `weight`, or the kind of entry: `opset`, `input`, `metadata`
    name: str  # its name, that of a weight in a body behind the path to the body
    a: str | None  # what A has there: element type and dims, or a text; None if A lacks it
    b: str | None  # the same for B
    how: str = ""  # of a weight that both have, the number of elements that differ and the largest |B - A|

    @property
    def text(self) -> str:
        if self.a is None or self.b is None:
            return f"{self.what} {self.name} is only in {'A' if self.b is None else 'B'}"
        return f"{self.what} {self.name}: {self.a} in A, {self.b} in B"


@dataclass(frozen=True)
class GraphDifference:
    """The differences between two files."""

    # maps every operator, also in control-flow bodies, to its counts in A and in B, as the files have it
    operators: Mapping[str, tuple[int, int]]
    tensors: tuple[Change, ...]  # the weights that differ
    same_tensors: int  # number of A's weights that B has bit for bit
    fields: tuple[Change, ...]  # differences in inputs, outputs, and opsets
    remarks: tuple[Change, ...]  # differences in metadata, producer and IR version, which do not affect the computation
    also: ClassVar = ("same",)

    @property
    def same(self) -> bool:
        """Whether both files have the same weights and declare the same."""
        return not (self.tensors or self.fields)


def difference(a: LoadedModel, b: LoadedModel) -> GraphDifference:
    """Compare two files. Raises ModelError."""
    left, right = _weights(a), _weights(b)
    tensors = tuple(_weight_changes(a, b, left, right))
    every = (thing for model in (a, b) for thing in iter_all(model.proto))
    used = {key_of(thing)[0] for thing in every if isinstance(thing, onnx.NodeProto)}
    ours, theirs = _stated(a.proto, used), _stated(b.proto, used)
    entries = ((*key, ours.get(key), theirs.get(key)) for key in {**ours, **theirs})
    stated = [Change(what, decoded(name), one, two) for what, name, one, two in entries if one != two]
    counts = [Counter(map(operator_of, iter_nodes(model.proto.graph.node))) for model in (a, b)]
    return GraphDifference(
        operators={name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])},
        tensors=tensors,
        same_tensors=len(left) - sum(each.a is not None for each in tensors),
        fields=tuple(each for each in stated if each.what not in _REMARKS),
        remarks=tuple(each for each in stated if each.what in _REMARKS),
    )


_Weights = Mapping[str, tuple[str, onnx.TensorProto]]
"""Initializers and constants by name (in bodies, behind the path): a digest of type, shape and bits, and the tensor."""


def _weights(loaded: LoadedModel) -> _Weights:
    found: dict[str, tuple[str, onnx.TensorProto]] = {}
    pending = [("", loaded.inlined.proto.graph)]
    for where, graph in pending:  # which grows
        constants = ((node.output[0], value) for node in graph.node if (value := constant_of(node)) is not None)
        for name, tensor in (*((each.name, each) for each in graph.initializer), *constants):
            values = read_tensor(loaded, tensor)
            bits: Any = repr(values.tolist()).encode() if values.dtype.kind in "OUS" else np.ascontiguousarray(values)
            content = tensor.data_type, tuple(tensor.dims), hashlib.sha256(bits).hexdigest()
            found[where + name] = repr(content), tensor
        bodies = ((holder_name(node), *each) for node in graph.node for each in subgraphs(node))
        pending += [(f"{where}{holder}/{name}/", body) for holder, name, body in bodies]
    return found


def _weight_changes(a: LoadedModel, b: LoadedModel, left: _Weights, right: _Weights) -> Iterator[Change]:
    held = [{digest for digest, _ in side.values()} for side in (left, right)]
    for name in sorted(left.keys() | right.keys()):
        (one, ours), (two, theirs) = (side.get(name, ("", None)) for side in (left, right))
        kind, other = (each and str(TensorType(each.data_type, tuple(each.dims))) for each in (ours, theirs))
        if ours is None or theirs is None:
            if (one or two) not in held[theirs is None]:
                yield Change("weight", name, kind, other)
        elif one != two:
            values = read_tensor(a, ours), read_tensor(b, theirs)
            yield Change("weight", name, kind, other, apart(*values) if kind == other else "")


def apart(a: Array, b: Array) -> str:
    """In how many elements two arrays of one type and shape differ, and by how much where these are real numbers."""
    if a.dtype.kind in "cO":
        return "values"
    left, right = (np.ascontiguousarray(each).view(np.uint8).reshape(-1, a.dtype.itemsize) for each in (a, b))
    unequal = np.flatnonzero((left != right).any(-1))
    ours, theirs = (side.reshape(-1)[unequal].astype(np.float64) for side in (a, b))
    with np.errstate(all="ignore"):
        far = np.abs(theirs - ours)
    far = np.where(np.isnan(far), np.inf, far)  # a NaN in one of them counts as an infinite difference
    top = int(np.argmax(far))
    index = [int(place) for place in np.unravel_index(unequal[top], a.shape)]
    return f"{counted(unequal.size, 'element')}, by up to {far[top]:.3g}{f' at {index}' if index else ''}"


# -- declarations ----------------------------------------------------------------------------------------------------


def _stated(proto: onnx.ModelProto, used: set[str]) -> dict[tuple[str, str], str]:
    """Maps kind and name of an entry to its text; `used` are the domains of operators."""
    producer = f"{decoded(proto.producer_name)} {decoded(proto.producer_version)}".strip()
    about = {"IR version": str(proto.ir_version), "producer": producer, "graph": decoded(proto.graph.name)}
    signature = {what: _signature(proto, what) for what in _SIGNATURE}
    versions = opsets(proto.opset_import).items()
    imports = [("opset" if domain in used else "unused opset", domain, version) for domain, version in versions]
    return {
        **{(what, name): _declared(*each) for what in _SIGNATURE for name, each in signature[what].items()},
        **{("order", f"{what}s"): ", ".join(signature[what]) for what in _SIGNATURE},
        **{(what, domain or "ai.onnx"): str(version) for what, domain, version in imports},
        **{("metadata", item.key): decoded(item.value) for item in proto.metadata_props},
        **{("model", name): value for name, value in about.items() if value},
    }


def _signature(proto: onnx.ModelProto, what: str) -> dict[str, tuple[onnx.TypeProto, bool]]:
    """Maps each name to its type and whether it has a default."""
    given = {tensor.name for tensor in proto.graph.initializer} if what == "input" else set[str]()
    return {value.name: (value.type, value.name in given) for value in getattr(proto.graph, what)}


def _declared(kind: onnx.TypeProto, default: bool) -> str:
    held = kind.WhichOneof("value")
    text = str(type_of(kind)) if held == "tensor_type" else (held or "of unknown type").removesuffix("_type")
    return f"{text}{' with a default' if default else ''}"


def renamed(a: LoadedModel, b: LoadedModel, names: Mapping[str, str]) -> LoadedModel:
    """B under A's names of inputs and outputs; `names` maps these to B's own. Raises UsageError for unfit ones."""
    for which, model, called in (("first", a, names), ("second", b, names.values())):
        known = {value.name for what in _SIGNATURE for value in getattr(model.proto.graph, what)}
        odd = next((name for name in called if name not in known), None)
        if odd is not None:
            raise UsageError(f"--map: the {which} model has no input or output {quoted(odd)}")
    if len({*names.values()}) < len(names):
        raise UsageError("--map: two names of the first model cannot become one")
    back = {theirs: ours for ours, theirs in names.items()}
    return b.with_proto(with_distinct_names(b.proto, back)) if names else b


def signature_differences(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[str, ...]:
    """Why two models cannot be run on the same inputs and compared, such as `output y: float32[2] in A, int64 in B`.

    Names and element types must agree, and so must sizes that both declare; names of symbolic dimensions do not matter.
    """
    found: list[str] = []
    for what in _SIGNATURE:
        both = (_signature(model, what).items() for model in (a, b))
        ours, theirs = ({name: kind for name, (kind, default) in each if not default} for each in both)
        for name in {**ours, **theirs}:
            if name not in ours or name not in theirs or not _agree(ours[name], theirs[name]):
                one, two = (_declared(side[name], False) if name in side else None for side in (ours, theirs))
                found.append(Change(what, quoted(name), one, two).text)
    return tuple(found)


def _agree(a: onnx.TypeProto, b: onnx.TypeProto) -> bool:
    """Whether element type, rank and sizes are the same where both are known."""
    if len({each.WhichOneof("value") for each in (a, b)} - {None}) > 1:
        return False
    ours, theirs = ((kind.elem_type or None, kind.rank, *(kind.shape or ())) for kind in (type_of(a), type_of(b)))
    known = zip(ours, theirs, strict=False)
    return all(one == two for one, two in known if isinstance(one, int) and isinstance(two, int))
