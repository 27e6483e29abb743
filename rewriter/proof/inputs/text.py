"""Inputs made from text: a tokenizer gives the token ids, and the other inputs follow from the model.

Every text is a case of its own, so nothing is padded: masks are ones, positions count from 0, caches are empty. The
package `tokenizers` (extra `text`) reads the tokenizer, from a `tokenizer.json` as Hugging Face models have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.errors import UsageError
from rewriter.graph.view import GraphView
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.dims import Setting, Sizes, resolve
from rewriter.proof.inputs.embedding_tables import Tables, find_tables, main_scope
from rewriter.proof.inputs.given import Text
from rewriter.proof.inputs.roles import InputSpec, Role, input_specs
from rewriter.proof.inputs.values import Request, make_values
from rewriter.proof.inputs.weight_hints import find_hints
from rewriter.text import clean, one_line, quoted

_FILE = "tokenizer.json"
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


def tokenized(given: Text, model: onnx.ModelProto, view: GraphView) -> Tokens:
    """The inputs of a model for given texts.

    Raises:
        UsageError: `tokenizers` is not installed, the tokenizer cannot be read or belongs to another model, a text has
            no tokens or too many, or the model has inputs that text says nothing about.
    """
    tokenizer = open_tokenizer(given.tokenizer)
    texts = (given.text,) if isinstance(given.text, str) else tuple(given.text)
    if not texts:
        raise UsageError("there is no text")
    specs = input_specs(model, view)
    ids = _ids_input(specs)
    scope = main_scope(model, view)
    tables, hints = find_tables(scope), find_hints(scope)
    cases, spelled = [], []
    for number, text in enumerate(texts):
        with _refused(f"the tokenizer cannot encode {quoted(text)}"):
            encoding = tokenizer.encode(text)
        count = len(encoding.ids)
        _check(encoding.ids, text, ids, tables)
        sizes = resolve(specs, Setting(1, count), hints=hints, fixed={}, longest=count)
        feeds = {spec.name: _values(spec, sizes, encoding, tables) for spec in specs}
        cases.append(Case(str(number), feeds))
        with _refused(f"the tokenizer cannot decode {quoted(text)}"):
            spelled.append(tuple(spelling(tokenizer, each) for each in encoding.ids))
    return Tokens(tuple(cases), tuple(spelled), texts, tokenizer)


def spelling(tokenizer: Any, number: int) -> str:
    """One token, as text where it is whole characters, else as the tokenizer names it; without control characters."""
    decoded = str(tokenizer.decode([number], skip_special_tokens=False))
    named = tokenizer.id_to_token(number)
    usable = decoded and "\N{REPLACEMENT CHARACTER}" not in decoded
    return _visible(decoded if usable or named is None else str(named))


def _visible(text: str) -> str:
    """Line breaks and tabs as their escapes, other control characters replaced."""
    return clean(text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t"))


def open_tokenizer(tokenizer: Any) -> Any:
    """A `tokenizers.Tokenizer` without padding and truncation; `tokenizer` is as in `Text`.

    Raises:
        UsageError: `tokenizers` is not installed, or the tokenizer cannot be read.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("this needs the package tokenizers: pip install 'attnonly[text]'") from None
    if isinstance(tokenizer, Tokenizer):
        # A copy: padding and truncation of the caller's own stay as they are.
        opened = Tokenizer.from_str(tokenizer.to_str())
    else:
        try:
            path = Path(tokenizer)
        except TypeError:
            kind = type(tokenizer).__name__
            raise UsageError(f"a tokenizer is a {_FILE} or a tokenizers.Tokenizer, not a {kind}") from None
        path = path / _FILE if path.is_dir() else path
        if not path.is_file():
            raise UsageError(f"{quoted(path)}: no such file; a tokenizer is a {_FILE}, as Hugging Face models have it")
        with _refused(f"{quoted(path)} is not a {_FILE}"):
            opened = Tokenizer.from_file(str(path))
    opened.no_padding()
    opened.no_truncation()
    return opened


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Raises UsageError for whatever the package raises: Exception itself, and a BaseException where Rust panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - see above
        raise UsageError(f"{what}: {one_line(error, 120)}") from None


def _ids_input(specs: Sequence[InputSpec]) -> InputSpec:
    """The input of token ids. Raises UsageError if there is none, or more than one."""
    unknown = next((spec for spec in specs if spec.role in _UNKNOWN), None)
    if unknown is not None:
        raise UsageError(f"text does not say what input {quoted(unknown.name)} is: give all inputs as arrays")
    found = [spec for spec in specs if spec.role is Role.IDS]
    if not found:
        raise UsageError("the model has no input of token ids: give its inputs as arrays")
    if len(found) > 1:
        listed = " and ".join(quoted(spec.name) for spec in found)
        raise UsageError(f"inputs {listed} both take tokens, and there is one text: give all inputs as arrays")
    return found[0]


def _check(ids: Sequence[int], text: str, spec: InputSpec, tables: Tables) -> None:
    """Raises UsageError if a model cannot take these tokens."""
    if not ids:
        raise UsageError(f"the tokenizer makes no tokens of {quoted(text)}")
    rows = tables.rows.get(spec.name)
    if rows is not None and max(ids) >= rows:
        what = f"the tokenizer gives token {max(ids)}, and the model knows {rows}"
        raise UsageError(f"{what}: the tokenizer belongs to another model")
    if tables.sequence is not None and len(ids) > tables.sequence:
        raise UsageError(f"the text has {len(ids)} tokens, and the model takes at most {tables.sequence}")
    fixed = spec.shape[-1] if spec.shape else 1
    if isinstance(fixed, int) and fixed != len(ids):
        raise UsageError(f"the text has {len(ids)} tokens, and input {quoted(spec.name)} takes exactly {fixed}")


def _values(spec: InputSpec, sizes: Sizes, encoding: Any, tables: Tables) -> NDArray[Any]:
    """One input [1, tokens], or as the model declares it."""
    given = {Role.IDS: encoding.ids, Role.TOKEN_TYPES: encoding.type_ids}.get(spec.role)
    shape = sizes.shapes[spec.name]
    if given is None:
        rows = tables.rows.get(spec.name)
        return make_values(Request(spec, sizes, rows, cached=False, special=False, masked=False, seed=0, case=1))
    if int(np.prod(shape)) != len(given):
        raise UsageError(f"input {quoted(spec.name)} has shape {list(shape)}, which one text does not fill")
    return np.asarray(given, dtype=spec.dtype).reshape(shape)
