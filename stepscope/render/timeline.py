"""The calls of a window in their order, and a good window beside a faulty one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stepscope.render.words import number, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.render.chart import Ints
    from stepscope.render.rows import Rows
    from stepscope.rules.outcome import Finding

Kind = Literal["forward", "scale", "backward", "unscale", "clip", "step", "update", "zero_grad", "scheduler", "other"]

MOST_CALLS = 60
MOST_PAIRS = 4

_WORDS: tuple[tuple[str, Kind], ...] = (
    ("unscale", "unscale"),
    ("clip", "clip"),
    ("zero_grad", "zero_grad"),
    ("scheduler", "scheduler"),
    ("update", "update"),
    ("backward", "backward"),
    ("forward", "forward"),
    ("scale", "scale"),
    ("step", "step"),
    ("attempt", "step"),
)
"""Parts of event names, the most telling first."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        kind: what sort of call, for its colour and symbol.
        label: its name.
        note: what is known of it: the weight of a backward, the limit of a clip.
        mark: ``extra`` if only this window has it, ``missing`` if only the other one does, else empty.
    """

    kind: Kind
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
    if not len(rows.trace.tables["events"]) or not rows.optimizers:
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
        pairs.append(WindowPair(f"{finding.code} {finding.name}", *_compared(faulty, beside)))
    if not pairs and good is not None:
        pairs = [WindowPair("", None, _window(rows, bounds, good, "a window of this run"))]
    return tuple(pairs[:MOST_PAIRS])


def _bounds(rows: Rows) -> Ints:
    """Micro-steps of the first process after which an optimizer step was tried, ascending."""
    values, _ = rows.column("sync_gradients")
    first = rows.ranks == rows.processes[0].rank
    return np.unique(rows.micro_step[first & (values == 1)])


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
    first = int(bounds[place - 1]) + 1 if place else int(rows.micro_step.min())
    weights = _by_step(rows, "loss_weight", first, last)
    calls = [_call(event, weights) for event in _events(rows, first, last)]
    shown = (
        calls if len(calls) <= MOST_CALLS else [*calls[: MOST_CALLS // 2], _left_out(calls), *calls[-MOST_CALLS // 2 :]]
    )
    return Window(title, first, last, tuple(shown))


def _left_out(calls: list[Call]) -> Call:
    return Call("other", f"… {len(calls) - MOST_CALLS} more calls …")


def _by_step(rows: Rows, column: str, first: int, last: int) -> dict[int, float]:
    points = rows.points(column, rows.processes[0])
    inside = (points.x >= first) & (points.x <= last)
    return dict(zip(points.x[inside].tolist(), points.y[inside].tolist(), strict=True))


def _events(rows: Rows, first: int, last: int) -> list[dict[str, Any]]:
    """The first process's events of a window, cut where one window's calls end and the next one's begin."""
    table = rows.trace.tables["events"]
    step, rank = pc.cast(table["micro_step"], pa.int64()), pc.cast(table["rank"], pa.int64())
    inside = pc.and_(pc.greater_equal(step, first - 1), pc.less_equal(step, last))
    mine = pc.fill_null(pc.equal(rank, int(rows.processes[0].rank)), False)
    chosen = table.filter(pc.and_(pc.fill_null(inside, False), mine)).sort_by("seq").to_pylist()
    before = [e for e in chosen if e["micro_step"] == first - 1]
    middle = [e for e in chosen if first <= e["micro_step"] < last]
    after = [e for e in chosen if e["micro_step"] == last]
    return before[_cut(before, first == 1) :] + middle + after[: _cut(after, False)]


def _cut(events: list[dict[str, Any]], from_start: bool) -> int:
    """Where, among events with the count of a window's last backward, the next window begins: its first forward."""
    stepped = from_start
    for place, event in enumerate(events):
        kind = _kind(event["event"])
        if kind in ("forward", "scale") and stepped:
            return place
        stepped |= kind == "step"
    return len(events)


def _kind(name: str) -> Kind:
    return next((kind for part, kind in _WORDS if part in str(name)), "other")


def _call(event: dict[str, Any], weights: dict[int, float]) -> Call:
    kind = _kind(event["event"])
    note = _note(event["detail"])
    if kind == "backward" and (weight := weights.get(int(event["micro_step"]))) is not None:
        note = f"loss weight {number(weight)}" + (f"; {note}" if note else "")
    return Call(kind, one_line(event["event"]), note)


def _note(detail: str | None) -> str:
    """The flat part of an event's detail in a few words."""
    try:
        said = json.loads(detail) if detail else {}
    except ValueError:
        return one_line(detail)
    if not isinstance(said, dict):
        return one_line(said)
    flat = {k: v for k, v in said.items() if not isinstance(v, list | dict) and v is not None}
    return "; ".join(f"{one_line(k).replace('_', ' ')} {number(v)}" for k, v in list(flat.items())[:4])


def _compared(faulty: Window, good: Window) -> tuple[Window, Window]:
    """Both windows, with the calls marked that only one of them has."""
    matcher = SequenceMatcher(a=[c.kind for c in faulty.calls], b=[c.kind for c in good.calls], autojunk=False)
    ours, theirs = list(faulty.calls), list(good.calls)
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag != "equal":
            ours[a:a_end] = [replace(c, mark="extra") for c in ours[a:a_end]]
            theirs[b:b_end] = [replace(c, mark="missing") for c in theirs[b:b_end]]
    return replace(faulty, calls=tuple(ours)), replace(good, calls=tuple(theirs))


def _textbook(faulty: Window) -> Window:
    """The order of calls that a window of the same kind should have, for a run in which no window is right."""
    kinds = {c.kind for c in faulty.calls}
    count = max(1, sum(c.kind == "backward" for c in faulty.calls))
    scaled = bool(kinds & {"unscale", "update", "scale"})
    micro: list[Kind] = [k for k in ("forward", "scale", "backward") if k in kinds or k == "backward"]
    end: list[Kind] = ["unscale", "clip"] if scaled and "clip" in kinds else ["clip"] if "clip" in kinds else []
    end += ["step", "update"] if scaled else ["step"]
    end += ["scheduler", "zero_grad"] if "scheduler" in kinds else ["zero_grad"]
    calls = tuple(
        Call(kind, kind, f"loss weight {number(1 / count)}" if kind == "backward" else "")
        for kind in [*micro * count, *end]
    )
    return Window("the textbook's order", None, None, calls)
