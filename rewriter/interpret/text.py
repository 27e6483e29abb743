"""The caller's inputs as cases of a model: arrays, or text as token ids.

Each text is a separate case, so masks are ones, positions count from 0, caches are empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.tokenizer import open_tokenizer, refusing, spelling
from rewriter.proof.inputs.cases import Case, Maker, load_cases
from rewriter.proof.inputs.specs import Role
from rewriter.proof.settings import Inputs, as_given
from rewriter.text import quoted


@dataclass(frozen=True, eq=False)
class Text:
    """Text as the input of a model, or arrays whose tokens a tokenizer spells."""

    text: str | Sequence[str]  # one, or several, each a separate case
    tokenizer: str | os.PathLike[str] | Any  # path of a `tokenizer.json` or its folder, or a `tokenizers.Tokenizer`
    arrays: Inputs | None = None


InputsOrText = Inputs | Text


@dataclass(frozen=True, eq=False)
class GivenCases:
    """Given inputs as cases; of texts also their tokens."""

    cases: tuple[Case, ...]
    spelled: tuple[tuple[str, ...], ...] = ()
    texts: tuple[str, ...] = ()
    tokenizer: Any = None

    @property
    def only(self) -> Case:
        if len(self.cases) != 1:
            raise UsageError(f"this takes one case, and there are {len(self.cases)}")
        return self.cases[0]

    def entry(self, number: int, count: int) -> str:
        """The tokenizer's text of entry `number` of an output with `count` entries; empty if these are not tokens."""
        number %= count
        known = 0 if self.tokenizer is None else self.tokenizer.get_vocab_size()
        return spelling(self.tokenizer, number) if number < known <= count else ""


def cases_of(model: onnx.ModelProto, inputs: InputsOrText) -> GivenCases:
    """The cases of given inputs. Raises UsageError where they, or the tokenizer, do not fit the model."""
    if not isinstance(inputs, Text):
        return GivenCases(load_cases(as_given(inputs), model))
    if inputs.arrays is None:
        return _tokenized(model, inputs)
    cases, opened = load_cases(as_given(inputs.arrays), model), open_tokenizer(inputs.tokenizer)
    every = [next(iter(_ids(model, case.feeds)), ()) for case in cases]
    known = all(opened.id_to_token(number) is not None for ids in every for number in ids)
    spellings = tuple(tuple(spelling(opened, number) for number in ids) for ids in every) if known else ()
    return GivenCases(cases, spellings, tokenizer=opened)


def _tokenized(model: onnx.ModelProto, given: Text) -> GivenCases:
    tokenizer = open_tokenizer(given.tokenizer)
    texts = (given.text,) if isinstance(given.text, str) else tuple(given.text)
    if not texts:
        raise UsageError("there is no text")
    maker = Maker(model)
    unknown = next((spec for spec in maker.specs if spec.role in (Role.FLOATS, Role.INTEGERS)), None)
    if unknown is not None:
        raise UsageError(f"text does not say what input {quoted(unknown.name)} is: give all inputs as arrays")
    found = [spec for spec in maker.specs if spec.role is Role.IDS]
    if len(found) != 1:
        what = f"text fills one input of token ids, and there are {len(found)}"
        raise UsageError(f"{what}: give all inputs as arrays")
    rows, longest, cases, spellings = found[0].rows, maker.longest, [], []
    for number, text in enumerate(texts):
        with refusing(f"the tokenizer cannot encode {quoted(text)}"):
            encoding = tokenizer.encode(text)
        ids = encoding.ids
        if not ids:
            raise UsageError(f"the tokenizer makes no tokens of {quoted(text)}")
        if rows is not None and max(ids) >= rows:
            what = f"the tokenizer gives token {max(ids)}, and the model knows {rows}"
            raise UsageError(f"{what}: the tokenizer belongs to another model")
        if longest is not None and len(ids) > longest:
            raise UsageError(f"the text has {len(ids)} tokens, and the model takes at most {longest}")
        feeds = dict(maker.case((1, len(ids), 0), number=1).feeds)
        for spec in maker.specs:
            if spec.role in {Role.IDS, Role.TOKEN_TYPES}:
                own = ids if spec.role is Role.IDS else encoding.type_ids
                shape = feeds[spec.name].shape
                if int(np.prod(shape)) != len(own):
                    raise UsageError(f"input {quoted(spec.name)} has shape {list(shape)}, which one text does not fill")
                feeds[spec.name] = np.asarray(own, dtype=spec.dtype).reshape(shape)
        cases.append(Case(str(number), feeds))
        with refusing(f"the tokenizer cannot decode {quoted(text)}"):
            spellings.append(tuple(spelling(tokenizer, each) for each in ids))
    return GivenCases(tuple(cases), tuple(spellings), texts, tokenizer)


def token_ids(model: onnx.ModelProto, feeds: Mapping[str, Array], length: int) -> tuple[int, ...] | None:
    """The token ids of the first sequence; None where no input has ids for that many tokens."""
    return next((ids for ids in _ids(model, feeds) if len(ids) == length), None)


def _ids(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> Iterator[tuple[int, ...]]:
    """The token ids of the first sequence in each input that has ids."""
    for spec in Maker(model).specs:
        array = feeds.get(spec.name)
        if spec.role is Role.IDS and array is not None and array.ndim > 1 and array.size:
            yield tuple(int(number) for number in array.reshape(-1, array.shape[-1])[0])
