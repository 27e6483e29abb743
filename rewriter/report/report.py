"""Results as data and as JSON: of a rewriting, and about given models (comparisons, certificates).

The schemas beside this file are the contract of the JSON, versioned by `VERSION`. They are generated from the
dataclasses, docstrings and comments included: `python -m tools.schemas`.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

import numpy as np
import onnx

from rewriter.compare import GraphDifference
from rewriter.errors import ExitStatus, NothingToConvertError, UsageError, ValidationError
from rewriter.files.atomic import write_text
from rewriter.files.save import sha256_of
from rewriter.proof.records import Certificate
from rewriter.proof.validate import Validation
from rewriter.text import counted, one_line, quoted

VERSION = 1  # of the JSON: raised if a field changes its meaning or goes
_SHOWN_PROBLEMS = 3
_MAX_BYTES, _MAX_SHOWN = 2**28, 80  # of a certificate; characters of a value of it that is shown
_Part = TypeVar("_Part")


class Result(ABC):
    """A result with the exit status that the command line would have; true if all is well."""

    also: ClassVar[tuple[str, ...]] = ()  # properties that the JSON has beside the fields

    @property
    def exit_status(self) -> ExitStatus:
        return ExitStatus(bool(self.problems))

    @property
    @abstractmethod
    def summary(self) -> str:
        """The result in one line, beginning with the verdict."""

    @property
    def problems(self) -> Sequence[str]:
        """The failures in words."""
        return ()

    def __bool__(self) -> bool:
        return not self.exit_status

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: numbers as numbers, infinite or missing ones as null."""
        return {"version": VERSION, **plain_data(self)}

    def write(self, path: Path) -> None:
        """Write the JSON, atomically."""
        write_text(path, json_text(self.to_json()))

    def raise_for_status(self) -> Self:
        """The result itself if all is well; otherwise raise ValidationError or NothingToConvertError."""
        if self:
            return self
        more = [f"and {len(self.problems) - _SHOWN_PROBLEMS} more"] * (len(self.problems) > _SHOWN_PROBLEMS)
        kind = NothingToConvertError if self.exit_status is ExitStatus.NOTHING_TO_CONVERT else ValidationError
        raise kind("; ".join([self.summary, *self.problems[:_SHOWN_PROBLEMS], *more]))

    def _required(self, part: _Part | None, what: str) -> _Part:
        """A part that only some results have. Raises as `raise_for_status`, or UsageError."""
        if part is None:
            self.raise_for_status()
            raise UsageError(f"there is no {what} in this result: {self.summary}")
        return part

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary}>"


@dataclass(frozen=True)
class BlockRow:
    """One candidate block."""

    name: str  # unique in the model; the module path where the exporter recorded it
    status: Literal["converted", "left"]  # converted to attention heads, or left unchanged
    activation: str = ""  # what the block's activation was recognised as; empty when unknown
    first: str = ""  # linear operators that produce the pre-activation, as OPERATOR INxOUT
    second: str = ""  # linear operators that read the activation's output
    program: str | None = None  # name of the head program
    exact: bool | None = None  # whether the program equals the activation in exact arithmetic
    # attention heads in the block, or in each of its experts; None where the weights' shapes do not say
    heads: int | None = None
    bias_tokens: int | None = None  # number of bias tokens that a head attends to
    experts: int | None = None  # number of experts, each with so many heads; None for a block without experts
    type: str = ""  # element type of the block, such as float32
    # the claimed error of the program over max(1, |f|), in exact arithmetic with coefficients rounded to the type in
    # which the heads compute; the certificate of `validation` proves it
    max_error: float | None = None
    # whether `max_error` was measured on a dense grid instead, as for programs fitted to this model
    measured: bool | None = None
    domain: float | None = None  # largest |pre-activation| for which that holds; None if unlimited
    reason: str | None = None  # why it was left
    node: str | None = None  # the node to which the reason refers
    # the block that this one is a part of, such as the clip of the value of its gate; otherwise empty
    part_of: str = ""


@dataclass(frozen=True)
class Shape:
    """The size of a model."""

    operators: Mapping[str, int]  # number of nodes by operator, in the main graph and in bodies of control flow
    nodes: int  # nodes in the main graph and in bodies of control flow
    bytes: int  # size on disk with external data; 0 for a model in memory that was not saved


@dataclass(frozen=True, repr=False)
class Report(Result):
    """The result of `rewrite`: true if the model was converted, and proved unless the proof was not asked for.

    `validation`, `after` and `rewritten` are there if it is true and no dry run, `validation` only if it was proved;
    otherwise reading them raises. `proof`, `made` and `in_memory` hold the same, or None.
    """

    model: str  # the model's path, or `<memory>`
    output: str  # path of the file written; empty if none was
    form: str  # the form in which heads became nodes
    blocks: tuple[BlockRow, ...]  # all candidates, the converted first
    before: Shape  # size of the original
    # size of the rewritten model; None if none was made
    made: Shape | None = field(default=None, metadata={"json": "after"})
    # the proof; None if it was not asked for or nothing was converted
    proof: Validation | None = field(default=None, metadata={"json": "validation"})
    seconds: Mapping[str, float] = field(default_factory=dict)  # time by step: load, plan, apply, save, validate, total
    notes: tuple[str, ...] = ()  # remarks on the model as a whole
    exit_status: ExitStatus = ExitStatus.CONVERTED  # the exit status of the command line
    # versions, processor, operating system and execution providers, without host names and paths
    environment: Mapping[str, str] = field(default_factory=dict)
    # the options of the rewriting, as keywords of `rewriter.rewrite`
    options: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # all files written: `output`, and files with its weights
    # the rewritten model where no output path was given; `rewritten` reads it from `output` otherwise
    in_memory: onnx.ModelProto | None = field(default=None, compare=False, metadata={"json": ""})

    @property
    def validation(self) -> Validation:
        return self._required(self.proof, "proof")

    @property
    def after(self) -> Shape:
        return self._required(self.made, "rewritten model")

    @cached_property
    def rewritten(self) -> onnx.ModelProto:
        """The rewritten model: of the kind that `rewrite` got; a ModelProto, read from the file once, for a path."""
        found = onnx.load(self.output) if self.output and self.in_memory is None else self.in_memory
        return self._required(found, "rewritten model")

    @property
    def converted(self) -> tuple[BlockRow, ...]:
        return tuple(row for row in self.blocks if row.status == "converted")

    @property
    def left(self) -> tuple[BlockRow, ...]:
        return tuple(row for row in self.blocks if row.status == "left")

    @property
    def what(self) -> str:
        heads = sum(row.heads or 0 for row in self.converted)
        read = "read as " if self.form == "local" else ""  # its graph holds neither queries nor patterns
        blocks = sum(not row.part_of for row in self.converted)
        return f"{counted(blocks, 'block')}, {read}{heads:,} attention heads"

    @property
    def problems(self) -> tuple[str, ...]:
        return () if self.proof is None else self.proof.problems

    @property
    def refuted(self) -> bool:
        """Whether there is a counterexample: the rewritten model does not compute what the original does."""
        return self.proof is not None and bool(self.proof.failures)

    @property
    def summary(self) -> str:
        if self.exit_status is ExitStatus.NOTHING_TO_CONVERT:
            why = f"{counted(len(self.left), 'candidate')} left" if self.left else "no candidate was found"
            return f"NOTHING TO CONVERT  in {self.model}: {why}"
        if self.exit_status is ExitStatus.VALIDATION_FAILED:
            return f"FAILED  {self.what}: {'refuted' if self.refuted else 'not proved'}, nothing was written"
        if self.made is None:
            return f"PLANNED  {self.what} in {self.model}; nothing was written"
        where = f"written to {self.output} in {self.seconds.get('total', 0.0):.1f} s" if self.output else "in memory"
        if self.proof is None:
            return f"NOT PROVED  {self.what}, {where}"
        how = f"certified {reach(self.proof.certificate)}"
        if not self.proof.providers:
            return f"CERTIFIED  {self.what}, {how}, not run; {where}"
        return f"PASSED  {self.what}, {how}, run on {', '.join(self.proof.providers)}; {where}"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data; without the functions of the regions, which may be long and are in the certificate."""
        made = super().to_json()
        for region in made["validation"]["certificate"]["regions"] if made["validation"] else ():
            region["functions"] = []
        return made


@dataclass(frozen=True, repr=False)
class FolderReport(Report):
    """The result of `rewrite` for a folder; it has the blocks of all models, and each model has its own proof."""

    models: Mapping[str, Report] = field(default_factory=dict)  # by file; only planned if a proof before it failed
    copied: tuple[str, ...] = ()  # the other files

    @classmethod
    def of(cls, folder: str, output: str, models: Mapping[str, Report], copied: tuple[str, ...] = ()) -> Self:
        """The reports of a folder's models, at least one, as one."""
        reports = list(models.values())
        operators = sum((Counter(each.before.operators) for each in reports), Counter[str]())
        blocks = tuple(block for each in reports for block in each.blocks)
        before = Shape(operators, operators.total(), sum(each.before.bytes for each in reports))
        seconds = {"total": sum(each.seconds["total"] for each in reports)}
        status = max((each.exit_status for each in reports if each.converted), default=ExitStatus.NOTHING_TO_CONVERT)
        about = reports[0].environment, reports[0].options
        made = (folder, output, reports[0].form, blocks, before, None, None, seconds, (), status, *about)
        return cls(*made, models=models, copied=copied)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(f"{name}: {problem}" for name, each in self.models.items() for problem in each.problems)

    @property
    def refuted(self) -> bool:
        return any(each.refuted for each in self.models.values())

    @property
    def what(self) -> str:
        return f"{counted(sum(bool(each.converted) for each in self.models.values()), 'model')}, {super().what}"

    @property
    def summary(self) -> str:
        if not self.output:
            return super().summary
        words = {each.summary.partition("  ")[0] for each in self.models.values() if each.converted}
        word = next(each for each in ("NOT PROVED", "CERTIFIED", "PASSED") if each in words)
        how = ", certified, not run" if word == "CERTIFIED" else ""
        return f"{word}  {self.what}{how}, written to {self.output}"

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "models": {name: each.to_json() for name, each in self.models.items()}}


def loud(verdict: str) -> str:
    """A verdict as the first words of a line: `CERTIFIED at the sizes tried`."""
    word, where, sizes = verdict.partition(" at ")
    return f"{word.upper()}{where}{sizes}"


def reach(certificate: Certificate) -> str:
    """The inputs for which a certificate holds, in words."""
    longest = min((each.tokens for each in certificate.regions if each.tokens), default=None)
    tokens = "" if longest is None else f" and up to {counted(longest, 'token')}"
    domain = "" if certificate.domain is None else f"for |pre-activation| <= {certificate.domain:g}{tokens}"
    if certificate.sizes:
        return f"{domain or 'for every input'} at {counted(len(certificate.sizes), 'size')}"
    return domain or ("for every input" if longest is None else f"for every input of up to {counted(longest, 'token')}")


def json_text(data: Mapping[str, Any]) -> str:
    """JSON text of `plain_data`; characters that could drive a terminal are escaped."""
    text = json.dumps(plain_data(data), indent=2, ensure_ascii=False, allow_nan=False)
    strange = {ord(char): json.dumps(char)[1:-1] for char in set(text) if not (char.isprintable() or char == "\n")}
    return text.translate(strange) + "\n"


def plain_data(value: Any) -> Any:
    """JSON-ready data: dataclasses as objects, with the properties they name; infinity and NaN as null."""
    if isinstance(value, (float, np.floating)):  # most values are numbers
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value):
        names = {each.metadata.get("json", each.name): each.name for each in fields(value)}
        names |= {name: name for name in getattr(value, "also", ())}
        return {key: plain_data(getattr(value, name)) for key, name in names.items() if key}
    if isinstance(value, Mapping):
        return {str(key): plain_data(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(entry) for entry in value]
    if isinstance(value, (np.bool_, np.integer, IntEnum)):
        return int(value) if isinstance(value, IntEnum) else value.item()
    return value


# -- results about given models ----------------------------------------------------------------------------------------


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

    @property
    def verdict(self) -> Verdict:
        """`different` only with a counterexample: a number at which an activation is further off than its limit."""
        return verdict_of(self.certificate)

    @property
    def problems(self) -> tuple[str, ...]:
        return (*(self.wrong or ()), *(refusal.text for refusal in self.certificate.refusals))

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
        """This certificate with what is wrong in one that was read, if any; times and paths are not compared."""
        if stated is None:
            return self
        return replace(self, wrong=tuple(_differences(json.loads(json_text(self.to_json())), stated, "")))


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
        fault = f"{quoted(path)} is not a certificate of version {VERSION}"
        raise UsageError(f"{fault}; pass what `rewrite certify -o` wrote")
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
        if self.proof.certified and self.proof.passed:
            return verdict_of(self.proof.certificate)
        return "agrees" if self.proof.providers else "not proved"

    @property
    def exit_status(self) -> ExitStatus:
        return ExitStatus.VALIDATION_FAILED if self.verdict in ("not proved", "different") else ExitStatus.CONVERTED

    @property
    def same(self) -> bool:
        return self.verdict.startswith("certified")

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.failures, *self.undecided)

    @property
    def summary(self) -> str:
        verdict, pair, proof = loud(self.verdict), f"{self.a} and {self.b}", self.proof
        if proof is None:
            return f"{verdict}  {pair} have different inputs or outputs; rename them with --map OLD=NEW"
        if self.failures:
            return f"{verdict}  {self.b} does not compute what {self.a} does"
        outputs = [each for run in proof.providers.values() for each in run.compared.values()]
        nothing = sum(each.startswith("nothing could be compared") for each in self.undecided)
        if nothing or (proof.providers and not outputs):
            several = nothing < len({each.name for each in outputs})
            return f"{verdict}  {pair}: {'not every output' if several else 'nothing'} could be compared"
        ratio = "" if math.isnan(self.error_ratio) else f", error ratio {self.error_ratio:.2f}"
        where = ", ".join(proof.providers)
        if self.same:
            holds = reach(proof.certificate)
            return f"{verdict}  {self.b} computes what {self.a} does {holds}{where and f', and on {where}'}{ratio}"
        if not where:
            return f"{verdict}  {pair}: neither proved nor refuted, and not run"
        inputs = counted(len(proof.cases), "input")
        largest = f"largest difference {max(each.max_abs for each in outputs):.2g}"
        return f"{verdict}  {self.b} agrees with {self.a} on {inputs} on {where}, {largest}{ratio}; not proved"

    @property
    def error_ratio(self) -> float:
        """The largest error of B over that of A, both against float64; NaN without such an evaluation."""
        return math.nan if self.proof is None else self.proof.error_ratio
