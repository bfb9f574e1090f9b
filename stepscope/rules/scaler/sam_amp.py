"""A two-phase optimizer (SAM) climbed on a gradient that was not fit for it.

What it does
------------
Looks at windows whose weights move between two backward passes with cleared gradients, which is what sharpness-aware
minimisation does: was the first gradient finite, was its loss scale taken off, and did the weights come back when the
step was skipped?

Why it matters
--------------
A GradScaler skips only the step. In the first phase the script uses the gradient itself: an infinite norm makes the climb
NaN (infinity times zero), and the weights stay NaN; a scaled gradient climbs too far; and if the scaler skips the step in
which the weights are put back, they stay where the climb took them.

What the evidence looks like
----------------------------
`grad_norm_left` of the window's first row not finite, `params_moved` true on its second; or `weights_norm`
not the same before and after a skipped window.

Fix
---
Unscale before the first phase, test the norm, and if it is not finite skip the iteration with ``update()``; put the
weights back outside of ``scaler.step``.

References
----------
davda54/sam#7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed
from stepscope.rules.scaler.evidence import failures
from stepscope.rules.view import Array, Mask, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Climbs on a gradient that is not finite, and weights that did not come back."""
    scaled = [rows for rows in view.optimizers if np.isfinite(rows["loss_scale_before"]).any()]
    view.need(scaled, "no enabled GradScaler scaled a loss")
    twice = {e["optimizer"] for e in failures(view, "unscale_failed") if e["detail"].get("stage") == "UNSCALED"}
    found = []
    for rows in scaled:
        one = _nonfinite(rows)
        if one is None and len(rows.ends):
            one = _left_up(rows) or _too_far(rows) or _still_scaled(rows)
        if one is None and rows.optimizer in twice:
            one = _refused(rows)
        found += [one] if one is not None else []
    yield from merged(found)


def climbs(rows: Rows) -> Mask:
    """Rows whose weights were moved before the window's next backward, while their gradient was cleared.

    ``weights_norm`` also tells of moves through ``.data``, which leave no other trace.
    """
    out = np.zeros(len(rows), dtype=np.bool_)
    if len(rows) < 2:
        return out
    window, weights = rows.window_of, rows["weights_norm"]
    same = (window[1:] == window[:-1]) & (rows["grad_norm_before"][1:] == 0.0)
    both = rows.seen("weights_norm")[1:] & rows.seen("weights_norm")[:-1]
    with np.errstate(invalid="ignore"):
        moved = rows.true("params_moved")[1:] | (both & (weights[1:] != weights[:-1]))
    scaled = np.isfinite(rows["loss_scale_before"])  # one phase is enough: the other may run in float32
    out[:-1] = same & moved & (scaled[:-1] | scaled[1:])
    return out


def _nonfinite(rows: Rows) -> Finding | None:
    wrong = climbs(rows) & ~np.isfinite(rows["grad_norm_left"]) & rows.seen("grad_norm_left")
    if not wrong.any():
        return None
    at = int(np.flatnonzero(wrong)[0])
    return _finding(
        rows,
        wrong,
        f"at micro-step {int(rows['micro_step'][at])} the first of two backward passes left a gradient of norm "
        f"{float(rows['grad_norm_left'][at]):g}, and the weights were moved along it: the scaler can skip the step, not this; "
        "skip the iteration when the first norm is not finite",
        float(rows["grad_norm_left"][at]),
        "a finite norm, or no climb",
    )


def _left_up(rows: Rows) -> Finding | None:
    """After a skipped step the weights are not those from before the climb."""
    first, last, ok = _windows(rows)
    start, up = rows["weights_norm"][first], rows["weights_norm"][np.minimum(first + 1, len(rows) - 1)]
    after = np.concatenate([start[1:], [np.nan]])
    with np.errstate(invalid="ignore"):
        lost = ok & rows.true("step_skipped")[last] & (np.abs(after - start) > 0.5 * np.abs(up - start)) & (up != start)
    if not lost.any():
        return None
    at = int(np.flatnonzero(lost)[0])
    return _finding(
        rows,
        last[lost],
        f"{int(lost.sum())} skipped steps left the weights where the first phase had moved them (norm {float(after[at]):.8g}, "
        f"before it {float(start[at]):.8g}): put them back outside of scaler.step",
        float(after[at]),
        float(start[at]),
    )


def _too_far(rows: Rows) -> Finding | None:
    """The climb multiplied the weights' norm: it used the gradient with its scale."""
    first, _, ok = _windows(rows)
    start, up = rows["weights_norm"][first], rows["weights_norm"][np.minimum(first + 1, len(rows) - 1)]
    with np.errstate(invalid="ignore"):
        far = (
            ok & (up > 10.0 * start) & (rows["loss_scale_before"][first] > 16.0) & (rows["unscale_calls"][first] == 0.0)
        )
    if not far.any():
        return None
    at = int(np.flatnonzero(far)[0])
    return _finding(
        rows,
        first[far],
        f"{int(far.sum())} first phases moved the weights from norm {float(start[at]):.4g} to {float(up[at]):.4g} along a "
        f"gradient that carried the scale {float(rows['loss_scale_before'][first[at]]):g}; unscale it first",
        float(up[at]),
        float(start[at]),
    )


def _still_scaled(rows: Rows) -> Finding | None:
    """The second phase stepped outside the scaler, on gradients that carried its scale."""
    _, last, ok = _windows(rows)
    scale = rows["loss_scale_before"][last]
    outside = ok & executed(rows)[last] & ~rows.true("step_in_scaler")[last] & rows.true("grad_scaled_at_step")[last]
    outside &= scale != 1.0
    if not outside.any():
        return None
    at = int(np.flatnonzero(outside)[0])
    used = float(rows["grad_norm_clipped"][last[at]])
    return _finding(
        rows,
        last[outside],
        f"{int(outside.sum())} second phases stepped on gradients that carried the scale {float(scale[at]):g}, outside of "
        "scaler.step: nothing unscales them or stops infinite ones; unscale both phases",
        used * float(scale[at]),
        used,
    )


def _refused(rows: Rows) -> Finding | None:
    """Both phases called ``unscale_``, which a scaler allows once between two updates."""
    wrong = climbs(rows)
    if not wrong.any():
        return None
    message = (
        "both phases call unscale_ on one optimizer, which the scaler refuses until update(): divide the first phase's "
        "gradients by scaler.get_scale() instead"
    )
    return _finding(rows, wrong, message, 2.0, 1)


def _windows(rows: Rows) -> tuple[Array, Array, Mask]:
    """First and last row of each attempted window, and whether the first is a climb to a second backward."""
    last = rows.ends
    first = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)
    return first, last, climbs(rows)[first] & (last > first)


def _finding(rows: Rows, wrong: Mask | Array, message: str, observed: float, expected: object) -> Finding:
    columns = ["grad_norm_left", "weights_norm", "step_skipped", "loss_scale_after"]
    return finding(
        RULE.code, RULE.name, "error", message, rows, wrong, observed=observed, expected=expected, columns=columns
    )


RULE = Rule(
    "SCL413",
    "sam-amp",
    "error",
    judge,
    needs=("grad_norm_left",),
    explains=("scaler-collapse", "accum-zero-grad-inside", "scaler-bypassed", "scaler-unscale-twice"),
)
