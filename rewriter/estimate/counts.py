"""What the time and the memory of a run depend on, as counts. `rewriter.api.estimating` takes them from a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """One conversion with its proof. Products and elements are those of one evaluation of the original.

    Attributes:
        nodes: nodes of the model.
        bytes: size of the model with its weights.
        file_bytes: size of the model file alone.
        largest_bytes: size of its largest weight.
        blocks: blocks to convert.
        block_bytes: size of the weights of these blocks.
        cases: inputs of the proof.
        products: multiplications in linear operators, over all inputs.
        elements: entries of all tensors between nodes, over all inputs.
        largest_elements: entries of the largest tensor between nodes.
        case_elements: entries of all tensors between nodes, on the input that has most.
        scores: entries of the patterns of all heads, over all inputs.
        largest_scores: entries of the largest pattern alive at one time, in blocks that are replaced as a whole.
        block_products: multiplications in the blocks to convert, over the inputs on which blocks are proved.
        points_scores: entries of the patterns on the adversarial points, in blocks that keep their linear operators.
        largest_points_scores: the same for one block.
        sublayers: blocks that are replaced as a whole, linear operators included.
        sublayer_products: their part of `block_products`.
        sublayer_scores: entries of the patterns of their heads, over the inputs on which blocks are proved.
        slots: bias tokens of all heads in blocks of the forms with positions, which are proved position by position.
        stages: sublayers of blocks that become several.
        by_blocks: whether one block or segment of a model is loaded at a time.
    """

    nodes: int
    bytes: int
    file_bytes: int
    largest_bytes: int
    blocks: int
    block_bytes: int
    cases: int
    products: int
    elements: int
    largest_elements: int
    case_elements: int
    scores: int
    largest_scores: int
    block_products: int
    points_scores: int
    largest_points_scores: int
    sublayers: int
    sublayer_products: int
    sublayer_scores: int
    slots: int
    stages: int
    by_blocks: bool

    @property
    def whole_bytes(self) -> int:
        """The weights, if a model is loaded as a whole."""
        return 0 if self.by_blocks else self.bytes

    @property
    def segment_bytes(self) -> int:
        """The largest weight, if one segment is loaded at a time."""
        return self.largest_bytes if self.by_blocks else 0

    @property
    def read_bytes(self) -> int:
        """The model file, which is read as a whole even if one segment is loaded at a time."""
        return self.file_bytes if self.by_blocks else 0
