"""What is known of the tensors of one graph, and of what lies between linear operators.

Comes in: nothing; `passes.match.dataflow` fills it. Goes out: `Fact`, `Source` and `Dataflow`, read by
`passes.match.blocks`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from passes.match.linear import LinearOperator, Miss


@dataclass(frozen=True)
class Source:
    """Where a leaf comes from.

    Attributes:
        operators: the linear operators added up in it.
        trailing: the affine and shape-only nodes behind them.
        miss: why it is, all the same, not what a linear operator gives; activations behind it are left for that.
    """

    operators: tuple[LinearOperator, ...]
    trailing: tuple[int, ...] = ()
    miss: Miss | None = None


@dataclass(frozen=True)
class Fact:
    """What is known of one tensor.

    Attributes:
        leaves: the tensors that this one is an elementwise function of; itself where it is a leaf or opaque.
        source: for a leaf, where it comes from; None for functions and for opaque tensors.
        nonlinear: whether the function is (syntactically) not affine.
        ends: for a tensor beyond an activation, the activation's output.
        axis: the channel axis counted from the end; None where a shape-only operator lost track of it.
    """

    leaves: tuple[str, ...]
    source: Source | None = None
    nonlinear: bool = False
    ends: str | None = None
    axis: int | None = -1


@dataclass
class Dataflow:
    """The facts of one graph; filled by `analyse`, read-only afterwards.

    Attributes:
        facts: tensor name to fact; a tensor that is not here is opaque or constant.
        operators: node index to linear operator.
        sinks: activation output to the linear operators that read it.
        blocked: activation output to why another reader is no linear operator.
        extended: activation outputs that a larger activation takes up.
        scales: scalars of dynamic quantisation, data that multiply a quantised product back into floats.
        near_misses: leaf to why the nonlinear node that reads it is not elementwise with scalar constants.
    """

    facts: dict[str, Fact] = field(default_factory=dict)
    operators: dict[int, LinearOperator] = field(default_factory=dict)
    sinks: dict[str, list[LinearOperator]] = field(default_factory=lambda: defaultdict(list))
    blocked: dict[str, list[Miss]] = field(default_factory=lambda: defaultdict(list))
    extended: set[str] = field(default_factory=set)
    scales: set[str] = field(default_factory=set)
    near_misses: dict[str, Miss] = field(default_factory=dict)

    def source_of(self, tensor: str) -> Source | None:
        """Where a leaf comes from, None for other tensors."""
        fact = self.facts.get(tensor)
        return None if fact is None else fact.source

    def activation_behind(self, tensor: str) -> str | None:
        """The activation output that `tensor` is, or lies beyond; None if there is none."""
        fact = self.facts.get(tensor)
        if fact is None:
            return None
        return tensor if fact.nonlinear else fact.ends
