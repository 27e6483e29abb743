"""The outcomes of `models.coverage` as Markdown: totals in docs/trust.md, tables in docs/tables/coverage.txt.

The text is the same for the same outcomes: it contains neither times nor paths.
"""

import importlib.metadata
import platform
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from models.coverage import Outcome
from models.extra import extras
from models.registry import ENTRIES
from models.variants import VARIANTS
from rewriter.errors import UsageError

_MARKED = re.compile(r"(<!-- made by python -m models coverage -->\n).*?(<!-- end -->)", re.DOTALL)

PACKAGES = ("onnx", "onnxruntime", "torch", "transformers", "onnxscript", "onnxslim", "onnxsim", "onnxconverter-common")

GROUPS = {
    "exports": "Exports: architecture by exporter",
    "types": "Exports in half precision",
    "exporter opsets": "Exports at other opsets",
    "onnxruntime": "Optimised by onnxruntime",
    "simplifiers": "Simplified by onnxslim and onnxsim",
    "precision": "Converted to float16 and mixed precision",
    "quantised": "Quantised",
    "opsets": "Converted to other opsets",
    "storage": "Stored in another way",
    "scopes": "Inside If, Loop and model-local functions",
    "merged": "Decoders with and without past, merged as by optimum",
    "onnxscript": "Models that come with onnxscript",
    "mobius": "As mobius-onnx builds them, with its local functions",
}


def summary(outcomes: Sequence[Outcome], command: str) -> str:
    """The section of the page: totals by group, and what they were measured with."""
    made = [outcome for outcome in outcomes if not outcome.refused]
    architectures = {outcome.job.entry for outcome in made}
    measured = f"{len(made)} files of {len(architectures)} architectures; `{command}` with {_versions()}."
    wrapped = textwrap.wrap(measured, 120, break_on_hyphens=False, break_long_words=False)
    return "\n".join([*_summary(outcomes), "", *wrapped]) + "\n"


def tables(outcomes: Sequence[Outcome]) -> str:
    """The file beside the page: every group by architecture, the tools' refusals, and what is missed or wrong."""
    parts = [
        "Blocks converted, by architecture and kind of file. `2/2`: two of two; `2/2, heads 1/3`: and `heads` finds",
        "one of three attention layers; `-`: the tool could not produce the file (the reasons follow each table).",
    ]
    for group, title in GROUPS.items():
        chosen = [outcome for outcome in outcomes if outcome.group == group]
        if chosen:
            parts += ["", f"## {title}", "", *_table(chosen), *_reasons(chosen)]
    parts += ["", "## Not run", "", *_counted((each, each.unrun) for each in outcomes if each.unrun)]
    parts += ["", "## Attention layers that `heads` does not find", "", *_counted(_lost(outcomes))]
    parts += ["", "## Missed, wrong, failed or not certified", "", *_problems(outcomes)]
    return "\n".join(parts) + "\n"


def table_of_form(outcomes: Sequence[Outcome], form: str) -> str:
    """What `--form FORM` does with each architecture, by exporter and tool."""
    made = [outcome for outcome in outcomes if not outcome.refused]
    proved = [outcome for outcome in made if _state(outcome) == "proved"]
    architectures = {outcome.job.entry for outcome in made}, {outcome.job.entry for outcome in proved}
    entries = [entry.name for entry in ENTRIES if entry.name in architectures[0]]
    columns = list(dict.fromkeys((each.job.exporter, each.variant) for each in outcomes))
    columns.sort(key=lambda column: (bool(column[1]), column[1], column[0]))
    cells = {(each.job.entry, each.job.exporter, each.variant): _state(each) for each in outcomes}
    titles = [" ".join(filter(None, column)) for column in columns]
    rows = [_row(("architecture", *titles)), _row(("---", *("---" for _ in columns)))]
    rows += [_row((name, *(cells.get((name, *column), "") for column in columns))) for name in entries]
    reasons = ((each, reason) for each in made if each not in proved for reason in each.missed[:1])
    return "\n".join([
        f"Form {form}: {len(proved)} of {len(made)} files and {len(architectures[1])} of {len(architectures[0])} "
        "architectures are proved,",
        "certified and run. `refused`: nothing is converted; `-`: the tool cannot write the file; empty: not tried.",
        "", *rows, "", "## Reasons", "", *_counted(reasons),
    ]) + "\n"  # fmt: skip


def _state(outcome: Outcome) -> str:
    if outcome.refused:
        return "-"
    if not outcome.converted and outcome.proved is not False:
        return "refused"
    return "proved" if outcome.proved and outcome.certified else "**not proved**"


def write(page: Path, outcomes: Sequence[Outcome], command: str) -> None:
    """Put the totals between their marks in a page, and the tables into `tables/coverage.txt` beside it.

    Raises:
        UsageError: the page has no such marks.
    """
    text, count = _MARKED.subn(
        lambda found: f"{found[1]}{summary(outcomes, command)}{found[2]}", page.read_text(encoding="utf-8")
    )
    if count != 1:
        raise UsageError(f"{page} has no place for the totals; pass -o docs/trust.md")
    page.write_text(text, encoding="utf-8")
    (page.parent / "tables" / "coverage.txt").write_text(tables(outcomes), encoding="utf-8")


def totals(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Sums over outcomes, keyed by `COLUMNS`."""
    sums: Counter[str] = Counter()
    for outcome in outcomes:
        sums["refused"] += bool(outcome.refused)
        sums["files"] += not outcome.refused
        sums["exist"] += outcome.exist
        sums["converted"] += outcome.converted
        sums["missed"] += max(0, outcome.exist - outcome.converted)
        sums["wrong"] += outcome.wrong
        sums["certified"] += outcome.certified is True
        sums["not certified"] += outcome.certified is False
        sums["run"] += outcome.proved is True
        sums["failed"] += outcome.proved is False
        sums["not run"] += bool(outcome.unrun)
        sums["attention"] += outcome.attention
        sums["found"] += outcome.found
        sums["lost"] += max(0, outcome.attention - outcome.found)
    return sums


_NAMES = re.compile(r"(?<=\()[^()]*[/_][^()]*(?=\))|'[^']*'|(?<=named )\S+")
"""Names of nodes and tensors in the messages of tools; without them, equal reasons are listed once."""

COLUMNS = (
    "files", "exist", "converted", "missed", "wrong", "certified", "not certified", "run", "failed", "not run",
    "attention", "found", "lost", "refused",
)  # fmt: skip


def _summary(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [("group", *COLUMNS), ("---", *("---:" for _ in COLUMNS))]
    for group in GROUPS:
        chosen = [outcome for outcome in outcomes if outcome.group == group]
        if chosen:
            rows.append((group, *_numbers(chosen)))
    rows.append(("**total**", *(f"**{number}**" for number in _numbers(outcomes))))
    return [_row(row) for row in rows]


def _numbers(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    sums = totals(outcomes)
    return tuple(str(sums[column]) for column in COLUMNS)


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    """One row per architecture (and exporter, for variants), one column per kind of file."""
    variants = bool(outcomes[0].variant)
    order = [variant.name for variant in VARIANTS]
    columns = list(dict.fromkeys(_column(outcome) for outcome in outcomes))
    columns.sort(key=lambda column: (order.index(column) if column in order else -1, _natural(column)))
    names = [*(entry.name for entry in ENTRIES), *extras()]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: names.index(outcome.job.entry)):
        exporter: str = outcome.job.exporter if variants else ""
        rows.setdefault((outcome.job.entry, exporter), {})[_column(outcome)] = _cell(outcome)
    lines = [_row(("architecture", *columns)), _row(("---", *("---:" for _ in columns)))]
    for (name, exporter), cells in rows.items():
        title = f"{name} ({exporter})" if exporter else name
        lines.append(_row((title, *(cells.get(column, "") for column in columns))))
    sums = [totals(outcome for outcome in outcomes if _column(outcome) == column) for column in columns]
    lines.append(_row(("**total**", *(f"**{_count(each)}**" for each in sums))))
    return lines


def _natural(column: str) -> tuple[str, int, str]:
    exporter, _, rest = column.partition(" ")
    opset, _, dtype = rest.partition(" ")
    return (exporter, int(opset) if opset.isdigit() else 0, dtype)


def _column(outcome: Outcome) -> str:
    return outcome.variant or outcome.job.column


def _cell(outcome: Outcome) -> str:
    if outcome.refused:
        return "-"
    return _count(totals([outcome])) if outcome.complete else f"**{_counts(outcome)}**"


def _count(sums: Counter[str]) -> str:
    """Blocks converted, and attention layers where some are lost."""
    blocks = f"{sums['converted']}/{sums['exist']}"
    return blocks if sums["found"] == sums["attention"] else f"{blocks}, heads {sums['found']}/{sums['attention']}"


def _counts(outcome: Outcome) -> str:
    state = ", the plain command fails" if outcome.proved is False else ""
    return f"{_count(totals([outcome]))}, {outcome.wrong} wrong{state}"


def _counted(reasons: Iterable[tuple[Outcome, str]]) -> list[str]:
    """One line for each reason, with the number of files and the first of them."""
    files: dict[str, list[str]] = {}
    for outcome, reason in reasons:
        files.setdefault(_NAMES.sub("...", reason), []).append(_where(outcome))
    ordered = sorted(files.items(), key=lambda pair: -len(set(pair[1])))
    return [f"- {len(set(each))} files, first {each[0]}: {reason}" for reason, each in ordered] or ["None."]


def _lost(outcomes: Iterable[Outcome]) -> Iterator[tuple[Outcome, str]]:
    return ((outcome, reason) for outcome in outcomes for reason in outcome.lost)


def _reasons(outcomes: Sequence[Outcome]) -> list[str]:
    refusals = Counter(
        (_column(outcome), _NAMES.sub("...", outcome.refused)) for outcome in outcomes if outcome.refused
    )
    if not refusals:
        return []
    lines = [
        f"- {column}, {count} file{'s' if count > 1 else ''}: {reason}"
        for (column, reason), count in sorted(refusals.items())
    ]
    return ["", "Refused by the tool:", "", *lines]


def _problems(outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    for outcome in outcomes:
        if not outcome.complete or outcome.certified is False:
            state = ", not certified" if outcome.certified is False else ""
            lines.append(f"- {_where(outcome)}: {_counts(outcome)}{state}")
            lines += [f"  - {reason}" for reason in dict.fromkeys(outcome.missed)]
    return lines or ["None."]


def _where(outcome: Outcome) -> str:
    return ", ".join(filter(None, (outcome.job.entry, outcome.job.column, outcome.variant)))


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
