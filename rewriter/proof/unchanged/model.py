"""Check that everything outside the replaced regions is unchanged, and that the regions contain attention.

Measurements cannot show this: the pass rule allows for certified errors, and a weight that was changed elsewhere could
hide in that allowance.

Two graphs compute the same if their outputs have the same names and every name that is read has the same definition in
both: an equal node, an equal weight, or the same input. Dead nodes may therefore be missing and the order of nodes is
free, but every other difference is found. New nodes are allowed only between the ends of a claim, where they may read
constants and the claim's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx

from rewriter.files.load import LoadedModel
from rewriter.files.walk import iter_nodes
from rewriter.graph.extract import cut, reads
from rewriter.graph.view import opsets
from rewriter.proof.claims import Claim, Side
from rewriter.proof.unchanged.definitions import Scope
from rewriter.proof.unchanged.is_attention import not_attention
from rewriter.proof.unchanged.same import Functions, Models, operator_key, same_attributes
from rewriter.proof.unchanged.scopes import Pair, inner, name_of, partners, scope_changes
from rewriter.proof.unchanged.sizes import depends_on_size


def unexplained_changes(original: Side, rewritten: Side, claims: Sequence[Claim]) -> list[str]:
    """Differences outside the regions of the claims, and regions without attention, one line each.

    Args:
        original: the original, in the form whose tensors the claims name.
        rewritten: the rewritten model.
        claims: one for every replaced block.

    Raises:
        ModelError: external data cannot be read.
    """
    models = original.model, rewritten.model
    functions = _functions(models[0]), _functions(models[1])
    found = [*_model_changes(models), *_function_changes(models, functions)]
    # Scopes are compared pair by pair from the outside in: only bodies of nodes that are equal apart from their bodies
    # have a counterpart, and the bodies of other nodes are covered by the finding about the node.
    old, new = (Scope.of_graph(model, model.proto.graph) for model in models)
    pending = [Pair(old, new, ()), *_function_bodies(models, functions)]
    unseen = list(claims)
    while pending:
        pair = pending.pop()
        here = [claim for claim in unseen if claim.path == pair.path]
        unseen = [claim for claim in unseen if claim not in here]
        regions = [_region(claim, pair, (original, rewritten), functions[1]) for claim in here]
        explained = frozenset(index for region in regions for index in region.nodes)
        same = partners(pair)
        exposed = _exposed(here, pair, explained)
        found += scope_changes(pair, explained, same, functions[1].keys() - functions[0].keys(), exposed)
        found += [failure for region in regions for failure in region.failures]
        pending += inner(pair, same)
    # A claim about a body that was never reached would otherwise pass unexamined.
    found += [f"{claim.name}: the graph that contains it is not in the rewritten model" for claim in unseen]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Region:
    """The part of the rewritten model that a claim accounts for.

    Attributes:
        nodes: indices of the nodes in its graph.
        failures: what contradicts the claim.
    """

    nodes: frozenset[int]
    failures: tuple[str, ...]


def _region(claim: Claim, pair: Pair, sides: tuple[Side, Side], functions: Functions) -> _Region:
    old, new = (side.views[claim.path] for side in sides)
    starts: Sequence[str] = claim.inputs
    ends: Sequence[str] = [claim.output]
    if claim.heads:
        starts, ends = claim.block_inputs, [*claim.block_outputs, *claim.shapes]
    # `cut` reports every further tensor that the part reads as an input, so a head that reads, say, another block's
    # activation shows here even if its values happen to agree.
    between = cut(new, starts, ends)
    nodes = [new.nodes[index] for index in between.nodes]
    failures = [
        f"{claim.name}: its heads read {name_of(name)}, which is not an input of its block"
        for name in between.inputs
        if name not in starts
    ]
    if claim.entrywise and depends_on_size(nodes, claim.output, functions):
        failures.append(f"{claim.name}: what its heads compute depends on the sizes of batch and sequence")
    return _Region(
        frozenset(index for index in between.nodes if _made_anew(new.nodes[index], claim, ends, pair.old)),
        (*failures, *not_attention(claim, old, nodes, pair.models, functions)),
    )


def _exposed(claims: Sequence[Claim], pair: Pair, explained: frozenset[int]) -> frozenset[str]:
    """The tensors that the claims expose, if nodes of their blocks make them."""
    made = {name for index in explained for name in pair.new.nodes[index].output}
    return frozenset(name for claim in claims if not claim.path for name in claim.exposed if name in made)


def _made_anew(node: onnx.NodeProto, claim: Claim, ends: Sequence[str], old: Scope) -> bool:
    """Whether a node's outputs have new names, but for the ends of the block, which keep theirs.

    A node of the original that lies between the ends is thus still compared with the original. If the whole block was
    replaced, the nodes that produce its ends may read new tensors only.
    """
    kept = [name for name in node.output if old.find(name) is not None]
    if not kept or not claim.heads:
        return set(kept) <= set(ends)
    return set(kept) <= set(ends) and all(old.find(name) is None for name in reads(node))


def _model_changes(models: Models) -> Iterator[str]:
    old, new = (model.proto for model in models)
    if old.ir_version != new.ir_version:
        yield f"the IR version is {new.ir_version}, but {old.ir_version} in the original"
    versions = opsets(new.opset_import)
    for domain, version in opsets(old.opset_import).items():
        if versions.get(domain) != version:
            which = name_of(domain or "ai.onnx")
            yield f"the opset of {which} is {versions.get(domain, 'missing')}, but {version} in the original"


def _functions(model: LoadedModel) -> Functions:
    return {operator_key(function): function for function in model.proto.functions}


def _function_changes(models: Models, functions: tuple[Functions, Functions]) -> Iterator[str]:
    """Functions that are missing or have other attributes or opsets; their bodies are compared like graphs."""
    old, new = functions
    nodes = (*models[1].proto.graph.node, *(node for function in new.values() for node in function.node))
    called = {operator_key(node) for node in iter_nodes(nodes)}
    # A function that is no longer called may be dropped; one that only the rewritten model has is left to
    # `scope_changes`, which lets only explained nodes call it.
    for key, before in old.items():
        after = new.get(key)
        if after is None:
            if key in called:
                yield f"function {name_of(key[1])} is missing"
        elif (
            sorted(before.attribute) != sorted(after.attribute)
            or not same_attributes(before.attribute_proto, after.attribute_proto, models)
            or opsets(before.opset_import) != opsets(after.opset_import)
        ):
            yield f"function {name_of(key[1])} does not have the attributes and opsets of the original's"


def _function_bodies(models: Models, functions: tuple[Functions, Functions]) -> Iterator[Pair]:
    for key, function in functions[0].items():
        if key in functions[1]:
            yield Pair(Scope.of_function(models[0], function), Scope.of_function(models[1], functions[1][key]))
