"""The decision about one block: which program, in which arithmetic and form, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx

from passes.fit import domain_of, fitted
from passes.match.blocks import Block
from passes.match.identify import IDENTICAL
from passes.match.projections import Projections
from passes.options import COMPACT, DEFAULT_OPTIONS, LOCAL, FormOptions, Options
from passes.programs.program import ARITHMETIC, FACTORED, Arithmetic, Program
from rewriter.graph.types import elem_name
from rewriter.graph.view import GraphView, LostError

_FLOAT, _DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
SMALLEST_OPSET = 7  # the first in which Mul and Add broadcast without attributes


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A block and its heads; what is needed to emit them. Rewritten files carry it (`passes.record`)."""

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

    @property
    def longest(self) -> int | None:
        """The longest sequence that the form can process; None for any."""
        square = self.carried or self.form not in (LOCAL, COMPACT, "masked")
        return self.options.positions if square else None

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
    if opset < SMALLEST_OPSET:
        why = f"opset {opset} is older than {SMALLEST_OPSET}; convert the model to a newer opset first"
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
    return Conversion(
        block=block, program=program, form=options.form, inline=options.inline, double=wide, options=options.forms
    )


def _program(block: Block, options: Options, *, quick: bool) -> Program:
    identified, arithmetic = block.identified, ARITHMETIC[block.coarsest]
    if options.accuracy is not None:
        arithmetic = replace(arithmetic, tolerance=options.accuracy)
    gated = identified.gated is not None
    if identified.activation.program is None and identified.activation.gate is None:
        return _fitted(block, options, arithmetic, gated=gated, quick=quick)
    program = identified.activation.program_for(identified.parameters, arithmetic, gated=gated, quick=quick)
    if program is None:
        what, rest = ("a gate with ", "; --gate product converts that alone") if gated else ("", "")
        raise LostError(f"no head program for {what}{identified.activation.name} yet{rest}", block.output)
    if options.accuracy is not None and program.max_error > options.accuracy:
        off, asked = f"is off by {program.max_error:.2g}", f"--accuracy asks for {options.accuracy:.2g}"
        raise LostError(f"the closest program, {program.name}, {off}; {asked}", block.output)
    return program


def _fitted(block: Block, options: Options, arithmetic: Arithmetic, *, gated: bool, quick: bool) -> Program:
    domain = options.domain
    if domain is None and block.gate in options.reached:
        domain = domain_of(options.reached[block.gate])
    if domain is None:
        what = "`rewrite` fits heads to it on the values that the model reaches, or up to --option domain=R"
        raise LostError(f"the table has no program for it; {what}", block.output, "domain")
    strict = options.accuracy is not None
    program = fitted(block.identified, domain, arithmetic, gated=gated, strict=strict, quick=gated and quick)
    if isinstance(program, str):
        raise LostError(program, block.output)
    return program
