"""Format numbers for readers: 3.1 × 10⁻⁷, 1,024, 66 %."""

from __future__ import annotations

import math

from rewriter.text import size as in_bytes

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_THIN = "\N{NARROW NO-BREAK SPACE}"
_MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
"""Shown in place of a missing number."""


def power(exponent: int) -> str:
    """10 to an integer power, such as 10⁻⁷."""
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def small(value: float | None, digits: int = 2) -> str:
    """A number of any size to `digits` significant digits; an en dash for None."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else f"{_MINUS}∞"
    if value == 0.0:
        return "0"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    scale = int(exponent)
    if -3 <= scale < 4:
        return plain(float(f"{value:.{digits}g}"))
    return f"{mantissa.replace('-', _MINUS)}{_THIN}×{_THIN}{power(scale)}"


def plain(value: float) -> str:
    """A number of moderate size without an exponent, with at most 10 digits after the point."""
    text = f"{value:,.10f}".rstrip("0").rstrip(".")
    return text.replace("-", _MINUS)


def count(value: int | None) -> str:
    """An integer with thousands separated; an en dash for None."""
    return NOTHING if value is None else f"{value:,}".replace("-", _MINUS)


def change(value: int) -> str:
    """A signed integer."""
    return f"+{value:,}" if value > 0 else count(value)


def percent(share: float) -> str:
    """A share, from 0 to 1, in per cent."""
    return f"{100 * share:.1f}{_THIN}%"


def size(nbytes: int) -> str:
    """Bytes, in powers of 1000."""
    return in_bytes(nbytes).replace(" ", _THIN)


def seconds(amount: float) -> str:
    """A duration; below a second in milliseconds."""
    if amount < 1.0:
        return f"{1e3 * amount:.3g}{_THIN}ms" if amount >= 1e-3 else f"{1e3 * amount:.1f}{_THIN}ms"
    return f"{amount:.1f}{_THIN}s"
