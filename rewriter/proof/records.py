"""What is proved about two models, as data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import onnx
from flint import fmpq

from rewriter.graph.view import Path, Place
from rewriter.proof.certificate.bounds import Bound
from rewriter.proof.values.departure import Departure
from rewriter.text import first_of

TOPS: Mapping[int, fmpq] = {
    onnx.TensorProto.FLOAT: fmpq(2) ** 128,
    onnx.TensorProto.FLOAT16: fmpq(65504),
    onnx.TensorProto.BFLOAT16: fmpq(2) ** 128,
    onnx.TensorProto.DOUBLE: fmpq(2) ** 1024,
}
"""No finite number of the type is larger."""

CEILINGS: Mapping[int, float] = {
    each: max(1e-5, float(ml_dtypes.finfo(onnx.helper.tensor_dtype_to_np_dtype(each)).eps)) for each in TOPS
}
"""The largest error over max(1, |f|) that a pass may claim for an activation unless the user asked for more, by element
type: what a program may be off by that is fitted while planning (those of the table are off by 1e-7 at most), and for
half precision the spacing of its numbers, to which constants round. What is claimed is then proved."""

UNCLAIMED = 1e-7
"""The limit of a region about which nothing is claimed, in every type: it holds the program over the reals to what the
table of programs states, and is not loosened for types whose rounding would hide a wrong coefficient."""
ASSUMED = (
    "operators compute what the specifications of ONNX and onnxruntime say",
    "arithmetic is that of the reals; operators that are the same in both models get the same operands",
    "where a model lists all of its initializers as inputs, as in IR version 3, they keep their values",
)
NOT_CLAIMED = (
    "rounding and overflow in the types of the model",
    "NaN and infinities",
    "what a runtime makes of the file",
    "how the bounds of the activations propagate to the outputs",
)


@dataclass(frozen=True)
class Claimed:
    """What is claimed about one activation."""

    limit: float  # largest |F_B - F_A| / max(1, |F_A|)
    domain: float | None = None  # largest |y| for which that is claimed; None for all
    leaves: tuple[str, ...] = ()  # the pre-activation and, of a gate, the value
    accuracy: float = math.inf  # the error that was asked for: a limit above it and the type's ceiling is lowered


@dataclass(frozen=True)
class Claim:
    """The claim about one replaced block."""

    name: str
    output: str  # of the activation
    reads: tuple[str, ...]  # the inputs of what was replaced: an activation, or the whole block
    makes: tuple[str, ...]  # its outputs, shapes last
    held: Claimed
    elem_type: int  # the least precise one at the ends of the activation, by which accuracy is judged
    path: Path = ()
    exposed: tuple[str, ...] = ()  # tensors of the heads that are further outputs of the rewritten model

    @property
    def place(self) -> Place:
        return self.path, self.output

    @property
    def gate(self) -> str:
        return self.held.leaves[0]


@dataclass(frozen=True)
class CertifiedRegion:
    """One activation of the original and its replacement."""

    original: str  # the tensor of the original that it computes
    rewritten: str  # the tensor of the rewritten model
    path: Path  # the graph of the original that it is in; () for the main one
    # the tensors of the original that it is a function of: the pre-activation, or gate and value
    leaves: tuple[str, ...]
    linear_in: str | None  # the value of a gate, in which both sides are linear; None for an activation
    elem_type: int  # narrowest element type in which the original computes it (TensorProto.DataType)
    nodes: int  # nodes of the region in the rewritten model
    bound: Bound  # what was proved
    functions: tuple[tuple[str, ...], ...]  # both functions of y, part by part
    tokens: int | None = None  # the longest sequence that the rewritten model takes there; None where it takes any


@dataclass(frozen=True)
class Refusal:
    """Why two tensors were not shown to be the same."""

    tensor: str = ""  # of the rewritten model
    original: str = ""  # the tensor of the original that it was compared with
    node: str = ""  # what makes it, in words
    reason: str = ""  # in a sentence
    # whether the reason is a counterexample: a number at which a function is further off than is claimed, or, where
    # nothing is, than folded constants explain
    refuted: bool = False
    path: Path = ()  # the graph of the original

    @property
    def text(self) -> str:
        what = self.node or self.tensor
        return f"{what}: {self.reason}" if what else self.reason


@dataclass(frozen=True)
class Certificate:
    """What was proved about two models."""

    certified: bool  # whether the rewritten model computes what the original does, up to the bounds of the regions
    regions: tuple[CertifiedRegion, ...] = ()  # the activations that were replaced, with their bounds
    refusals: tuple[Refusal, ...] = ()  # why not, the most telling first; empty if certified
    seconds: float = 0.0  # how long it took
    # the sizes of inputs for which it is proved, such as `batch 2, sequence 5`; empty for every size
    sizes: tuple[str, ...] = ()
    bits: int | None = None  # of a proof at some sizes: other models pass with a probability of less than 2^-bits
    rounded: tuple[str, ...] = ()  # constants that were read as the number that they are rounded from, such as sqrt(8)
    folded: tuple[str, ...] = ()  # constants that a tool multiplied in float32, which were read as exact
    # where the values of both models part; None where they do not, or were not compared
    departure: Departure | None = None
    partly: tuple[str, ...] = ()  # tables that the original lacks, and of which these sizes read only a part
    drawn: tuple[str, ...] = ()  # what one model alone computes from integers, of which only those drawn were tried
    tried_only: str = ""  # why it is not known for every size
    assumed: tuple[str, ...] = ASSUMED  # what the proof rests on
    not_claimed: tuple[str, ...] = NOT_CLAIMED  # what it says nothing about
    also: ClassVar[tuple[str, ...]] = ("domain",)

    @property
    def domain(self) -> float | None:
        """The largest |pre-activation| for which all regions are proved; None where they are for every number."""
        return min((each.bound.domain for each in self.regions if each.bound.domain is not None), default=None)

    @property
    def notes(self) -> tuple[str, ...]:
        """What it rests on that the verdict does not say."""
        found = {
            "constants read as what they are rounded from": self.rounded,
            "constants folded in float32, read as exact": self.folded,
            "tables read only in part at these sizes": self.partly,
            "computed from integers, of which only those drawn were tried": self.drawn,
            "why not at every size": (self.tried_only,) if self.sizes and self.tried_only else (),
        }
        return tuple(f"{what}: {first_of(each)}" for what, each in found.items() if each)

    @property
    def refuted(self) -> bool:
        return any(each.refuted for each in self.refusals)

    @property
    def worst(self) -> float:
        """The largest bound of a region, over max(1, |F|); 0 if all are exact."""
        return max((region.bound.bound for region in self.regions), default=0.0)
