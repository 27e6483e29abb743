"""The conversion of one block: its program, arithmetic and form, or why there is none; and the builder of its nodes."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike

from passes.fit import domain_of, fitted
from passes.match.blocks import Block
from passes.match.identify import IDENTICAL
from passes.match.projections import Projections
from passes.options import COMPACT, DEFAULT_OPTIONS, LOCAL, FormOptions, Options
from passes.programs.program import ARITHMETIC, FACTORED, LARGEST_QUERY, Program
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Constant, Fragment, Tensor, Variable
from rewriter.graph.types import elem_name
from rewriter.graph.view import GraphView, LostError, needed

_FLOAT, _DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
_BROADCASTING_OPSET = 7  # the first in which Mul and Add broadcast without attributes


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A block and its heads; what is needed to emit them. Rewritten files carry it (`passes.plan`)."""

    block: Block
    program: Program
    form: str
    inline: bool = False  # whether the heads are nodes instead of calls of a model-local function
    double: bool = False
    options: FormOptions = DEFAULT_OPTIONS
    # the linear operators as plain matrices; None if the form replaces the activation only
    projections: Projections | None = None
    carried: int = 0  # bias tokens of the network's stream (form `whole`); 0: its own
    by_reference: str = ""  # why a form that replaces blocks keeps W1 and W2
    fixed: bool = False  # whether the model fixes the length of its sequences

    @property
    def longest(self) -> int | None:
        """The longest sequence that the form can process; None for any, and where the model fixes the length."""
        square = self.carried or self.form not in (LOCAL, COMPACT, "masked")
        return self.options.positions if square and not self.fixed else None

    @property
    def ends(self) -> tuple[list[str], str]:
        """The tensors that the heads replace everything between: what they read, and their result."""
        if self.projections is None:
            return [self.block.gate, self.block.value], self.block.output
        return [self.projections.query.data], self.projections.result

    @property
    def compute_type(self) -> int:
        return _DOUBLE if self.double else _FLOAT

    @property
    def type_of_positions(self) -> int:
        """The element type of constants that blocks share in form `whole`."""
        return _DOUBLE if self.block.elem_type == _DOUBLE else _FLOAT

    @property
    def whole_block(self) -> Projections:
        """The linear operators as plain matrices, in forms that always replace the whole block."""
        if self.projections is None:
            raise ValueError(f"'{self.block.name}' is not replaced with its linear operators")
        return self.projections

    @property
    def max_error(self) -> float:
        """Certified bound on the error over max(1, |f|) of the heads as written, in exact arithmetic."""
        # The original nodes may themselves deviate from the activation that they were identified as.
        named = self.block.identified.error
        return self.program.max_error + self.program.coefficient_error + (named if named > IDENTICAL else 0.0)

    @property
    def widened(self) -> bool:
        """Whether the heads are computed in float64 although no end of the block is float64."""
        return self.double and _DOUBLE not in self.block.types

    @property
    def dtype(self) -> type[np.floating]:
        return np.float64 if self.double else np.float32

    @property
    def heads(self) -> int | None:
        neurons = self.block.neurons
        return None if neurons is None else neurons * len(self.program.as_heads.heads)


def decide(view: GraphView, block: Block, options: Options) -> Conversion:
    """Choose the program and the arithmetic of `block`, before `Form.prepare`. Raises LostError.

    Form `local` has the program with the fewest operations, and offsets of logits outside the exponentials
    (docs/decisions/0003); other forms have the one with the fewest heads and keys, with softmax as in the paper.
    """
    factored = options.form == LOCAL
    opset, types = view.opsets.get("", 1), block.types
    odd, why = next((elem_type for elem_type in sorted(types) if elem_type not in ARITHMETIC), None), ""
    if opset < _BROADCASTING_OPSET:
        why = f"opset {opset} is older than {_BROADCASTING_OPSET}; convert the model to a newer opset first"
    elif block.elem_type == 0:
        why = "its element type is unknown; add value_info, for example with onnx.shape_inference"
    elif odd is not None:
        why = f"its element type {elem_name(odd)} is not a floating-point type that heads can be computed in"
    if why:
        raise LostError(why, block.output)
    program = _program(block, options, quick=factored)
    # Is float32 precise enough for logits that include offsets, except those of steep keys?
    offsets = [abs(token.offset - head.gamma) for head in program.heads for token in head.bias_tokens]
    mild = max((offset for offset in offsets if offset <= FACTORED), default=0.0)
    narrow = factored or mild * 2.0**-24 <= 2.0 * ARITHMETIC[block.coarsest].tolerance
    wide = _DOUBLE in types or program.double or not narrow
    program = program.rounded(np.float64 if wide else np.float32, factored=factored)
    forms = FormOptions(**{each.name: getattr(options, each.name) for each in fields(FormOptions)})
    return Conversion(
        block=block, program=program, form=options.form, inline=options.inline, double=wide, options=forms
    )


def _program(block: Block, options: Options, *, quick: bool) -> Program:
    identified, arithmetic, strict = block.identified, ARITHMETIC[block.coarsest], options.accuracy is not None
    if options.accuracy is not None:
        arithmetic = replace(arithmetic, tolerance=options.accuracy)
    gated = identified.gated is not None
    if identified.activation.program is None and identified.activation.gate is None:
        domain = options.domain
        if domain is None and block.gate in options.reached:
            domain = domain_of(options.reached[block.gate])
        if domain is None:
            what = "`rewrite` fits heads to it on the values that the model reaches, or up to --option domain=R"
            raise LostError(f"the table has no program for it; {what}", block.output, "domain")
        fit = fitted(identified, domain, arithmetic, gated=gated, strict=strict, quick=gated and quick)
        if isinstance(fit, str):
            raise LostError(fit, block.output)
        return fit
    program = identified.activation.program_for(identified.parameters, arithmetic, gated=gated, quick=quick)
    if program is None:
        what, rest = ("a gate with ", "; --gate product converts that alone") if gated else ("", "")
        raise LostError(f"no head program for {what}{identified.activation.name} yet{rest}", block.output)
    if options.accuracy is not None and program.max_error > options.accuracy:
        off, asked = f"is off by {program.max_error:.2g}", f"--accuracy asks for {options.accuracy:.2g}"
        raise LostError(f"the closest program, {program.name}, {off}; {asked}", block.output)
    return program


# -- its nodes ---------------------------------------------------------------------------------------------------------
#
# Shapes are computed at run time, so any batch and any number of tokens work. Operators are those of opset 11; methods
# take care of attributes that later opsets turned into inputs.

SMALLEST_OPSET = 11  # of Slice with computed bounds, and Range
_AXES_ARE_INPUTS = 13
ALLOWZERO_OPSET = 14  # from which a 0 in the shape of a Reshape can be a size
DOMAIN = "attnonly"  # of the model-local functions; prefix of the metadata keys
BLOCK_KEY = f"{DOMAIN}.block"  # metadata key of a node's block
LARGEST_FLOAT32_QUERY = 2.0**60  # queries are clipped: beyond it every weight is 0 or 1


def _of_two(operator: str) -> Callable[["Builder", Tensor, Tensor, str], Variable]:
    return lambda b, x, y, name: b.node(operator, [x, y], name)


class Builder(Fragment):
    """A fragment whose numbers have the type `compute_type`; the members `wanted` of `EXPOSED` become outputs."""

    def __init__(self, prefix: str, *, opset: int, compute_type: int, wanted: Sequence[str] = ()) -> None:
        super().__init__(prefix)
        self.compute_type = compute_type
        self.exposed: list[onnx.ValueInfoProto] = []
        self.opset = opset
        self._wanted = wanted

    @classmethod
    def of(cls, view: GraphView, conversion: Conversion) -> "Builder":
        name, opset = conversion.block.name, view.opsets.get("", 1)
        wanted = conversion.options.exposed(name)
        return cls(f"{name}/heads", opset=opset, compute_type=conversion.compute_type, wanted=wanted)

    def typed(self, compute_type: int) -> "Builder":
        other = copy(self)
        other.compute_type = compute_type
        return other

    def within(self, name: str) -> "Builder":
        inner = copy(self)
        inner.prefix = self.qualified(name) if name else self.prefix
        return inner

    @property
    def dtype(self) -> type[np.floating]:
        return np.float64 if self.compute_type == onnx.TensorProto.DOUBLE else np.float32

    def expose(self, kind: str, tensor: Tensor, sizes: Sequence[int | None]) -> None:
        """Expose a tensor of this builder's type if the user wants its kind, a member of `EXPOSED`."""
        if kind in self._wanted:
            self.exposed.append(onnx.helper.make_tensor_value_info(str(tensor.name), self.compute_type, sizes))

    def numbers(self, name: str, values: ArrayLike) -> Constant:
        return self.constant(name, np.asarray(values, dtype=self.dtype))

    def integers(self, *values: int) -> Constant:
        name = "integers_" + "_".join(str(value).replace("-", "minus") for value in values)
        return self.constant(name, np.asarray(values, dtype=np.int64))

    def renamed(self, tensor: Variable, name: str) -> Variable:
        tensor.name = self.qualified(name)
        return tensor

    def read(self, tensor: str, elem_type: int, name: str) -> Tensor:
        return self.cast(self.tensor(tensor), elem_type, name)

    add, sub, mul, div = map(_of_two, ("Add", "Sub", "Mul", "Div"))

    def cast(self, tensor: Tensor, elem_type: int, name: str) -> Tensor:
        same = elem_type == self.compute_type
        return tensor if same else self.node("Cast", [tensor], name, to=int(self.compute_type))

    def write(self, tensor: Tensor, output: str, elem_type: int) -> None:
        given: dict[str, Any] = {} if elem_type == self.compute_type else {"to": int(elem_type)}
        self.node("Cast" if given else "Identity", [tensor], "result", output=output, **given)

    def reshape(self, tensor: Tensor, shape: Tensor | Sequence[int], name: str, *, zeros: bool = False) -> Variable:
        """Reshape to a computed shape, or to numbers; 0 keeps an axis unless `zeros` are sizes, -1 is inferred."""
        given: dict[str, Any] = {"allowzero": 1} if zeros and self.opset >= ALLOWZERO_OPSET else {}
        made = self.integers(*shape) if isinstance(shape, Sequence) else shape
        return self.node("Reshape", [tensor, made], name, **given)

    def unsqueeze(self, tensor: Tensor, axis: int, name: str) -> Variable:
        if self.opset < _AXES_ARE_INPUTS:
            return self.node("Unsqueeze", [tensor], name, axes=[axis])
        return self.node("Unsqueeze", [tensor, self.integers(axis)], name)

    def transpose(self, tensor: Tensor, order: Sequence[int], name: str) -> Variable:
        return self.node("Transpose", [tensor], name, perm=list(order))

    def concat(self, tensors: Sequence[Tensor], axis: int, name: str) -> Variable:
        return self.node("Concat", tensors, name, axis=axis)

    def rows(self, tensor: Tensor, start: int, stop: int | Tensor, axis: int, name: str) -> Variable:
        """A slice of one axis; `stop` may be a 1-D tensor of one integer."""
        end = self.integers(stop) if isinstance(stop, int) else stop
        return self.node("Slice", [tensor, self.integers(start), end, self.integers(axis)], name)

    def total(self, terms: Sequence[Tensor], name: str, last: str = "") -> Tensor:
        """The sum of terms, called `last`, or `name`."""
        # Not Sum: onnxruntime's CPU kernel is single-threaded and copies, so a sum of three takes three times as long.
        made = terms[0]
        for number, term in enumerate(terms[1:], start=1):
            made = self.add(made, term, f"{name}_{number}" if number < len(terms) - 1 else last or name)
        return made

    def split(self, tensor: Tensor, sizes: tuple[int, int], names: tuple[str, str]) -> tuple[Variable, Variable]:
        """The last axis of a tensor of four axes in two parts."""
        given: dict[str, Any] = {"split": list(sizes)} if self.opset < _AXES_ARE_INPUTS else {}
        inputs = [tensor] if given else [tensor, self.integers(*sizes)]
        first, second = self.node("Split", inputs, names[0], axis=3, **given), self.tensor(self.qualified(names[1]))
        first.inputs[0].outputs.append(second)
        return first, second

    def sizes(self, tensor: Tensor, start: int, stop: int, name: str) -> Variable:
        """Some of the sizes of a tensor, as a 1-D tensor."""
        return self.rows(self.node("Shape", [tensor], f"{name}_of"), start, stop, 0, name)

    def entry(self, inputs: Mapping[str, Tensor], name: str, j: int) -> Variable:
        index = self.constant(f"{name}_index_{j}", np.asarray(j, dtype=np.int64))
        return self.node("Gather", [inputs[name], index], f"{name}_{j}", axis=0)

    def clipped(self, tensor: Tensor, ends: tuple[float, float], name: str) -> Variable:
        if self.opset < 11:
            return self.node("Clip", [tensor], name, min=ends[0], max=ends[1])
        bounds = [self.numbers(f"{end}_{name}", value) for end, value in zip(("lowest", "highest"), ends, strict=True)]
        return self.node("Clip", [tensor, *bounds], name)

    def bounded(self, query: Tensor, name: str) -> Variable:
        """A query clipped to +-2^60 (float64: 2^500), where weights are 0 or 1: infinite logits would give NaN."""
        limit = LARGEST_QUERY if self.dtype == np.float64 else LARGEST_FLOAT32_QUERY
        return self.clipped(query, (-limit, limit), name)

    def paired(self, query: Tensor, name: str, *, one_first: bool = False, shape: Tensor | None = None) -> Variable:
        """The query (y, 1), or (1, y), whose 1 multiplies the offsets of the keys; `shape` is that of y."""
        shape = self.node("Shape", [query], f"{name}_shape") if shape is None else shape
        pair = [query, self.node("Expand", [self.numbers(f"{name}_one", 1.0), shape], f"{name}_ones")]
        return self.concat(pair[::-1] if one_first else pair, 3, name)

    def padded(self, tensor: Tensor, before: int, after: int, name: str) -> Variable:
        """Columns of zeros before and after a tensor of three axes."""
        return self.node("Pad", [tensor, self.integers(0, 0, before, 0, 0, after)], name)

    def scores(self, query: Tensor, key: Tensor, suffix: str, kind: str = "") -> Variable:
        """query key^T, [batch, heads, queries, keys]."""
        turned = self.transpose(key, (0, 1, 3, 2), f"key_transposed{suffix}")
        return self.node("MatMul", [query, turned], f"{kind}scores{suffix}")

    def pattern(self, scores: Tensor, suffix: str, sizes: Sequence[int | None] = (None, None, None, None)) -> Variable:
        self.expose("scores", scores, sizes)
        result = self.node("Softmax", [scores], f"pattern{suffix}", axis=3)
        self.expose("pattern", result, sizes)
        return result


def replacement(b: Builder, conversion: Conversion, functions: Sequence[onnx.FunctionProto] = ()) -> Replacement:
    """The built nodes, and the functions that they call, in place of the nodes that compute the same output."""
    whole, (_, output) = conversion.projections, conversion.ends
    metadata = {
        BLOCK_KEY: conversion.block.name,
        f"{DOMAIN}.form": conversion.form,
        f"{DOMAIN}.activation": conversion.block.identified.label,
        f"{DOMAIN}.program": conversion.program.name,
        f"{DOMAIN}.max_error": f"{conversion.max_error:.3g}",
    }
    every = b.nodes(metadata)
    # The values of heads with constant values are built but never read.
    nodes = tuple(every[place] for place in needed(every, [output]))
    read = {name for node in nodes for name in node.input}
    initializers = tuple(tensor for tensor in b.initializers() if tensor.name in read)
    shapes = list[Replacement]()
    if whole is not None:
        for name in whole.shapes:
            part = Builder(b.qualified(f"shape_{len(shapes)}"), opset=b.opset, compute_type=b.compute_type)
            shape = part.node("Shape", [part.tensor(whole.query.data)], "input_shape")
            sizes = [part.rows(shape, 0, -1, 0, "leading"), part.integers(whole.query.out_features)]
            part.concat(sizes, 0, "shape").name = name
            shapes.append(Replacement(name, tuple(part.nodes(metadata)), tuple(part.initializers())))
    return Replacement(output, nodes, initializers, tuple(functions), tuple(shapes), tuple(b.exposed))
