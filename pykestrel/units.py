"""Counts and byte sizes as people write them: ``32k``, ``1GB``, ``512MiB``."""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral

from .errors import UsageError

_COUNT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)([kKmM]?)", re.ASCII)
_BYTES = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?([kKmMgGtT]?)(i?[bB])?", re.ASCII)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return pattern.fullmatch(text) if len(text) <= 100 else None  # longer is no number of ours


def parse_count(value: str | Integral | int, what: str = "a count") -> int:
    """A number of tokens, items or positions: ``4096``, ``32k`` (32,768), ``1m`` (1,048,576).

    Raises UsageError, which names `what`, for anything that is no whole number >= 0.
    """
    if isinstance(value, bool) or not isinstance(value, (Integral, str)):
        raise UsageError(f"{what} must be a whole number such as 4096 or 32k, got {value!r}")
    number = Fraction(-1)
    if not isinstance(value, str):
        number = Fraction(int(value))
    elif match := _match(_COUNT, value.strip().replace("_", "")):
        number = Fraction(match[1]) * 1024 ** _POWER[match[2].lower()]
    if number.denominator != 1 or not 0 <= number < 2**63:
        raise UsageError(f"{what} must be a whole number such as 4096 or 32k, got {value!r:.60}")
    return number.numerator


def parse_bytes(value: str | Integral | int, what: str = "a byte size") -> int:
    """A byte size: ``1GB`` is 10**9, ``1GiB`` and ``1G`` are 2**30, a bare number is bytes.

    Raises UsageError, which names `what`, for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (Integral, str)):
        raise UsageError(f"{what} must be a byte size such as 1GB or 512MiB, got {value!r}")
    if not isinstance(value, str):
        if value < 0:
            raise UsageError(f"{what} must not be negative, got {value}")
        return int(value)
    match = _match(_BYTES, value.strip())
    if match is None or ((match[3] or "").lower() == "ib" and not match[2]):
        raise UsageError(f"{what} must be a byte size such as 1GB or 512MiB, got {value!r:.60}")
    base = 1000 if match[2] and (match[3] or "").lower() == "b" else 1024
    return int(Fraction(match[1]) * base ** _POWER[match[2].lower()])


def plural(count: int, what: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def show_bytes(count: float) -> str:
    """``1234567`` -> ``1.23 MB`` (decimal units, three digits)."""
    units = ["B", "KB", "MB", "GB", "TB"]
    while abs(count) >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    if units[0] == "B" or abs(count) >= 100:
        return f"{count:.0f} {units[0]}"
    return f"{count:.3g} {units[0]}"
