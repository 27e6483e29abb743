"""`certify`: prove that one model computes what another does, at every input of every size; nothing is run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from passes.record import UnreadableError, read_record
from rewriter.api.run import name_of, recorded_options
from rewriter.errors import ModelError, UsageError
from rewriter.files.load import LoadedModel, Source, load_model
from rewriter.proof.certificate.certify import UNCLAIMED, Certificate, Claimed
from rewriter.proof.certificate.certify import certify as prove
from rewriter.report.certification import Certification, FileDigest
from rewriter.text import quoted


def certify(
    original: Source,
    rewritten: Source,
    *,
    claims: Mapping[str, tuple[float, float | None]] | None = None,
    limit: float = UNCLAIMED,
) -> Certification:
    """Prove that `rewritten` computes the outputs of `original` over the reals, for every input of every size.

    Every activation of `original` that `rewritten` computes otherwise is bounded for all real numbers; everything else
    must be the same operator on the same operands and weights. No input is run, and nothing that a file says of itself
    is believed: the plan that a model of this tool carries only states which bound is to be proved.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: path of the model to be judged, or a model in memory.
        claims: output of an activation in `original` to (limit, domain): the largest |f_B - f_A| / max(1, |f_A|) for
            all |y| up to `domain`, or everywhere if that is None. Default: what the plan in `rewritten` claims.
        limit: the limit of all other activations.

    Returns:
        The certificate; `exit_status` is 0 if it is one. Otherwise it is 1, with the reasons in `problems`, and
        `verdict` is `not proved`, or `different` with a counterexample.

    Raises:
        UsageError: the limit of a claim is negative, or its domain empty.
        ModelError: a model is unreadable, malformed or unsafe.
    """
    if not 0.0 <= limit < math.inf:
        raise UsageError(f"the limit is {limit:g}; it must be finite and at least 0")
    models = [load_model(source, mapped=True) for source in (original, rewritten)]
    held = _planned(models[1]) if claims is None else {name: _claimed(name, *each) for name, each in claims.items()}
    return certification_of(original, rewritten, prove(*models, claims=held, limit=limit), models)


def certification_of(
    original: Source, rewritten: Source, certificate: Certificate, models: Sequence[LoadedModel] = ()
) -> Certification:
    """A certificate that the judge made, with digests of the files that it is about; it is not computed again."""
    a, b = models or [load_model(source, mapped=True) for source in (original, rewritten)]
    return Certification(_digest(original, a), _digest(rewritten, b), certificate)


def _claimed(name: str, limit: float, domain: float | None) -> Claimed:
    if not 0.0 <= limit < math.inf or (domain is not None and not 0.0 < domain < math.inf):
        raise UsageError(f"the claim about {quoted(name)} is not a limit of at least 0 and a domain above 0, or None")
    return Claimed(limit, domain)


def _planned(model: LoadedModel) -> dict[str, Claimed]:
    """What the plan in a model claims; nothing where it carries none that can be read."""
    try:
        record = read_record(model.proto)
    except UnreadableError:
        return {}
    if record is None:
        return {}
    accuracy = recorded_options(record).accuracy or 0.0
    return {
        block.output: Claimed(
            block.bound,
            block.program.domain if math.isfinite(block.program.domain) else None,
            tuple(name for name in (block.y, block.value) if name),
            accuracy,
        )
        for block in record.blocks
    }


def _digest(source: Source, model: LoadedModel) -> FileDigest:
    if model.path is None:
        content = hashlib.sha256(model.proto.SerializeToString(deterministic=True)).hexdigest()
        return FileDigest(name_of(source), content, {})
    data = {ref.location: ref.path for ref in model.external}
    return FileDigest(name_of(source), _sha256(model.path), {name: _sha256(path) for name, path in data.items()})


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{quoted(path)} cannot be read: {error.strerror}; check the disk") from error
