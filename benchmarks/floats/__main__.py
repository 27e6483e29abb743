"""`python -m benchmarks.floats`: what rounding adds, at every number that a pre-activation can be.

Each activation of the table in docs/programs.md, and the heads that form `local` puts in its place, run in onnxruntime
on the CPU at every finite number of the type; both are compared with the activation in float64. float16 and bfloat16
take seconds, float32 one to four minutes each. A run that is stopped goes on where it was (the state is beside the
results). A row is measured once per pair of models, build of onnxruntime and instruction set.
"""

import math
import time
from pathlib import Path

import click

from benchmarks.common import RESULTS, print_table
from benchmarks.floats.atlas import Entry, Source, entries, write
from benchmarks.floats.errors import KINDS
from benchmarks.floats.pairs import pair
from benchmarks.floats.subjects import SUBJECTS

ATLAS = RESULTS / "floats.json"
_SAVED = 64
"""The state is written after so many blocks."""


@click.command()
@click.option("--type", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Repeatable. Default: all.")
@click.option("--only", multiple=True, type=click.Choice(list(SUBJECTS)), help="Only this activation; repeatable.")
@click.option("--minutes", type=float, default=math.inf, help="Stop after this time; the next run goes on.")
@click.option("--on", type=click.Choice(("cpu", "cuda")), default="cpu", help="Execution provider.")
@click.option("--json", "output", type=click.Path(path_type=Path), default=ATLAS, help="Where the results are.")
def main(kinds: tuple[str, ...], only: tuple[str, ...], minutes: float, on: str, output: Path) -> None:
    """Both models at every finite number of the types."""
    end, left = time.monotonic() + 60.0 * minutes, list[str]()
    for kind in kinds or KINDS:
        for name in only or SUBJECTS:
            if time.monotonic() >= end or not measured(name, kind, output, end, on):
                left.append(f"{name} in {kind}")
    rows = entries(output)
    head = ("activation", "type", "original", "rewritten", "at", "ulp, original", "ulp, rewritten")
    print_table("Largest errors over max(1, |f|), and in units in the last place of f", head, list(map(_shown, rows)))
    for each in left:
        click.echo(f"not measured: {each}")


def measured(name: str, kind: str, output: Path, end: float = math.inf, on: str = "cpu") -> bool:
    """Measure one activation in one type, or go on with it, until the clock says `end`: whether it is complete."""
    found = pair(SUBJECTS[name], KINDS[kind], on)
    if isinstance(found, str):
        click.echo(f"{name} in {kind}: {found}")
        return False
    entry = Entry.begun(name, kind, found, Source.here(on))
    if any(each.key == entry.key for each in entries(output)):
        return True
    state = output.with_suffix(".state.json")
    begun = entries(state)
    entry = next((each for each in begun if each.key == entry.key), entry)
    others = [each for each in begun if (each.activation, each.type) != (name, kind)]
    while not entry.complete and time.monotonic() < end:
        entry.extend(found, SUBJECTS[name].exact)
        if entry.done % _SAVED == 0:
            write(state, [*others, entry])
    if not entry.complete:
        write(state, [*others, entry])
        return False
    order = [(each, one) for each in KINDS for one in SUBJECTS]
    kept = [row for row in entries(output) if (*row.key[:3],) != (*entry.key[:3],)]
    write(output, sorted([*kept, entry], key=lambda row: order.index((row.type, row.activation))))
    if others:
        write(state, others)
    else:
        state.unlink(missing_ok=True)
    return True


def _shown(row: Entry) -> tuple[str, ...]:
    one, two = row.original, row.rewritten
    pairs = ("" if one is None else f"{one.relative:.2g}", f"{two.relative:.2g}", two.relative_at)
    return row.activation, row.type, *pairs, "" if one is None else f"{one.ulp:.3g}", f"{two.ulp:.3g}"


if __name__ == "__main__":
    main()
