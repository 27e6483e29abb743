"""Evaluates a model, node by node, in one arithmetic.

A float input, and what depends on one, is a `Value`. Integers, Booleans, and floats that are made of constants and
shapes alone stay arrays, computed by the runtime's own kernels, so that constants that a tool folded are the same bits.

A row of a table that is taken by an integer input (an embedding) is, in the field, a random combination of *all* rows:
the multilinear extension in the one-hot vector of the id, so that any one token tests the whole table.
"""

import itertools
import math
from collections import ChainMap, UserDict
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx

from rewriter.arrays import Array, distinct, grouped
from rewriter.errors import ModelError
from rewriter.evaluate import moves, products, quantised, reductions  # noqa: F401 - their rows
from rewriter.evaluate.arithmetic import Arithmetic, Field, Unsupported, Value, content, is_float, multiply, unchanging
from rewriter.evaluate.moves import CASTS, PARTS, REARRANGED, SECTIONS
from rewriter.evaluate.nodes import CONTROL, Kernels, control, key_on, version_of
from rewriter.evaluate.scalar import CHOOSING, COMPARISONS, EQUAL_ARE, INTEGERS, OF_TWO, OPPOSITE, SIGNED, STEPS
from rewriter.evaluate.table import ALWAYS, DOMAINS, MOVES, PRODUCTS, Call, Operator, is_random, row, tuple_of
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.attention import definition
from rewriter.graph.edit import by_definition
from rewriter.graph.fused import FUSED, SATURATING, saturating, with_parts, with_plain_experts
from rewriter.graph.types import TensorType
from rewriter.graph.view import SIZES, LostError, attributes, constant_of, key_of, label, needed, opsets, overridable_in
from rewriter.graph.walk import iter_nodes, reads, subgraphs, with_distinct_names
from rewriter.text import one_line

_OTHER_DOMAINS = ("ai.onnx.ml", "ai.onnx.preview.training")
_UNFIT = (ValueError, IndexError, TypeError, KeyError, AttributeError, AssertionError, ZeroDivisionError, OverflowError)
"""Exceptions raised while evaluating an invalid node."""
_LAID_OUT = PARTS | REARRANGED - CASTS
_PARTS_OPSET = 13  # nodes that define an operator are of this opset, or a later one
_SMALL_WEIGHT = 64
_RARE = 0.125  # the share of the rarer result of comparisons, below which it hardly counts as drawn
_MOST_POSITIONS = 2**16  # entries of a table of positions that is computed with as the runtime does, too
_MAX_SMALL, _MAX_HELD, _MAX_UNPACKED = 2**16, 4, 2**22
_Made = TypeVar("_Made")


def _read(tensor: onnx.TensorProto, model: LoadedModel) -> Array:
    try:
        return read_tensor(model, tensor)
    except ModelError as error:
        raise Unsupported(str(error)) from error


class Weights(UserDict[str, Any]):
    """Initializers and constants by name. Small ones are cached; of large ones the last few, for lockstep."""

    def __init__(self, graph: onnx.GraphProto, model: LoadedModel, twin: "Weights | None" = None) -> None:
        """Large initializers that `twin` has with the same name and bits are its arrays, of which it has digests."""
        others: UserDict[str, Any] = UserDict() if twin is None else twin

        def read(name: str) -> Array:
            return _read(self.data[name], model)

        @cache
        def shared(name: str) -> bool:
            tensor, other = self.data[name], others.data.get(name)
            alike = other is not None and (tensor.data_type, *tensor.dims) == (other.data_type, *other.dims)
            if not alike or tensor.data_type == onnx.TensorProto.STRING:
                return False
            one, two = (each.reshape(-1).view(np.uint8) for each in (read(name), others[name]))
            return np.array_equal(one, two)

        def read_large(name: str) -> Array:
            return others[name] if shared(name) else unchanging(read(name), self._facts.setdefault(name, {}))

        stated = {node.output[0]: tensor for node in graph.node if (tensor := constant_of(node)) is not None}
        super().__init__({tensor.name: tensor for tensor in graph.initializer} | stated)
        self._small, self._large = cache(read), lru_cache(_MAX_HELD)(read_large)
        self._facts: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> Array:
        small = math.prod(self.data[name].dims) <= _MAX_SMALL
        return self._small(name) if small else self._large(name)

    def described(self, name: str) -> tuple[str, tuple[int, ...], bytes]:
        """Type, shape and `content` of an initializer, which is not read again for them."""
        tensor = self.data[name]
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        return dtype, tuple(tensor.dims), self._facts.get(name, {}).get("content") or content(self[name])


class Program:
    """A model as it is evaluated: functions inlined, operators without a row written out, weights read once."""

    def __init__(
        self, model: LoadedModel, *, other: onnx.ModelProto | None = None, twin: "Program | None" = None
    ) -> None:
        """With `other`, fused operators that it lacks are written out too: its heads may be functions of their parts.

        Weights that `twin` has too are its arrays. Raises Unsupported where local functions cannot be inlined.
        """
        self._model, self._twin = replace(model, lazy=True), twin and twin.weights(twin.graph)
        try:
            self.named = _with_definitions(model.inlined.proto, model, other)  # with the model's own names
            self.proto = with_distinct_names(self.named)
        except UnicodeDecodeError:
            raise Unsupported("it has names that are not UTF-8") from None
        except (RuntimeError, onnx.checker.ValidationError) as error:
            raise Unsupported(f"its local functions cannot be inlined: {one_line(str(error), 120)}") from error
        self.graph: onnx.GraphProto = self.proto.graph
        self.opsets = opsets(self.proto.opset_import)
        self.parts_opset = max(self.opsets.get("", 1), _PARTS_OPSET)
        self.kernels = Kernels(self.opsets, self.proto.ir_version)
        self.kernels_of_parts = Kernels({**self.opsets, "": self.parts_opset}, self.proto.ir_version)
        self._made: dict[tuple[Any, int], tuple[Any, Any]] = {}
        self._definitions: dict[object, list[onnx.NodeProto]] = {}
        if missing := {key_of(node)[0] for node in iter_nodes(self.graph.node)} - self.opsets.keys():
            raise Unsupported(f"it uses operators of {min(missing) or 'ai.onnx'} without importing their version")
        self.overridable = overridable_in(self.graph)

    def _once(self, make: Callable[..., _Made], message: Any, *further: Any) -> _Made:
        """Cache what is derived from a graph or a node, which is kept alive: its id is the key."""
        key = make.__name__, id(message)
        if key not in self._made:
            self._made[key] = message, make(message, *further)
        made: _Made = self._made[key][1]
        return made

    def weights(self, graph: onnx.GraphProto) -> Any:
        """The initializers and constants of a graph, as `Weights`, which are read lazily."""
        return self._once(Weights, graph, self._model, self._twin)

    def constants(self, most: float = math.inf) -> dict[str, Array]:
        """The initializers and Constant nodes of the main graph that are not text, by name, of up to `most` entries."""
        weights = self.weights(self.graph)
        every = {name: weights[name] for name, tensor in weights.data.items() if 0 < math.prod(tensor.dims) <= most}
        return {name: x for name, x in every.items() if x.dtype.kind not in "OUS"}

    @cached_property
    def makers(self) -> dict[str, onnx.NodeProto]:
        """Tensor to the node that computes it, bodies included."""
        return {name: node for node in iter_nodes(self.graph.node) for name in node.output if name}

    def definition(self, node: onnx.NodeProto, types: Mapping[str, TensorType]) -> list[onnx.NodeProto]:
        """The nodes that define an operator at some types and shapes. Raises LostError."""
        key = (*node.output, *types.items())
        if key not in self._definitions:
            self._definitions[key] = definition(node, types, self.parts_opset)
        return self._definitions[key]

    def attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        return self._once(attributes, node)

    def reads(self, node: onnx.NodeProto) -> list[str]:
        """The tensors that a node and its bodies read."""
        return self._once(reads, node)

    def nodes(self, graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, list[str]]]:
        """The nodes of a graph except constants, each with the tensors that no later node reads."""
        return self._once(_nodes, graph)


def _nodes(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, list[str]]]:
    every, outputs = list(graph.node), {value.name for value in graph.output}
    nodes = [every[place] for place in needed(every, outputs) if constant_of(every[place]) is None]
    last = {name: place for place, node in enumerate(nodes) for name in (*reads(node), *node.output)}
    dead = grouped((place, name) for name, place in last.items() if name and name not in outputs)
    return [(node, dead.get(place, [])) for place, node in enumerate(nodes)]


def _with_definitions(model: onnx.ModelProto, weights: LoadedModel, other: onnx.ModelProto | None) -> onnx.ModelProto:
    """A model in which operators without a row, and operators that `other` lacks, are written out."""
    kept = {(key_of(node), *node.output) for node in iter_nodes(other.graph.node)} if other else set()
    low = saturating(model.graph, lambda tensor: _read(tensor, weights), overridable_in(model.graph))

    def parts(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        key = key_of(node)
        written = FUSED.get(key, None if low.isdisjoint(node.output) else SATURATING.get(key))
        apart = row(*key) is None or (other and (key, *node.output) not in kept)
        return written(node) if written and apart else None

    model = with_plain_experts(with_parts(model, parts))
    version = opsets(model.opset_import).get("", 1)
    used = {name for domain, name in map(key_of, iter_nodes(model.graph.node)) if not domain and row("", name) is None}
    schemas = (onnx.defs.get_schema(name, version) for name in used if onnx.defs.has(name, version))
    defined = [("", each.name) for each in schemas if each.has_function]  # type: ignore[attr-defined]
    return by_definition(deepcopy(model), defined) if defined else model


class Choice(NamedTuple):
    """A comparison of integers."""

    apart: int  # a hash of their differences
    equal: int  # which ones equal numbers are like: the smaller (-1), the larger (1), or none of them (0)
    met: bool  # whether some numbers were equal
    compared: int  # how many pairs
    results: frozenset[bool]
    decided: bool  # by inputs, not by sizes


class Evaluator:
    """One evaluation of a model, at one point."""

    def __init__(
        self,
        program: Program,
        arithmetic: Arithmetic,
        feeds: Mapping[str, Array],
        *,
        in_reals: bool = False,
        replaced: Mapping[str, Any] | None = None,
        turned: Container[str] = (),
        mixed: bool = False,
    ) -> None:
        """In a field, random residues replace the floats of `feeds`.

        With `in_reals`, arithmetic on constant floats is that of the reals (of float64) instead of the runtime's.
        Values of `replaced` take the place of what nodes compute; comparisons of integers in `turned` have the other
        result, or `mixed`, one that is random for each difference.
        """
        self.program, self.arithmetic, self.feeds = program, arithmetic, feeds
        self.in_reals, self.replaced, self.turned, self._mixed = in_reals, replaced or {}, turned, mixed
        self.opsets = program.opsets
        self.needed: set[str] | None = None  # what is computed; None for all
        # Tensors that are still read.
        self.environment: MutableMapping[str, Any] = ChainMap({}, program.weights(program.graph))
        self.data: dict[str, None] = {}  # tensors that hold entries, in the order in which they were computed
        self.decided: set[str] = set()  # what depends on the values of integer inputs, and integers that data decides
        self.ordered: set[str] = set()  # integers that data decides
        self.choices: dict[str, Choice] = {}  # by comparison of integers
        self.fixed: set[str] = set()  # tensors computed from constants alone, the same at every size
        self.stepped: set[str] = set()  # what depends on data that was rounded
        self.cut: set[str] = set()  # slices with a step, or a bound beyond the end, which other sizes may reach
        self.marked: set[str] = set()  # data of which more is known than its entries
        self.largest = 0  # entries of the largest tensor

    # -- walking
    def run(self) -> dict[str, Any]:
        """The outputs, by name. Raises Unsupported."""
        with np.errstate(all="ignore"):
            for _ in self.steps():
                pass
        return self.outputs()

    def outputs(self) -> dict[str, Any]:
        for value in self.program.graph.output:
            if value.name not in self.environment:
                raise Unsupported(f"nothing computes the output '{value.name}'")
        return {value.name: self.environment[value.name] for value in self.program.graph.output}

    def steps(self) -> Iterator[onnx.NodeProto]:
        """Evaluate node by node and yield the next one, so that several evaluations can share a weight."""
        graph = self.program.graph
        self.environment.update(self.replaced)
        weights = self.program.weights(graph)
        self.fixed |= weights.keys() - self.program.overridable
        replaceable = self.program.overridable if isinstance(self.arithmetic, Field) else ()
        given = {**{name: weights[name] for name in replaceable}, **self.feeds}
        for value in graph.input:
            if value.name in given:
                self._feed(value.name, given[value.name])
        for node, dead in self.program.nodes(graph):
            if self.needed is not None and self.needed.isdisjoint(node.output):
                continue
            yield node
            self.node(node, self.environment)
            for name in dead:
                self.environment.pop(name, None)

    def _feed(self, name: str, x: Any) -> None:
        if not is_float(x):
            self.decided.add(name)
        elif isinstance(self.arithmetic, Field):
            drawn = "input", name, x.shape
            x = Value(self.arithmetic.function(drawn, np.arange(x.size)).reshape(x.shape))
        else:
            x = self.arithmetic.lift(x)
        self.environment[name] = x
        self.record(name, x)

    def body(self, graph: onnx.GraphProto, environment: MutableMapping[str, Any]) -> list[Any]:
        """The outputs of the body of a node; `environment` has what it reads from around it, and its inputs."""
        given = {value.name: environment[value.name] for value in graph.input if value.name in environment}
        inner = ChainMap(given, self.program.weights(graph), environment)
        for node, _ in self.program.nodes(graph):
            self.node(node, inner)
        return [inner[value.name] for value in graph.output]

    def node(self, node: onnx.NodeProto, environment: MutableMapping[str, Any]) -> None:
        """Evaluate one node. Raises Unsupported, with the node."""
        names, kind = self.program.reads(node), node.op_type
        decided = kind not in SIZES and not self.decided.isdisjoint(names)
        fixed = environment is self.environment and self.fixed.issuperset(names)  # not in a body
        call = Call(node, kind, self.program.attributes(node), self, decided)
        try:
            operands = [environment[name] if name else None for name in node.input]
            made = tuple_of(self._computed(call, operands, environment))
        except (Unsupported, LostError) as error:
            raise Unsupported(f"{label(node)}: {error}") from None
        except _UNFIT as error:
            raise Unsupported(f"{label(node)}: {type(error).__name__} {one_line(str(error), 120)}") from error
        if fixed:
            self.fixed.update(node.output)
        stepped = kind in STEPS or not self.stepped.isdisjoint(names)
        chosen = kind not in SIZES and any(isinstance(x, Value) and x.constant is None for x in operands)
        ordered = chosen or not self.ordered.isdisjoint(names)
        for name, value in zip(node.output, made, strict=False):
            if name:
                environment[name] = np.asarray(value) if isinstance(value, np.generic) else value
                self.computed(node, name, environment)
                known = environment[name]
                if ordered and not is_float(known):
                    self.ordered.add(name)
                if decided or (chosen and not is_float(known)):
                    self.decided.add(name)
                if isinstance(known, Value) and (stepped or known.whole):
                    self.stepped.add(name)

    def computed(self, node: onnx.NodeProto, name: str, environment: MutableMapping[str, Any]) -> None:  # noqa: ARG002
        """Called with each tensor as soon as it is computed; a subclass may keep or replace it."""
        environment[name] = self.replaced.get(name, environment[name])
        self.record(name, environment[name])

    def record(self, name: str, value: Any) -> None:
        if isinstance(value, Value):
            self.data[name] = None
            if value.masks is not None or value.whole or value.grid:
                self.marked.add(name)
            self.largest = max(self.largest, value.size)

    # -- one node
    def _computed(self, call: Call, operands: list[Any], environment: MutableMapping[str, Any]) -> Any:
        node, kind = call.node, call.kind
        domain = key_of(node)[0]
        if kind in CONTROL and not domain:
            return control(call, operands, environment)
        self.note_tables(call, operands)
        depends = any(isinstance(each, (Value, list)) for each in operands)
        if call.decided and kind in PRODUCTS and not depends:
            # Floats made of integer inputs (a time step) enter the arithmetic where they meet a weight.
            a, b = operands[:2]
            if a.ndim > 1 and a.shape[-1] > 1 and b.size > _SMALL_WEIGHT:
                pairs = zip(node.input, operands, strict=True)
                operands = [self._entered(each) if name in self.decided else each for name, each in pairs]
                depends = any(isinstance(each, Value) for each in operands)
        found = row(domain, kind)
        # Inputs may choose from what the attributes of an operator without a row hold, such as a LabelEncoder.
        opaque = found is None and kind not in INTEGERS and not subgraphs(node) and isinstance(self.arithmetic, Field)
        if not depends and not (call.decided and (opaque or self.takes_rows(call, operands))):
            made = self._plain(call, operands)
            if kind == "OneHot" and node.input[0] in self.decided:  # integers, with which rows may be chosen
                index, depth, values = operands
                self._compared(call, [index[..., None], np.arange(int(depth.item()))], made)
                return values.sum() - made if node.output[0] in self.turned else made
            return made if self.fixed.issuperset(node.input) else self._choosing(call, operands, made)
        if found is None:
            return self._opaque(call, operands)
        entries = [each for each in operands if isinstance(each, Value)]
        if entries and not call.decided and all(each.constant is not None for each in entries):
            numbers = [x.constant if isinstance(x, Value) else x for x in operands]
            return self._both_ways(found, call, numbers, operands)
        return found(call, *operands)

    def part(self, call: Call, operands: list[Any], chosen: bool) -> Sequence[Any]:
        """The outputs of one of the nodes that define an operator; comparisons that are `chosen` are noted."""
        if not any(isinstance(each, Value) for each in operands):
            made = self._plain(call, operands, self.program.kernels_of_parts)
            return tuple_of(self._choosing(call, operands, made) if chosen else made)
        if (found := row(*key_of(call.node))) is None:
            raise Unsupported(f"data decides {call.kind}")
        return tuple_of(found(call, *operands))

    def _choosing(self, call: Call, operands: Sequence[Any], made: Any) -> Any:
        """What a node of integers makes, noted where it compares them."""
        asked = call.kind in CASTS and operands[0].dtype.kind in "iu" and getattr(made, "dtype", None) == np.bool_
        flags = self.decided.issuperset(call.node.input) and not self.choices.keys() >= {*call.node.input}
        asked |= flags and call.kind in ("And", "Or")  # which are seldom all on
        compares = asked or call.kind in (CHOOSING if call.decided else COMPARISONS)
        return self._compared(call, operands, tuple_of(made)[0]) if compares else made

    def _compared(self, call: Call, operands: Sequence[Any], made: Array) -> Array:
        """What an operator makes that compares integers: its first operand with each other one, a bound, or 0."""
        name, (first, *others) = call.node.output[0], operands
        kinds = ("Max", "Min") if call.kind == "Clip" else [call.kind] * len(operands)
        if call.kind in (*SIGNED, *CASTS):
            others = [0]
        elif call.kind == "Clip" and not others:
            others = [call.get("min"), call.get("max")]
        pairs = [(kind, np.asarray(each)) for kind, each in zip(kinds, others, strict=False) if each is not None]
        for kind, other in pairs:
            if len(pairs) > 1:
                made = (np.maximum if kind == "Max" else np.minimum)(first, other).astype(made.dtype)
            self._note_choice(call, name, kind, first, other, made)
            if name in self.turned:
                made = self._turned(kind, first, other, made)
            first, name = made, f"{name}, a bound"
        return made

    def _note_choice(self, call: Call, name: str, kind: str, a: Array, b: Array, made: Array) -> None:
        if not call.decided and ((a < 0).all() or (b < 0).all()):
            return  # no size is negative
        apart = distinct(np.subtract(a, b, dtype=np.float64))
        turned = -apart[::-1]
        order = (apart.tolist() > turned.tolist()) - (apart.tolist() < turned.tolist())
        # Equal numbers do not tell which one Max or Min takes.
        found = made if made.dtype == np.bool_ else np.subtract(a, b)[np.not_equal(a, b)] > 0
        # Results for positions follow from each other; one of few entries was hardly drawn.
        along, least = not call.decided and made.size > 1, _RARE * max(found.size, 1)
        results = frozenset(each for each in (False, True) if along or np.count_nonzero(found == each) >= least)
        met = 0 in apart
        if met and call.decided and len({each in self.decided for each in call.node.input[:2]}) > 1:
            # Each number that they are compared with, such as the ids of one-hot rows, must have been one.
            met = bool(np.isin(*((b, a) if call.node.input[0] in self.decided else (a, b))).all())
        digest, before = hash((turned if order > 0 else apart).tobytes()), self.choices.get(name)
        compared = made.size
        if before is not None:  # in another round of a loop
            digest, met, results = hash((before.apart, digest)), before.met or met, before.results | results
            compared += before.compared
        like = order * EQUAL_ARE.get(kind, 0)
        self.choices[name] = Choice(digest, like, met, compared, results, call.decided)

    def _turned(self, kind: str, a: Array, b: Array, made: Array) -> Array:
        """The other result of a comparison: of each entry, or at random by difference."""
        if made.dtype == np.bool_:
            other = ~made
        elif kind in OPPOSITE:
            other = -made
        elif kind in OF_TWO:
            other = a + b - made
        else:
            return made
        if self._mixed and isinstance(self.arithmetic, Field):
            apart = np.abs(np.subtract(a, b, dtype=np.float64)).astype(np.int64)
            other = np.where(self.arithmetic.hash64("turned", apart) % np.uint64(2) == 1, other, made)
        return other.astype(made.dtype)

    def _opaque(self, call: Call, operands: list[Any]) -> Any:
        """An operator that the table lacks, as an unknown function of its attributes and operands.

        Shapes, and results that are integers, are those of the runtime's kernel at numbers drawn from the operands.
        """
        if any(isinstance(each, list) for each in operands) or not (
            isinstance(self.arithmetic, Field) or self.arithmetic.by_kernels
        ):
            raise Unsupported("it is not in the table of operators")
        if is_random(call.kind) or subgraphs(call.node):
            raise Unsupported("it draws numbers, or has a body")
        f, domain = self.arithmetic, key_of(call.node)[0]
        if not isinstance(f, Field):
            narrow = [x.entries.astype(np.float32) if isinstance(x, Value) else x for x in operands]
            return tuple(f.lift(x) if is_float(x) else x for x in self.program.kernels.run(call.node, narrow))
        texts = [isinstance(x, np.ndarray) and x.dtype.kind in "OUS" for x in operands]
        entries = (x if x is None or text else f.lift(x).entries for x, text in zip(operands, texts, strict=True))
        whole = tuple(isinstance(x, Value) and x.whole for x in operands)
        version = version_of(call.node, self.opsets)
        name = "opaque", version, whole, key_on(call.node, entries, self.opsets.get(domain, 1))
        # Of any size, and dependent on the attributes, too: integers that are the same for these are not for others.
        drawn: list[Any] = [
            np.tan(np.pi * f.function(name, x.entries) / f.p).astype(np.float32) ** 3 if isinstance(x, Value) else x
            for x in operands
        ]
        if domain in (*DOMAINS, *_OTHER_DOMAINS):
            made = list(self.program.kernels.run(call.node, drawn))
        elif any((x.domain, x.name) == (call.node.domain, call.kind) for x in self.program.proto.functions):
            raise Unsupported("it is a function that cannot be inlined")
        else:  # which no kernel computes: as large as what it reads first
            made = [np.zeros(np.shape(drawn[0]), np.float32) if name else None for name in call.node.output]
        data = [x.entries for x in operands if isinstance(x, Value)]
        if data and not all(map(is_float, made)):
            f.counted(data[0])
        for place, value in enumerate(made):
            if is_float(value):
                made[place] = Value(f.function((*name, place), np.arange(value.size)).reshape(value.shape))
        return tuple(made)

    def _entered(self, x: Any) -> Any:
        return Value(self.arithmetic.lift(x, scalar=False).entries) if is_float(x) else x

    def _plain(self, call: Call, operands: list[Any], kernels: Kernels | None = None) -> Any:
        """A node on plain arrays; `kernels` for a part of a definition, whose numbers are those of its type."""
        node, kind = call.node, call.kind
        if kind == "Constant" and not key_of(node)[0]:
            if (tensor := constant_of(node)) is None:
                raise Unsupported("a constant of another kind")
            return onnx.numpy_helper.to_array(tensor)  # in a definition; the program has its own as weights
        found = row(key_of(node)[0], kind)
        floats = any(is_float(each) for each in operands)
        if self.in_reals and found is not None and not isinstance(self.arithmetic, Field):
            if floats and kind in _LAID_OUT:  # entries are widened by the operators that compute with them
                return found(call, *operands)
            if floats:  # and no data: what they make may decide a shape
                made = tuple_of(found(call, *(call.lift(each) if is_float(each) else each for each in operands)))
                numbers = [each.entries if isinstance(each, Value) else each for each in made]
                whole = [isinstance(each, Value) and each.whole for each in made]
                return tuple(x.astype(np.int64) if each else x for x, each in zip(numbers, whole, strict=True))
        elif self.in_reals and found is not None and kind not in ALWAYS and kernels is None:
            lifted = self._in_reals(call, operands)
            if lifted is not None:
                return self._both_ways(found, call, operands, lifted)
        return self._by_runtime(call, operands, kernels)

    def _both_ways(self, found: Operator, call: Call, operands: list[Any], lifted: list[Any]) -> Any:
        """What a node makes of constants in the reals; integers, which may be positions in a table, as the runtime."""
        if max(x.size for x in operands if isinstance(x, np.ndarray)) > _MOST_POSITIONS:
            return found(call, *lifted)
        numbers = tuple_of(self._by_runtime(call, operands, self.program.kernels))
        if not all(map(is_float, numbers)):
            return numbers
        made = tuple_of(found(call, *lifted))
        for value, constant in zip(made, numbers, strict=False):  # a kernel leaves out outputs that nothing reads
            if isinstance(value, Value):
                value.constant = constant
        return made

    def _by_runtime(self, call: Call, operands: list[Any], kernels: Kernels | None) -> Any:
        node, kind = call.node, call.kind
        found, floats = row(key_of(node)[0], kind), any(map(is_float, operands))
        if found is not None and kind in (MOVES if floats else ALWAYS):
            plain = all(each is None or isinstance(each, np.ndarray) for each in operands)  # no sequences
            if not plain or kind in SECTIONS or sum(map(np.size, operands)) <= _MAX_SMALL:
                return found(call, *operands)
            return self.program.kernels.run(node, operands, partial(found, call))
        if is_random(kind):
            raise Unsupported("it draws numbers")
        if kind in INTEGERS and all(each.dtype.kind in "biu" for each in operands):
            return np.asarray(INTEGERS[kind](*operands))
        return (kernels or self.program.kernels).run(node, operands)

    def _in_reals(self, call: Call, operands: list[Any]) -> list[Any] | None:
        """Constant floats as entries, where arithmetic on them is that of the reals."""
        if call.kind == "DequantizeLinear" and operands[0].size > 1:
            number = Value(self.arithmetic.lift(operands[0]).entries, whole=True, grid=("q", str(operands[0].dtype)))
            return [number, *operands[1:]]
        if any(name in self.decided for name in call.node.input):
            return None
        least = 1 if call.kind == "Sqrt" else 2
        wide = [each is not None and is_float(each) and each.size >= least for each in operands]
        if all((~np.isfinite(x) | (x <= self.arithmetic.low)).any() for x in itertools.compress(operands, wide)):
            return None
        return [self._entered(x) if each else x for each, x in zip(wide, operands, strict=True)]

    # -- tables
    def takes_rows(self, call: Call, operands: Sequence[Any]) -> bool:
        """Whether rows of a table of floats are taken by the value of an input."""
        kind, table = call.kind, operands[0]
        if kind == "EmbedLayerNormalization" or (kind == "OneHot" and is_float(operands[2])):
            return True
        if kind == "GatherBlockQuantized":
            return not call.get("gather_axis", 0) and table.size <= _MAX_UNPACKED
        ends = kind == "GatherND" and not call.get("batch_dims", 0) and operands[1].shape[-1] == 1
        own, index = call.node.input[0], call.node.input[-1]
        taking = kind in ("Gather", "GatherElements") and (not call.get("axis", 0) or index not in self.ordered)
        kept = is_float(table) or table.dtype in (np.int8, np.uint8)
        return bool((ends or taking) and own not in self.decided and table.ndim > 0 and kept)

    def rows(self, call: Call, table: Any, index: Array) -> Value:
        """Rows of a table that the values of inputs choose; in a field blended."""
        whole = isinstance(table, np.ndarray) and table.dtype.kind in "iu"
        if not isinstance(self.arithmetic, Field):
            taken = call.lift(call.move(table, lambda t: t[index]), scalar=False)
            return Value(taken.entries, whole=whole, grid=("q", str(table.dtype)) if whole else None)
        shares, places = self._shares(table, index)
        # A matrix stays the same object, whose residues are kept.
        flat = table if table.ndim == 2 else call.move(table, lambda t: t.reshape(len(t), -1))
        mixed = self.arithmetic.matmul(shares, flat).reshape(len(shares.entries), *table.shape[1:])
        return Value(mixed[places.reshape(index.shape)], whole=whole)

    def _shares(self, table: Any, index: Array) -> tuple[Value, Array]:
        """The combinations of all rows, one for each distinct index; and which one each index takes."""
        count = table.shape[0]
        taken, places = np.unique(np.where(index < 0, index + count, index), return_inverse=True)
        return Value(self.arithmetic.function(("blend", count), taken[:, None], np.arange(count)[None])), places

    def product(self, node: onnx.NodeProto) -> tuple[Arithmetic, Any, Any]:
        """What a MatMul multiplies, or a Gather whose rows are blended: the arithmetic, entries, and a weight."""
        operands: list[Any] = [self.environment.get(name) for name in node.input]
        x, y = operands
        if node.op_type == "Gather":
            call = Call(node, node.op_type, self.program.attributes(node), self, node.input[1] in self.decided)
            x, y = (self._shares(x, y)[0], x) if call.decided and self.takes_rows(call, operands) else (None, None)
        return self.arithmetic, x, y

    def note_tables(self, call: Call, operands: list[Any]) -> None:
        """Called with each node before it is computed; a subclass may replace tables that are read in part."""


@np.errstate(all="ignore")
def in_step(evaluators: Sequence[Evaluator]) -> list[str]:
    """Run evaluations of one program in lockstep; returns why each failed, empty if it did not."""
    failed = ["" for _ in evaluators]
    running = {place: each.steps() for place, each in enumerate(evaluators)}
    while running:
        coming: list[onnx.NodeProto] = []
        for place, steps in list(running.items()):
            try:
                coming.append(next(steps))
            except (StopIteration, Unsupported) as error:
                failed[place] = str(error)  # a StopIteration has no message
                del running[place]
        if len(coming) > 1 and coming[0].op_type in ("MatMul", "Gather"):
            # The weight that they share is read once; an operand that does not fit is an error where it is used.
            with suppress(Unsupported, *_UNFIT):
                multiply([evaluators[place].product(coming[0]) for place in running])
    return failed
