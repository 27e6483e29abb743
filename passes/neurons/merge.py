"""Merging: MLP blocks with fewer neurons, where some are proved not to be needed.

The result is a copy in which these blocks have smaller weights, as new initializers. Tensors keep their names,
pre-activations and outputs included, so that the proof can compare block by block; a weight with other consumers stays.
`passes.neurons.reduce` says when a neuron can be removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from passes.match.blocks import Block
from passes.match.identify import IDENTICAL, Identifier
from passes.match.operands import AnyArray, Layer, NotPlainError, PreActivation, Read, read_layer
from passes.neurons.bounds import preactivation_bounds
from passes.neurons.reduce import Nature, Neurons, reduce_neurons
from passes.neurons.shrink import Shrinker
from passes.programs.softmax import Array
from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView

HOMOGENEOUS = {"relu": 1, "leaky_relu": 1, "relu_squared": 2, "square": 2}
"""Activations with f(t y) = t^n f(y) for every t > 0, and their n."""

_KINKED = ("relu", "leaky_relu")
"""Activations that are linear on each side of 0."""


@dataclass(frozen=True)
class Record:
    """The outcome for one block.

    Attributes:
        block: its name.
        before: its number of neurons, None where unknown.
        after: its number of neurons afterwards.
        dead: neurons removed because their row of W2 is zero or their activation is always 0.
        constant: neurons removed because no input changes them; their constant is in the output's bias.
        duplicate: neurons merged with an equal one.
        proportional: neurons merged with one that is a power of two times larger.
        affine: remaining neurons that are proved to compute an affine function.
        reason: why the block was not examined; None where it was.
    """

    block: str
    before: int | None
    after: int | None
    dead: int = 0
    constant: int = 0
    duplicate: int = 0
    proportional: int = 0
    affine: int = 0
    reason: str | None = None

    @property
    def removed(self) -> int:
        """The number of removed neurons."""
        return self.dead + self.constant + self.duplicate + self.proportional

    @property
    def text(self) -> str:
        """The record as reports print it."""
        if self.reason is not None:
            return f"merge: {self.block} keeps its neurons: {self.reason}"
        kinds = ("dead", "constant", "duplicate", "proportional")
        parts = [f"{number} {kind}" for kind in kinds if (number := getattr(self, kind))]
        stay = f"; {self.affine} of those that stay are affine" if self.affine else ""
        if not parts:
            return f"merge: all {self.before} neurons of {self.block} are needed{stay}"
        return f"merge: {self.block} has {self.after} neurons instead of {self.before} ({', '.join(parts)}){stay}"


@dataclass(frozen=True)
class Merged:
    """The merged model.

    Attributes:
        model: the copy; the original object where nothing could be merged.
        records: one per block, in the order of the blocks.
        ends: maps a second operator's output to the tensor that restores its original value, after a constant is added.
    """

    model: onnx.ModelProto
    records: tuple[Record, ...]
    ends: dict[str, str] = field(default_factory=dict)


def merge(model: onnx.ModelProto, views: Sequence[GraphView], blocks: Sequence[Block], read: Read) -> Merged:
    """Merge the neurons of `blocks`.

    Args:
        model: the model, which is not changed.
        views: the views of its graphs.
        blocks: the blocks to examine.
        read: reads the values of a tensor: the weights of these blocks and of the normalisations before them.
    """
    shrinker = Shrinker(model)
    by_path = {view.path: view for view in views}
    identifiers = {path: Identifier(view, Constants(view)) for path, view in by_path.items()}
    records = [_merge_block(shrinker, by_path[b.path], identifiers[b.path], b, read) for b in blocks]
    return Merged(shrinker.finish(), tuple(records), shrinker.ends)


def _merge_block(shrinker: Shrinker, view: GraphView, identifier: Identifier, block: Block, read: Read) -> Record:
    try:
        shrinker.require_room()  # first, before any weight is read
        layer = read_layer(view, block, read)
        reduction = reduce_neurons(_neurons(layer), _nature(view, identifier, block, layer, read))
        if reduction.removed:
            shrinker.replace(view, layer, reduction)
    except NotPlainError as reason:
        return Record(block.name, block.neurons, block.neurons, reason=str(reason))
    before = len(layer.gate.weight.per_neuron)
    return Record(
        block=block.name,
        before=before,
        after=len(reduction.kept),
        dead=reduction.dead,
        constant=reduction.constant,
        duplicate=reduction.duplicate,
        proportional=reduction.proportional,
        affine=reduction.affine,
    )


def _neurons(layer: Layer) -> Neurons:
    gate, gate_inputs = _columns(layer.gate)
    value, value_inputs = (None, 0) if layer.value is None else _columns(layer.value)
    return Neurons(gate, gate_inputs, value, value_inputs, tuple(output.weight.per_neuron for output in layer.outputs))


def _columns(projection: PreActivation) -> tuple[AnyArray, int]:
    """Columns of W1 followed by the biases, one row per neuron, and the number of columns of W1."""
    weight = projection.weight.per_neuron
    biases = [np.broadcast_to(bias.array.reshape(-1, 1), (len(weight), 1)) for bias in projection.biases]
    return np.concatenate([weight, *biases], axis=1) if biases else weight, weight.shape[1]


def _nature(view: GraphView, identifier: Identifier, block: Block, layer: Layer, read: Read) -> Nature:
    """The activation's values, by the graph's own nodes, and what is proved about its pre-activations."""

    def function(gate: Array, value: Array) -> Array:
        given = {block.gate: gate, block.value: value} if layer.value is not None else {block.gate: gate}
        return identifier.evaluate(block.region, [given[leaf] for leaf in block.region.leaves])

    # The values come from the graph itself, but homogeneity and the kink are properties of the named function. They
    # hold for the region only if the two are the same function, not merely close.
    name = block.identified.activation.name
    named_exactly = block.identified.error <= IDENTICAL
    # Bounds only help where the sign of y decides: left of its kink ReLU is 0, leaky ReLU is another line.
    bounds = preactivation_bounds(view, layer.gate, read) if name in _KINKED and named_exactly else None
    never = np.zeros(len(layer.gate.weight.per_neuron), dtype=bool)
    above, below = (never, never) if bounds is None else (bounds[0] > 0.0, bounds[1] < 0.0)
    return Nature(
        function=function,
        degree=HOMOGENEOUS.get(name) if named_exactly else None,
        off=below if name == "relu" else never,
        affine=above if name == "relu" else above | below,
    )
