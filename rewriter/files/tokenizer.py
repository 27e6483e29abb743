"""A tokenizer in a file, as Hugging Face models have it, read by the package `tokenizers` (extra `text`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rewriter.errors import UsageError
from rewriter.text import clean, one_line, quoted

_FILE = "tokenizer.json"
_MAX_TOKEN_LENGTH = 40

_TEXTS = (  # English prose, code, and a list with digits
    "The harbour was quiet before sunrise. Two fishermen mended a net beside the old lighthouse, while gulls circled "
    "above the water and the first ferry came in from the island. Nobody spoke until the bell rang; then the market "
    "opened, the cranes began to move, and by eight o'clock every street smelled of bread, salt and diesel oil.",
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError('no values')\n"
    "    total = 0.0\n    for value in values:\n        total += value\n    return total / len(values)\n\n"
    "print(mean([1.5, 2.5, 4.0]))\nfor (int i = 0; i < n; ++i) { sum[i] = a[i] * b[i] + c; }  // in C\n",
    "1. 3 kg flour, 2 l milk, 12 eggs: 27.80 EUR\n2. Train 9:45 to 14:05, platform 7, seat 61\n"
    "3. Call +44 20 7946 0958 before 31 May 2024\n4. Primes: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29\n"
    "5. Room 402, code 1966-07-30, 99 % paid\n",
)

TokenText = Callable[[int], str]  # a token id in words


def open_tokenizer(tokenizer: Any) -> Any:
    """Open a tokenizer, or copy one, without padding and truncation. Raises UsageError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("this needs the package tokenizers: pip install 'attnonly[text]'") from None
    if isinstance(tokenizer, Tokenizer):
        if tokenizer.padding is None and tokenizer.truncation is None:
            return tokenizer
        opened = Tokenizer.from_str(tokenizer.to_str())  # the caller's is not changed
    else:
        try:
            path = Path(tokenizer)
        except TypeError:
            kind = type(tokenizer).__name__
            raise UsageError(f"a tokenizer is a {_FILE} or a tokenizers.Tokenizer, not a {kind}") from None
        path = path / _FILE if path.is_dir() else path
        if not path.is_file():
            raise UsageError(f"{quoted(path)}: no such file; a tokenizer is a {_FILE}, as Hugging Face models have it")
        with refusing(f"{quoted(path)} is not a {_FILE}"):
            opened = Tokenizer.from_file(str(path))
    opened.no_padding()
    opened.no_truncation()
    return opened


@lru_cache(maxsize=4)
def sample_tokens(model: Path | None) -> tuple[tuple[int, ...], ...]:
    """Three texts in the tokens of the `tokenizer.json` beside a model, or beside its folder `onnx`; else empty."""
    folders = () if model is None else (model.parent, *(model.parents[1:2] if model.parent.name == "onnx" else ()))
    if (path := next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)) is not None:
        with suppress(UsageError), refusing("the tokenizer cannot encode text"):
            tokenizer = open_tokenizer(path)
            return tuple(tuple(ids) for ids in (tokenizer.encode(text).ids for text in _TEXTS) if ids)
    return ()


def spelling(tokenizer: Any, number: int) -> str:
    """One token, as text if that is whole characters, else as the tokenizer names it; without control characters."""
    decoded = str(tokenizer.decode([number], skip_special_tokens=False))
    named = tokenizer.id_to_token(number)
    usable = decoded and "\N{REPLACEMENT CHARACTER}" not in decoded
    text = decoded if usable or named is None else str(named)
    return clean(text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t"))


def tokens_as_text(tokenizer: Any) -> TokenText:
    """Token ids in words: by a tokenizer as for `open_tokenizer`, or as numbers for None. Raises UsageError."""
    if tokenizer is None:
        return str
    opened = open_tokenizer(tokenizer)

    @cache
    def told(token: int) -> str:
        text = spelling(opened, token)[:_MAX_TOKEN_LENGTH]
        return f"'{text}'" if text else str(token)

    return told


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn all errors of the package, BaseException included (where Rust panics), into a UsageError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - see above
        raise UsageError(f"{what}: {one_line(error, 120)}") from None
