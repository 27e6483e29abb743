"""The command `python -m benchmarks all`."""

import json
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.common import RESULTS, ROOT
from benchmarks.performance.check import compared, losses
from benchmarks.performance.measure import Setting, measured, stored
from benchmarks.performance.page import figure_of, text_of
from benchmarks.performance.subjects import SUBJECTS

COMMITTED = RESULTS / "performance.json"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--quick", is_flag=True, help="Two layers of each model, 128 tokens only.")
@click.option("--only", metavar="NAME", multiple=True, help="Only models of this name (repeatable).")
@click.option("--type", "types", type=click.Choice(("float32", "float16")), multiple=True, help="Only these types.")
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, help="Only these lengths.")
@click.option("--repeat", type=click.IntRange(min=3), default=Setting.repeat, help="Rounds per row.")
@click.option(
    "--threads", type=click.IntRange(min=0), default=Setting.threads, help="Threads per operator; 0: one per core."
)
@click.option("--page/--no-page", default=None, help="Write docs/performance.md. Default: unless --quick.")
@click.option("--check", is_flag=True, help="Write nothing; fail if a ratio is 30 % above the committed one.")
@click.option("--fresh", is_flag=True, help="Measure again what an earlier run has measured.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT,
    show_default=False,
    help="Where to write benchmarks/results, docs and docs/figures. Default: this checkout.",
)
def main(
    *,
    quick: bool,
    only: tuple[str, ...],
    types: tuple[str, ...],
    tokens: tuple[int, ...],
    repeat: int,
    threads: int,
    page: bool | None,
    check: bool,
    fresh: bool,
    out: Path,
) -> None:
    """Measure whole models, rewritten and original, and write docs/performance.md."""
    unknown = set(only) - {each.name for each in SUBJECTS}
    if unknown:
        known = ", ".join(each.name for each in SUBJECTS)
        raise click.UsageError(f"unknown model {', '.join(sorted(unknown))}; there are {known}")
    halves = tuple(name == "float16" for name in types) or (False, True)
    subjects = [each.quick() if quick else each for each in SUBJECTS if not only or each.name in only]
    subjects = [
        replace(
            each,
            tokens=tuple(length for length in each.tokens if not tokens or length in tokens),
            halves=tuple(half for half in each.halves if half in halves),
        )
        for each in subjects
    ]
    setting = Setting(repeat, threads)
    results = out / COMMITTED.relative_to(ROOT)
    if check:
        results = results.with_name("performance-check.json")
    rows = measured(
        subjects,
        setting,
        [] if fresh or check else stored(results, setting),
        results,
        lambda line: click.echo(line, err=True),
    )
    if check:
        _check(rows)
        return
    click.echo(f"{len(rows)} rows in {results}")
    if page is False or (page is None and quick):
        return
    figure = out / "docs" / "figures" / "performance.svg"
    figure.parent.mkdir(parents=True, exist_ok=True)
    figure.write_text(figure_of(rows), encoding="utf-8")
    page_text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    text = text_of(page_text, json.loads(results.read_text(encoding="utf-8")), rows, f"figures/{figure.name}")
    (out / "docs" / "performance.md").write_text(text, encoding="utf-8")
    click.echo("docs/performance.md and its figure are written")


def _check(rows: list[dict[str, object]]) -> None:
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))["rows"] if COMMITTED.exists() else []
    number = compared(committed, rows)
    if not number:
        raise click.ClickException("nothing to compare: the committed results have none of these rows")
    found = list(losses(committed, rows))
    for line in found:
        click.echo(line)
    if found:
        raise click.ClickException(f"{len(found)} of {number} ratios are more than 30 % above the committed ones")
    click.echo(f"{number} ratios are within 30 % of the committed ones")
