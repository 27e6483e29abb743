"""Text as inputs: each text is a case of its own, so masks are ones, positions count from 0, caches are empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from rewriter.errors import UsageError
from rewriter.files.tokenizer import open_tokenizer, refusing, spelling
from rewriter.proof.inputs.cases import Case, Maker
from rewriter.proof.inputs.given import Text
from rewriter.proof.inputs.specs import InputSpec, Role
from rewriter.text import quoted

_UNKNOWN = (Role.FLOATS, Role.INTEGERS, Role.TIMESTEP, Role.KEEP)
"""Roles of inputs that text says nothing about."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Texts as token ids, and the spelling of these.

    Attributes:
        cases: the inputs, one case per text.
        spelled: the tokens of each text.
        texts: the texts.
        tokenizer: the `tokenizers.Tokenizer`.
    """

    cases: tuple[Case, ...]
    spelled: tuple[tuple[str, ...], ...]
    texts: tuple[str, ...]
    tokenizer: Any

    def entry(self, number: int, count: int) -> str:
        """How the tokenizer spells entry `number` of an output with `count` entries; empty if these are no tokens."""
        number %= count
        known = self.tokenizer.get_vocab_size()
        return spelling(self.tokenizer, number) if number < known <= count else ""


def tokenized(given: Text, model: onnx.ModelProto) -> Tokens:
    """The inputs of a model for given texts.

    Raises:
        UsageError: `tokenizers` is not installed, the tokenizer cannot be read or belongs to another model, a text has
            no tokens, or the model has inputs that text says nothing about.
    """
    tokenizer = open_tokenizer(given.tokenizer)
    texts = (given.text,) if isinstance(given.text, str) else tuple(given.text)
    if not texts:
        raise UsageError("there is no text")
    maker = Maker(model)
    ids = _ids_input(maker.specs)
    cases, spelled = [], []
    for number, text in enumerate(texts):
        with refusing(f"the tokenizer cannot encode {quoted(text)}"):
            encoding = tokenizer.encode(text)
        _check(encoding.ids, text, ids, maker.longest)
        feeds = dict(maker.case((1, len(encoding.ids), 0), number=1).feeds)
        for spec in maker.specs:
            if spec.role in {Role.IDS, Role.TOKEN_TYPES}:
                own = encoding.ids if spec.role is Role.IDS else encoding.type_ids
                shape = feeds[spec.name].shape
                if int(np.prod(shape)) != len(own):
                    raise UsageError(f"input {quoted(spec.name)} has shape {list(shape)}, which one text does not fill")
                feeds[spec.name] = np.asarray(own, dtype=spec.dtype).reshape(shape)
        cases.append(Case(str(number), feeds))
        with refusing(f"the tokenizer cannot decode {quoted(text)}"):
            spelled.append(tuple(spelling(tokenizer, each) for each in encoding.ids))
    return Tokens(tuple(cases), tuple(spelled), texts, tokenizer)


def _ids_input(specs: Sequence[InputSpec]) -> InputSpec:
    """The input of token ids. Raises UsageError unless there is one."""
    unknown = next((spec for spec in specs if spec.role in _UNKNOWN), None)
    if unknown is not None:
        raise UsageError(f"text does not say what input {quoted(unknown.name)} is: give all inputs as arrays")
    found = [spec for spec in specs if spec.role is Role.IDS]
    if len(found) != 1:
        raise UsageError(f"text fills one input of token ids, and there are {len(found)}: give all inputs as arrays")
    return found[0]


def _check(ids: Sequence[int], text: str, spec: InputSpec, longest: int | None) -> None:
    """Raises UsageError if a model cannot take these tokens."""
    if not ids:
        raise UsageError(f"the tokenizer makes no tokens of {quoted(text)}")
    if spec.rows is not None and max(ids) >= spec.rows:
        what = f"the tokenizer gives token {max(ids)}, and the model knows {spec.rows}"
        raise UsageError(f"{what}: the tokenizer belongs to another model")
    if longest is not None and len(ids) > longest:
        raise UsageError(f"the text has {len(ids)} tokens, and the model takes at most {longest}")
