"""The decision about one block: which program, in which arithmetic and form.

Comes in: a found block. Goes out: `Conversion`, or the `Miss` that stands in its way. Pure: nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from passes.activations import Arithmetic
from passes.find import Block
from passes.formoptions import DEFAULT_OPTIONS, FormOptions
from passes.identify import IDENTICAL
from passes.linear import Miss
from passes.programs import Program
from passes.projections import Projections

_FLOAT, _DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE

ARITHMETIC: dict[int, Arithmetic] = {
    onnx.TensorProto.FLOAT: Arithmetic(steepness=2.0**40, tolerance=1.2e-7),
    onnx.TensorProto.DOUBLE: Arithmetic(steepness=2.0**80, tolerance=1e-16),
    onnx.TensorProto.FLOAT16: Arithmetic(steepness=2.0**40, tolerance=2.0**-12),
    onnx.TensorProto.BFLOAT16: Arithmetic(steepness=2.0**40, tolerance=2.0**-12),
}
"""Element type of a block to its arithmetic. Half precisions are computed in float32, with casts around the heads.

steepness: SiLU(k y) / k is ReLU to 0.28 / k everywhere, and bit for bit once |k y| > 104, where the exponential is
0 or infinite: k = 2^40 makes that |y| > 1e-10. tolerance: half a unit in the last place of 1; bfloat16 takes
float16's, since one more bias token costs little and its own leaves GELU at 1.5e-3.
"""

SMALLEST_OPSET = 7
"""From here on Mul and Add broadcast without attributes."""


@dataclass(frozen=True)
class Conversion:
    """One block and how it will be converted.

    Attributes:
        block: the block.
        program: its head program.
        form: name of the form, a key of `passes.forms.FORMS`.
        inline: whether the heads are written out instead of calling a model-local function.
        compute_type: element type of the heads' arithmetic (FLOAT or DOUBLE).
        options: the user's choices about the form.
        projections: the linear operators as plain matrices, where the form replaces the whole block; None where it
            replaces the activation and the operators stay as they are.
        carried: bias tokens that the network's residual stream carries for the block; 0: it appends its own.
        by_reference: why they stay, in forms that would rather replace the whole block.
    """

    block: Block
    program: Program
    form: str
    inline: bool
    compute_type: int
    options: FormOptions = DEFAULT_OPTIONS
    projections: Projections | None = None
    by_reference: str = ""
    carried: int = 0

    @property
    def max_error(self) -> float:
        """Certified largest error of the heads as they stand in the graph, in exact arithmetic, over max(1, |f|)."""
        named = self.block.identified.error  # how far the graph's own spelling is from the activation it was named
        return self.program.max_error + self.program.coefficient_error + (named if named > IDENTICAL else 0.0)

    @property
    def dtype(self) -> type[np.floating]:
        """The numpy type of the heads' arithmetic."""
        return np.float64 if self.compute_type == _DOUBLE else np.float32

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that what is replaced is a function of, from its linear operators' inputs on."""
        if self.projections is not None:
            return (self.projections.query.data,)
        return tuple(dict.fromkeys(operator.data for operator in self.block.first))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that what is replaced ends in, linear operators included."""
        if self.projections is not None:
            return (self.projections.result,)
        return tuple(operator.output for operator in self.block.second) or (self.block.output,)

    @property
    def heads_tensor(self) -> str:
        """The tensor [batch, tokens + bias tokens, neurons] that the heads write, where the whole block is replaced."""
        return "" if self.projections is None else f"{self.block.name}/heads/z_side_by_side"

    @property
    def heads(self) -> int | None:
        """Attention heads in the converted block: neurons times heads per neuron."""
        neurons = self.block.neurons
        return None if neurons is None else neurons * len(self.program.heads)


def decide(block: Block, *, form: str, inline: bool, opset: int) -> Conversion | Miss:
    """Choose the program of `block`, or say why there is none."""
    identified = block.identified
    if opset < SMALLEST_OPSET:
        return Miss(
            f"opset {opset} is older than {SMALLEST_OPSET}; convert the model to a newer opset first", block.output
        )
    if block.elem_type == 0:
        return Miss("its element type is unknown; add value_info, for example with onnx.shape_inference", block.output)
    types = {block.elem_type, block.gate_type, block.value_type}
    odd = next((elem_type for elem_type in sorted(types) if elem_type not in ARITHMETIC), None)
    if odd is not None:
        name = onnx.TensorProto.DataType.Name(odd).lower()
        return Miss(f"its element type {name} is not a floating-point type that heads can be computed in", block.output)
    if identified.activation.program is None:
        return Miss(f"no head program for {identified.activation.name} yet", block.output)
    if identified.gated is not None and identified.activation.name not in ("sigmoid", "tanh"):
        return Miss("no head program yet for a gate whose activation is unbounded", block.output)
    program = identified.activation.program(identified.parameters, ARITHMETIC[block.coarsest])
    if identified.gated is not None:
        program = program.gate()
    compute_type = _DOUBLE if _DOUBLE in types else _FLOAT
    program = program.rounded(np.float64 if compute_type == _DOUBLE else np.float32)
    return Conversion(block, program, form, inline, compute_type)
