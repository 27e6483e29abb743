"""`certify`: prove that one model computes what another does, at every input of every size; nothing is run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from passes.record import UnreadableError, read_record
from rewriter.api.run import NARROWEST, name_of
from rewriter.errors import UsageError
from rewriter.files.load import LoadedModel, Source, load_model
from rewriter.graph.view import Place, all_views
from rewriter.proof.certificate.certify import UNCLAIMED, Certificate, Claimed
from rewriter.proof.certificate.certify import certify as prove
from rewriter.report.certification import Certification, FileDigest, sha256_of
from rewriter.text import quoted


def certify(
    original: Source,
    rewritten: Source,
    *,
    claims: Mapping[str, tuple[float, float | None]] | None = None,
    limit: float = UNCLAIMED,
    accuracy: float | None = None,
) -> Certification:
    """Prove that `rewritten` computes the outputs of `original` over the reals, for every input of every size.

    Every activation of `original` that `rewritten` computes differently is bounded for all real numbers; everything
    else must be the same operator on the same operands and weights. No input is run, and no statement in a file is
    trusted: the plan in a model of this tool only says which bound is to be proved.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: path of the model to be judged, or a model in memory.
        claims: output of an activation in `original` to (limit, domain): the largest |f_B - f_A| / max(1, |f_A|) for
            all |y| up to `domain`, or everywhere if that is None. Default: what the plan in `rewritten` claims.
        limit: the limit of all other activations.
        accuracy: the largest bound that a plan may claim, if that is more than the rounding of the block's type.

    Returns:
        The certificate; `exit_status` is 0 if it is one. Otherwise it is 1, with the reasons in `problems`, and
        `verdict` is `not proved`, or `different` with a counterexample.

    Raises:
        UsageError: the limit of a claim is negative, its domain empty, or the accuracy not between 0 and 1.
        ModelError: a model is unreadable, malformed or unsafe.
    """
    if not 0.0 <= limit < math.inf:
        raise UsageError(f"the limit is {limit:g}; it must be finite and at least 0")
    if accuracy is not None and not 0.0 < accuracy < 1.0:
        raise UsageError(f"the accuracy is {accuracy:g}; it must be between 0 and 1")
    models = [load_model(source, mapped=True) for source in (original, rewritten)]
    held = _planned(models[1], accuracy)
    if claims is not None:
        paths = [view.path for view in all_views(models[0].proto)]
        held = {(path, name): _claimed(name, *each) for name, each in claims.items() for path in paths}
    return certification_of(original, rewritten, prove(*models, claims=held, limit=limit), models)


def certification_of(
    original: Source, rewritten: Source, certificate: Certificate, models: Sequence[LoadedModel] = ()
) -> Certification:
    """A certificate of the judge, with digests of the files that it is about; it is not computed again."""
    a, b = models or [load_model(source, mapped=True) for source in (original, rewritten)]
    return Certification(_digest(original, a), _digest(rewritten, b), certificate)


def _claimed(name: str, limit: float, domain: float | None) -> Claimed:
    if not 0.0 <= limit < math.inf or (domain is not None and not 0.0 < domain < math.inf):
        raise UsageError(f"the claim about {quoted(name)} is not a limit of at least 0 and a domain above 0, or None")
    return Claimed(limit, domain)


def _planned(model: LoadedModel, accuracy: float | None) -> dict[Place, Claimed]:
    """The claims of the plan in a model; empty without a readable plan."""
    try:
        record = read_record(model.proto)
    except UnreadableError:
        return {}
    if record is None:
        return {}
    return {
        block.place: Claimed(
            block.bound,
            block.program.domain if NARROWEST <= block.program.domain < math.inf else None,
            tuple(name for name in (block.y, block.value) if name),
            accuracy or 0.0,
        )
        for block in record.blocks
    }


def _digest(source: Source, model: LoadedModel) -> FileDigest:
    if model.path is None:
        content = hashlib.sha256(model.proto.SerializeToString(deterministic=True)).hexdigest()
        return FileDigest(name_of(source), content)
    data = {ref.location: ref.path for ref in model.external}
    return FileDigest(name_of(source), sha256_of(model.path), data)
