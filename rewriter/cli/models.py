"""The commands about models: `rewrite MODEL -o OUT`, the plain one, `inspect`, `doctor`, and those about two models."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import rewriter
from passes.options import ALREADY, Options
from rewriter.cli.options import (
    MODEL,
    MODELS,
    SETTINGS,
    STANDARD,
    Checked,
    carried_out,
    command,
    declared_options,
    file_option,
    output_option,
    rare_options,
    report_option,
)
from rewriter.errors import UsageError
from rewriter.proof.settings import CompareOptions, Settings
from rewriter.text import quoted, size

if TYPE_CHECKING:
    from rewriter.api.diagnosing import Diagnosis
    from rewriter.report.terminal import Console


COMMON = "output form only skip dry_run certificate_only providers inputs html force report help_all"
"""The options that `rewrite --help` lists; `--help-all` lists all."""

_OTHER_FILES = (".json", ".html", ".npz", ".npy", ".data", ".bin", ".ort", ".safetensors", ".txt", ".md", ".py")
_early = partial(click.option, is_flag=True, expose_value=False, is_eager=True)

_EPILOG = """\b
Commands for models (rewrite COMMAND --help):
  inspect    print the blocks of a model, their size and their heads
  certify    prove for every input that one model computes what another does
  validate   judge whether a rewritten model computes what the original does
  diff       compare any two models: graphs, weights, outputs
  bench      measure how long models take beside the original
  doctor     check versions, execution providers, memory and disk

\b
Commands for heads:
  heads      list all heads, and write their weights or a page about them
  run        run a model and record what heads compute on inputs
  rank       rank heads: which work together, and on what
  attribute  attribute a logit to heads, tokens and biases
  graph      make the attribution graph of a logit

\b
Exit status:
  0   converted, and proved (or --no-validate, or --dry-run)
  1   the proof failed; nothing is written at OUT
  2   usage error
  3   nothing to convert; nothing is written
  4   the model is unreadable, malformed or unsafe
  5   an execution provider is not available, or lacks float64
  70  internal error; please report it
"""


class Screen(Checked):
    """A command whose help lists the options in `COMMON` only."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = {param.name for param in self.params if ctx.meta.get("all")} or COMMON.split()
        shown = [param for param in self.get_params(ctx) if param.name in names or "--help" in param.opts]
        with formatter.section("Options"):
            formatter.write_dl([record for param in shown if (record := param.get_help_record(ctx)) is not None])


def _help_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta["all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from rewriter.api.run import environment

    found = environment()
    parts = [f"{name} {found[name]}" for name in ("onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")]
    click.echo(f"rewrite {found['attnonly']} ({', '.join(parts)})")
    ctx.exit()


@click.command(name="rewrite", cls=Screen, epilog=_EPILOG, context_settings=SETTINGS)
@click.argument("model", type=click.Path(path_type=Path))
@file_option("-o", "--output", metavar="OUT", help="Where to write the result.")
@declared_options(Options)
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option(
    "--certificate-only/--no-validate", default=None, help="Prove but run nothing; or write the result unproved."
)
@declared_options(Settings)
@rare_options(Options, Settings)
@output_option("--html", suffix=".html", help="Write the report as a page.")
@output_option("--certificate", suffix=".json", help="Write the certificate; `rewrite certify --check` checks it.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@report_option("the report")
@click.option("-q", "--quiet", is_flag=True, help="Print the last line only.")
@click.option("-v", "--verbose", is_flag=True, help="Print the proof of every block, and more statistics.")
@_early("--version", callback=_version, help="Print versions.")
@_early("--help-all", callback=_help_all, help="Show all options.")
def convert(
    model: Path,
    output: Path | None,
    *,
    dry_run: bool,
    certificate_only: bool | None,
    report: Path | None,
    html: Path | None,
    certificate: Path | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Replace the MLP blocks of MODEL by attention heads, and prove that the outputs stay the same.

    MODEL is an ONNX file, or a folder such as optimum writes: then OUT is a new folder with all models converted, and
    the other files copied. The result appears at OUT only if it computes what MODEL does: certified, for every input or
    in a domain that is named, and run with onnxruntime on a few. For models that this machine cannot run there is
    --certificate-only.
    """
    if output is None and not dry_run:
        raise UsageError("where should the result go? give -o OUT, or --dry-run to see the plan only")
    if STANDARD in (model, output):
        raise UsageError("models are read from files and written to files; '-' is for --report only")
    if not model.is_dir():
        if output is not None and output.suffix.lower() in _OTHER_FILES:
            raise UsageError(f"{quoted(output)} would be an ONNX model under another kind of name; end it in .onnx")
    elif html or certificate:
        flag = "--html" if html else "--certificate"
        raise UsageError(f"{flag} is for one model, not for a folder; leave it out, or convert its files one by one")
    if certificate is not None and (certificate_only is False or dry_run):
        raise UsageError("--certificate needs a run that proves its result")
    options |= {"dry_run": dry_run, "validate": {None: True, True: "certificate", False: False}[certificate_only]}

    def show(console: "Console", result: "rewriter.Report") -> None:
        if certificate is not None and result:
            from rewriter.api.comparing import certification_of

            certification_of(model, result.output, result.validation.certificate).write(certificate)
        if html is not None:
            from rewriter.report.html import write_page

            write_page(result, html)
        console.report(result)

    how = {"quiet": quiet, "verbose": verbose}
    return carried_out(report, lambda told: rewriter.rewrite(model, output, progress=told, **options), show, **how)


# -- one model, this machine ----------------------------------------------------------------------------------------


@command(MODEL, ok="some block can be converted", nothing="none can")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Sequence length for which heads, keys and patterns of each form are counted.",
)
@report_option("what was found")
def inspect(model: Path, *, tokens: int, report: Path | None) -> int:
    """Print the MLP blocks of MODEL, their size, and the heads that they would become; write nothing."""
    return carried_out(report, lambda _: rewriter.inspect(model, tokens=tokens), _show)


def _show(console: "Console", found: "rewriter.Inspection") -> None:
    from passes.forms import FORMS
    from rewriter.report.sections import Table, block_parts

    for part in block_parts(found):
        console.part(part)
    for note in found.notes:
        console.line(f"note: {note}", "yellow")
    accounting = found.accounting
    if accounting.blocks:
        headings = "form, blocks:count, heads:count, keys:count, pattern of all heads:count, in the graph"
        rows = []
        for cost, blocks in Counter(cost for block in accounting.blocks for cost in block.forms).items():
            heads = " + ".join(f"{number:,}" for number in cost.heads)
            rows.append((cost.form, blocks, heads, cost.keys, size(cost.pattern_bytes), FORMS[cost.form].help))
        console.part(Table.of(f"Forms: one block at {accounting.tokens:,} tokens", headings, rows))
        refused = Counter(reason for block in accounting.blocks for reason in block.refused)
        for (form, reason), number in refused.items():
            console.line(f"form {form} cannot take {number} of the blocks: {reason}", "yellow")
        share = f"{100 * accounting.share:.1f} %"
        console.line(f"these blocks take {share} of the multiply-adds of linear operators per token")
    if accounting.head_dimension is not None:
        heads = "" if accounting.attention_heads is None else f"{accounting.attention_heads} heads per sublayer, "
        console.line(f"the model's own attention: {heads}head dimension {accounting.head_dimension}")
    counts = (f"{count:,} {kind}" for kind, count in accounting.operators.items())
    console.line(f"operators once converted: {', '.join(counts)}")
    console.line(f"purity once converted, nonlinearities that remain: {accounting.purity}")
    for activation, count in Counter(row.activation for row in found.left if row.reason == ALREADY).most_common():
        console.line(f"{count} {'MLP is' if count == 1 else 'MLPs are'} attention already: {activation}")
    if not found.converted:
        console.verdict(found)


@command(MODEL, ok="nothing is wrong", failed="something is; each problem is a line that says what to do")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@report_option("what was found")
def doctor(model: Path | None, *, report: Path | None) -> int:
    """Look at versions, execution providers, memory and disk, and say how to mend what is wrong.

    Every execution provider is started. With MODEL, its size is compared with memory and disk.
    """
    return carried_out(report, lambda _: rewriter.doctor(model), _show_diagnosis)


def _show_diagnosis(console: "Console", found: "Diagnosis") -> None:
    lines = [*found.environment.items(), *((name, reason or "works") for name, reason in found.providers.items())]
    lines.append(("memory", "unknown" if found.memory is None else f"{size(found.memory)} available"))
    lines.append(("disk", f"{size(found.disk)} free"))
    if found.model_bytes is not None:
        lines.append(("model", f"{size(found.model_bytes)} with its weights"))
    for label, value in lines:
        console.line(f"{label:18}{value}")
    for problem in found.problems:
        console.line(f"{'problem':18}{problem}", "red")
    console.line(found.summary, "bold")


# -- models beside each other -------------------------------------------------------------------------------------

_model = click.Path(path_type=Path)
_original, _rewritten = click.argument("original", type=_model), click.argument("rewritten", type=_model)
_verbose = click.option("-v", "--verbose", is_flag=True, help="Print everything: all nodes and weights.")
_comparing = partial(command, MODELS, usage="the given inputs left nothing to compare")


@_comparing(
    ok="CERTIFIED or AGREES: REWRITTEN computes what ORIGINAL does, or agrees where it was run",
    failed="DIFFERENT or NOT PROVED: it does not, or neither proof nor run decides it",
)
@_original
@_rewritten
@declared_options(Settings, only=("providers", "inputs", "dims"))
@declared_options(CompareOptions)
@report_option("the comparison")
@_verbose
def validate(original: Path, rewritten: Path, *, report: Path | None, verbose: bool, **options: Any) -> int:
    """Judge whether REWRITTEN computes what ORIGINAL does, on inputs made for the model.

    Any two models with the same inputs and outputs can be compared, whoever wrote them. CERTIFIED: proved, and a run
    agrees. AGREES: not proved, but both agree on the inputs that were run. DIFFERENT: there is a counterexample.
    """
    return _compared(partial(rewriter.validate, original, rewritten, **options), report, verbose=verbose)


@_comparing(
    ok="CERTIFIED or AGREES: B computes what A does, or agrees where both were run",
    failed="DIFFERENT or NOT PROVED: they differ, or neither proof nor run decides it",
)
@click.argument("a", type=_model)
@click.argument("b", type=_model)
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request.")
@declared_options(Settings, only=("providers", "inputs"))
@declared_options(CompareOptions, only=("names",))
@report_option("the comparison")
@_verbose
def diff(a: Path, b: Path, *, markdown: bool, report: Path | None, verbose: bool, **options: Any) -> int:
    """Compare two models: operators, metadata, weights bit for bit, and what they compute.

    Tensors are matched by value, so names and operators do not matter: the first node of B that computes what A does
    not is named, with what A makes of the same operands, and the regions that differ, the largest first. The verdict is
    that of `rewrite validate`, which also takes sizes and a tolerance; `rewrite certify` runs nothing.
    """
    return _compared(partial(rewriter.diff, a, b, **options), report, verbose=verbose, markdown=markdown)


def _compared(
    compare: "Callable[..., rewriter.Comparison]", report: Path | None, *, verbose: bool, markdown: bool = False
) -> int:
    from rewriter.report.sections import compared, in_markdown

    def shown(console: "Console", found: "rewriter.Comparison") -> None:
        parts = compared(found, verbose=verbose and not markdown)
        if markdown:
            for line in in_markdown(found.summary, found.problems, (part for part, _ in parts)):
                console.line(line)
        else:
            console.result(found, parts, found.seconds["total"])

    return carried_out(report, lambda told: compare(progress=told), shown, verbose=verbose)


@command(
    {4: "a model is unreadable, malformed or unsafe"},
    ok="CERTIFIED, for every size or at the sizes tried (with --check: the certificate holds)",
    failed="NOT PROVED or DIFFERENT (with --check: the certificate does not hold)",
    usage="FILE is no certificate",
)
@click.argument("original", type=_model)
@click.argument("rewritten", type=_model, required=False)
@file_option(
    "--check", metavar="FILE.json", help="Compute the certificate afresh, and compare it with the one in this file."
)
@declared_options(CompareOptions, only=("accuracy", "names"))
@report_option("the certificate", "-o")
def certify(original: Path, rewritten: Path | None, *, check: Path | None, report: Path | None, **options: Any) -> int:
    """Prove that REWRITTEN computes what ORIGINAL does, over the reals.

    No inputs are run. All tensors of both models are compared by value, in exact arithmetic; activations that are
    computed otherwise are bounded for all real numbers, or in a domain that is named. Any two models can be judged.

    Without REWRITTEN, what this onnxruntime makes of ORIGINAL is judged, at its levels basic, extended and all; where
    one is not certified, its optimisers are disabled one at a time, and the one at fault is named.
    """
    from rewriter.report.report import read_certificate
    from rewriter.report.sections import certified

    if rewritten is None:
        if check is not None:
            raise UsageError("--check is for two models; name the rewritten one, too")

        def show_levels(console: "Console", found: "rewriter.RuntimeCertification") -> None:
            console.result(found, certified(found), sum(each.certificate.seconds for each in found.levels))

        return carried_out(report, lambda told: rewriter.certify(original, progress=told, **options), show_levels)
    stated = None if check is None else read_certificate(check)

    def show_proof(console: "Console", found: "rewriter.Certification") -> None:
        console.result(found, certified(found), found.certificate.seconds, "in the JSON of -o")

    return carried_out(report, lambda _: rewriter.certify(original, rewritten, **options).checked(stated), show_proof)


@command(MODELS, ok="measured", failed="a model does not run", usage="the models take different inputs")
@_original
@_rewritten
@click.argument("more", type=_model, nargs=-1)
@click.option("--tokens", type=int, metavar="N", multiple=True, help="Tokens of a sequence (repeatable). Default: 128.")
@declared_options(Settings, only=("providers",), providers={"help": "Execution provider, as for rewrite (repeatable)."})
@report_option("the measurement")
def bench(original: Path, rewritten: Path, more: tuple[Path, ...], *, report: Path | None, **options: Any) -> int:
    """Measure how long REWRITTEN, and MORE models, take beside ORIGINAL; they take turns.

    ORIGINAL, given again among MORE, shows the noise. A run includes copying inputs and outputs.
    """
    models = (original, rewritten, *more)
    return carried_out(report, lambda told: rewriter.bench(*models, progress=told, **options), _show_times)


def _show_times(console: "Console", found: "rewriter.Benchmark") -> None:
    from rewriter.report.sections import Table

    heads = "inputs, provider, model, ms:ratio, from:ratio, over original:ratio, to:ratio"
    rows = ((row.inputs, row.provider, row.model, row.milliseconds, *row.over_original) for row in found.times)
    console.part(Table.of("Median time of one run, and quartiles of the ratio within a round", heads, rows))
    console.line(found.summary, "bold green")
