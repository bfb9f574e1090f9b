"""The run in figures and facts, and the banners that say what limits the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from stepscope.render.words import clean, counted, grouped, number, one_line, share

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from stepscope.render.rows import Rows
    from stepscope.store.trace import Trace


@dataclass(frozen=True, slots=True)
class Number:
    """One figure of the summary.

    Attributes:
        key: its name in JSON.
        label: what it is.
        value: the figure itself; None where it was not observed.
        text: as people read it, with the unit.
    """

    key: str
    label: str
    value: float | int | None
    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One circumstance of the run: a label and a text."""

    label: str
    text: str


def numbers(rows: Rows) -> tuple[Number, ...]:
    """The figures of a run."""
    if not len(rows):
        return ()
    return tuple(_counts(rows)) + tuple(_losses(rows)) + tuple(_scales(rows))


def _counts(rows: Rows) -> Iterable[Number]:
    """Micro-steps and windows of the first process, over its optimizers; targets over all processes."""
    first = rows.ranks == rows.processes[0].rank
    attempts = _true(rows, "sync_gradients", first)
    skipped = _true(rows, "step_skipped", first)
    yield _figure("micro_steps", "micro-steps", len(rows.steps))
    yield _figure("optimizer_steps", "optimizer steps tried", attempts)
    applied = None if attempts is None or skipped is None else attempts - skipped
    yield _figure("applied_steps", "applied", applied)
    yield _figure("skipped_steps", "skipped", skipped)
    yield _figure("tail_windows", "tail windows", _true(rows, "tail", first))
    yield _figure("targets", "targets in the loss", _total(rows, "num_items"))


def _losses(rows: Rows) -> Iterable[Number]:
    track = rows.processes[0]
    points = rows.points("loss", track)
    finite = points.finite().y
    yield _figure("first_loss", "first loss, unscaled", _at(finite, 0))
    yield _figure("last_loss", "last loss, unscaled", _at(finite, -1))
    yield _figure("nonfinite_losses", "losses not finite", _nonfinite(rows, "loss"))
    yield _figure("lr_min", "lowest learning rate", _extreme(rows, "lr", np.min))
    yield _figure("lr_max", "highest learning rate", _extreme(rows, "lr", np.max))


def _scales(rows: Rows) -> Iterable[Number]:
    yield _figure("peak_loss_scale", "highest loss scale", _extreme(rows, "loss_scale_before", np.max))
    bound, seen = rows.column("clip_bound")
    part = float(np.nansum(bound) / seen.sum()) if seen.any() else None
    yield Number("clip_bound_share", "steps that the clip bound", part, number(None) if part is None else share(part))
    yield _figure("grad_norm_max", "largest gradient norm before the clip", _extreme(rows, "grad_norm", np.max))
    yield _figure("update_ratio_max", "largest update ratio", _extreme(rows, "update_ratio", np.max))


def _figure(key: str, label: str, value: float | int | None) -> Number:
    return Number(key, label, value, number(value))


def _true(rows: Rows, column: str, among: npt.NDArray[np.bool_]) -> int | None:
    """Rows in which a truth value of a window holds; None where it was never observed."""
    values, seen = rows.column(column)
    return int(np.count_nonzero(values[seen & among])) if seen.any() else None


def _total(rows: Rows, column: str) -> int | None:
    """Sum over micro-steps and processes; a micro-step that has a row for each optimizer counts once."""
    if not rows.has(column):
        return None
    return int(sum(np.nansum(rows.points(column, track).y) for track in rows.processes))


def _nonfinite(rows: Rows, column: str) -> int | None:
    if not rows.has(column):
        return None
    return int(sum(np.count_nonzero(~np.isfinite(rows.points(column, t).y)) for t in rows.processes))


def _at(values: Any, place: int) -> float | None:
    return float(values[place]) if len(values) else None


def _extreme(rows: Rows, column: str, which: Any) -> float | None:
    values, seen = rows.column(column)
    finite = values[seen & np.isfinite(values)]
    return float(which(finite)) if len(finite) else None


def banners(trace: Trace) -> tuple[str, ...]:
    """What limits this report, gravest first."""
    return (*_cut_off(trace), *_ended(trace.meta), *_thinned(trace), *_limits(trace.meta))


def _cut_off(trace: Trace) -> Iterable[str]:
    if not trace.whole:
        last = int(np.nanmax(trace.values("micro_step"))) if len(trace.tables["steps"]) else 0
        yield (
            f"The recording was cut off after micro-step {grouped(last)}: the run was killed or is still going on. "
            "What follows is true up to there; what came later was not seen."
        )
    if not len(trace.tables["steps"]):
        yield "No micro-step was recorded: there is nothing to judge."
    if stopped := trace.meta.get("stopped_at"):
        yield (
            f"Recording ended after {counted(int(stopped), 'micro-step')}, as --max-steps asked; the run went on, and what came "
            "later was not seen."
        )


def _ended(meta: dict[str, Any]) -> Iterable[str]:
    if meta.get("status") == "interrupted":
        yield "The run was interrupted; the trace holds everything up to then."
    if meta.get("status") == "failed":
        code = meta.get("exit_code")
        yield "The run ended with an error" + (f" (exit code {number(code)})" if code is not None else "") + "."


def _thinned(trace: Trace) -> Iterable[str]:
    """Rows of single parameters are written ever more rarely, or at the rhythm that was asked for."""
    rows = trace.tables["params"]
    if not len(rows) or "global_step" not in rows.column_names:
        return
    written = pc.count_distinct(rows["global_step"]).as_py()
    steps = int(np.nanmax(trace.values("global_step"))) if trace.has("global_step") else 0
    if written < 0.9 * steps:
        yield (
            f"Single parameters have rows at {grouped(written)} of {counted(steps, 'optimizer step')}: those are thinned while "
            "recording (--every sets the rhythm). Everything else has a row for each micro-step."
        )


def _limits(meta: dict[str, Any]) -> Iterable[str]:
    for probe, reason in _pairs(meta.get("probes_off")):
        yield f"The probe {probe} was switched off: {reason}. Its columns are empty from then on."
    by_reason: dict[str, list[str]] = {}
    for column, reason in _pairs(meta.get("not_observed")):
        by_reason.setdefault(reason, []).append(column)
    for reason, columns in by_reason.items():
        yield f"Not observed: {', '.join(columns)} ({reason})."


def _pairs(value: Any) -> list[tuple[str, str]]:
    return [(one_line(k), one_line(v).rstrip(".")) for k, v in value.items()] if isinstance(value, dict) else []


_FACTS = (
    ("command", "command"),
    ("script", "script"),
    ("kind", "recorded with"),
    ("status", "status"),
    ("exit_code", "exit code"),
    ("started", "started"),
    ("seconds", "seconds"),
    ("device", "device"),
    ("host", "host"),
    ("rank", "rank"),
    ("world_size", "processes"),
    ("versions", "versions"),
    ("declared", "declared"),
    ("settings", "settings"),
    ("reference", "reference loop"),
)


def facts(trace: Trace) -> tuple[Fact, ...]:
    """The circumstances of a run in a fixed order; what the trace does not say is left out."""
    meta = trace.meta
    said = [Fact(label, described(meta[key])) for key, label in _FACTS if meta.get(key) not in (None, {}, [], "")]
    for key, label in (
        ("optimizers", "optimizer"),
        ("schedulers", "scheduler"),
        ("scalers", "scaler"),
        ("models", "model"),
    ):
        said += [Fact(label, described(one)) for one in meta.get(key) or ()]
    return tuple(said)


def described(value: Any) -> str:
    """A value of `meta` in one line."""
    if isinstance(value, dict):
        return "; ".join(f"{one_line(k).replace('_', ' ')}: {described(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        nested = any(isinstance(v, dict) for v in value)
        return " | ".join(f"({described(v)})" for v in value) if nested else " ".join(described(v) for v in value)
    return clean(value) if isinstance(value, str) else number(value)
