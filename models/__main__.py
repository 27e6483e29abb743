"""`python -m models`: list the table, export an entry, train small decoders, regenerate files, measure coverage.

The exit status is 0, or 2 after one line that says what is wrong (1 if an export does not compute what PyTorch does).
Listing needs neither PyTorch nor transformers.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from models.entry import DEFAULT_OPSETS, DTYPES, EXPORTERS, SIZES, Dtype, Exporter
from models.export import Exported, export_model, regenerate, require_packages
from models.registry import ENTRIES, get
from rewriter.errors import ExitStatus, RewriteError, UsageError, ValidationError


@click.group(help="Example models for `rewrite`: known architectures, random or trained weights, both exporters.")
def cli() -> None:
    """Group of the commands below."""


@cli.command("list")
def list_command() -> None:
    """Show every model of the table."""
    header = (
        "name",
        "architecture",
        "activation",
        "MLP blocks (" + "/".join(SIZES) + ")",
        "gated",
        "exporters",
        "description",
    )
    rows = [
        (
            entry.name,
            entry.architecture,
            entry.activation,
            "/".join(str(entry.mlp_blocks(size)) if size in entry.sizes else "-" for size in SIZES),
            "yes" if entry.gated else "no",
            ", ".join(entry.exporters),
            entry.description,
        )
        for entry in ENTRIES
    ]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in ENTRIES:
        for exporter, reason in entry.refusals.items():
            click.echo(f"{entry.name}: {exporter} cannot export it: {reason}")


@cli.command("export")
@click.argument("name")
@click.option("--size", type=click.Choice(SIZES), help="Default: the smallest that exists.")
@click.option("--exporter", type=click.Choice(EXPORTERS), help="Default: the first that can do the model.")
@click.option("--opset", type=click.IntRange(min=1), help=f"Default: {dict(DEFAULT_OPSETS)}.")
@click.option("--dtype", type=click.Choice(DTYPES), default="fp32", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The ONNX file to write.")
def export_command(
    name: str,
    size: str | None,
    exporter: Exporter | None,
    opset: int | None,
    dtype: Dtype,
    seed: int,
    output: Path,
) -> None:
    """Write model NAME as an ONNX file, checked against PyTorch."""
    entry = get(name)
    size = size or entry.default_size
    exporter = exporter or entry.exporters[0]
    done = export_model(entry, output, size=size, exporter=exporter, opset=opset, dtype=dtype, seed=seed)
    click.echo(f"{_line(done)}; {entry.mlp_blocks(size)} MLP blocks, {exporter}, {dtype}, size {size}, seed {seed}")


@cli.command("regenerate")
def regenerate_command() -> None:
    """Regenerate the example files of this folder."""
    for done in regenerate(Path(__file__).parent):
        click.echo(_line(done))


@cli.command("train")
@click.argument("names", nargs=-1)
@click.option("--steps", type=click.IntRange(min=1), help="Batches to train on. Default: those of the table.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path(__file__).parent / "trained",
    help="The folder to write to. Default: models/trained.",
)
def train_command(names: tuple[str, ...], steps: int | None, seed: int, output: Path) -> None:
    """Train small decoders (default: all of them) and export them; a few minutes each on two cores."""
    from models.training.table import TRAINED

    unknown = next((name for name in names if name not in TRAINED), None)
    if unknown is not None:
        raise UsageError(f"unknown decoder {unknown!r}; known: {', '.join(TRAINED)}")
    if not output.is_dir():
        raise UsageError(f"the folder {output} does not exist; create it first")
    require_packages("tokenizers")
    from models.training.train import train_and_export

    for name in names or TRAINED:
        done = train_and_export(TRAINED[name], output, seed=seed, steps=steps, told=click.echo)
        click.echo(_line(done))


@cli.command("coverage")
@click.option("--quick", is_flag=True, help="A sample of about thirty files.")
@click.option("--only", multiple=True, help="Entries of the table; repeatable. Default: all.")
@click.option("--processes", type=click.IntRange(1, 2), default=2, show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The page to update; tables/coverage.txt beside it too. Default: print both.",
)
@click.option(
    "--kept",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the results of each export in this file; a later run with it goes on where the first one ended.",
)
@click.option(
    "--files",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the model files in this folder, and use the files already there.",
)
@click.option(
    "--form",
    type=click.Choice(("whole",)),
    help="Try this form on all exports and on some variants; writes only tables/whole.txt.",
)
@click.option("--create-only", is_flag=True, help="Create the files of --files, without judging them.")
def coverage_command(
    quick: bool,
    only: tuple[str, ...],
    processes: int,
    output: Path | None,
    kept: Path | None,
    files: Path | None,
    create_only: bool,
    form: str | None,
) -> None:
    """Put many model files through `rewrite`, and count the blocks and attention layers found in them."""
    from models.cells import jobs, jobs_of_whole
    from models.coverage import Outcome, run_jobs
    from models.files import create_files
    from models.matrix import summary, table_of_form, tables, totals, write

    def show(outcome: Outcome) -> None:
        state = outcome.refused or f"{outcome.converted}/{outcome.exist}, heads {outcome.found}/{outcome.attention}"
        mark = "" if outcome.complete else "  INCOMPLETE"
        click.echo(f"{outcome.job.entry} {outcome.job.column} {outcome.variant}: {state}{mark}", err=True)

    chosen = [job for job in (jobs_of_whole() if form else jobs(quick=quick)) if not only or job.entry in only]
    if create_only:
        if files is None:
            raise UsageError("--create-only needs --files FOLDER")
        create_files(files, chosen)
        return
    outcomes = run_jobs(chosen, processes, show, kept, files, form=form or "")
    if form:
        text = table_of_form(outcomes, form)
        if output is None:
            click.echo(text, nl=False)
        else:
            (output.parent / "tables" / f"{form}.txt").write_text(text, encoding="utf-8")
        return
    command = "python -m models coverage" + (" --quick" if quick else "") + "".join(f" --only {name}" for name in only)
    if output is None:
        click.echo(f"{summary(outcomes, command)}\n{tables(outcomes)}", nl=False)
    else:
        write(output, outcomes, command)
    sums = totals(outcomes)
    click.echo(
        f"{sums['files']} files, {sums['failed']} fail; blocks: {sums['missed']} missed, {sums['wrong']} wrong; "
        f"attention layers: {sums['lost']} lost",
        err=True,
    )
    if sums["missed"] or sums["wrong"] or sums["failed"]:
        raise ValidationError("not every file passes; the last section of the tables says which and why")


def _line(done: Exported) -> str:
    return (
        f"{done.path.name}: {done.size_bytes / 1e6:.2f} MB, opset {done.opset}, "
        f"within {done.difference:.0e} of PyTorch (relative to the largest output)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; one line and an exit status for every expected error."""
    try:
        cli.main(arguments, prog_name="python -m models", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return int(ExitStatus.USAGE)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        return int(ExitStatus.USAGE)
    except RewriteError as error:
        click.echo(f"error: {error}", err=True)
        return int(error.exit_status)
    except OSError as error:
        click.echo(f"error: cannot write the file: {error.strerror}: {error.filename}", err=True)
        return int(ExitStatus.USAGE)
    except click.Abort:
        click.echo("interrupted; no file was written", err=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
