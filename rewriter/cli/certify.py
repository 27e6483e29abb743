"""`rewrite certify ORIGINAL REWRITTEN`: a proof for every input, or the reason why not; `rewriter.certify` does it."""

from __future__ import annotations

from pathlib import Path

import click

from rewriter.cli.options import check_report, command, file_option, links_option, report_option, write_report
from rewriter.cli.streams import STANDARD


@command(
    {4: "a model is unreadable, malformed or unsafe"},
    ok="certified (with --check: the certificate holds)",
    failed="refused (with --check: the certificate does not hold)",
    usage="FILE is no certificate",
)
@click.argument("original", type=click.Path(path_type=Path))
@click.argument("rewritten", type=click.Path(path_type=Path))
@file_option(
    "--check",
    metavar="FILE.json",
    help="Compute the certificate afresh, and compare it with the one in this file.",
)
@links_option
@report_option("the certificate", "-o")
def certify(
    original: Path,
    rewritten: Path,
    *,
    check: Path | None,
    allow_links: bool,
    report: Path | None,
) -> int:
    """Prove that REWRITTEN computes what ORIGINAL does, at every input of every size, over the reals.

    Nothing is run and nothing is sampled. Activations that are computed otherwise are bounded for all real numbers;
    everything else must be the same operators on the same weights. Any two models can be judged, whoever made them.
    """
    check_report(report, (original, rewritten, check))
    from rewriter import certify as prove
    from rewriter.report.certification import read_certificate
    from rewriter.report.terminal.comparison import show_certification, show_check
    from rewriter.report.terminal.console import Console

    stated = None if check is None else read_certificate(check)
    console = Console(error=report == STANDARD)
    found = prove(original, rewritten, allow_links=allow_links)
    write_report(report, found.to_json)
    if stated is None:
        show_certification(console, found)
        return int(found.exit_status)
    return int(show_check(console, found, stated))
