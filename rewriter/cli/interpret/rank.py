"""`rewrite rank MODEL`: which heads work together, on what, and which do nothing; four functions do the work.

They are `rewriter.compositions`, `head_tokens`, `head_activity` and `idle_heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from rewriter.cli.declared import declared_options
from rewriter.cli.interpret.options import top_option
from rewriter.cli.options import MODEL, check_report, command, file_option, report_option, write_report
from rewriter.cli.streams import STANDARD
from rewriter.errors import ExitStatus, UsageError
from rewriter.proof.settings import Settings
from rewriter.text import counted, one_line

if TYPE_CHECKING:
    from rewriter.api.interpret.index import HeadIndex
    from rewriter.api.interpret.ranking.activity import Activity, Place
    from rewriter.api.interpret.ranking.composition import Compositions
    from rewriter.api.interpret.ranking.copies import IdleHeads
    from rewriter.api.interpret.ranking.tokens import HeadTokens

_WIDTH = 80
_NAME = 30


@command(
    MODEL,
    ok="heads were ranked",
    failed="onnxruntime does not run the model on these inputs",
    nothing="no heads were found",
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--tokens", is_flag=True, help="The tokens that heads read and write.")
@click.option("--idle", is_flag=True, help="Heads whose weights are zero, and heads that do the same.")
@declared_options(
    Settings,
    only=("inputs",),
    inputs={"metavar": "FILE.npz", "help": "The tokens of these inputs at which heads are most active; dead heads."},
)
@file_option("--tokenizer", metavar="FILE.json", help="Show tokens as text.")
@top_option
@report_option("the rankings of all heads")
def rank(
    model: Path,
    *,
    tokens: bool,
    idle: bool,
    inputs: Path | None,
    report: Path | None,
    tokenizer: Path | None,
    top: int,
) -> int:
    """Rank the heads of MODEL, original heads and neurons alike: which work together, on what, and which do nothing."""
    check_report(report, (model, inputs))
    from rewriter.api.interpret.index import heads

    index = heads(model)
    if not index.sublayers:
        click.echo("no heads were found", err=report == STANDARD)
        return int(ExitStatus.NOTHING_TO_CONVERT)
    asked = {"composition": not (tokens or idle or inputs), "tokens": tokens, "idle": idle}
    found = dict(_rankings(index, asked, inputs, tokenizer, top))
    write_report(report, lambda: {"model": str(model), **{name: each.to_json() for name, (each, _) in found.items()}})
    lines = [line for each, told in found.values() for line in ("", *told(each))]
    count = sum(each.sublayer.heads for each in index.sublayers)
    last = f"{counted(count, 'head')} in {counted(len(index.sublayers), 'sublayer')}"
    for line in (*lines[1:], last):
        click.echo(line, err=report == STANDARD)
    return 0


Told = Callable[[Any], Iterable[str]]


def _rankings(
    index: HeadIndex, asked: dict[str, bool], inputs: Path | None, tokenizer: Path | None, top: int
) -> Iterator[tuple[str, tuple[Any, Told]]]:
    """Name to (what was found, what prints it)."""
    from rewriter.api.interpret.ranking.activity import head_activity
    from rewriter.api.interpret.ranking.composition import compositions
    from rewriter.api.interpret.ranking.copies import idle_heads
    from rewriter.api.interpret.ranking.tokens import head_tokens

    if tokenizer is not None and not (asked["tokens"] or inputs):
        raise UsageError("--tokenizer is for --tokens and --inputs")
    if asked["composition"]:
        yield "composition", (compositions(index, top=top), lambda each: _composition(each, top))
    if asked["tokens"]:
        yield "tokens", (head_tokens(index, top=top, tokenizer=tokenizer), lambda each: _tokens(each, top))
    if inputs is not None:
        yield (
            "activity",
            (head_activity(index, inputs, top=top, tokenizer=tokenizer), lambda each: _activity(each, top)),
        )
    if asked["idle"]:
        yield "idle", (idle_heads(index), lambda each: _idle(each, top))


def _composition(found: Compositions, top: int) -> Iterator[str]:
    scales = "with the scales of normalisations" if found.folded else "without the scales of normalisations"
    yield f"composition, {scales}; unrelated weights: {found.baseline:.3f}"
    yield f"  {'':<3} {'reader':<{_NAME}} {'writer':<{_NAME}} {'score':>6}"
    for each in found.strongest(top):
        yield f"  {each.kind:<3} {_name(each.reader)} {_name(each.writer)} {each.score:6.4f}"


def _tokens(found: HeadTokens, top: int) -> Iterator[str]:
    yield "tokens, of the heads that tell few tokens from the others"
    for what, reason in found.missing.items():
        yield from wrap(f"  {what} nothing that can be shown: {one_line(reason, 200)}", _WIDTH)
    for row in found.selective(top):
        share = "" if row.share > 1.0 - 1e-6 else f", {row.share:.0%} of the squared weights"
        yield f"  {_name(row.head)} {_side(row.side)}{share}"
        for ends in (row.top, row.bottom):
            text = "  ".join(f"{one_line(found.told(token), 44)} {score:+.3g}" for token, score in ends)
            yield from wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _side(side: str) -> str:
    """`queries and values read`."""
    names = {"Q": "queries", "K": "keys", "V": "values"}
    return "writes" if side == "O" else f"{' and '.join(names[each] for each in side)} read"


def _activity(found: Activity, top: int) -> Iterator[str]:
    what = "activations" if found.by == "z" else "weights of tokens in their own pattern"
    yield f"{what} at {counted(found.tokens, 'token')}, of the heads with the highest peaks"
    for row in found.peaks(top):
        peak = (row.top[0].value - row.mean) / row.deviation
        yield f"  {_name(row.head)} mean {row.mean:+.3g}, peak {peak:.1f} deviations above"
        text = "  ".join(f"{_place(place, found)} {place.value:+.3g}" for place in row.top)
        yield from wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    if found.dead:
        yield f"dead on these inputs: {counted(len(found.dead), 'head')}"
    for row in found.dead[:top]:
        yield f"  {_name(row.head)} {row.dead}"
    if len(found.dead) > top:
        yield f"  and {len(found.dead) - top:,} more"


def _place(place: Place, found: Activity) -> str:
    case = f"{one_line(place.case, 20)}/" if place.case else ""
    token = "" if place.token is None else f"={one_line(found.told(place.token), 44)}"
    return f"{case}{place.sequence}:{place.position}{token}"


def _idle(found: IdleHeads, top: int) -> Iterator[str]:
    yield f"idle by their weights: {counted(len(found.idle), 'head')}"
    for each in found.idle[:top]:
        yield f"  {_name(each.head)} {each.reason}"
    if len(found.idle) > top:
        yield f"  and {len(found.idle) - top:,} more"
    yield f"duplicates, of similarity {found.similarity:g} and more: {counted(len(found.duplicates), 'pair')}"
    for pair in found.duplicates[:top]:
        yield f"  {_name(pair.first)} {_name(pair.second)} {pair.reads:+.4f}"
    if len(found.duplicates) > top:
        yield f"  and {len(found.duplicates) - top:,} more"


def _name(head: str) -> str:
    shown = one_line(head, 1000)
    return f"{shown if len(shown) <= _NAME else f'...{shown[3 - _NAME :]}':<{_NAME}}"
