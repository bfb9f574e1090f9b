"""The loss that the script logs is K times too small (or too large) while the gradient is right.

What it does
------------
Compares each value that the script prints (``--declare logged_loss=REGEX``) with the recorded undivided losses since the
last print: their mean, the last window's, the last one, the whole run's. A fault is reported where the values match one of
these only after multiplication or division by K.

Why it matters
--------------
Nothing is wrong with the training, but its curve cannot be compared with a validation loss, with another K, or with
anybody else's run. It must not be taken for a fault of the gradient.

What the evidence looks like
----------------------------
The logged values times K are the means of `loss`, while `loss_weight_sum` is 1.

Fix
---
Log the loss before it is divided, or add up the divided ones over the window.

Known false alarms
------------------
Other averages (smoothed ones, over other spans) that lie within the range of the recorded losses are taken as right.

References
----------
huggingface/transformers#35438, espnet/espnet#5090.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Array, View


def judge(view: View) -> Iterator[Finding]:
    """Logged values that match the recorded losses only by a factor of K."""
    logged = [(e["micro_step"], float(e["detail"]["value"])) for e in view.events("logged_loss")]
    view.need(logged, "no logged loss was seen: --declare logged_loss='loss ([0-9.]+)' says what the script prints")
    w = next((w for w in windows_of(view) if len(w)), None)
    if w is None or (w.k or 1) < 2:
        return
    k = int(w.k or 1)
    found = [f for f in _factors(w, logged, k) if f is not None]
    wrong = [f for f in found if f[0] != 1.0]
    if not wrong or len(wrong) < max(0.6 * len(found), 1):
        return
    factor, value, mean, micro_step = wrong[0]
    word = f"1/{k}" if factor < 1.0 else f"{k} times"
    yield finding(
        RULE.code,
        RULE.name,
        "warning",
        f"{len(wrong)} of {len(logged)} logged losses are {word} of what was recorded: at micro-step {micro_step} the log says "
        f"{value:g}, the mean undivided loss is {mean:.6g}; the gradient is not concerned",
        w.rows,
        np.isin(w.rows["micro_step"], [f[3] for f in wrong]),
        observed=value,
        expected=mean,
        columns=["loss", "loss_weight"],
    )


def _factors(w: Windows, logged: list[tuple[int, float]], k: int) -> Iterator[tuple[float, float, float, int] | None]:
    """For each logged value the factor between it and the losses: 1, 1/K, K, or None where nothing fits."""
    steps, loss = w.rows["micro_step"], w.rows["loss"]
    digits = max(len(f"{value:.12g}".partition(".")[2]) for _, value in logged)
    before = 0
    for micro_step, value in logged:
        since = loss[(steps > before) & (steps <= micro_step)]
        so_far = loss[steps <= micro_step]
        before = micro_step if len(since) else before
        if len(since) and np.isfinite(since).all() and np.isfinite(value):
            yield _factor(value, since, so_far, k, 0.6 * 10.0**-digits, micro_step)


def _factor(
    value: float, since: Array, so_far: Array, k: int, step: float, micro_step: int
) -> tuple[float, float, float, int] | None:
    means = [since.mean(), since[-k:].mean(), since[-1], so_far.mean(), so_far[-k:].mean(), np.median(since)]
    for factor in (1.0, 1.0 / k, float(k)):
        if any(abs(value - factor * m) <= step * max(1.0, factor) + 2e-4 * abs(value) for m in means):
            return factor, value, float(means[0]), micro_step
    low, high = float(since.min()), float(since.max())
    if low <= value <= high:
        return 1.0, value, float(means[0]), micro_step
    for factor in (1.0 / k, float(k)):
        if low <= value / factor <= high:
            return factor, value, float(means[0]), micro_step
    return None


RULE = Rule("ACC110", "accum-loss-misreported", "warning", judge, needs=("loss",), channel="declare")
