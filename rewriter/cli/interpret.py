"""`rewrite heads`, `run`, `attribute`, `graph` and `rank`: what heads are and what they compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rewriter.cli.options import (
    MODEL,
    check_new,
    check_page,
    check_report,
    command,
    declared_options,
    file_option,
    report_option,
    with_options,
    write_report,
)
from rewriter.cli.streams import STANDARD
from rewriter.errors import ExitStatus, UsageError
from rewriter.proof.inputs.given import Text
from rewriter.proof.settings import Settings
from rewriter.text import counted, one_line

if TYPE_CHECKING:
    from rewriter.interpret.activity import Activity, Place
    from rewriter.interpret.attribute import Attribution
    from rewriter.interpret.index import HeadIndex
    from rewriter.interpret.rank import Compositions, HeadTokens, IdleHeads


# -- options ----------------------------------------


Command = TypeVar("Command", bound=Callable[..., Any])


def logits(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int | None, int | None]:
    """The entry of a logit, and the one that is subtracted: N, or N-M."""
    entry, minus, other = (text or "").partition("-")
    if text is None:
        return None, None
    if not entry.isdecimal() or (minus and not other.isdecimal()):
        raise click.BadParameter(f"'{text}' is neither N nor N-M, such as 318 or 318-262")
    return int(entry), int(other) if minus else None


top_option = click.option(
    "--top", type=click.IntRange(1), metavar="K", default=10, show_default=True, help="Rows of each table."
)

_TEXT = (
    click.option("--text", metavar="TEXT", multiple=True, help="The input as text, instead of --inputs."),
    file_option(
        "--tokenizer",
        metavar="FILE",
        help="The tokenizer of --text: a tokenizer.json, or a folder with one. Needs the extra text.",
    ),
)

_LOGIT = (
    click.option(
        "--logit",
        "pair",
        metavar="N[-M]",
        required=True,
        callback=logits,
        help="Entry N of the output's last axis; N-M: its difference from entry M.",
    ),
    click.option("--position", type=int, metavar="N", default=-1, show_default=True, help="The token."),
)


def logit_options(command: Command) -> Command:
    """The options of commands that take a logit apart: the inputs, and which entry of which output."""
    return input_options("The inputs: one case.")(with_options(_LOGIT)(command))


def input_options(told: str, **instead: Any) -> Callable[[Command], Command]:
    """`--inputs`, `--text` and `--tokenizer`, which the command receives as `inputs`: a path or a `Text`.

    Args:
        told: the help of `--inputs`.
        **instead: further options of the proof, as for `declared_options`.
    """

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def called(*, inputs: Path | None, text: tuple[str, ...], tokenizer: Path | None, **options: Any) -> Any:
            return command(inputs=_given(inputs, text, tokenizer), **options)

        declared = declared_options(Settings, only=("inputs", *instead), inputs={"help": told}, **instead)
        made: Command = declared(with_options(_TEXT)(called))
        return made

    return decorated


def files_of(inputs: Path | Text) -> tuple[Path, ...]:
    """The files that inputs are read from, which no output may replace."""
    return (inputs,) if isinstance(inputs, Path) else (Path(inputs.tokenizer),)


def _given(inputs: Path | None, text: tuple[str, ...], tokenizer: Path | None) -> Path | Text:
    if (inputs is None) == (not text):
        raise UsageError("pass --inputs FILE.npz, or --text and --tokenizer" + (", not both" if text else ""))
    if bool(text) != (tokenizer is not None):
        raise UsageError("--text and --tokenizer belong together")
    return Text(text, tokenizer) if inputs is None else inputs


# -- heads ----------------------------------------


@command(
    MODEL,
    ok="heads were found",
    failed="with --html: the model cannot be run or evaluated on these inputs",
    usage="the output cannot be written",
    nothing="no heads were found",
)
@click.argument("model", type=click.Path(path_type=Path))
@file_option("-o", "--output", metavar="FILE", help="Write the tensors to FILE.safetensors or FILE.npz.")
@click.option("--fold-ln", is_flag=True, help="Fold the scale and bias of normalisations into the weights after them.")
@file_option(
    "--html",
    "page",
    metavar="FILE.html",
    help="Write a page with patterns, activations and tokens of heads on one sequence of --inputs.",
)
@declared_options(
    Settings, only=("inputs",), inputs={"metavar": "FILE.npz", "help": "With --html: the inputs, one case."}
)
@click.option("--logit", "pair", metavar="N[-M]", callback=logits, help="With --html: attribute entry N of the output.")
@file_option("--tokenizer", metavar="FILE.json", help="With --html: show tokens as text, by a tokenizer.json.")
@report_option("the list of heads")
def heads(
    model: Path,
    *,
    output: Path | None,
    fold_ln: bool,
    report: Path | None,
    page: Path | None,
    inputs: Path | None,
    pair: tuple[int | None, int | None],
    tokenizer: Path | None,
) -> int:
    """List every head of MODEL, original heads and the heads of its neurons; -o also writes their weights.

    MODEL is an original or a rewritten file. Names and shapes are those of TransformerLens. Whatever is not understood
    is listed with the node. A page (--html) shows heads on one sequence, and with --logit what they add to a logit.
    """
    from rewriter.files.save import check_output
    from rewriter.interpret.arrays import check_suffix
    from rewriter.interpret.index import heads as index
    from rewriter.interpret.page import head_pictures
    from rewriter.report.html.heads import write_heads_page

    _check(page, {"inputs": inputs, "logit": pair[0], "tokenizer": tokenizer}, (model, output), report=report)
    check_report(report, (model, output, inputs))
    if output is not None:
        check_suffix(output)
        check_new(output)
    found = index(model, fold_ln=fold_ln)
    if output is not None:
        check_output(output, source=found.source, force=False)
        found.write(output)
    if page is not None and inputs is not None:
        write_heads_page(head_pictures(model, inputs, logit=pair[0], minus=pair[1], tokenizer=tokenizer), page)
    facts = found.to_json()
    write_report(report, lambda: facts)
    lines = [
        f"{one_line(each.name, 100):<24} {_told(facts['sublayers'][each.name])}  {one_line(each.module, 160)}"
        for each in found.sublayers
    ]
    lines += [f"not understood: {one_line(miss.reason, 160)} [{one_line(miss.node, 100)}]" for miss in found.missed]
    total = sum(each.sublayer.heads for each in found.sublayers)
    written = "" if output is None else f", written to {output}"
    written += "" if page is None else f", page written to {page}"
    last = f"{total} heads in {len(found.sublayers)} sublayers, {len(found)} tensors{written}"
    for line in (*lines, last):
        click.echo(line.rstrip(), err=report == STANDARD)
    return int(ExitStatus.CONVERTED if found.sublayers else ExitStatus.NOTHING_TO_CONVERT)


def _check(
    page: Path | None, given: Mapping[str, Any], others: tuple[Path | None, ...], *, report: Path | None
) -> None:
    """Refuse options of the page without a page, and a page that cannot be made, before the long work."""
    if page is None:
        first = next((name for name, value in given.items() if value is not None), None)
        if first is not None:
            raise UsageError(f"--{first} is for the page; add --html FILE.html")
        return
    if given["inputs"] is None:
        raise UsageError("--html shows heads on inputs; add --inputs FILE.npz")
    check_page(page, (*others, given["inputs"]), report=report, force=False)


def _told(facts: dict[str, object]) -> str:
    if facts["kind"] == "neurons":
        return f"{facts['heads']:>6} heads of {facts['neurons']} neurons, {facts['activation']} as {facts['program']}"
    extras = [word for word in ("rotary", "cross") if facts[word]]
    groups = [] if facts["groups"] == 1 else [f"{facts['groups']} per key and value"]
    return ", ".join([f"{facts['heads']:>6} heads", *groups, *extras])


# -- run_cached ----------------------------------------


@command(
    {**MODEL, 5: "the execution provider is not available"},
    ok="the model was run",
    failed="onnxruntime does not run the model on these inputs",
    usage="the inputs do not fit the model",
)
@click.argument("model", type=click.Path(path_type=Path))
@input_options("The inputs; several cases as case/input.", providers={"help": "Execution provider; default: cpu."})
@file_option("--cache", metavar="FILE.npz", required=True, help="Write what was recorded, with the model's outputs.")
@click.option("--names", metavar="GLOB", multiple=True, default=("*",), help="Record only these hooks (repeatable).")
def run_cached(
    model: Path,
    *,
    inputs: Path | Text,
    cache: Path,
    names: tuple[str, ...],
    providers: tuple[str, ...],
) -> int:
    """Run MODEL on given inputs, and record the residual stream and what original and neuron heads compute.

    Names are those of TransformerLens' hooks, such as blocks.0.attn.hook_pattern. --text may be repeated: each text is
    a case.
    """
    if cache.suffix != ".npz":
        raise UsageError(f"'{cache}' must end in .npz")
    check_new(cache)
    if len(providers) > 1:
        raise UsageError("one execution provider at a time")
    from rewriter.files.atomic import atomically
    from rewriter.files.save import check_output
    from rewriter.interpret.arrays import write_npz
    from rewriter.interpret.index import heads
    from rewriter.interpret.run import Recording

    index = heads(model)
    recording = Recording.of(index, inputs, names, providers[0] if providers else "cpu")
    check_output(cache, source=index.source, force=False)
    shapes: dict[str, tuple[int, ...]] = {}
    spelled = () if recording.tokens is None else recording.tokens.spelled
    facts = index.to_json() | ({"tokens": spelled} if spelled else {})
    atomically(cache, lambda file: write_npz(file, recording.noted(shapes), facts))
    for tokens in spelled:
        click.echo(f"tokens: {' | '.join(tokens)}")
    for name, shape in shapes.items():
        click.echo(f"{name:<44} {list(shape)}")
    click.echo(f"{len(shapes)} arrays written to {cache}")
    return 0


# -- attribute ----------------------------------------


@command(
    MODEL,
    ok="the logit was attributed",
    failed="the model cannot be evaluated",
    usage="this output cannot be attributed",
)
@click.argument("model", type=click.Path(path_type=Path))
@logit_options
@click.option("--patching", is_flag=True, help="Also run the model without what each MLP writes at each token.")
@top_option
@report_option("all contributions")
def attribute(
    model: Path,
    *,
    inputs: Path | Text,
    pair: tuple[int, int | None],
    top: int,
    report: Path | None,
    **how: Any,
) -> int:
    """Attribute a logit to heads, tokens and biases: what writes it directly, and along all paths.

    Patterns and normalisation denominators are held at their values; both sums equal the logit, and the residual is
    printed.
    """
    check_report(report, (model, *files_of(inputs)))
    from rewriter.interpret.attribute import attribute as attributed

    found = attributed(model, inputs, pair[0], minus=pair[1], **how)
    sums = {"direct": found.direct, "paths": found.paths}
    write_report(report, lambda: _facts(found))
    lines = [f"logit {found.logit:.6g}" + _between(found.entries)]
    for name, parts in sums.items():
        lines += ["", f"{name}: the sum is off by {found.residuals[name]:.2g}"]
        lines += [f"  {value:+12.6f}  {part}" for part, value in _largest(found.by_neuron(parts), top, found.tokens)]
    if found.correlation is not None:
        lines += ["", f"correlation with patching, over MLPs and tokens: {found.correlation:.4f}"]
    click.echo("\n".join(lines), err=report == STANDARD)
    return 0


def _facts(found: Attribution) -> dict[str, Any]:
    """JSON-ready data: every contribution of both sums."""
    import numpy as np

    from rewriter.report.report import plain_data

    sums = {"direct": found.direct, "paths": found.paths}
    facts: dict[str, Any] = {
        name: {part: np.asarray(array).tolist() for part, array in parts.items()} for name, parts in sums.items()
    }
    if found.tokens:
        facts |= {"tokens": list(found.tokens), "entries": list(found.entries)}
    facts |= {"logit": found.logit, "residuals": dict(found.residuals), "correlation": found.correlation}
    return dict(plain_data(facts))


def _between(entries: tuple[str, ...]) -> str:
    """The tokens whose logits these are, where that is known."""
    return "".join(f"{mark}'{entry}'" for mark, entry in zip((" ", " - "), entries, strict=False))


def _largest(parts: Mapping[str, Any], top: int, tokens: tuple[str, ...]) -> list[tuple[str, float]]:
    """The contributions of largest size; those of heads and tokens with their number, of tokens with their text."""
    import numpy as np

    rows: list[tuple[str, float]] = []
    for name, part in parts.items():
        array = np.asarray(part)
        for place, value in enumerate(array.flat):
            said = f" '{tokens[place]}'" if tokens and name == "embed" and array.ndim else ""
            rows.append((f"{name}[{place}]{said}" if array.ndim else name, float(value)))
    return sorted(rows, key=lambda row: -abs(row[1]))[:top]


# -- graph ----------------------------------------


@command(
    MODEL, ok="the graph was made", failed="the model cannot be evaluated", usage="this output cannot be attributed"
)
@click.argument("model", type=click.Path(path_type=Path))
@logit_options
@file_option("-o", "--out", metavar="FILE.json", help="Write the pruned graph to FILE.json.")
@report_option("the scores")
def graph(
    model: Path,
    *,
    inputs: Path | Text,
    pair: tuple[int, int | None],
    out: Path | None,
    report: Path | None,
    **how: Any,
) -> int:
    """Make the attribution graph of a logit: tokens, biases, heads and neurons, and their direct effects.

    Edges are exact with patterns and normalisation denominators held, without transcoders and without error nodes. The
    file has the JSON schema of circuit-tracer and Neuronpedia.
    """
    for path in (out, report):
        if path is not None:
            check_report(path, (model, *files_of(inputs), out if path is report else None))
    if out is not None:
        check_new(out)
    from rewriter.interpret.graph import attribution_graph
    from rewriter.report.report import plain_data, write_json

    found = attribution_graph(model, inputs, pair[0], minus=pair[1], **how)
    made = plain_data(found.to_json())
    if out is not None:
        write_json(out, made)
    facts = {
        **made["metadata"],
        "nodes": len(made["nodes"]),
        "links": len(made["links"]),
        "all_nodes": len(found.nodes),
    }
    write_report(report, lambda: facts)
    whole, left = (
        f"replacement score {facts[f'{kind}replacement_score']:.4f}, "
        f"completeness score {facts[f'{kind}completeness_score']:.4f}"
        for kind in ("", "pruned_")
    )
    residual = f"in-edges off by {facts['largest_residual']:.2g} at most"
    lines = [
        f"logit {found.logit:.6g}",
        f"all: {len(found.nodes)} nodes, {whole}, {residual}",
        f"pruned: {facts['nodes']} nodes, {facts['links']} edges, {left}",
    ]
    if out is not None:
        lines[-1] += f", written to {out}"
    for line in lines:
        click.echo(line, err=report == STANDARD)
    return 0


# -- rank ----------------------------------------


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
    from rewriter.interpret.index import heads

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
    from rewriter.interpret.activity import head_activity
    from rewriter.interpret.rank import compositions, head_tokens, idle_heads

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
