"""Patterns and the denominators of normalisations as edits that hold them at their values on given inputs."""

from __future__ import annotations

import numpy as np

from passes.heads.layers import Named
from passes.heads.neurons import NeuronHeads
from passes.heads.original import Attention
from rewriter.api.interpret.chain import chain_to, known_output, norm_of
from rewriter.api.interpret.edits import Constant, Edit, Frozen, Normalised
from rewriter.api.interpret.frozen import freeze
from rewriter.api.interpret.hooks import hooks_of
from rewriter.api.interpret.selection import Names, chosen_heads
from rewriter.api.interpret.targets import Target
from rewriter.errors import UsageError
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import InputsOrText


def patterns_on(target: Target, names: Names, inputs: InputsOrText) -> list[Edit]:
    """Patterns as they are on the inputs. Raises UsageError."""
    case = target.case(inputs)
    return [
        _pattern(target, named, named.sublayer, numbers, case)
        if isinstance(named.sublayer, Attention)
        else _affine(target, named, named.sublayer, numbers, case)
        for named, numbers in chosen_heads(target.index, names)
    ]


def _pattern(target: Target, named: Named, own: Attention, numbers: list[int], case: Case) -> Edit:
    if not own.pattern:
        raise UsageError(f"{named.name} is inside an operator, which keeps its pattern; it cannot be frozen")
    pattern = target.run(case, [own.pattern])[own.pattern]
    where = np.zeros((*pattern.shape[:-2], 1, 1), np.bool_)
    where.reshape(-1, own.heads)[:, numbers] = True
    return Edit(own.pattern, Constant(pattern.astype(target.dtype(own.pattern))), where)


def _affine(target: Target, named: Named, own: NeuronHeads, numbers: list[int], case: Case) -> Edit:
    """`factor v + offset`, v being what the values read: frozen patterns, summed over the heads of each neuron."""
    if not own.gate:
        raise UsageError(f"{named.name} has no tensor of its pre-activations; freeze the original or form local")
    hook = hooks_of(target.index)[f"{named.name}.hook_pattern"]
    weights = hook.make(target.run(case, hook.tensors)).astype(np.float64)
    factor = np.zeros((*weights.shape[:2], own.neurons))
    offset = np.zeros_like(factor)
    for place, group in enumerate(own.groups):
        part = weights[..., place * own.neurons : (place + 1) * own.neurons, :]
        factor += group.factor * group.head.c * part[..., 0]
        offset += group.factor * group.head.d * part[..., 0]
        for slot, token in enumerate(group.head.bias_tokens, start=1):
            offset += group.factor * token.value * part[..., slot]
    tensor = own.output.data
    where = np.zeros(own.neurons, np.bool_)
    where[numbers] = True
    source = own.own or own.gate
    rank = target.run(case, [source])[source].ndim
    dtype = target.dtype(tensor)
    shaped = [array.reshape(*([-1] if rank == 2 else array.shape[:2]), own.neurons) for array in (factor, offset)]
    return Edit(tensor, Frozen(source, *(array.astype(dtype) for array in shaped)), where)


def norms_on(target: Target, inputs: InputsOrText, output: str | None) -> list[Edit]:
    """The normalisations on the stream with the denominators that they have on the inputs. Raises UsageError."""
    case = target.case(inputs)
    chain = chain_to(target.index, known_output(target.index, output))
    found = {chain.norm.output: (chain.norm, chain.stream, "the last normalisation")}
    for place, stage in enumerate(chain.stages):
        if stage.norm is not None:
            found[stage.norm.output] = (stage.norm, chain.stages[place - 1].after, stage.sublayers[0][0].name)
        for named, _ in stage.sublayers:
            norm = norm_of(target.index, named, stage)
            if norm is not None:
                found[norm.output] = (norm, stage.before, named.name)
    edits = []
    for norm, before, name in found.values():
        values = target.run(case, [before, norm.output])
        stream = values[before].astype(np.float64)
        width = stream.shape[-1]
        scale, bias = target.index.scale_and_bias(norm, width)
        made = freeze(
            stream.reshape(-1, width), values[norm.output].astype(np.float64).reshape(-1, width), scale, bias, name
        )
        dtype = target.dtype(norm.output)
        factors = made.factors.reshape(*stream.shape[:-1], 1)
        factors, scale, bias = (each.astype(dtype) for each in (factors, made.scale, made.bias))
        edits.append(Edit(norm.output, Normalised(before, factors, scale, bias, made.centred), None))
    return edits
