"""`python -m benchmarks.programs_page`: the generated parts of docs/programs.md, and its drawings.

The text between the markers (`<!-- generated: NAME -->` to `<!-- end -->`), docs/figures/programs/*.svg and the
drawings of the line and the powers beside them are rewritten from the table of activations; text outside the markers is
written by hand and stays. The programs are those of form `local`. `--check` writes nothing and reports whether anything
would change.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.floats.report import FLOATS
from benchmarks.program_figures import FLOAT, example, figure, line_figure, portraits, powers_figure
from passes.programs.activations import ACTIVATIONS, Activation
from passes.programs.program import ARITHMETIC, Powers, Program

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "programs.md"
FIGURES = ROOT / "docs" / "figures" / "programs"
LINE, POWERS = (FIGURES.parent / f"error-{name}.svg" for name in ("line", "powers"))

_MOST_TOKENS = 5
_MINUS = "\N{MINUS SIGN}"
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """Every entry: the cost of its program, and its error."""
    rows = [
        "| activation | heads × keys | in other forms | stated error | float32: original → heads |",
        "| --- | --- | --- | --- | --- |",
    ]
    measured = _pairs()
    for entry in ACTIVATIONS:
        one = portraits().get(entry.name)
        if one is None:
            rows.append(f"| {entry.name} | fitted while planning | | | |")
            continue
        name = f"[{entry.name}](#{entry.name})"
        cost = costs(one.program, one.fewest)
        rows.append(f"| {name} | {cost} | {certified(one.program)} | {measured[one.program.name]} |")
    return "\n".join(rows) + "\n"


def gates() -> str:
    """Every entry as the gate of h(g) u."""
    rows = [
        "| gate | heads × keys | in other forms | stated error of the weight | up to \\|g\\| |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in ACTIVATIONS:
        program = gate_program(entry)
        fewest = entry.program_for(example(entry), ARITHMETIC[FLOAT], gated=True)
        if program is None or fewest is None:
            other = "none yet" if entry.program is not None else "fitted while planning"
            rows.append(f"| {entry.name} | {other} | | | |")
            continue
        cost = costs(program, fewest)
        domain = "any" if math.isinf(program.domain) else f"{program.domain:.0f}"
        rows.append(f"| {entry.name} | {cost} | {certified(program)} | {domain} |")
    return "\n".join(rows) + "\n"


def gate_program(entry: Activation) -> Program | None:
    """The program of h(g) u in form `local` of float32 models, None where none is known."""
    return entry.program_for(example(entry), ARITHMETIC[FLOAT], gated=True, quick=True)


def costs(program: Program, fewest: Program) -> str:
    """Heads per neuron times keys per head: of the program, and of that with the fewest heads where it is another."""
    return f"{_size(program)}{_asterisk(program)} | {'' if fewest == program else _size(fewest) + _asterisk(fewest)}"


def _size(program: Program) -> str:
    return f"{len(program.as_heads.heads)} × {program.bias_tokens + 1}"


def _asterisk(program: Program) -> str:
    return " *" if program.double else ""


def _pairs() -> dict[str, str]:
    """Program to its largest errors at every finite float32: those of the original, and of the heads."""
    found = json.loads(FLOATS.read_text(encoding="utf-8"))["errors"]["float32"]
    return {name: f"{_number(original)} → {_number(heads)}" for name, (heads, original) in found.items()}


def numbers() -> str:
    """One row per program: its keys with their logits and values. Fitted ones have too many to read."""
    rows = [
        "| program | self: logit, value | bias tokens: logit, value | outside the heads |",
        "| --- | --- | --- | --- |",
    ]
    for one in portraits().values():
        if one.program.powers is not None or not one.program.heads:
            continue
        (head,) = one.program.heads
        if len(head.bias_tokens) > _MOST_TOKENS:
            continue
        tokens = (f"{_affine(token.slope, token.offset)}, {_coefficient(token.value)}" for token in head.bias_tokens)
        own = f"{_affine(head.beta, head.gamma)}, {_affine(head.c, head.d)}"
        rest = _affine(one.program.linear, one.program.constant)
        rows.append(f"| {one.entry.name} | {own} | {'; '.join(tokens)} | {'' if rest == '0' else rest} |")
    return "\n".join(rows) + "\n"


def gallery() -> str:
    """The drawings."""
    parts = []
    for one in portraits().values():
        stated = ", ".join(f"{n} {v:.6g}" for n, v in zip(one.entry.parameters, one.parameters, strict=True))
        program = one.program
        notes = [] if math.isinf(program.domain) else [f"For |y| up to {program.domain:.4g}."]
        if program.powers is not None:
            logit = "y" if program.powers.step == 1.0 else f"({_coefficient(program.powers.step)} y)"
            notes.append(f"With r = e^{logit} and z = r + 1/r, h = {_sum_of_fractions(program.powers)}.")
        if program.line is not None:
            size = f"{len(program.line.head.logits)} keys with step {_coefficient(program.line.step)}"
            read = ", times heads whose self values are read from the line" if program.heads else ", times the line"
            notes.append(f"y{read}, of {size}.")
        drawing = f"![{one.entry.name}: values, weights, errors](figures/programs/{one.entry.name}.svg)"
        parts += [f"### {one.entry.name}", "", drawing, "", " ".join([f"Shown with {stated}.", *notes]), ""]
    return "\n".join(parts)


def certified(program: Program) -> str:
    """The stated error as the page prints it: rounded up."""
    return "exact" if program.max_error == 0.0 else _number(program.max_error)


def _sum_of_fractions(powers: Powers) -> str:
    """The h of the powers."""
    text = _term(powers.base) if powers.base else ""
    for fraction in powers.fractions:
        below = ""
        for part, shift in reversed(fraction):
            below = f"{_term(part)} / (z{_term(shift)}{below})"
        text += below
    return (_MINUS if text.startswith(f" {_MINUS}") else "") + text[3:]


def _term(number: float) -> str:
    """A further term of a sum."""
    return f" {_MINUS if number < 0.0 else '+'} {_coefficient(abs(number))}"


def _affine(slope: float, offset: float) -> str:
    terms = [(slope, " y"), (offset, "")]
    text = ""
    for factor, unit in terms:
        if factor:
            sign = _MINUS if factor < 0 else "+"
            size = _coefficient(abs(factor))
            body = unit.strip() if unit and size == "1" else f"{size}{unit}"
            text += f" {sign} {body}" if text else f"{_MINUS if factor < 0 else ''}{body}"
    return text or "0"


def _coefficient(value: float) -> str:
    power = math.log2(abs(value)) if value else 0.5  # 0 is not a power of two
    if power == round(power) and abs(power) >= 10:
        return f"{_MINUS if value < 0 else ''}2^{power:.0f}"
    return f"{value:.6g}".replace("-", _MINUS)


def _number(value: float) -> str:
    """Two digits, rounded up, so that a printed bound holds."""
    if not value:
        return "0"
    scale = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / scale - 1e-9) * scale:.1e}"


GENERATED: dict[str, Callable[[], str]] = {
    "table": table,
    "gates": gates,
    "numbers": numbers,
    "gallery": gallery,
}


def page(text: str) -> str:
    """The page with its generated parts rewritten."""
    return _PART.sub(lambda match: f"{match[1]}{GENERATED[match[2]]()}{match[3]}", text)


def figures() -> dict[Path, str]:
    """Path to drawing."""
    drawn = {FIGURES / f"{name}.svg": figure(one) for name, one in portraits().items()}
    return drawn | {LINE: line_figure(), POWERS: powers_figure()}


def main(arguments: list[str]) -> int:
    """Write the page and the drawings; with --check only compare."""
    wanted = figures()
    wanted[PAGE] = page(PAGE.read_text(encoding="utf-8"))
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale = sorted(set(FIGURES.glob("*.svg")) - set(wanted))
    for path in (*changed, *stale):
        print(path.relative_to(ROOT))
    if "--check" in arguments:
        return int(bool(changed or stale))
    FIGURES.mkdir(parents=True, exist_ok=True)
    for path in changed:
        path.write_text(wanted[path], encoding="utf-8")
    for path in stale:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
