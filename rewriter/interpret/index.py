"""`heads`: every head of a model under one index, original heads and neuron heads alike; nothing is written.

Indexing reads the graph and small constants. A tensor (docs/heads.md has their shapes) is computed from the model's
weights on each access, and is not kept.
"""

import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import translate
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx

from passes.forms.softmax import neuron_scores
from passes.match.projections import Projection, matrix_of
from passes.options import Options
from passes.plan import make_plan
from passes.programs.program import BiasToken, Group
from rewriter.arrays import Array, grouped
from rewriter.errors import ModelError, UsageError
from rewriter.files.atomic import atomically
from rewriter.files.load import LoadedModel, Source, load_model, read_tensor
from rewriter.graph.attention import PACKED, packed_matrix, with_dequantised, with_plain
from rewriter.graph.constants import UNFIT, Constants
from rewriter.graph.view import GraphView, LostError, Miss, all_views, key_of, label
from rewriter.inputs.cases import Maker
from rewriter.interpret.stream import Embedding, Write, chain_to, embedded, positions_of, without_bias_rows, writes
from rewriter.interpret.sublayers import PROGRAMS, Attention, NeuronHeads, Sublayer, find_sublayers
from rewriter.interpret.trace import Norm, Tracer, norm_apart, norm_before, noting
from rewriter.text import quoted

METADATA = "__metadata__"  # key of the description of the arrays, as JSON
_ROUNDED = "attribution leaves out that DynamicQuantizeLinear rounds activations"


ValueOf = Callable[..., Array]  # a constant tensor's name, and the index of a part of it if not all, to its value


@dataclass(frozen=True, eq=False)
class HeadTensor:
    """A tensor that `make` computes from the model's weights."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], Array]


@dataclass(frozen=True, eq=False)
class AffineMap:
    """`x W + b` of a linear operator, with a normalisation's scale and bias folded in, if any."""

    projection: Projection
    value_of: ValueOf
    norm: Norm | None = None

    def weight(self, columns: Sequence[int] | None = None) -> Array:
        """W, [in, out], or some of its columns; a negative one counts from the end."""
        own, norm = self.projection, self.norm
        part = slice(own.start, own.stop) if columns is None else own.start + np.asarray(columns) % own.out_features
        held = self.value_of(own.weight, (..., part, slice(None)) if own.transposed else (..., part))
        held = held.reshape(held.shape[-2:])
        plain = held.T if own.transposed else held
        return plain if norm is None or not norm.scale else self.value_of(norm.scale).reshape(-1, 1) * plain

    def bias(self) -> Array:
        """b, [out]."""
        biases = self.projection.biases
        total = np.zeros(self.projection.out_features, self.value_of(biases[0].name).dtype if biases else np.float64)
        for vector in biases:
            held = self.value_of(vector.name).reshape(-1)
            total = total + (held if vector.size == 1 else held[vector.start : vector.stop])
        if self.norm is not None and self.norm.bias:
            total = total + self.value_of(self.norm.bias).reshape(-1) @ replace(self, norm=None).weight()
        return total


@dataclass(frozen=True, eq=False)
class HeadIndex(Mapping[str, Array]):
    """The heads of a model: a read-only mapping from names such as `blocks.3.attn.W_Q` to arrays."""

    sublayers: tuple[Sublayer, ...]  # attention and MLP blocks in the order of the graph
    missed: tuple[Miss, ...]  # what is not understood; attention has the kind `attention`
    source: LoadedModel
    proto: onnx.ModelProto  # whose tensors sublayers name, with local functions inlined where needed
    runs: onnx.ModelProto  # the same with activations rounded by DynamicQuantizeLinear, if any
    view: GraphView
    tensors: Mapping[str, HeadTensor]
    value_of: ValueOf  # reads constants of the graph; raises LostError
    folded: Callable[[str], Norm | None]
    wide: "Callable[[], HeadIndex]"  # the same in float64, without folding
    maker: Callable[[], Maker]  # of inputs; raises UsageError
    writes: Mapping[str, Write]  # how sublayers add to the residual stream, as far as they do
    stream: tuple[int, int] | None = None  # in form `whole`: the stream's bias tokens, and its tokens at the most

    def __getitem__(self, name: str) -> Array:
        """Raises KeyError, or ModelError for unreadable weights."""
        tensor = self.tensors[name]
        try:
            made = np.require(tensor.make(), tensor.dtype, ["C", "W"])  # a copy of what is mapped
            return made.reshape(tensor.shape)
        except LostError as error:
            raise ModelError(f"{name} cannot be computed: {error.miss.reason} ({error.miss.node})") from error
        except UNFIT as error:
            raise ModelError(f"{name} cannot be computed: its weights do not fit together") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def view_of_runs(self) -> GraphView:
        return self.view if self.runs is self.proto else all_views(self.runs)[0]

    @property
    def attention(self) -> tuple[Attention, ...]:
        return tuple(each for each in self.sublayers if isinstance(each, Attention))

    @property
    def missed_attention(self) -> tuple[Miss, ...]:
        return tuple(miss for miss in self.missed if miss.kind == "attention")

    @property
    def layers(self) -> dict[str, tuple[Sublayer, ...]]:
        return {layer: tuple(own) for layer, own in grouped((each.layer, each) for each in self.sublayers).items()}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all tensors to a `.safetensors` file, with `to_json` as metadata. Raises UsageError or ModelError."""
        if Path(path).suffix != ".safetensors":
            raise UsageError(f"{quoted(path)} must end in .safetensors")
        atomically(Path(path), self._write)

    def _write(self, file: BinaryIO) -> None:
        header: dict[str, Any] = {METADATA: {"format": "np", "attnonly": json.dumps(self.to_json())}}
        ends = accumulate((prod(each.shape) * each.dtype.itemsize for each in self.tensors.values()), initial=0)
        for (name, each), place in zip(self.tensors.items(), pairwise(ends), strict=True):
            header[name] = {"dtype": f"F{8 * each.dtype.itemsize}", "shape": [*each.shape], "data_offsets": place}
        text = json.dumps(header).encode("utf-8")
        text += b" " * (-len(text) % 8)  # the data is aligned to 8 bytes
        file.write(struct.pack("<Q", len(text)) + text)
        for name, each in self.tensors.items():
            array = np.ascontiguousarray(self[name], dtype=each.dtype.newbyteorder("<"))
            file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")

    def to_json(self) -> dict[str, Any]:
        """The sublayers as JSON-ready data: sizes, scales, programs with their constants."""
        left = [{"reason": miss.reason, "node": miss.node} for miss in self.missed]
        found = {"sublayers": {each.name: _described(each) for each in self.sublayers}, "not understood": left}
        return found if self.stream is None else {**found, "bias_tokens": self.stream[0], "max_tokens": self.stream[1]}


def heads(model: Source, *, fold_ln: bool = False, program: str = "fewest", wide: bool = False) -> HeadIndex:
    """Index the heads of a model, original or rewritten.

    Args:
        model: path of an ONNX file, or a model in memory.
        fold_ln: fold the scale and the bias of the normalisation before a sublayer into its W and b, instead of
            listing them as `ln1.w`, `ln1.b` and so on. Centring stays with the normalisation.
        program: `fewest` heads per neuron, as the forms other than `local` have, or `fast`, as `local` does.
        wide: give all tensors in float64, so that nothing is rounded after the weights.

    Raises UsageError for an unknown `program`, or ModelError for a model that is unreadable, malformed or unsafe.
    """
    if program not in PROGRAMS:
        raise UsageError(f"unknown program '{program}'; known are: {', '.join(PROGRAMS)}")
    source = replace(load_model(model, mapped=True), lazy=True)
    read = partial(read_tensor, source)
    plain = with_plain(without_bias_rows(source.proto))
    smooth = with_dequantised(plain)
    plan = make_plan(smooth, Options(), read)
    runs = plan.model if smooth is plain else make_plan(plain, Options(), read).model
    view = plan.views[0]
    tracer = Tracer(source, plan.model, plan.views)
    lost = list[Miss]()
    named = find_sublayers(tracer, plan, lost, program)
    lost += [
        Miss("attention in a body is not indexed", f"{each.where}/{label(node)}", "attention")
        for each in plan.views[1:]
        for place, node in enumerate(each.nodes)
        if re.fullmatch("Softmax|.*Attention", node.op_type) and place not in plan.recognised.nodes(each)
    ]
    notes = [*plan.recognised.notes, *([_ROUNDED] if smooth is not plain else [])]

    def made(*, fold_ln: bool = False, wide: bool = True) -> HeadIndex:
        builder = _Builder(tracer, Constants(view, read), fold_ln=fold_ln, wide=wide)
        tensors = {name: tensor for each in named for name, tensor in builder.of(each).items()}
        kept = tuple(each for each in named if f"{each.name}.W_O" in tensors)
        added: Mapping[str, Write] = {}
        for output in plan.model.graph.output:
            with suppress(UsageError, LostError, *UNFIT):
                added = added or writes(view, tracer.constants, kept)
                tensors |= dict(builder.ends(kept, added, output.name))
                break
        missed = (*lost, *builder.missed, *(Miss(note, "") for note in notes))
        shared = source, plan.model, runs, view, tensors, builder.value, builder.folded, made, tracer.maker, added
        return HeadIndex(kept, missed, *shared, plan.recognised.stream)

    return made(fold_ln=fold_ln, wide=wide)


def indexed(model: Source | HeadIndex, **options: Any) -> HeadIndex:
    """The index itself, or that of a model with the options of `heads`."""
    return model if isinstance(model, HeadIndex) else heads(model, **options)


def _described(each: Sublayer) -> dict[str, Any]:
    shared = {"layer": each.layer, "module": each.module, "heads": each.heads}
    if isinstance(each, Attention):
        facts = {"groups": each.groups, "scale": each.scale, "rotary": each.query.rotary, "cross": each.cross}
        return {"kind": "attention", **shared, **facts}
    program = {"activation": each.activation, "program": each.program.name, "max_error": each.bound, "scale": 1.0}
    groups = [asdict(group) for group in each.groups]
    return {"kind": "neurons", **shared, "neurons": each.count, **program, "heads_per_neuron": groups}


class _Builder:
    def __init__(self, tracer: Tracer, values: Constants, *, fold_ln: bool, wide: bool) -> None:
        self._view, self._constants, self._values = tracer.view, tracer.constants, values
        self._fold, self._wide = fold_ln, wide
        self._norms: dict[str, set[str]] = {}
        self._packed = {node.input[1]: node for node in tracer.view.nodes if key_of(node) == PACKED}
        self.missed: list[Miss] = []

    def of(self, own: Sublayer) -> dict[str, HeadTensor]:
        found = dict[str, HeadTensor]()
        with noting(self.missed, own.name, own.module, "attention" if isinstance(own, Attention) else ""):
            tensors = dict(self._attention(own) if isinstance(own, Attention) else self._neurons(own))
            norm, known = norm_apart(self._view, self._constants, own.data), self._norms.setdefault(own.layer, set())
            if tensors and norm is not None and not self._fold and norm.output not in known:
                known.add(norm.output)
                found |= dict(self._scales(f"{own.layer}.ln{len(known)}", norm))
            found |= {f"{own.name}.{name}": tensor for name, tensor in tensors.items()}
        return found

    def ends(
        self, sublayers: Sequence[Sublayer], added: Mapping[str, Write], output: str
    ) -> Iterator[tuple[str, HeadTensor]]:
        """The embeddings, the normalisations behind sublayers, and the unembedding, as far as they are understood."""
        chain = chain_to(self._view, sublayers, added, output)
        start = chain.stages[0].before
        norm = norm_before(self._view, self._constants, start)
        tables = embedded(self._view, self._constants, start if norm is None else norm.data)
        for name, table in tables.items():
            rows, width = self._constants.shape(table.name) or (0, 0)
            shape, make = (rows - (table.first or 0), width), partial(self._embedding, table)
            yield name, HeadTensor(shape, self._dtype(table.name), make)
        yield from self._scales("embed.ln", norm if tables else None)
        for stage in chain.stages:
            if stage.norm is not None:
                known = self._norms.setdefault(layer := stage.sublayers[0].layer, set())
                known.add(stage.norm.output)
                yield from self._scales(f"{layer}.ln{len(known)}", stage.norm)
        if not (self._fold and chain.unembedding is not None):
            yield from self._scales("ln_final", chain.norm)
        if (read := chain.unembedding) is not None:
            affine, dtype = AffineMap(read, self.value, chain.norm if self._fold else None), self._dtype(read.weight)
            shape = read.in_features, read.out_features
            yield "unembed.W_U", HeadTensor(shape, dtype, lambda: affine.weight() * dtype.type(chain.factor))
            yield "unembed.b_U", HeadTensor(shape[1:], dtype, affine.bias)

    def _embedding(self, table: Embedding) -> Array:
        rows = self.value(table.name)[table.first :].astype(self._dtype(table.name), copy=False)
        return np.asarray((rows - table.zero) * table.factor if table.zero else rows * table.factor)

    def _scales(self, prefix: str, norm: Norm | None) -> Iterator[tuple[str, HeadTensor]]:
        for part, name in norm.constants.items() if norm is not None else ():
            shape, make = (self.value(name).size,), partial(lambda name: self.value(name).reshape(-1), name)
            yield f"{prefix}.{part}", HeadTensor(shape, self._dtype(name), make)

    def _attention(self, own: Attention) -> Iterator[tuple[str, HeadTensor]]:
        sides, maps = {"Q": own.query, "K": own.key, "V": own.value}, dict[str, AffineMap]()
        for side, operator in {**{side: heads.operator for side, heads in sides.items()}, "O": own.output}.items():
            read = matrix_of(self._view, self._constants, operator, biased=side == "O")
            maps[side] = AffineMap(read, self.value, None if side == "O" else self.folded(operator.data))
        dtype, out = self._dtype(maps["Q"].projection.weight), maps["O"].projection.out_features

        def weight(side: str) -> Array:
            factor = sides[side].factor if side == "V" else 1.0
            return np.asarray(np.moveaxis(maps[side].weight()[:, sides[side].columns], 0, 1) * dtype.type(factor))

        def bias(side: str) -> Array:
            return sides[side].by_head(maps[side].bias(), 1, scaled=side == "V")

        for side, heads in sides.items():
            count, width = heads.columns.shape
            shape = (count, maps[side].projection.in_features, width)
            yield f"W_{side}", HeadTensor(shape, dtype, partial(weight, side))
        yield "W_O", HeadTensor((*own.channels.shape, out), dtype, lambda: maps["O"].weight()[own.channels])
        for side, heads in sides.items():
            yield f"b_{side}", HeadTensor(heads.columns.shape, dtype, partial(bias, side))
            for part, name in heads.norm.norm.constants.items() if heads.norm is not None else ():
                of_norm = partial(lambda norm, name: norm.of_heads(self.value(name)), heads.norm, name)
                yield f"{side.lower()}_norm.{part}", HeadTensor(heads.columns.shape, dtype, of_norm)
        yield "b_O", HeadTensor((out,), dtype, maps["O"].bias)
        table, sink = positions_of(self._view, own.product)
        yield from self._positions(table, sink=sink)

    def _positions(self, *tables: str, sink: str = "") -> Iterator[tuple[str, HeadTensor]]:
        """W_QK between positions, in form `whole`: one for all heads, or one for each; a sink is the first column."""
        if (shape := self._constants.shape(tables[0]) if tables[0] in self._constants else None) is not None:
            heads = (self._constants.shape(sink) or (1,))[0] if sink else 1
            joined = max(len(tables) * prod(shape[:-2]), heads), *shape[-2:]

            def made() -> Array:
                # `HeadIndex` gives it this shape.
                stacked = np.stack([*map(self.value, tables)])
                return stacked + self.value(sink) if sink else stacked

            yield "P", HeadTensor(joined, self._dtype(tables[0]), made)

    def _neurons(self, own: NeuronHeads) -> Iterator[tuple[str, HeadTensor]]:
        """A head with fewer bias tokens than another has keys (0, -inf) for them."""
        # Factors of programs take weights out of float16's range.
        norm, dtype = self.folded(own.query.data), np.result_type(self._dtype(own.query.data), np.float32)
        query, value = AffineMap(own.query, self.value, norm), AffineMap(own.value, self.value, norm)
        output = AffineMap(own.output, self.value)
        groups, m, width = own.groups, own.program.bias_tokens, own.dimension

        def by_group(of_group: Callable[[Group, Array], Array], base: Array) -> Array:
            """[heads, ...] from [neurons, ...]."""
            return np.concatenate([of_group(group, base) for group in groups])

        def pair(first: Array, second: float) -> Array:
            """`first` [neurons, ...] and a number, as the last axis; without the number where d_head is 1."""
            return np.stack([first, np.full_like(first, second)][:width], axis=-1)

        def same(of_group: Callable[[Group], Sequence[Any]]) -> Array:
            """[heads, ...] of numbers that all neurons share."""
            return np.repeat(np.array([of_group(group) for group in groups]), own.count, axis=0)

        def tokens(group: Group) -> list[BiasToken]:
            return [*group.head.bias_tokens, *[BiasToken(offset=-np.inf)] * (m - group.bias_tokens)]

        count, rows, out = own.heads, own.query.in_features, own.output.out_features
        made: tuple[tuple[str, tuple[int, ...], Callable[[], Array]], ...] = (
            ("W_Q", (count, rows, width), lambda: by_group(lambda _, w: pair(w, 0.0), query.weight().T)),
            ("W_K", (count, rows, width), lambda: np.zeros((count, rows, width), dtype)),
            ("W_V", (count, rows, 1), lambda: by_group(lambda g, w: w[..., None] * g.head.c, value.weight().T)),
            ("W_O", (count, 1, out), lambda: by_group(lambda g, w: w[:, None] * g.factor, output.weight())),
            ("b_Q", (count, width), lambda: by_group(lambda _, b: pair(b, 1.0), query.bias())),
            ("b_K", (count, width), lambda: same(lambda g: (g.head.beta, g.head.gamma)[:width])),
            ("b_V", (count, 1), lambda: by_group(lambda g, b: b[..., None] * g.head.c + g.head.d, value.bias())),
            ("b_O", (out,), output.bias),
            ("bias_K", (count, m, width), lambda: same(lambda g: [(t.slope, t.offset)[:width] for t in tokens(g)])),
            ("bias_V", (count, m, 1), lambda: same(lambda g: [t.value for t in tokens(g)])),
        )
        for name, shape, make in made:
            yield name, HeadTensor(shape, dtype, make)
        yield from self._positions(*(neuron_scores(group.bias_tokens) for group in groups))

    def folded(self, data: str) -> Norm | None:
        return norm_apart(self._view, self._constants, data) if self._fold else None

    def value(self, name: str, part: Any = ...) -> Array:
        """A constant, or a part of it; float16 and bfloat16 as float32, everything as float64 if `wide`."""
        packed = self._packed.get(name)
        return self._float(name, part) if packed is None else packed_matrix(packed, self._float)[part]

    def _float(self, name: str, part: Any = ...) -> Array:
        value: Array = self._values.of(name, wide=self._wide)[part]
        if value.dtype.kind in "iub":
            return value
        return value.astype(np.result_type(value.dtype, np.float64 if self._wide else np.float32), copy=False)

    def _dtype(self, tensor: str) -> np.dtype[Any]:
        kind = onnx.TensorProto.DOUBLE if self._wide else self._view.type_of(tensor).elem_type
        known: dict[int, str] = {onnx.TensorProto.DOUBLE: "float64", onnx.TensorProto.FLOAT16: "float16"}
        return np.dtype(known.get(kind, "float32"))


Names = str | Sequence[str]
"""Names of heads such as `blocks.1.attn.3`, or globs. In `mlp_heads` the number is that of the neuron, and means all
heads of its program: the heads of one neuron may nearly cancel."""


def chosen_heads(index: HeadIndex, names: Names) -> list[tuple[Sublayer, list[int]]]:
    """The sublayers with chosen heads, in order, each with their numbers. Raises UsageError."""
    if not names:
        raise UsageError("no head is named; a name is, for example, 'blocks.0.attn.3', or a glob such as '*.attn.*'")
    told = ", ".join(f"{each.members[0]} to {each.members[-1]}" for each in index.sublayers[:4])
    found = matching(names, {head for each in index.sublayers for head in each.members}, "head", told or "none")
    every = ((each, [n for n, head in enumerate(each.members) if head in found]) for each in index.sublayers)
    return [(each, numbers) for each, numbers in every if numbers]


def matching(names: Names, known: Collection[str], kind: str, examples: str) -> set[str]:
    """The known names that a glob matches. Raises UsageError if one matches nothing."""
    found = set[str]()
    for glob in (names,) if isinstance(names, str) else names:
        own = [glob] if glob in known else [*filter(re.compile(translate(glob)).match, known)]
        if not own:
            raise UsageError(f"no {kind} matches '{glob}'; there are, for example, {examples}")
        found.update(own)
    return found
