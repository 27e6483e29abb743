"""The results of `rewrite certify`, as data and as JSON; the schemas are beside this file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from rewriter.errors import ExitStatus, ModelError, UsageError
from rewriter.proof.records import Certificate
from rewriter.report.report import VERSION, Result, json_text, loud, reach
from rewriter.text import counted, one_line, quoted

_MAX_BYTES, _MAX_SHOWN = 2**28, 80  # of a certificate; characters of a value of it that is shown


@dataclass(frozen=True)
class FileDigest:
    """One of the two models.

    Attributes:
        path: as given.
        sha256: of the model file.
        files: the data files that it refers to, by location.
    """

    path: str
    sha256: str
    files: Mapping[str, Path] = field(default_factory=dict, metadata={"json": ""})
    also: ClassVar = ("data",)

    @property
    def data(self) -> Mapping[str, str]:
        """The sha256 of its data files, by location: computed when a certificate is written or checked."""
        return {name: sha256_of(path) for name, path in self.files.items()}


def sha256_of(path: Path) -> str:
    """The digest of a file. Raises ModelError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{quoted(path)} cannot be read: {error.strerror}; check the disk") from error


Verdict = Literal["certified", "certified at the sizes tried", "not proved", "different"]


def verdict_of(certificate: Certificate) -> Verdict:
    """`different` only with a counterexample: a number at which an activation is further off than its limit."""
    if certificate.certified:
        return "certified at the sizes tried" if certificate.sizes else "certified"
    return "different" if certificate.refuted else "not proved"


@dataclass(frozen=True, repr=False)
class Certification(Result):
    """What was proved about two models.

    Attributes:
        original: the specification.
        rewritten: the model that was judged.
        certificate: the proof.
        wrong: how a certificate that was read differs from this one; None if none was.
    """

    original: FileDigest
    rewritten: FileDigest
    certificate: Certificate
    wrong: tuple[str, ...] | None = field(default=None, metadata={"json": ""})
    also = ("verdict",)

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if certified, and a certificate that was read holds; otherwise 1."""
        return ExitStatus(bool(self.problems))

    @property
    def verdict(self) -> Verdict:
        """`different` only with a counterexample: a number at which an activation is further off than its limit."""
        return verdict_of(self.certificate)

    @property
    def problems(self) -> tuple[str, ...]:
        reasons = tuple(refusal.text for refusal in self.certificate.refusals)
        return (*(self.wrong or ()), *(() if self.certificate.certified else reasons or ("not certified",)))

    @property
    def summary(self) -> str:
        pair, where = f"{self.rewritten.path} against {self.original.path}", reach(self.certificate)
        if self.wrong is not None:
            return f"DOES NOT HOLD  the certificate of {pair}" if self.problems else f"HOLDS  {pair}, {where}"
        if not self.certificate.certified:
            return f"{loud(self.verdict)}  {pair}"
        count, worst = counted(len(self.certificate.regions), "activation"), self.certificate.worst
        within = f"{count} replaced, each within {worst:.2g} max(1, |f|)" if worst else "all values are the same"
        return f"{loud(self.verdict)}  {pair}, {where}: {within}"

    def checked(self, stated: Any) -> Self:
        """Whether a certificate that was read holds, this one being computed from the files; times and paths differ."""
        ours: dict[str, Any] = json.loads(json_text(self.to_json()))
        return replace(self, wrong=tuple(_differences(ours, stated, "")))


@dataclass(frozen=True)
class Level:
    """What onnxruntime makes of a model at one level of optimisation.

    Attributes:
        level: basic, extended or all.
        nodes: their number in the file that it writes.
        certificate: what was proved about that file.
        guilty: optimisers without any one of which it is certified; empty where it is, or none alone is at fault.
    """

    level: str
    nodes: int
    certificate: Certificate
    guilty: tuple[str, ...]
    also: ClassVar = ("verdict",)

    @property
    def verdict(self) -> Verdict:
        """As of two models."""
        return verdict_of(self.certificate)


@dataclass(frozen=True, repr=False)
class RuntimeCertification(Result):
    """What was proved about the files that onnxruntime makes of a model.

    Attributes:
        model: the specification.
        onnxruntime: its version.
        nodes: their number in the model.
        levels: by level of optimisation.
    """

    model: FileDigest
    onnxruntime: str
    nodes: int
    levels: tuple[Level, ...]

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if all levels are certified; otherwise 1."""
        return ExitStatus(bool(self.problems))

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(
            f"level {each.level} is {each.verdict}"
            + ("; certified without " if each.guilty else "; no optimiser alone is at fault")
            + ", or without ".join(each.guilty)
            for each in self.levels
            if not each.certificate.certified
        )

    @property
    def summary(self) -> str:
        verdicts = [each.verdict for each in self.levels]
        worst = max(verdicts, key=get_args(Verdict).index)
        levels = ", ".join(each.level for each in self.levels if each.verdict == worst)
        what = f"what onnxruntime {self.onnxruntime} makes of {self.model.path}"
        return f"{loud(worst)}  {what}{'' if len({*verdicts}) == 1 else f' at {levels}'}"


def _differences(ours: Any, stated: Any, name: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(stated, dict):
        for key in sorted({*ours, *stated} - {"path", "seconds"}):
            yield from _differences(ours.get(key), stated.get(key), f"{name}.{key}".removeprefix("."))
    elif isinstance(ours, list) and isinstance(stated, list) and len(ours) == len(stated):
        for place, pair in enumerate(zip(ours, stated, strict=True)):
            yield from _differences(*pair, f"{name}[{place}]")
    elif ours != stated:
        told = (one_line(json.dumps(each), _MAX_SHOWN) for each in (stated, ours))
        yield "{}: it states {}, and the files give {}".format(one_line(name), *told)


def read_certificate(path: Path) -> Any:
    """Read what `Certification.write` wrote. Raises UsageError for any other file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{quoted(path)} is too large for a certificate; pass what `rewrite certify -o` wrote")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{quoted(path)} cannot be read: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{quoted(path)} is not JSON; pass what `rewrite certify -o` wrote") from error
    if not isinstance(content, dict) or content.get("version") != VERSION or "certificate" not in content:
        raise UsageError(
            f"{quoted(path)} is not a certificate of version {VERSION}; pass what `rewrite certify -o` wrote"
        )
    return content
