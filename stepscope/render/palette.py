"""Colours of both themes, one home for the page, its static pictures and plotly.

Series colours keep apart for the common kinds of colour blindness (after Okabe and Ito) and have a contrast of at least
4.5 : 1 against the page, so that they can also colour text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SERIES = 6
"""Colours before they repeat."""

LIGHT: Mapping[str, str] = {
    "page": "#ffffff",
    "panel": "#f6f7f9",
    "text": "#1b1f24",
    "soft": "#57606a",
    "rule": "#d5dae0",
    "accent": "#0b62a8",
    "error": "#b42318",
    "warning": "#9a4a00",
    "notice": "#0b62a8",
    "good": "#116b42",
    "s0": "#0b62a8",
    "s1": "#c2410c",
    "s2": "#00755a",
    "s3": "#a02d85",
    "s4": "#7f5a00",
    "s5": "#51596a",
    "muted": "#6a7480",
}

DARK: Mapping[str, str] = {
    "page": "#14171b",
    "panel": "#1c2127",
    "text": "#e7eaee",
    "soft": "#a9b3be",
    "rule": "#353c45",
    "accent": "#74b6f4",
    "error": "#ff9187",
    "warning": "#f5b364",
    "notice": "#74b6f4",
    "good": "#63d29b",
    "s0": "#74b6f4",
    "s1": "#ff9d70",
    "s2": "#52d3a8",
    "s3": "#f08ed9",
    "s4": "#e3bb52",
    "s5": "#aab4c3",
    "muted": "#98a3ae",
}

MARK_TOKENS = {"nonfinite": "error", "skipped": "warning", "cited": "accent"}
"""Which colour each kind of mark has."""

MARK_SYMBOLS = {"nonfinite": "✕", "skipped": "▼", "cited": "◆"}
"""Its shape as text."""

HEAT = ("#00204d", "#31446b", "#666970", "#958f78", "#cab969", "#ffea46")
"""Cividis in six stops, dark to bright: reads the same with and without colour vision."""


def series_token(colour: int | None) -> str:
    """The colour's name for a series: ``s0`` … ``s5``, ``muted`` for a limit."""
    return "muted" if colour is None else f"s{colour % SERIES}"


def css_variables(theme: Mapping[str, str]) -> str:
    """The theme as CSS custom properties."""
    return "".join(f"--{name}:{value};" for name, value in theme.items())
