"""The cells of the coverage matrix: which exports are made, and which variants of them."""

from dataclasses import dataclass, replace

from models.entry import DEFAULT_OPSETS, Dtype, Entry
from models.extra import GROUPS
from models.registry import ENTRIES
from models.variants import VARIANTS

TORCHSCRIPT_OPSETS = (9, 11, 13, 15, 18, 20)
DYNAMO_OPSETS = (20, 22)
OLDEST = {"timestep-embedder": (7, 8, 9), "moe-dense": (9,), "deit": (9,), "wav2vec2": (9,)}
"""Opsets below 13 at which TorchScript can still export an entry outside the sample."""

ON_ALL = ("onnxruntime", "simplifiers")
"""Groups of variants of every entry; the other groups have variants of `SAMPLE` only."""

SAMPLE = (
    "gpt2-silu",
    "opt",
    "llama",
    "phi3",
    "bert",
    "modernbert",
    "t5",
    "vit",
    "convnext",
    "wav2vec2-conformer",
    "moe-dense-gelu",
    "gpt2-cache",
)
"""Entries that cover every spelling of the table: Conv1D, Linear, parallel and packed blocks, each activation."""

DYNAMO_SAMPLE = ("gpt2-silu", "phi3", "bert")
QUICK = ("gpt2-silu", "bert", "llama")
OLD_OPSETS = ("opset-7", "opset-9", "opset-11")


@dataclass(frozen=True)
class Job:
    """One export, and its variants.

    Attributes:
        entry: name of the table entry, or of a file of `models.extra`.
        exporter: the exporter that writes it, or the column of that file.
        opset: its opset; 0 for those files.
        dtype: the type of its weights.
        group: the table that lists the export itself.
        variants: names of the variants.
    """

    entry: str
    exporter: str
    opset: int
    dtype: Dtype
    group: str
    variants: tuple[str, ...] = ()

    @property
    def column(self) -> str:
        """The column title of the export."""
        return f"{self.exporter} {self.opset} {self.dtype}" if self.opset else self.exporter

    @property
    def name(self) -> str:
        """The folder of its files."""
        return f"{self.entry}-{self.exporter}-{self.opset}-{self.dtype}"


def jobs(*, quick: bool) -> tuple[Job, ...]:
    """All jobs, or a sample of about thirty cells."""
    if quick:
        return tuple(_quick())
    found: list[Job] = []
    for entry in ENTRIES:
        if "tiny" not in entry.sizes:
            continue
        found += _of_torchscript(entry) if "torchscript" in entry.exporters else []
        found += _of_dynamo(entry) if "dynamo" in entry.exporters else []
    for group, listed in GROUPS.items():
        found += [Job(each.name, each.column, 0, "fp32", group, each.variants) for each in listed()]
    return tuple(found)


WHOLE_VARIANTS = ("ort-extended", "ort-transformers", "onnxslim", "int8-dynamic", "int4-nbits")
"""What form `whole` is tried on, beside exports; of `SAMPLE` only."""


def jobs_of_whole() -> tuple[Job, ...]:
    """The default export of every entry by both exporters, and what other tools make of some."""
    found = (job for job in jobs(quick=False) if job.group == "exports")
    variants = dict.fromkeys(SAMPLE, WHOLE_VARIANTS)
    return tuple(replace(job, variants=variants.get(job.entry, ())) for job in found)


def _of_torchscript(entry: Entry) -> list[Job]:
    sampled = entry.name in SAMPLE
    base = DEFAULT_OPSETS["torchscript"]
    found = [Job(entry.name, "torchscript", base, "fp32", "exports", _variants(sampled))]
    found += [Job(entry.name, "torchscript", base, dtype, "types") for dtype in _dtypes("fp16", "bf16")]
    for opset in TORCHSCRIPT_OPSETS if sampled else (*OLDEST.get(entry.name, ()), 13):
        variants = OLD_OPSETS if opset == TORCHSCRIPT_OPSETS[2] and sampled else ()
        found.append(Job(entry.name, "torchscript", opset, "fp32", "exporter opsets", variants))
    return found


def _of_dynamo(entry: Entry) -> list[Job]:
    base = DEFAULT_OPSETS["dynamo"]
    found = [Job(entry.name, "dynamo", base, "fp32", "exports", _variants(entry.name in SAMPLE))]
    if entry.name in DYNAMO_SAMPLE:
        found += [Job(entry.name, "dynamo", base, dtype, "types") for dtype in _dtypes("fp16", "bf16")]
        found += [
            Job(entry.name, "dynamo", opset, "fp32", "exporter opsets", ("int4-qdq",) if opset > 20 else ())
            for opset in DYNAMO_OPSETS
        ]
    return found


def _quick() -> list[Job]:
    chosen = ("ort-extended", "onnxslim", "fp16-keep-io", "int8-dynamic", "if-captured", "function-shared", "constants")
    found = [Job(name, "torchscript", 17, "fp32", "exports", chosen) for name in QUICK]
    found.append(Job("phi3", "torchscript", 17, "fp32", "exports", ("ort-all",)))
    found.append(Job("wav2vec2-conformer", "torchscript", 17, "fp16", "types"))
    found.append(Job("t5", "torchscript", 13, "fp32", "exporter opsets"))
    found.append(Job("bert", "dynamo", 18, "fp32", "exports", ("ort-transformers", "opset-23")))
    return found


def _variants(sampled: bool) -> tuple[str, ...]:
    """Names of the variants that a default export goes through; the oldest opsets start from opset 13."""
    return tuple(
        variant.name for variant in VARIANTS if (sampled or variant.group in ON_ALL) and variant.name not in OLD_OPSETS
    )


def _dtypes(*names: Dtype) -> tuple[Dtype, ...]:
    return names
