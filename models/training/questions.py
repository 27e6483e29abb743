"""Standard questions as text: indirect objects, greater-than, induction, agreement, capitals; for encoders paraphrases.

Each `Prompt` is a text, the same with one word changed, and two next words between which the change decides:

    indirect-object  `When Mary and John went to the shop, John gave a book to` -> Mary, not John (Wang et al., 2023);
                     the change repeats the other name
    greater-than     `The war lasted from the year 1741 to the year 17` -> 58, not 23 (Hanna et al., 2023); the change
                     lets it begin in the year 01, so both can follow
    induction        random words, repeated up to the middle; the change is in the word that comes next
    agreement        `The keys near the car` -> are, not is; the change is in the number of the first noun
    capital          `The capital of France is the city of` -> Paris, not Berlin; the change names the other country

Encoders of sentences have no next word: they are asked which of two paraphrases a sentence is closer to. Text and
change differ in the subject, the action or the place, and so do the paraphrases:

    A dog is sleeping in the garden, or changed: A horse is sleeping in the garden
    Inside that garden you can see the dog sleeping, not the horse

Words are single tokens of GPT-2's, SmolLM2's or BERT's tokenizer, as far as known; a benchmark leaves out prompts where
they are not. Tokenizers that split numbers read the first digit of an answer: the wrong one is in an earlier decade.
"""

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
COUNTED = _split("dog cat horse teacher doctor farmer soldier friend student author pilot guard")
_PHRASES = ("The {own} near the {other}", "The {own} behind the {other}", "The {own} that saw the {other}")
CAPITALS = _split(
    "France Paris Germany Berlin Italy Rome Spain Madrid Russia Moscow China Beijing Japan Tokyo England London Egypt "
    "Cairo Greece Athens Ireland Dublin Austria Vienna Sweden Stockholm Portugal Lisbon Cuba Havana Peru Lima "
    "Poland Warsaw Norway Oslo Hungary Budapest Kenya Nairobi Iran Tehran Iraq Baghdad Syria Damascus"
)
_CITIES = ("The capital of {country} is the city of", "The capital city of {country} is called")
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
    wrong = min(wrong, start - start % 10 - 1) if start > 9 else wrong
    words = {"event": generator.choice(EVENTS), "century": generator.choice(CENTURIES)}
    text, corrupted = (_SPAN.format(start=f"{year:02d}", **words) for year in (start, _FIRST))
    return Prompt(text, corrupted, f"{right:02d}", f"{wrong:02d}")


def induction(generator: Generator) -> Prompt:
    """Which word followed the last time."""
    *words, other = (f" {word}" for word in generator.choice(_WORDS, _PERIOD + 1, replace=False))
    changed = [*words[:_REPEATED], other, *words[_REPEATED + 1 :]]
    asked = words[:_REPEATED]
    return Prompt("".join([*words, *asked]), "".join([*changed, *asked]), words[_REPEATED], other)


def agreement(generator: Generator) -> Prompt:
    """Which verb agrees with the first of two nouns."""
    one, other = generator.choice(COUNTED, 2, replace=False)
    other, phrase = f"{other}{generator.choice(['', 's'])}", _PHRASES[generator.integers(len(_PHRASES))]
    texts = [(phrase.format(own=own, other=other), verb) for own, verb in ((one, " is"), (f"{one}s", " are"))]
    (text, right), (corrupted, wrong) = texts[:: generator.choice([1, -1])]
    return Prompt(text, corrupted, right, wrong)


def capital(generator: Generator) -> Prompt:
    """Which city is the capital of a country."""
    asked, template = 2 * generator.choice(len(CAPITALS) // 2, 2, replace=False), generator.integers(len(_CITIES))
    text, corrupted = (_CITIES[template].format(country=CAPITALS[place]) for place in asked)
    right, wrong = (f" {CAPITALS[place + 1]}" for place in asked)
    return Prompt(text, corrupted, right, wrong)


QUESTIONS: Mapping[str, Callable[[Generator], Prompt]] = MappingProxyType(
    {"indirect-object": indirect_object, "greater-than": greater_than, "induction": induction}
)
FURTHER: Mapping[str, Callable[[Generator], Prompt]] = MappingProxyType({"agreement": agreement, "capital": capital})
"""Questions of language models: the committed decoder has not learned them."""


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
