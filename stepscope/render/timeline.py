"""The calls of a window in their order, and a good window beside a faulty one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Literal

import numpy as np

from stepscope.render.words import number, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.render.chart import Ints
    from stepscope.render.rows import Rows, Track
    from stepscope.rules.outcome import Finding

MOST_CALLS = 60
MOST_PAIRS = 4

CALLS = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "U": ("unscale_", "scaler"),
    "u": ("unscale_ in scaler.step", "scaler"),
    "C": ("clip_grad_norm_", "clip"),
    "V": ("clip_grad_value_", "clip"),
    "S": ("optimizer.step", "step"),
    "K": ("step skipped", "skip"),
    "P": ("scaler.update", "scaler"),
    "L": ("scheduler.step", "schedule"),
    "Z": ("zero_grad", "clear"),
    "E": ("average updated", "other"),
    "R": ("all_reduce", "other"),
}
"""What each letter of the column `calls` stands for, and the kind of call, which has its colour."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        kind: what sort of call.
        label: its name.
        note: what is known of it: the weight of a backward, what the clip did.
        mark: ``extra`` if only this window has it, ``missing`` if only the other one does, else empty.
    """

    kind: str
    label: str
    note: str = ""
    mark: Literal["", "extra", "missing"] = ""


@dataclass(frozen=True, slots=True)
class Window:
    """Calls from the first forward of a window to what follows its step.

    Attributes:
        title: which window.
        first: its first micro-step, None for the textbook's.
        last: its last micro-step.
        calls: in order.
    """

    title: str
    first: int | None
    last: int | None
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class WindowPair:
    """A faulty window (None in a run without findings) beside a good one."""

    finding: str
    faulty: Window | None
    good: Window | None


def window_pairs(rows: Rows, found: Sequence[Finding]) -> tuple[WindowPair, ...]:
    """For each finding at a step its window beside a good one; without findings one window of the run."""
    if not rows.has("calls") or not rows.optimizers:
        return ()
    bounds = _bounds(rows)
    good = _good(rows, bounds, found)
    pairs, seen = [], set()
    for finding in found:
        place = _place(bounds, finding.first_step)
        if place is None or place in seen:
            continue
        seen.add(place)
        faulty = _window(rows, bounds, place, "window of the finding")
        beside = _window(rows, bounds, good, "a window without findings") if good is not None else _textbook(faulty)
        pairs.append(WindowPair(one_line(f"{finding.code} {finding.name}"), *_compared(faulty, beside)))
    if not pairs and good is not None:
        pairs = [WindowPair("", None, _window(rows, bounds, good, "a window of this run"))]
    return tuple(pairs[:MOST_PAIRS])


def _bounds(rows: Rows) -> Ints:
    """Micro-steps of the first optimizer after which a step was tried, ascending."""
    tried = rows.points("sync_gradients", rows.optimizers[0])
    bounds: Ints = tried.x[tried.y == 1]
    return bounds


def _place(bounds: Ints, step: int | None) -> int | None:
    """Number of the window that holds a micro-step; the last one stands for an unfinished window."""
    if step is None or not len(bounds):
        return None
    return min(int(np.searchsorted(bounds, step)), len(bounds) - 1)


def _good(rows: Rows, bounds: Ints, found: Sequence[Finding]) -> int | None:
    """The first window that no error or warning covers and whose step was applied; later ones before the very first."""
    clean = np.ones(len(bounds), dtype=np.bool_)
    for finding in found:
        if finding.severity == "notice":
            continue
        if finding.first_step is None:
            return None
        last = finding.last_step if finding.last_step is not None else finding.first_step
        clean[np.searchsorted(bounds, finding.first_step) : np.searchsorted(bounds, last) + 1] = False
    skipped, _ = rows.column("step_skipped")
    clean &= ~np.isin(bounds, rows.micro_step[skipped == 1])
    places = np.flatnonzero(clean)
    return int(places[min(1, len(places) - 1)]) if len(places) else None


def _window(rows: Rows, bounds: Ints, place: int, title: str) -> Window:
    last = int(bounds[place])
    first = int(bounds[place - 1]) + 1 if place else int(rows.micro_step[rows.optimizers[0].index[0]])
    calls = list(_calls(rows, rows.optimizers[0], first, last))
    half = MOST_CALLS // 2
    if len(calls) > MOST_CALLS:
        calls = [*calls[:half], Call("other", f"… {len(calls) - MOST_CALLS} more calls …"), *calls[-half:]]
    return Window(title, first, last, tuple(calls))


def _calls(rows: Rows, track: Track, first: int, last: int) -> Iterable[Call]:
    steps = rows.micro_step[track.index]
    for place in track.index[np.searchsorted(steps, first) : np.searchsorted(steps, last, side="right")].tolist():
        for letter in rows.text("calls", place):
            label, kind = CALLS.get(letter, (one_line(letter), "other"))
            yield Call(kind, label, _note(rows, letter, place))


_NOTES = {
    "B": ("loss weight", "loss_weight"),
    "U": ("by", "loss_scale_before"),
    "C": ("limit", "clip_max_norm"),
    "S": ("lr", "lr"),
    "P": ("to", "loss_scale_after"),
}
"""What stands under a call: a word and the column with the value."""


def _note(rows: Rows, letter: str, place: int) -> str:
    word, column = _NOTES.get(letter, ("", ""))
    values, seen = rows.column(column)
    return f"{word} {number(float(values[place]))}" if column and seen[place] else ""


def _compared(faulty: Window, good: Window) -> tuple[Window, Window]:
    """Both windows, with the calls marked that only one of them has."""
    matcher = SequenceMatcher(a=[c.label for c in faulty.calls], b=[c.label for c in good.calls], autojunk=False)
    ours, theirs = list(faulty.calls), list(good.calls)
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag != "equal":
            ours[a:a_end] = [replace(c, mark="extra") for c in ours[a:a_end]]
            theirs[b:b_end] = [replace(c, mark="missing") for c in theirs[b:b_end]]
    return replace(faulty, calls=tuple(ours)), replace(good, calls=tuple(theirs))


def _textbook(faulty: Window) -> Window:
    """The order of calls that a window of the same kind should have, for a run in which no window is right."""
    made = {c.label: letter for letter, (label, _) in CALLS.items() for c in faulty.calls if c.label == label}
    there = set(made.values())
    count = max(1, sum(c.label == "backward" for c in faulty.calls))
    scaled = bool(there & set("UuPK"))
    forwards = sum(c.label == "forward" for c in faulty.calls)
    micro = "F" * -(-forwards // count) + "B"
    end = ("U" if scaled and "C" in there else "u" if scaled else "") + ("C" if "C" in there else "") + "S"
    end += ("P" if scaled else "") + ("L" if "L" in there else "") + "Z"
    weight = f"loss weight {number(1 / count)}"
    calls = (Call(CALLS[c][1], CALLS[c][0], weight if c == "B" else "") for c in micro * count + end)
    return Window("the textbook's order", None, None, tuple(calls))
