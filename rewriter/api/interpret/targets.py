"""A model to be changed, the places of its heads' outputs, and what stands there on given inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from passes.heads.layers import Named
from passes.heads.neurons import NeuronHeads
from passes.heads.original import Attention
from rewriter.api.interpret.cache import Recording, side_of, values_of
from rewriter.api.interpret.edits import Constant, Edit, edit, is_edited, self_contained, unedited
from rewriter.api.interpret.hooks import hooks_of
from rewriter.api.interpret.index import HeadIndex, heads
from rewriter.api.interpret.selection import Names, chosen_heads
from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source, load_model
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import InputsOrText

_AXES = {"compact": -2, "masked": -3, "maskless": -3}
"""Form to the axis of heads in what they write."""


@dataclass(frozen=True, eq=False)
class Site:
    """Where the outputs of a sublayer's heads are replaced.

    Attributes:
        named: the sublayer.
        tensor: the heads' outputs.
        where: the chosen ones, a boolean array that broadcasts with it.
        dtype: its element type.
        axis: the axis of heads or channels.
    """

    named: Named
    tensor: str
    where: Array
    dtype: np.dtype[Any]
    axis: int = -1


@dataclass(frozen=True, eq=False)
class Target:
    """A model to be changed.

    Attributes:
        index: the heads of the model without interventions.
        proto: the model, with earlier ones.
    """

    index: HeadIndex
    proto: onnx.ModelProto

    @classmethod
    def of(cls, model: Source) -> Target:
        """Load a model. Raises UsageError and ModelError."""
        source = load_model(model, mapped=True)
        if is_edited(source.proto):
            proto = self_contained(source)
            return cls(heads(unedited(proto)), proto)
        index = heads(model)
        index.require_tokens_only("an intervention")
        return cls(index, self_contained(replace(index.source, proto=index.proto)))

    def changed(self, edits: Sequence[Edit]) -> onnx.ModelProto:
        """The model with these edits, too."""
        edit(self.proto, edits)
        return self.proto

    # -- outputs of heads --------------------------------------------------------------------------------------------

    def sites(self, names: Names) -> Iterator[Site]:
        """The places of the chosen heads' outputs. Raises UsageError."""
        for named, numbers in chosen_heads(self.index, names):
            own = named.sublayer
            if isinstance(own, Attention):
                where = np.zeros(own.channels.size, np.bool_)
                where[own.channels[numbers]] = True
                yield Site(named, own.output.data, where, self.dtype(own.output.data))
            else:
                yield self._of_neurons(named, own, numbers)

    def _of_neurons(self, named: Named, own: NeuronHeads, numbers: list[int]) -> Site:
        tensor = own.output.data
        where = np.zeros(own.neurons, np.bool_)
        where[numbers] = True
        if own.gate:
            return Site(named, tensor, where, self.dtype(tensor))
        # The heads' own sublayer: [batch, tokens, heads, 1] in form compact, [batch, heads, rows, 1] in the others.
        # Form staged has heads of several channels; gates have several heads per neuron, and no such tensor.
        if own.form not in _AXES or len(own.groups) != 1:
            raise UsageError(f"{named.name} has no tensor of what its neurons write; use the original or form local")
        axis = _AXES[own.form]
        return Site(named, tensor, where.reshape(-1, *[1] * (-1 - axis)), self.dtype(tensor), axis)

    def dtype(self, tensor: str) -> np.dtype[Any]:
        """The element type of a tensor; float32 where it is not known."""
        known = self.index.view.type_of(tensor).elem_type or onnx.TensorProto.FLOAT
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(known))

    def means(self, sites: Sequence[Site], inputs: InputsOrText) -> list[Edit]:
        """The mean of every channel over the tokens of all cases."""
        totals: dict[str, Array] = {}
        counts: dict[str, int] = {}
        for case in Recording.of(self.index, inputs, (), "cpu").cases:
            values = self.run(case, [site.tensor for site in sites])
            for site in sites:
                array = np.moveaxis(self._of_tokens(site, case, values[site.tensor]), site.axis, -1)
                rows = array.reshape(-1, array.shape[-1]).astype(np.float64)
                totals[site.tensor] = totals.get(site.tensor, np.zeros(rows.shape[1])) + rows.sum(axis=0)
                counts[site.tensor] = counts.get(site.tensor, 0) + len(rows)
        return [
            Edit(
                site.tensor,
                Constant((totals[site.tensor] / counts[site.tensor]).astype(site.dtype).reshape(site.where.shape)),
                site.where,
            )
            for site in sites
        ]

    def _of_tokens(self, site: Site, case: Case, array: Array) -> Array:
        """The rows of tokens: where bias tokens are in the sequence, they come after them."""
        if site.axis != -3:
            return array
        pre = hooks_of(self.index)[f"{site.named.name}.hook_pre"]
        tokens = pre.make(self.run(case, pre.tensors)).shape[1]
        return np.asarray(array[:, :, :tokens])

    def recorded(self, sites: Sequence[Site], inputs: InputsOrText, order_of: Callable[[int], Array]) -> list[Edit]:
        """What the heads write on the inputs, with the sequences in some order."""
        case = self.case(inputs)
        values = self.run(case, [site.tensor for site in sites])
        count = _sequences(case)
        order = order_of(count)
        edits = []
        for site in sites:
            array = values[site.tensor]
            if array.shape[0] % count:
                raise UsageError(f"{site.named.name} does not have the inputs' {count} sequences in its first axis")
            ordered = array.reshape(count, -1)[order].reshape(array.shape)
            edits.append(Edit(site.tensor, Constant(ordered.astype(site.dtype)), site.where))
        return edits

    # -- running -----------------------------------------------------------------------------------------------------

    def case(self, inputs: InputsOrText) -> Case:
        """The only case of the inputs. Raises UsageError."""
        cases = Recording.of(self.index, inputs, (), "cpu").cases
        if len(cases) != 1:
            raise UsageError(f"this takes one case, and the file has {len(cases)}")
        return cases[0]

    def run(self, case: Case, tensors: Sequence[str]) -> Mapping[str, Array]:
        """The values of tensors in the model without interventions. Raises ValidationError."""
        return values_of(side_of(self.index), case, tensors, "cpu")


def _sequences(case: Case) -> int:
    """The number of sequences: inputs have them as their first axis."""
    return next((len(array) for array in case.feeds.values() if array.ndim), 1)
