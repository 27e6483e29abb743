"""`python -m benchmarks.fit NAME`: fit head programs, prove their errors, and write the table.

    python -m benchmarks.fit gelu --keys 8 --float32         # one head, 8 bias tokens, coefficients on the float32 grid
    python -m benchmarks.fit gelu --keys 8 --values 3 --write # for gates: three values other than zero
    python -m benchmarks.fit softsign --domain -16 16         # as many heads and keys as the tolerance needs
    python -m benchmarks.fit numpy:arctan --domain -8 8       # any function of an array
    python -m benchmarks.fit gelu_tanh --powers 13 --step 1 --no-base --float32   # equally spaced: one exponential
    python -m benchmarks.fit line --keys 13 --domain -512 512 --step 0.125 --float32   # the line g as attention

NAME is an activation of the table, or `module:function`.
`--keys` searches for one head (needs scipy); without it the fit is that of the runtime, up to `--tolerance`. `--powers`
needs scipy, `line` needs mpmath; both print numbers, with an error that is measured.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import click
import numpy as np

from benchmarks.fit import float32, lines, powers, table
from benchmarks.fit.minimax import from_program
from benchmarks.fit.parameters import Layout, to_program
from benchmarks.fit.polish import polish, target
from benchmarks.fit.search import Task, free_parameters, points, search
from passes.fit import fit_function
from passes.programs.program import Array, Program, fitted_programs
from rewriter.graph.view import LostError

Function = Callable[[Array], Array]

_PREFIX = {"gelu": "gelu_erf"}
_LINE = "line"
_FEWEST = 4
_FAR = 9.0
"""Largest |y| of a search over all reals; GELU is within 1e-17 of a line beyond it."""


@click.command()
@click.argument("name")
@click.option("--keys", type=click.IntRange(1, 24), help="Bias tokens of one head; left out: as the tolerance needs.")
@click.option("--powers", "spaced", type=click.IntRange(5, 15), help="Number of equally spaced keys, an odd one.")
@click.option(
    "--step", type=click.FloatRange(min=0.0, min_open=True), help="Step of a line, or of the keys of --powers."
)
@click.option("--base/--no-base", "based", default=True, help="Whether --powers has a base.")
@click.option("--values", type=click.IntRange(0, 24), help="Values other than zero among them: a program for gates.")
@click.option("--domain", type=(float, float), help="Where y lies; left out: all reals.")
@click.option("--float32", "single", is_flag=True, help="Polish the coefficients on the float32 grid.")
@click.option("--tolerance", type=float, default=1e-6, show_default=True, help="Error wanted, without --keys.")
@click.option("--starts", type=click.IntRange(1), default=60, show_default=True, help="Starts of the search.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@click.option("--write", is_flag=True, help="Put the entry into programs.json where it is better than the one there.")
def main(
    name: str,
    keys: int | None,
    spaced: int | None,
    step: float | None,
    based: bool,
    values: int | None,
    domain: tuple[float, float] | None,
    single: bool,
    tolerance: float,
    starts: int,
    seed: int,
    write: bool,
) -> None:
    """Fit NAME by attention heads and print the entry of the table."""
    if name == _LINE or spaced is not None:
        if write:
            raise click.ClickException("--write only takes heads with their own numbers")
        found = _line(keys, domain, step, single) if spaced is None else _in_powers(name, spaced, single, step, based)
        click.echo(json.dumps(found))
        return
    f = _function(name)
    if keys is None:
        program = _by_tolerance(name, f, domain, tolerance)
        single = True
    else:
        program = _by_keys(name, f, Task(*_points(f, domain), keys, values, domain is None), starts, seed, single)
        program = replace(program, domain=math.inf if domain is None else max(abs(end) for end in domain))
    if name not in table.FUNCTIONS:
        if write:
            raise click.ClickException(f"{name} is not an activation of the table: no entry")
        click.echo(f"{program.name}: largest error {program.max_error:.3g}, measured; {len(program.heads)} heads")
        return
    made = table.make(program, name, single=single, gate=values is not None)
    click.echo(json.dumps(made.entry))
    if write and _improves(made):
        table.write([made.entry])
        click.echo(f"written to {table.PATH.name}", err=True)


def _line(keys: int | None, domain: tuple[float, float] | None, step: float | None, single: bool) -> dict[str, object]:
    if keys is None or keys < _FEWEST or domain is None or step is None:
        raise click.ClickException(f"a line needs --keys ({_FEWEST} or more), --domain and --step")
    return lines.entry(keys, max(abs(end) for end in domain) * step, step, single=single)


def _in_powers(name: str, keys: int, single: bool, step: float | None, based: bool) -> dict[str, object]:
    if name not in _PREFIX and name != "gelu_tanh":
        raise click.ClickException(f"{name} is not y Phi(y) with Phi(-y) = 1 - Phi(y)")
    if keys % 2 == 0:
        raise click.ClickException("--powers takes an odd number of keys")
    made, error = powers.fit(name, keys, single=single, step=step, based=based)
    if not math.isfinite(error):
        raise click.ClickException("every fit found divides by a number near 0; try another --step, or leave it out")
    numbers = {"step": made.step, "parts": made.parts, "shifts": made.shifts, "pairs": made.pairs, "base": made.base}
    return {"name": f"{_PREFIX.get(name, name)}_k{keys}", "activation": name, "max_error": error} | numbers


def _function(name: str) -> Function:
    if name in table.FUNCTIONS:
        return table.FUNCTIONS[name]
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(table.FUNCTIONS)
        raise click.ClickException(
            f"{name} is neither an activation ({known}) nor a module:function ({error})"
        ) from error


def _points(f: Function, domain: tuple[float, float] | None) -> tuple[Array, Array]:
    if domain is not None:
        return points(f, *domain)
    y, _ = points(f, -_FAR, _FAR)
    y = np.unique(np.concatenate([y, [-30.0, -20.0, -14.0, -12.0, -10.5, 10.5, 12.0, 16.0, 20.0]]))
    return y, f(y)


def _by_keys(name: str, f: Function, task: Task, starts: int, seed: int, single: bool) -> Program:
    rows = [*fitted_programs(), *fitted_programs("gate")]
    known = [from_program(program)[1] for activation, program in rows if activation == name and len(program.heads) == 1]
    layout = Layout((task.keys,))
    _, x = search(task, known, starts=starts, seed=seed)
    title = f"{_PREFIX.get(name, name)}_m{task.keys}" + (f"_v{task.values}" if task.values is not None else "")
    if not single:
        return to_program(layout, x, title)
    judge = target(f, task.y, float(np.max(np.abs(task.y))))
    _, program, _ = polish(layout, x, free_parameters(task, layout, x), judge, tries=8 * starts, seed=seed)
    return replace(program, name=title)


def _by_tolerance(name: str, f: Function, domain: tuple[float, float] | None, tolerance: float) -> Program:
    if domain is None:
        raise click.ClickException("give --domain LO HI, or --keys for a fit over all reals")
    reach = max(abs(end) for end in domain)
    try:
        return float32.on_grid(fit_function(f, reach, tolerance, f"{name.replace(':', '_')}_{reach:g}"))
    except LostError as lost:
        raise click.ClickException(lost.miss.reason) from lost


def _improves(made: table.Made) -> bool:
    """Whether the table has no entry with this name, or one that is worse in float32 or in exact arithmetic."""
    rows = [program for _, program in (*fitted_programs(), *fitted_programs("gate"))]
    old = next((program for program in rows if program.name == made.entry["name"]), None)
    return old is None or made.max_error < old.max_error or made.float32_error < old.rounding


if __name__ == "__main__":
    main()
