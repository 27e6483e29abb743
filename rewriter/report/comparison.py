"""What was found about given models, comparisons and certificates, as data and as JSON; the schemas lie beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isnan, nan
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from rewriter.compare import GraphDifference
from rewriter.errors import ExitStatus, UsageError
from rewriter.files.save import sha256_of
from rewriter.proof.records import Certificate
from rewriter.proof.validate import Validation
from rewriter.report.report import VERSION, Result, by_problems, json_text, loud, reach
from rewriter.text import counted, one_line, quoted

_MAX_BYTES, _MAX_SHOWN = 2**28, 80  # of a certificate; characters of a value of it that is shown


@dataclass(frozen=True)
class FileDigest:
    """One of the two models."""

    path: str  # as given
    sha256: str  # of the model file
    # the data files that it refers to, by location
    files: Mapping[str, Path] = field(default_factory=dict, metadata={"json": ""})
    also: ClassVar = ("data",)

    @property
    def data(self) -> Mapping[str, str]:
        """The sha256 of its data files, by location: computed when a certificate is written or checked."""
        return {name: sha256_of(path) for name, path in self.files.items()}


Verdict = Literal["certified", "certified at the sizes tried", "not proved", "different"]
Judged = Literal[Verdict, "agrees"]


def verdict_of(certificate: Certificate) -> Verdict:
    """The verdict that a certificate allows."""
    if certificate.certified:
        return "certified at the sizes tried" if certificate.sizes else "certified"
    return "different" if certificate.refuted else "not proved"


@dataclass(frozen=True, repr=False)
class Certification(Result):
    """What was proved about two models."""

    original: FileDigest  # the specification
    rewritten: FileDigest  # the model that was judged
    certificate: Certificate  # the proof
    # how a certificate that was read differs from this one; None if none was
    wrong: tuple[str, ...] | None = field(default=None, metadata={"json": ""})
    also = ("verdict",)

    exit_status = by_problems

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
        """This certificate with what is wrong in one that was read, `stated`; times and paths are not compared."""
        ours: dict[str, Any] = json.loads(json_text(self.to_json()))
        return replace(self, wrong=tuple(_differences(ours, stated, "")))


@dataclass(frozen=True)
class Level:
    """What onnxruntime makes of a model at one level of optimisation."""

    level: str  # basic, extended or all
    nodes: int  # their number in the file that it writes
    certificate: Certificate  # what was proved about that file
    # optimisers without any one of which it is certified; empty where it is, or none alone is at fault
    guilty: tuple[str, ...]
    also: ClassVar = ("verdict",)

    @property
    def verdict(self) -> Verdict:
        """As of two models."""
        return verdict_of(self.certificate)


@dataclass(frozen=True, repr=False)
class RuntimeCertification(Result):
    """What was proved about the files that onnxruntime makes of a model."""

    model: FileDigest  # the specification
    onnxruntime: str  # its version
    nodes: int  # their number in the model
    levels: tuple[Level, ...]  # by level of optimisation

    exit_status = by_problems

    @property
    def problems(self) -> tuple[str, ...]:
        wrong = [each for each in self.levels if not each.certificate.certified]
        faults = (", or without ".join(each.guilty) for each in wrong)
        whose = (f"certified without {names}" if names else "no optimiser alone is at fault" for names in faults)
        return tuple(f"level {each.level} is {each.verdict}; {who}" for each, who in zip(wrong, whose, strict=True))

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


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """How B compares with A: true if it is certified or agrees.

    `graph` is there after `diff`, `validation` unless the signatures differ; otherwise reading them raises. `files` and
    `proof` hold the same, or None.
    """

    a: str  # path of A, the original
    b: str  # path of B
    # the differences in inputs and outputs; if there are any, nothing else was compared
    signature: tuple[str, ...] = ()
    # the differences between the files; None if they were not asked for
    files: GraphDifference | None = field(default=None, metadata={"json": "graph"})
    proof: Validation | None = field(default=None, metadata={"json": "validation"})  # the certificate and the runs
    # atol and rtol that took the place of the rule; then errors are in an output's units
    tolerance: tuple[float, float] | None = None
    undecided: tuple[str, ...] = ()  # outputs of which neither proof nor run shows anything
    notes: tuple[str, ...] = ()  # remarks
    seconds: Mapping[str, float] = field(default_factory=dict)  # time by step
    also = ("failures", "error_ratio", "verdict", "exit_status")

    @property
    def graph(self) -> GraphDifference:
        return self._required(self.files, "comparison of the files")

    @property
    def validation(self) -> Validation:
        return self._required(self.proof, "run")

    @property
    def failures(self) -> tuple[str, ...]:
        """What differs, each with a counterexample: an input that was run, or a number that refutes a region."""
        if self.proof is not None:
            return self.proof.failures
        return tuple(f"the signatures differ: {text}" for text in self.signature)

    @property
    def verdict(self) -> Judged:
        """One of four words.

        `certified`: proved for every size, and the run agrees; `certified at the sizes tried`: proved for these;
        `agrees`: not proved, but B agrees with A on the inputs that were run; `not proved`: nothing was run, or the run
        does not decide; `different`: there is a counterexample.
        """
        if self.proof is None or self.failures:
            return "different"
        if self.undecided:
            return "not proved"
        if self.proof.certificate is not None and self.proof.certified and self.proof.passed:
            return verdict_of(self.proof.certificate)
        return "agrees" if self.proof.providers else "not proved"

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if B is certified or agrees, otherwise 1."""
        return ExitStatus.VALIDATION_FAILED if self.verdict in ("not proved", "different") else ExitStatus.CONVERTED

    @property
    def same(self) -> bool:
        """Whether B is certified."""
        return self.verdict.startswith("certified")

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.failures, *self.undecided)

    @property
    def summary(self) -> str:
        return f"{loud(self.verdict)}  {self._finding}"

    @property
    def _finding(self) -> str:
        pair, proof = f"{self.a} and {self.b}", self.proof
        if proof is None:
            return f"{pair} have different inputs or outputs; rename them with --map OLD=NEW"
        if self.failures:
            return f"{self.b} does not compute what {self.a} does"
        outputs = [each for run in proof.providers.values() for each in run.compared.values()]
        nothing = sum(each.startswith("nothing could be compared") for each in self.undecided)
        if nothing or (proof.providers and not outputs):
            several = nothing < len({each.name for each in outputs})
            return f"{pair}: {'not every output' if several else 'nothing'} could be compared"
        ratio = "" if isnan(self.error_ratio) else f", error ratio {self.error_ratio:.2f}"
        where = ", ".join(proof.providers)
        if self.same:
            holds = "" if proof.certificate is None else f" {reach(proof.certificate)}"
            return f"{self.b} computes what {self.a} does{holds}{where and f', and on {where}'}{ratio}"
        if not where:
            return f"{pair}: neither proved nor refuted, and not run"
        inputs = counted(len(proof.cases), "input")
        largest = f"largest difference {max(each.max_abs for each in outputs):.2g}"
        return f"{self.b} agrees with {self.a} on {inputs} on {where}, {largest}{ratio}; not proved"

    @property
    def error_ratio(self) -> float:
        """The largest error of B over that of A, both against float64; NaN without such an evaluation."""
        return nan if self.proof is None else self.proof.error_ratio
