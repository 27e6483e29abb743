"""Standard questions as text: indirect objects, greater-than, induction, and for encoders what a sentence is like.

Each `Prompt` is a text, the same with one word changed, and two next words between which the change decides:

    indirect-object  `When Mary and John went to the shop, John gave a book to` -> Mary, not John (Wang et al., 2023);
                     the change repeats the other name
    greater-than     `The war lasted from the year 1741 to the year 17` -> 58, not 23 (Hanna et al., 2023); the change
                     lets it begin in the year 01, so both can follow
    induction        random words, repeated up to the middle; the change is in the word that comes next

Encoders of sentences have no next word: they are asked which of two paraphrases a sentence is closer to. Text and
change differ in the subject, the action or the place, and so do the paraphrases:

    A dog is sleeping in the garden, or changed: A horse is sleeping in the garden
    Inside that garden you can see the dog sleeping, not the horse

Words are single tokens of GPT-2's or BERT's tokenizer, as far as known; a benchmark leaves out prompts where they are
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES = _split("Mary John Tom James Dan Martin Amy Anna Paul Mark David Kate Sarah Peter Laura Simon")
PLACES = _split("store garden restaurant school hospital office house station")
OBJECTS = _split("ring kiss bone basketball computer necklace drink snack book letter")
EVENTS = _split("war trial journey siege reign strike drought famine project voyage")
CENTURIES = ("16", "17", "18")
_FIRST = 1

_GIFTS = (
    "When {one} and {other} went to the {place}, {giver} gave a {object} to",
    "Then, {one} and {other} had a long talk at the {place}. {giver} gave a {object} to",
    "After {one} and {other} left the {place}, {giver} handed a {object} to",
    "Then, {one} and {other} worked at the {place}. {giver} sent a {object} to",
)
_SPAN = "The {event} lasted from the year {century}{start} to the year {century}"
_PERIOD, _REPEATED = 8, 5
SUBJECTS = _split("dog cat horse child woman man doctor soldier teacher farmer")
ACTIONS = _split("sleeping running singing eating dancing reading playing waiting")
SCENES = _split("garden kitchen forest school hospital church station library")
_SENTENCES = (
    "A {subject} is {action} in the {scene}",
    "The {subject} was {action} near the {scene}",
    "One {subject} kept {action} behind the {scene}",
)
_PARAPHRASE = "Inside that {scene} you can see the {subject} {action}"
_WORDS = (*NAMES, *PLACES, *OBJECTS, *EVENTS)

Generator = np.random.Generator


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        text: the question.
        corrupted: the same with one word changed.
        right: what follows `text`; for encoders what means the same.
        wrong: what does not; for encoders what means the same as `corrupted`.
    """

    text: str
    corrupted: str
    right: str
    wrong: str


def indirect_object(generator: Generator) -> Prompt:
    """Who was given something."""
    one, other = (str(name) for name in generator.choice(NAMES, 2, replace=False))
    places = {"place": generator.choice(PLACES), "object": generator.choice(OBJECTS)}
    template = _GIFTS[generator.integers(len(_GIFTS))]
    first, second = (template.format(one=one, other=other, giver=giver, **places) for giver in (one, other))
    if generator.integers(2):
        return Prompt(first, second, f" {other}", f" {one}")
    return Prompt(second, first, f" {one}", f" {other}")


def greater_than(generator: Generator) -> Prompt:
    """Which year can end something."""
    wrong, start, right = np.sort(generator.choice(np.arange(2, 100), 3, replace=False))
    words = {"event": generator.choice(EVENTS), "century": generator.choice(CENTURIES)}
    text, corrupted = (_SPAN.format(start=f"{year:02d}", **words) for year in (start, _FIRST))
    return Prompt(text, corrupted, f"{right:02d}", f"{wrong:02d}")


def induction(generator: Generator) -> Prompt:
    """Which word followed the last time."""
    *words, other = (f" {word}" for word in generator.choice(_WORDS, _PERIOD + 1, replace=False))
    changed = [*words[:_REPEATED], other, *words[_REPEATED + 1 :]]
    asked = words[:_REPEATED]
    return Prompt("".join([*words, *asked]), "".join([*changed, *asked]), words[_REPEATED], other)


QUESTIONS: Mapping[str, Callable[[Generator], Prompt]] = MappingProxyType(
    {"indirect-object": indirect_object, "greater-than": greater_than, "induction": induction}
)


def _sentence(generator: Generator, changed: str) -> Prompt:
    """Which paraphrase a sentence is like, if one word is changed."""
    words = {"subject": SUBJECTS, "action": ACTIONS, "scene": SCENES}
    drawn = {name: generator.choice(known, 2, replace=False) for name, known in words.items()}
    one = {name: pair[0] for name, pair in drawn.items()}
    other = {**one, changed: drawn[changed][1]}
    template = _SENTENCES[generator.integers(len(_SENTENCES))]
    made = [text.format(**each) for text in (template, _PARAPHRASE) for each in (one, other)]
    return Prompt(*made)


SENTENCES: Mapping[str, Callable[[Generator], Prompt]] = MappingProxyType(
    {name: partial(_sentence, changed=name) for name in ("subject", "action", "scene")}
)
"""Questions of encoders."""


def questions_tokenizer() -> Any:
    """A tokenizer that knows the words of all questions, each with the space before it, as GPT-2's has them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    text = " ".join((*_GIFTS, _SPAN)).translate(str.maketrans("", "", "{},."))
    fixed = (word for word in text.split() if word not in ("one", "other", "place", "giver", "object", "event"))
    words = sorted({f" {word}" for word in (*fixed, *_WORDS) if word.isalpha()})
    years = [f"{year:02d}" for year in range(100)]
    known = ("<end>", "When", "Then", "After", "The", ",", ".", *(f" {each}" for each in CENTURIES), *years, *words)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<end>"))
    pattern = Regex(r" ?\p{L}+| ?\d\d|[,.]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def questions_batches(tokenizer: Any, batch: int, length: int, generator: Generator) -> Iterator[tuple[Any, Any]]:
    """Questions with their answers, ids [batch, length], and which of them can be known, without end.

    Half of them are about indirect objects, which take longest to learn. Of words that repeat, all repeated ones count.
    """
    while True:
        ids, known = np.zeros((2, batch, length), np.int64)
        for row, (own, counted) in enumerate(zip(ids, known, strict=True)):
            if row % 4 == 0:
                found, first = _repeated(tokenizer, length, generator)
            else:
                found = tokenizer.encode(_span(generator) if row % 4 == 1 else _gift(generator)).ids
                first = len(found) - 1
            own[: len(found)], counted[first : len(found)] = found, 1
        yield ids, known.astype(bool)


def _gift(generator: Generator) -> str:
    prompt = indirect_object(generator)
    return prompt.text + prompt.right


def _span(generator: Generator) -> str:
    start = int(generator.integers(_FIRST, 99))
    words = {"event": generator.choice(EVENTS), "century": generator.choice(CENTURIES)}
    return f"{_SPAN.format(start=f'{start:02d}', **words)}{generator.integers(start + 1, 100):02d}"


def _repeated(tokenizer: Any, length: int, generator: Generator) -> tuple[Any, int]:
    period = int(generator.integers(4, length // 2))
    words = generator.choice(_WORDS, period, replace=False)
    return np.resize(tokenizer.encode("".join(f" {word}" for word in words)).ids, length), period
