"""The proof of two models, in two ways that judge each other.

- *For every size* (`rewriter.proof.certificate`): node for node the same, outside of regions whose functions are
  bounded.
- *By value* (`rewriter.proof.values`): the same values in finite fields, at several sizes, whatever the nodes.

The first, and nothing against it from the second, is a certificate for every input. The second alone is one for the
inputs of the sizes that were tried. Where one says that models are the same and the other that they are not, this tool
is wrong, and nothing is proved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rewriter.errors import UsageError
from rewriter.files.load import LoadedModel
from rewriter.graph.view import Place
from rewriter.proof.certificate.certify import UNCLAIMED, Certificate, Claimed, Refusal, certify
from rewriter.proof.claims import Claim
from rewriter.proof.values.compare import Equality, compare

LARGEST = 2**31
"""Bytes of models that are evaluated: a field takes sixteen bytes for every weight in use."""

_DISAGREE = (
    "two proofs disagree: node for node the models are {}, by value {}; this is a bug of this tool, please report it"
)


def prove(
    original: LoadedModel,
    rewritten: LoadedModel,
    *,
    claims: Mapping[Place, Claimed] | None = None,
    blocks: Sequence[Claim] = (),
    limit: float = UNCLAIMED,
    names: Mapping[str, str] | None = None,
    dims: Mapping[str, int] | None = None,
) -> Certificate:
    """Prove that `rewritten` computes the outputs of `original`, or say where it does not.

    Args:
        original: the model that is the specification.
        rewritten: the model to be judged; it may have further outputs.
        claims: by graph and tensor of the original, what its replacement is held to.
        blocks: what was replaced. Each must have been, by heads.
        limit: the limit of all other activations.
        names: inputs and outputs of the original that the rewritten model calls otherwise.
        dims: sizes of symbolic dimensions, where they are not free.
    """
    found = certify(original, rewritten, claims=claims, blocks=blocks, limit=limit)
    if max(original.size, rewritten.size) > LARGEST:
        return replace(found, undecided=f"larger than {LARGEST // 10**9} GB")
    try:
        values = compare(original, rewritten, claims=claims or {}, limit=limit, names=names, dims=dims)
    except UsageError as error:  # no inputs can be generated; the run says so too
        values = Equality(reason=str(error))
    return _together(found, values)


def _together(found: Certificate, values: Equality) -> Certificate:
    """The certificate of both proofs."""
    seconds = found.seconds + values.seconds
    if found.certified and values.departure is not None:
        text = _DISAGREE.format("the same", f"they part: {values.reason}")
        return replace(found, certified=False, refusals=(Refusal("", "", "", text),), seconds=seconds)
    if found.certified:
        return replace(found, undecided=values.reason, seconds=seconds)
    if not values.same:
        by_value = Refusal("", "", "", f"by value: {values.reason}")
        return replace(found, refusals=(*found.refusals, by_value), departure=values.departure, seconds=seconds)
    if found.refuted:
        text = _DISAGREE.format(f"refuted ({found.refusals[0].text})", "the same")
        return replace(found, refusals=(Refusal("", "", "", text),), seconds=seconds)
    unmet = tuple(each for each in found.refusals if each.unmet)
    return Certificate(
        certified=not unmet,
        regions=values.regions,
        refusals=unmet,
        seconds=seconds,
        sizes=values.sizes,
        bits=values.bits,
        rounded=values.rounded,
        folded=values.folded,
    )
