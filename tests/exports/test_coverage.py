"""A sample of the coverage matrix: every block that exists is found, none wrongly; needs PyTorch.

`python -m models coverage` is the whole matrix.
"""

import re
from pathlib import Path

import pytest

from models.cells import Job, jobs
from models.coverage import UNMENTIONED, run_job

ROOT = Path(__file__).resolve().parents[2]

OLD = ("opset-7", "opset-9", "opset-11")
JOBS = (
    *jobs(quick=True),
    Job("modernbert", "torchscript", 17, "fp32", "exports", ("onnxslim",)),
    Job("opt", "torchscript", 13, "bf16", "types"),
    Job("gpt2", "torchscript", 17, "fp16", "types"),
    Job("llama", "torchscript", 13, "fp32", "exporter opsets", ("int4-nbits", "mixed")),
    Job("albert", "torchscript", 20, "fp32", "exporter opsets"),
    Job("gpt2-silu", "torchscript", 9, "fp32", "exporter opsets", ("inputs",)),
    Job("t5", "torchscript", 13, "fp32", "exporter opsets", OLD),
    Job("convnext", "torchscript", 17, "fp32", "exports", ("ort-all", "loop")),
    Job("segformer", "torchscript", 17, "fp32", "exports"),
    Job("moe-dense", "torchscript", 17, "fp32", "exports"),
    Job("gpt2-cache", "torchscript", 17, "fp32", "exports", ("if-own",)),
    Job("dinov2-swiglu", "dynamo", 18, "fp32", "exports", ("int8-weights",)),
    Job("conformer-optimum", "torchscript", 17, "fp32", "exports"),
    Job("vit-optimum", "torchscript", 17, "fp32", "exports"),
    Job("whisper-cache", "torchscript", 17, "fp32", "exports"),
    Job("llama-static", "torchscript", 17, "fp32", "exports"),
    Job("t5-merged", "file", 0, "fp32", "merged", ("ort-extended",)),
    Job("onnxscript-bart-encoder", "file", 0, "fp32", "onnxscript"),
    Job("onnxscript-whisper-encoder", "file", 0, "fp32", "onnxscript"),
)


def each_job(job: Job) -> str:
    return f"{job.entry}-{job.exporter}-{job.opset}-{job.dtype}"


@pytest.mark.parametrize("job", JOBS, ids=each_job)
def test_every_block_is_found_and_none_wrongly(job: Job) -> None:
    outcomes = run_job(job)
    assert not outcomes[0].refused
    for outcome in outcomes:
        assert outcome.missed == (), outcome
        assert outcome.complete, outcome
        assert outcome.certified is not False, outcome
        assert outcome.refused or outcome.proved or job.dtype == "bf16" or not outcome.exist, outcome
        assert outcome.found <= outcome.attention, outcome
        assert UNMENTIONED not in outcome.lost, outcome


def test_the_committed_page_is_that_of_the_tables() -> None:
    """Totals of the page against the tables beside it: blocks converted, blocks that exist, and files refused."""
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    marked = page.split("<!-- made by python -m models coverage -->\n")[1].split("<!-- end -->")[0]
    text = (ROOT / "docs" / "tables" / "coverage.txt").read_text(encoding="utf-8")
    counts = re.findall(r"\*\*(\d+)/(\d+)(?:, heads \d+/\d+)?\*\*", text)
    refused = sum(int(number) for number in re.findall(r", (\d+) files?: ", text))
    cells = next(line for line in marked.splitlines() if "total" in line).replace("*", "").split(" | ")
    assert [int(cells[2]), int(cells[3]), int(cells[-1].strip(" |"))] == [
        sum(int(exist) for _, exist in counts),
        sum(int(converted) for converted, _ in counts),
        refused,
    ]
