"""Render a report as one self-contained HTML file, deterministically.

Style and script are inline. A content security policy with their hashes forbids everything else, so the page
can neither load nor send anything, whatever names the model contains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewriter.report.html import numbers, sections, tables
from rewriter.report.html.rendering import filled, policy, resource, short
from rewriter.report.html.verdict import Verdict, verdict_of
from rewriter.report.report import Report
from rewriter.report.tables import account_table, converted_table, operator_table

_MOST_FAILURES = 200
_LONGEST_SENTENCE = 600


def write_page(report: Report, path: Path, *, verdict: Verdict | None = None) -> None:
    """Write the page to `path` atomically. Raises UsageError if jinja2 is missing or the path cannot be written."""
    from rewriter.files.atomic import write_text

    write_text(path, render(report, verdict=verdict))


def render(report: Report, *, verdict: Verdict | None = None) -> str:
    """Render the page of a report.

    Args:
        report: the report. Parts that it lacks (blocks, proof, details) get no section.
        verdict: the text at the top, unless it is the verdict on a rewriting.

    Raises:
        UsageError: jinja2 is missing.
    """
    return filled("page.html.j2", _context(report, verdict or verdict_of(report)), {"shown": tables.shown})


def _context(report: Report, verdict: Verdict) -> dict[str, Any]:
    """All variables of the template."""
    style, script = resource("style.css"), resource("script.js")
    return {
        "style": style,
        "script": script,
        "policy": policy(style, script),
        "verdict": verdict,
        "model": tables.name(report.model),
        "output": None if report.output is None else tables.name(report.output),
        "facts": sections.key_figures(report),
        "notes": [short(note, _LONGEST_SENTENCE) for note in report.notes],
        "times": tables.pair_table("Time by step", "step", "time", sections.times(report)),
        "environment": tables.pair_table("Made with", "what", "version", report.environment),
        **_blocks(report),
        **_proof(report),
        **_details(report),
        "operators": None if report.after is None else operator_table(report.before.operators, report.after.operators),
    }


def _blocks(report: Report) -> dict[str, Any]:
    proofs = () if report.validation is None else report.validation.blocks
    return {
        "converted": converted_table(report.converted, proofs) if report.converted else None,
        "left": tables.left_tables(report.left),
        "left_count": len(report.left),
    }


def _proof(report: Report) -> dict[str, Any]:
    validation = report.validation
    if validation is None:
        return {"proof": None, "failures": [], "more_failures": 0}
    return {
        "proof": {
            "outputs": tables.outputs(validation),
            "providers": tables.provider_table(validation),
            "cases": [short(case, _LONGEST_SENTENCE) for case in validation.cases],
            "skipped": [short(case, _LONGEST_SENTENCE) for case in validation.skipped],
            "reference": short(validation.reference, _LONGEST_SENTENCE),
            "fallen": sorted({short(node) for proof in validation.providers.values() for node in proof.cpu_nodes}),
        },
        "failures": [short(failure, _LONGEST_SENTENCE) for failure in validation.failures[:_MOST_FAILURES]],
        "more_failures": max(len(validation.failures) - _MOST_FAILURES, 0),
    }


def _details(report: Report) -> dict[str, Any]:
    details = report.details
    if details is None:
        return {"programs": [], "more_programs": 0, "account": None}
    programs = sections.program_sections(details.programs)
    account = {
        "table": account_table("Head accounting, block by block", details.counts),
        "share": numbers.percent(details.share),
        "remaining": short(details.remaining, _LONGEST_SENTENCE),
        "head_dimension": details.head_dimension,
        "attention_heads": details.attention_heads,
    }
    return {
        "programs": programs,
        "more_programs": len(details.programs) - len(programs),
        "account": account if details.counts else None,
    }
