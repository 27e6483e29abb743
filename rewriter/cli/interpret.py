"""`rewrite heads`, `run`, `attribute`, `graph` and `rank`: what heads are and what they compute."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeVar, Union

import click

import rewriter
from rewriter.cli.options import about_model, answer, declared_options, file_option, output_option, report_option
from rewriter.errors import ExitStatus, UsageError
from rewriter.files.atomic import atomically, write_text
from rewriter.proof.settings import Settings
from rewriter.text import counted, one_line

if TYPE_CHECKING:
    from rewriter.interpret.index import HeadIndex
    from rewriter.interpret.interventions import ChangedHeads
    from rewriter.interpret.rank import Compositions, HeadTokens

Command = TypeVar("Command", bound=Callable[..., Any])
_WIDTH, _NAME_WIDTH = 80, 30

_top = click.option(
    "--top", type=click.IntRange(1), metavar="K", default=10, show_default=True, help="Rows of each table."
)


Inputs = Union[Path, "rewriter.Text"]
Logit = dict[str, Any]  # as keywords of `attribute`: `logit`, `minus`, `position`


def _logit_of(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Logit | None:
    if text is None:
        return None
    read = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(-?\d+))?", text, re.ASCII)
    if read is None:
        raise click.BadParameter(f"'{text}' is not N[-M][:TOKEN], such as 318, 318-262 or 318:5")
    logit, minus, position = read.groups()
    return {"logit": int(logit), "minus": None if minus is None else int(minus), "position": int(position or -1)}


def _inputs(told: str, *, optional: bool = False) -> Callable[[Command], Command]:
    """`--inputs`, `--text`, `--tokenizer` as `inputs`, a path or `Text`; if `optional`, the tokenizer as well."""
    where = "A tokenizer.json, or a folder with one; default: the one beside MODEL. Needs the extra text."
    of_text = click.option("--text", metavar="TEXT", multiple=True, help="The input as text, instead of --inputs.")
    of_tokenizer = file_option("--tokenizer", metavar="FILE", help=where)
    of_arrays = declared_options(Settings, only=("inputs",), inputs={"help": told})

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def called(*, inputs: Path | None, text: tuple[str, ...], tokenizer: Path | None, **others: Any) -> Any:
            if inputs is not None and text:
                raise UsageError("pass --inputs FILE.npz or --text, not both")
            if not optional and inputs is None and not text:
                raise UsageError("pass --inputs FILE.npz, or --text TEXT")
            beside = others["model"].parent / "tokenizer.json"  # where Hugging Face models have it
            found = tokenizer or (beside if beside.is_file() else None)
            if text and found is None:
                raise UsageError("there is no tokenizer.json beside the model; add --tokenizer FILE")
            # Without the package, tokens are shown by their numbers.
            shown = found if text or tokenizer or find_spec("tokenizers") else None
            if optional:
                others["tokenizer"] = shown
            given = shown is not None and (text or inputs is not None)
            return command(inputs=rewriter.Text(text, shown, None if text else inputs) if given else inputs, **others)

        made: Command = of_arrays(of_text(of_tokenizer(called)))
        return made

    return decorated


def _logit(told: str, *, required: bool = False) -> Callable[[Command], Command]:
    told += " N of the output's last axis, less entry M, at TOKEN; default: the last one."
    return click.option("--logit", metavar="N[-M][:TOKEN]", required=required, callback=_logit_of, help=told)


@about_model(
    ok="heads were found",
    failed="with --html: the model cannot be run or evaluated on these inputs",
    usage="the output cannot be written",
    nothing="no heads were found",
)
@output_option("-o", "--output", suffix=".safetensors", new=True, help="Write the tensors to FILE.safetensors.")
@output_option(
    *("--html", "page"),
    suffix=".html",
    help="Write a page with patterns, activations and tokens of heads on one sequence of --inputs.",
)
@_inputs("With --html: the inputs, one case.", optional=True)
@_logit("With --html: attribute entry")
@report_option("the list of heads")
def heads(
    model: Path,
    *,
    output: Path | None,
    report: Path | None,
    page: Path | None,
    inputs: Inputs | None,
    logit: Logit | None,
    tokenizer: Path | None,
) -> int:
    """List every head of MODEL, original heads and the heads of its neurons; -o also writes their weights.

    MODEL is an original or a rewritten file. Names and shapes are those of TransformerLens. What is not understood
    is listed with the node. A page (--html) shows heads on one sequence, and with --logit what they add to a logit.
    """
    if page is None:
        if inputs is not None or logit is not None:
            raise UsageError(f"--{'logit' if inputs is None else 'inputs'} is for the page; add --html FILE.html")
    elif inputs is None:
        raise UsageError("--html shows heads on inputs; add --inputs FILE.npz or --text TEXT")
    found = rewriter.heads(model)
    if output is not None:
        found.write(output)
    if page is not None and inputs is not None:
        from rewriter.report.html import render_heads

        write_text(page, render_heads(rewriter.head_pictures(found, inputs, tokenizer=tokenizer, **logit or {})))
    facts, total = found.to_json(), sum(each.heads for each in found.sublayers)
    written = "" if output is None else f", written to {output}"
    written += "" if page is None else f", page written to {page}"
    last = f"{total} heads in {len(found.sublayers)} sublayers, {len(found)} tensors{written}"
    if not found.sublayers:
        kinds = [miss.kind == "attention" for miss in found.missed if miss.kind == "attention" or miss.node]
        counts = (kinds.count(True), "attention layer"), (kinds.count(False), "MLP block")
        lost = " and ".join(counted(*each) for each in counts if each[0])
        reason = f"; {lost} {'is' if len(kinds) == 1 else 'are'} listed above with the reason"
        if not kinds:
            reason = ", for the reason above" if found.missed else ": the model has no attention and no MLP block"
        last = f"rewrite: no heads were found{reason}"
    answer([*_head_rows(found, facts), last], report, facts, error=not found.sublayers)
    return int(ExitStatus.CONVERTED if found.sublayers else ExitStatus.NOTHING_TO_CONVERT)


def _head_rows(found: "HeadIndex", facts: Mapping[str, Any]) -> Iterator[str]:
    for each in found.sublayers:
        own = facts["sublayers"][each.name]
        if own["kind"] == "neurons":
            extras = [f" of {own['neurons']} neurons, {own['activation']} as {own['program']}"]
        else:
            extras = [f", {own['groups']} per key and value"] * (own["groups"] > 1)
            extras += [f", {word}" for word in ("rotary", "cross") if own[word]]
        yield f"{one_line(each.name, 100):<24} {own['heads']:>6} heads{''.join(extras)}  {one_line(each.module, 160)}"
    for miss in found.missed:
        where = f" [{one_line(miss.node, 100)}]" if miss.node else ""
        yield f"not understood: {one_line(miss.reason, 160)}{where}"


@about_model(
    ok="the model was run",
    failed="onnxruntime does not run the model on these inputs",
    usage="the inputs do not fit the model",
)
@_inputs("The inputs; several cases as case/input.")
@output_option(
    "--cache", suffix=".npz", new=True, required=True, help="Write what was recorded, with the model's outputs."
)
@click.option("--names", metavar="GLOB", multiple=True, default=("*",), help="Record only these hooks (repeatable).")
def run(model: Path, *, inputs: Inputs, cache: Path, names: tuple[str, ...]) -> None:
    """Run MODEL on given inputs, and record the residual stream and what original and neuron heads compute.

    Names are those of TransformerLens' hooks, such as blocks.0.attn.hook_pattern. --text may be repeated: each text is
    a case.
    """
    import numpy as np

    from rewriter.interpret.index import METADATA

    index = rewriter.heads(model)
    found = rewriter.run_with_cache(index, inputs, names=names)
    arrays: dict[str, Any] = {**found.cache, **{f"outputs/{name}": array for name, array in found.outputs.items()}}
    facts = index.to_json() | ({"tokens": found.tokens} if found.tokens else {})
    described: dict[str, Any] = {METADATA: json.dumps(facts)}
    atomically(cache, lambda file: np.savez(file, **arrays, **described))
    lines = [f"tokens: {' | '.join(each)}" for each in found.tokens]
    lines += [f"{name:<44} {list(array.shape)}" for name, array in arrays.items()]
    answer([*lines, f"{len(arrays)} arrays written to {cache}"])


@about_model(
    ok="the logit, neuron or score was attributed",
    failed="the model cannot be evaluated",
    usage="this output, neuron or head cannot be attributed",
)
@_inputs("The inputs: one case.")
@_logit("Attribute entry")
@click.option(
    "--why",
    metavar="HEAD[:QUERY[:KEY]]",
    help="Instead of --logit: why a neuron's pre-activation, or a head's score for two tokens, is what it is.",
)
@_top
@report_option("all contributions")
def attribute(
    model: Path, *, inputs: Inputs, logit: Logit | None, why: str | None, top: int, report: Path | None
) -> None:
    """Attribute a logit to heads, tokens and biases: what writes it directly, and along all paths.

    Patterns, gates of neurons and normalisation denominators are held at their values; both sums equal the logit, and
    the residual is printed. With --why a neuron, as blocks.0.mlp_heads[68], or an original head, as
    blocks.1.attn[0]:6:2, is attributed to what it reads. QUERY is the last token by default, KEY what it attends to
    most.
    """
    if (logit is None) == (why is None):
        raise UsageError("pass --logit N or --why HEAD" + ("" if why is None else ", not both"))
    lines, facts = _why(model, inputs, why or "", top) if logit is None else _attributed(model, inputs, logit, top)
    answer(lines, report, facts)


Answer = tuple[list[str], dict[str, Any]]  # lines to print, and the report


def _difference(entries: Iterable[str]) -> str:
    return "".join(f"{mark}'{entry}'" for mark, entry in zip((" ", " - "), entries, strict=False))


def _attributed(model: Path, inputs: Inputs, logit: Logit, top: int) -> Answer:
    from rewriter.arrays import largest_places

    found = rewriter.attribute(model, inputs, **logit)
    sums = {"direct": found.direct, "paths": found.paths}
    texts = {"tokens": found.tokens, "entries": found.entries} if found.tokens else {}
    all_parts = {name: {part: array.tolist() for part, array in parts.items()} for name, parts in sums.items()}
    lines = [f"logit {found.logit:.6g}{_difference(found.entries)}{', before the tanh that caps it' * found.capped}"]
    for name, parts in sums.items():
        rows: list[tuple[str, float]] = []
        for part, array in parts.items():
            for place in largest_places(abs(array).reshape(-1), top):
                said = f" '{found.tokens[place]}'" if found.tokens and part == "embed" and array.ndim else ""
                rows.append((f"{part}[{place}]{said}" if array.ndim else part, float(array.flat[place])))
        rows.sort(key=lambda row: -abs(row[1]))
        lines += ["", f"{name}: the sum is off by {found.residuals[name]:.2g}"]
        lines += [f"  {_amount(value)}  {part}" for part, value in rows[:top]]
    return lines, {**all_parts, **texts, "logit": found.logit, "residuals": found.residuals}


def _why(model: Path, inputs: Inputs, asked: str, top: int) -> Answer:
    read = re.fullmatch(r"([^:]+)(?::(-?\d+))?(?::(-?\d+))?", asked)
    if read is None:
        raise UsageError(f"--why: '{asked}' is not HEAD[:QUERY[:KEY]], such as blocks.1.attn[0]:6:2")
    head, query, key = read.groups()
    found = rewriter.why(model, inputs, head, query=int(query or -1), key=None if key is None else int(key))

    def at(token: int) -> str:
        return f"token {token}" + (f" '{found.tokens[token]}'" if found.tokens else "")

    what = "pre-activation" if found.key is None else "score"
    places = at(found.query) + ("" if found.key is None else f" for {at(found.key)}")
    lines = [f"{what} {found.total:.6g} of {found.head} at {places}", f"the sum is off by {found.residual:.2g}"]
    if round(found.added, 6):
        lines.append(f"  {_amount(found.added)}  added by the model: masks, position biases")
    lines += [f"  {_amount(value)}  {row}{' x ' * bool(column)}{column}" for row, column, value in found.top(top)]
    return lines, found.to_json()


def _amount(value: float) -> str:
    """Six digits behind the point; six in all for values as large as a mask."""
    return f"{value:+12.6f}" if abs(value) < 1e6 else f"{value:+12.6g}"


@about_model(ok="the graph was made", failed="the model cannot be evaluated", usage="this output cannot be attributed")
@_inputs("The inputs: one case.")
@_logit("Entry", required=True)
@output_option(
    "-o", "--out", new=True, metavar="FILE.json", help="Write the pruned graph, with its scores, to FILE.json."
)
def graph(model: Path, *, inputs: Inputs, logit: Logit, out: Path | None) -> None:
    """Make the attribution graph of a logit: tokens, biases, heads and neurons, and their direct effects.

    Edges are exact with patterns and normalisation denominators held, without transcoders and without error nodes. The
    file has the JSON schema of circuit-tracer and Neuronpedia.
    """
    found = rewriter.attribution_graph(model, inputs, **logit)
    made = found.to_json()
    if out is not None:
        from rewriter.report.report import json_text

        write_text(out, json_text(made))
    spelled = found.entries != tuple(str(logit[name]) for name in ("logit", "minus") if logit[name] is not None)
    facts, written = made["metadata"], "" if out is None else f", written to {out}"
    lines = (
        f"logit {found.logit:.6g}{_difference(found.entries) if spelled else ''}",
        f"all: {len(found.nodes)} nodes, in-edges off by {facts['largest_residual']:.2g} at most",
        f"pruned: {len(made['nodes'])} nodes, {len(made['links'])} edges, replacement score "
        f"{facts['replacement_score']:.4f}, completeness score {facts['completeness_score']:.4f}{written}",
        f"scores of {counted(len(found.why), 'head')}, as sums over pairs of nodes: off by "
        f"{facts['largest_score_residual']:.2g} at most",
    )
    answer(lines)


@about_model(
    ok="heads were ranked",
    failed="with --against: onnxruntime does not run the models on these inputs",
    usage="with --against: the models have different heads",
    nothing="no heads were found",
)
@click.option("--tokens", is_flag=True, help="The tokens that heads read and write.")
@file_option(
    "--against", metavar="OTHER.onnx", help="The heads that this model, quantised or fine-tuned, changed most."
)
@_inputs("With --against: the inputs, one case.", optional=True)
@_top
@report_option("the rankings of all heads")
def rank(
    model: Path,
    *,
    tokens: bool,
    against: Path | None,
    inputs: Inputs | None,
    report: Path | None,
    tokenizer: Path | None,
    top: int,
) -> int:
    """Rank the heads of MODEL, original heads and neurons alike: which work together, and on what.

    With --against OTHER.onnx: which of them OTHER, such as MODEL quantised, computes most differently, and how much of
    the outputs' error goes when one of them alone is MODEL's again.
    """
    if (against is None) != (inputs is None):
        raise UsageError("--inputs and --text are for --against" if inputs else "--against needs --inputs or --text")
    if against is not None and tokens:
        raise UsageError("pass --tokens or --against, not both")
    index = rewriter.heads(model)
    if not index.sublayers:
        answer(["no heads were found"], report)
        return int(ExitStatus.NOTHING_TO_CONVERT)
    if against is not None and inputs is not None:
        compared = rewriter.changed_heads(model, against, inputs, top=top)
        lines, facts = [*_changed_rows(compared, top)], {"against": str(against), **asdict(compared)}
    elif tokens:
        read = rewriter.head_tokens(index, top=top, tokenizer=tokenizer)
        lines, facts = [*_token_rows(read, top)], {"tokens": read.to_json()}
    else:
        found = rewriter.compositions(index, top=top, every_head=report is not None)
        lines, facts = [*_composition_rows(found, top)], {"composition": found.to_json() if report else {}}
    count = sum(each.heads for each in index.sublayers)
    last = f"{counted(count, 'head')} in {counted(len(index.sublayers), 'sublayer')}"
    answer((*lines, last), report, {"model": str(model), **facts})
    return 0


def _composition_rows(found: "Compositions", top: int) -> Iterator[str]:
    yield f"composition, without the scales of normalisations; unrelated weights: {found.baseline:.3f}"
    yield f"  {'':<3} {'reader':<{_NAME_WIDTH}} {'writer':<{_NAME_WIDTH}} {'score':>6}"
    for each in found.strongest(top):
        yield f"  {each.kind:<3} {_name(each.reader)} {_name(each.writer)} {each.score:6.4f}"


def _changed_rows(found: "ChangedHeads", top: int) -> Iterator[str]:
    yield f"changed heads; the outputs are off by {found.error:.3g} of their norm"
    yield f"  {'':<{_NAME_WIDTH}} {'weights':>8} {'written':>8} {'restored':>9}"
    for each in found.rows[:top]:
        yield f"  {_name(each.head)} {each.weights:8.3g} {each.written:8.3g} {each.restored:9.2%}"


def _token_rows(found: "HeadTokens", top: int) -> Iterator[str]:
    yield "tokens, of the heads that tell few tokens from the others"
    names = {"Q": "queries", "K": "keys", "V": "values"}
    for what, reason in found.missing.items():
        yield from wrap(f"  {what} nothing that can be shown: {one_line(reason, 200)}", _WIDTH)
    for row in found.selective(top):
        share = "" if row.share > 1.0 - 1e-6 else f", {row.share:.0%} of the squared weights"
        side = "writes" if row.side == "O" else f"{' and '.join(names[each] for each in row.side)} read"
        yield f"  {_name(row.head)} {side}{share}"
        for ends in (row.top, row.bottom):
            shown = "  ".join(f"{one_line(found.text_of(token), 44)} {score:+.3g}" for token, score in ends)
            yield from wrap(shown, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _name(head: str) -> str:
    shown = one_line(head, 1000)
    return f"{shown if len(shown) <= _NAME_WIDTH else f'...{shown[3 - _NAME_WIDTH :]}':<{_NAME_WIDTH}}"
