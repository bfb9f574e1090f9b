"""What a step really used: the windows of one optimizer, without the micro-steps whose gradient was cleared before it.

Everything here is about quantities: a micro-step counts as used when ``.grad`` still held it at the step, whoever cleared
what and by which call.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.outcome import SEVERITIES, Finding

if TYPE_CHECKING:
    import numpy.typing as npt

    from stepscope.rules.view import Array, Mask, Rows, View

CLOSE = 0.01
"""Relative difference up to which two weights are taken as equal; float16 gradients carry three digits."""


class Windows:
    """The attempted windows of one optimizer. Arrays have shape ``(windows,)`` unless they say ``(rows,)``.

    Args:
        view: the run.
        rows: the optimizer's rows.
    """

    def __init__(self, view: View, rows: Rows) -> None:
        self.view = view
        self.rows = rows
        self.end: Array = rows.ends
        self.start: Array = np.concatenate([[0], self.end[:-1] + 1]).astype(np.int64) if len(self.end) else self.end
        self.declared: int | None = (
            int(view.declared["accumulation_steps"]) if view.declared.get("accumulation_steps") else None
        )

    def __len__(self) -> int:
        return len(self.end)

    # ---- what was still there ---------------------------------------------------------------------------------------

    @cached_property
    def cleared(self) -> Mask:
        """Before this row's backward the window had begun and ``.grad`` was empty again. Shape ``(rows,)``.

        A micro-step without targets leaves a gradient of zeros: the one after it finds nothing, and nothing was cleared.
        """
        rows = self.rows
        empty = rows.seen("grad_norm_before") & (rows["grad_norm_before"] == 0.0) & (rows["window_step"] > 1)
        nothing_given = np.concatenate([[False], rows["num_items"][:-1] == 0.0])
        return np.asarray(empty & ~nothing_given)

    @cached_property
    def live_from(self) -> Array:
        """Position of the first row whose gradient the step used."""
        if not len(self):
            return self.start
        marks = np.where(self.cleared, np.arange(len(self.rows)), -1)
        last = np.asarray(np.maximum.reduceat(marks[: self.end[-1] + 1], self.start))
        return np.asarray(np.maximum(last, self.start))

    @cached_property
    def live(self) -> Array:
        """Micro-steps whose gradient the step used."""
        return self.end - self.live_from + 1

    @cached_property
    def size(self) -> Array:
        """Micro-steps in the window, cleared ones too."""
        return self.end - self.start + 1

    @cached_property
    def lost(self) -> Mask:
        """Rows whose gradient no step used: cleared before one, or left at the end of the run. Shape ``(rows,)``.

        What another optimizer's step used is not lost: a generator's backward also reaches the discriminator.
        """
        place = np.arange(len(self.rows))
        window = self.rows.window_of
        live_from = np.concatenate([self.live_from, [len(self.rows)]])
        gone = place < live_from[np.minimum(window, len(self))]
        if not self.view.trace.whole or self.view.trace.meta.get("stopped_at"):
            gone &= window < len(self)
        if not gone.any():
            return gone
        return np.asarray(gone & ~self.elsewhere & ~self.inside_closure)

    @cached_property
    def inside_closure(self) -> Mask:
        """Rows of windows whose step evaluates a closure: such steps clear between evaluations. Shape ``(rows,)``."""
        closure = np.concatenate([self.closure, [False]])
        return np.asarray(closure[np.minimum(self.rows.window_of, len(self))])

    @cached_property
    def closure(self) -> Mask:
        """The step evaluated a closure."""
        return np.asarray(self.rows.windows("closure") == 1.0)

    @cached_property
    def elsewhere(self) -> Mask:
        """Rows whose backward was used by a step of another optimizer. Shape ``(rows,)``."""
        others = [w for w in siblings(self.view, self.rows) if w.rows is not self.rows]
        used = [w.rows["micro_step"][w.used_rows] for w in others]
        return (
            np.isin(self.rows["micro_step"], np.concatenate(used)) if used else np.zeros(len(self.rows), dtype=np.bool_)
        )

    @cached_property
    def used_rows(self) -> Mask:
        """Rows whose gradient a step used. Shape ``(rows,)``."""
        live_from = np.concatenate([self.live_from, [len(self.rows)]])
        return np.asarray(np.arange(len(self.rows)) >= live_from[np.minimum(self.rows.window_of, len(self))])

    # ---- weights ----------------------------------------------------------------------------------------------------

    @cached_property
    def weight(self) -> Array:
        """Weight of each row's mean loss; NaN where the loss is no mean, or is not known. Shape ``(rows,)``.

        A sum over targets counts as a mean when the weights of its targets never add up to more than one.
        """
        rows = self.rows
        weight = rows["loss_weight"].copy()
        plain = np.asarray((rows["loss_reduction"] == "sum") | (rows["loss_reduction"] == "none"))
        if plain.any():
            whole = rows["target_weight"] * rows["num_items"]
            normalised = not (whole[plain] > 1.0 + 1e-6).any() and np.isfinite(whole[plain]).any()
            weight[plain] = whole[plain] if normalised else np.nan
        return of_all_terms(rows, weight)

    @cached_property
    def total(self) -> Array:
        """Sum of the weights in the window, cleared ones too."""
        return self.rows.per_window(self.weight)

    @cached_property
    def used(self) -> Array:
        """Sum of the weights whose gradient the step used."""
        return self.rows.per_window(np.where(self.used_rows, self.weight, 0.0))

    @cached_property
    def ratio(self) -> Array:
        """Norm of ``.grad`` at the clip (or the step) over its norm as the last backward left it; NaN where not seen."""
        rows = self.rows
        scale = rows.windows("loss_scale_before")
        left = rows.windows("grad_norm_scaled") / np.where(np.isfinite(scale), scale, 1.0)
        clipped = np.isfinite(rows.windows("clip_norm"))
        seen = np.where(clipped, rows.windows("grad_norm"), rows.windows("grad_norm_clipped"))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(seen / left)

    @cached_property
    def divided(self) -> Array:
        """Factor by which ``.grad`` itself was multiplied between the last backward and the clip (or step); 1 if by none.

        Only a factor that the windows of one size share, or that makes the weights come to one, is taken as a division:
        one that varies otherwise is a clip written by hand, or an average over processes.
        """
        shared = _shared(self.ratio, self.size)
        return np.where(close(self.used * self.ratio, 1.0), self.ratio, shared)

    @cached_property
    def effective(self) -> Array:
        """What the weights of a window come to at the step: `used` times `divided`. One in a right window."""
        return self.used * self.divided

    @cached_property
    def k(self) -> int | None:
        """Micro-steps that the author means to accumulate: declared, told by a constant weight 1/K, or the usual window."""
        if self.declared:
            return self.declared
        return self.k_of_weights or self.usual

    @cached_property
    def k_of_weights(self) -> int | None:
        """K where at least four of five rows have one weight 1/K, K a whole number from 2; else None."""
        known = self.weight[np.isfinite(self.weight) & (self.weight > 0)]
        if not len(known) or len(known) < 0.8 * len(self.weight):
            return None
        typical = float(np.median(known))
        k = round(1.0 / typical) if typical > 1e-6 else 0
        same = close(known, typical).mean() >= 0.8
        return k if k >= 2 and same and abs(typical * k - 1.0) < CLOSE else None

    @cached_property
    def usual(self) -> int | None:
        """The commonest number of used micro-steps, None without a window."""
        return most_common(self.live)

    # ---- epochs -----------------------------------------------------------------------------------------------------

    @cached_property
    def last_of_epoch(self) -> Mask:
        """Rows that are the last of their pass over a DataLoader; all False where none was used. Shape ``(rows,)``."""
        passes = self.rows["loader_pass"]
        last = np.zeros(len(passes), dtype=np.bool_)
        seen = np.flatnonzero(np.isfinite(passes))
        if len(seen):
            _, first_from_behind = np.unique(passes[seen][::-1], return_index=True)
            last[seen[len(seen) - 1 - first_from_behind]] = True
        return last

    @cached_property
    def crosses(self) -> Mask:
        """An epoch ends among the micro-steps that the step used, before the last of them."""
        before = np.concatenate([[0], np.cumsum(self.last_of_epoch)])
        return np.asarray(before[self.end] - before[self.live_from] > 0) if len(self) else np.zeros(0, dtype=np.bool_)

    def mask(self, windows: Mask | Array) -> Array:
        """Positions of the last rows of the chosen windows, for `finding`."""
        return np.asarray(self.end[windows])


def windows_of(view: View) -> list[Windows]:
    """The windows of each optimizer that stepped after a backward; made once for a view."""
    known: dict[int, Windows] = view.__dict__.setdefault("_accumulation_windows", {})
    for rows in view.optimizers:
        if id(rows) not in known:
            known[id(rows)] = Windows(view, rows)
    return [known[id(rows)] for rows in view.optimizers]


def of_all_terms(rows: Rows, weight: Array) -> Array:
    """Weights of the losses, where several terms of one weight may be one loss: ``(a + b) / 2``. Shape ``(rows,)``.

    Both readings are tried: the one whose weights come to one over the windows holds, else the one that they miss by the
    windows' size, else that of single terms.
    """
    alike = rows["loss_terms_alike"]
    several = np.isfinite(weight) & (alike > 1)
    if not several.any() or not len(rows.ends):
        return weight
    size = rows.per_window(np.ones(len(rows)))
    readings = (weight, np.where(several, weight * alike, weight))
    for factor in (1.0, size, 1.0 / size):
        for reading in readings:
            if close(rows.per_window(reading), factor).mean() >= 0.5:
                return reading
    return weight


def siblings(view: View, rows: Rows) -> list[Windows]:
    """The windows of all optimizers of the same process."""
    return [w for w in windows_of(view) if w.rows.rank == rows.rank]


def close(values: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float = CLOSE) -> Mask:
    """Where `values` equal `expected` within a relative tolerance; False for NaN."""
    return np.isclose(np.asarray(values, dtype=np.float64), expected, rtol=tolerance, atol=1e-9)


def most_common(values: Array) -> int | None:
    """The commonest whole number, None where there is none."""
    if not len(values):
        return None
    found, counts = np.unique(values, return_counts=True)
    return int(found[np.argmax(counts)])


def _shared(ratio: Array, size: Array) -> Array:
    """The ratio where windows of one size share it, else 1."""
    out = np.ones(len(ratio))
    for one in np.unique(size):
        same = size == one
        known = ratio[same][np.isfinite(ratio[same]) & (ratio[same] > 0)]
        if not len(known):
            continue
        typical = float(np.median(known))
        if close(known, typical).mean() > 0.8 and not close(typical, 1.0):
            out[same] = typical
    return out


def merged(findings: list[Finding]) -> list[Finding]:
    """One finding for all optimizers (and processes) that show the same fault, the gravest first.

    Programs with an optimizer for each tensor, or several processes, would report one cause many times.
    """
    if not findings:
        return []
    first = min(findings, key=lambda f: SEVERITIES.index(f.severity))
    if len(findings) == 1:
        return [first]
    names = list(dict.fromkeys(str(f.evidence.get("optimizer")) for f in findings))
    message = f"{first.message} (and {len(findings) - 1} more of the same)"
    return [replace(first, message=message, evidence={**first.evidence, "optimizers": names[:50]})]
