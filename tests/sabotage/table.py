"""The table of all sabotages, read from `rows.txt`, and the sample that always runs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tests.sabotage.edits import patch
from tests.sabotage.harness import Patch
from tests.sabotage.subjects import Subject, on


class Expect(Enum):
    """How a sabotage must end."""

    BLOCK = "fails, and names the block"
    MODEL = "fails"
    REFUSED = "fails, or the file is refused"
    HARMLESS = "the outputs are within the certificate"
    UNSEEN = "passes: it is wrong for so few sizes or values that no sample of them helps"


@dataclass(frozen=True)
class Sabotage:
    """One way to be wrong. A message must name the `block`, counted as the report does, and hold one of the `words`.

    A harmless one makes outputs differ by at most `below` of the largest. An `honest` one is the model's own fault.
    """

    name: str
    patch: Patch
    subjects: tuple[Subject, ...]
    expect: Expect = Expect.BLOCK
    block: int = 0
    words: tuple[str, ...] = ()
    below: float = 0.0
    honest: bool = False


_FIRST = ("*0*", "mlp")
"""Only the first block, where a form takes long."""

_MASKED = {"form": "masked", "only": _FIRST}
_COMPACT, _MASKLESS, _STAGED = (
    {"form": form, "only": _FIRST, "max_tokens": 70} for form in ("compact", "maskless", "staged")
)

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "": ("", {}),
    "compact": (", form compact", _COMPACT),
    "masked": (", form masked", _MASKED),
    "maskless": (", form maskless", _MASKLESS),
    "staged": (", form staged", _STAGED),
    "whole": (", form whole", {"form": "whole", "max_tokens": 64}),
    "whole to 80": (", form whole", {"form": "whole", "max_tokens": 80}),
    "whole to 90": (", form whole", {"form": "whole", "max_tokens": 90}),
    "in segments": (", in segments", {"proof": "blocks"}),
    "inlined": (", inlined", {"inline": True}),
    "scope all": ("", {"scope": "all"}),
    "empty": ("", {"dims": {"tokens": 0}}),
    "no batch": ("", {"dims": {"batch": 0}}),
}
"""How models are rewritten: what is added to the sabotage's name, and the options. 64 are the positions of decoders."""

_WORDS, _SAMPLE = "words for what is done to tensors; %1 and %2 are arguments", "the sample that always runs"


def _sections() -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for line in (Path(__file__).parent / "rows.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("= "):
            rows = found[line[2:]] = []
        elif line and not line.startswith("#"):
            rows.append(line.split(" | "))
    return found


def _groups(cell: str) -> Iterator[tuple[str, tuple[Subject, ...]]]:
    """Variants and the models tried in each: `relu; masked, staged: silu gelu`."""
    for group in cell.split("; "):
        variants, _, models = group.rpartition(": ")
        for variant in variants.split(", "):
            yield variant, on(*models.split(), **VARIANTS[variant][1])


_STEPS = re.compile(r"\[([^]]+)\]")


def _read(row: list[str], expected: str) -> Iterator[Sabotage]:
    """The sabotages of a row: one for each step in brackets, which is `@` in what is done, and for each variant."""
    names, models, where, what, *ending = row
    steps = _STEPS.search(names)
    for step in steps[1].split() if steps else ("",):
        named = _STEPS.sub(step, names)
        done = _spelled_out(what.replace("@", step) if step else what)
        by_name: dict[str, tuple[Subject, ...]] = {}
        for variant, subjects in _groups(models):
            by_name[named + VARIANTS[variant][0]] = by_name.get(named + VARIANTS[variant][0], ()) + subjects
        for name, tried in by_name.items():
            whole = tried[0].options.get("form") == "whole"
            plain = Sabotage(name, patch(where, done, only_carried=whole), tried)
            yield _ending(plain, ending[0] if ending else expected)


def _spelled_out(text: str) -> str:
    """A text with the words in braces, `{rolled: 2}`, replaced by their meaning."""

    def meaning(match: re.Match[str]) -> str:
        word, _, arguments = match[1].partition(": ")
        found = TEXTS[word]
        for number, argument in enumerate(arguments.split("; "), 1):
            found = found.replace(f"%{number}", argument)
        return _spelled_out(found)

    return re.sub(r"\{([a-z][a-z ]+(?:: [^{}]*)?)\}", meaning, text)


def _ending(sabotage: Sabotage, told: str) -> Sabotage:
    """How it must end: `fails`, `refused`, `harmless 1e-6`, `passes`, `block 1`, `says --a or --b`, `honest`."""
    for part in filter(None, told.split("; ")):
        word, _, rest = part.partition(" ")
        if word == "block":
            sabotage = replace(sabotage, block=int(rest))
        elif word == "says":
            sabotage = replace(sabotage, words=tuple(rest.split(" or ")))
        elif word == "honest":
            sabotage = replace(sabotage, honest=True)
        else:
            sabotage = replace(sabotage, expect=_ENDINGS[word], below=float(rest or 0))
    return sabotage


_ENDINGS = {"fails": Expect.MODEL, "refused": Expect.REFUSED, "harmless": Expect.HARMLESS, "passes": Expect.UNSEEN}

_ROWS = _sections()
TEXTS = dict(" | ".join(row).split(" = ", 1) for row in _ROWS.pop(_WORDS))
_SAMPLED = _ROWS.pop(_SAMPLE)

FAMILIES: Mapping[str, tuple[Sabotage, ...]] = {
    kind: tuple(sabotage for row in rows for sabotage in _read(row, expected))
    for (kind, _, expected), rows in ((title.partition(" | "), rows) for title, rows in _ROWS.items())
}
"""Kind to sabotages."""

TABLE = tuple(sabotage for family in FAMILIES.values() for sabotage in family)
_BY_NAME = {sabotage.name: sabotage for sabotage in TABLE}

SAMPLE = tuple(
    replace(_BY_NAME[name], subjects=tuple(subject for _, tried in _groups(cell) for subject in tried))
    for name, cell in _SAMPLED
)
"""One or two of each kind, on models that take a fraction of a second."""
