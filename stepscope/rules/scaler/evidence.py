"""What rules about the GradScaler share: whether one was in use, and which of its calls raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.view import Mask, Rows, View

FAILURES = ("scaler_step_failed", "unscale_failed", "scaler_update_failed")
"""Events that a call of a GradScaler leaves when it raises."""


def need_scaler(view: View) -> None:
    """Skip the rule where no enabled GradScaler was used."""
    used = view.trace.has("loss_scale_before") or view.trace.has("unscale_divisor") or view.trace.has("found_inf")
    view.need(used or next(view.events(*FAILURES), None) is not None, "no enabled GradScaler was used")


def failures(view: View, *names: str) -> Iterator[dict[str, Any]]:
    """Calls of a scaler that raised: the event's keys and ``detail`` with stage, error and what the optimizer held."""
    for event in view.events(*(names or FAILURES)):
        yield {**event, "detail": event["detail"] or {}}


def skipped(rows: Rows) -> Mask:
    """Windows' last rows whose step was skipped. Shape ``(rows,)``."""
    return np.asarray(rows.true("sync_gradients") & rows.true("step_skipped"))


def where(event: dict[str, Any]) -> str:
    """Optimizer and place of an event, for a message."""
    return f"{event['optimizer'] or 'an optimizer'} at micro-step {event['micro_step']}"
