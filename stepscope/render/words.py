"""Numbers and untrusted text as people read them, the same in every format."""

from __future__ import annotations

import math
import re
from typing import Any

NARROW_SPACE = "\u202f"
"""Between groups of three digits: does not break and is not taken for a decimal mark."""

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff\ud800-\udfff]"
)


def clean(text: object) -> str:
    """`text` with every control, bidirectional and invisible character spelled out (``<U+202E>``).

    A name in a trace was chosen by someone else: it must neither steer a terminal nor reorder the line it stands in.
    Line ends and tabs stay.
    """
    return _UNSAFE.sub(lambda match: f"<U+{ord(match.group()):04X}>", str(text))


def one_line(text: object) -> str:
    """`clean` text with every run of white space as one blank."""
    return " ".join(clean(text).split())


def number(value: Any, *, digits: int = 4) -> str:
    """A value as text: four significant digits, digits of whole numbers in threes, words for what is no number.

    Args:
        value: a number, truth value, text or None; texts such as ``"Infinity"`` in evidence stay what they are.
        digits: significant digits of a number that is not whole.
    """
    if value is None:
        return "not observed"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return grouped(value)
    if isinstance(value, float):
        return _real(value, digits)
    return ", ".join(number(v) for v in value) if isinstance(value, list | tuple) else one_line(value)


def _real(value: float, digits: int) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    if value.is_integer() and abs(value) < 1e15:
        return grouped(int(value))
    if 1e4 <= abs(value) < 1e7:
        return grouped(round(value))
    return f"{value:.{digits}g}"


def grouped(value: int) -> str:
    """12345 as ``12 345``, with a narrow blank that does not break; four digits stay together."""
    return str(value) if abs(value) < 10_000 else f"{value:,}".replace(",", NARROW_SPACE)


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 error``, ``2 errors``."""
    return f"{grouped(count)} {noun if count == 1 else plural or noun + 's'}"


def share(part: float) -> str:
    """A fraction in percent; never rounds a few to none or nearly all to all."""
    percent = 100 * part
    if 0 < percent < 0.1 or 99.9 < percent < 100:
        return "under 0.1 %" if percent < 50 else "over 99.9 %"
    return f"{percent:.3g} %"


def steps_phrase(first: int | None, last: int | None) -> str:
    """Where a finding holds: ``micro-step 4``, ``micro-steps 4 to 12``, ``whole run``."""
    if first is None:
        return "whole run"
    if last is None or last == first:
        return f"micro-step {grouped(first)}"
    return f"micro-steps {grouped(first)} to {grouped(last)}"


def label(key: object) -> str:
    """A key of plain data as a title: blanks for underscores."""
    return one_line(key).replace("_", " ")


def flat(value: Any) -> str:
    """Any plain JSON value in one line."""
    if isinstance(value, dict):
        return "; ".join(f"{label(k)} {flat(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(flat(v) for v in value)
    return number(value)
