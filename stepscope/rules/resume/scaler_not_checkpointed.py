"""The loss scale did not survive the resume.

What it does
------------
Compares scale and growth tracker at the save with those that the resumed run begins with.

Why it matters
--------------
A scaler that starts over at 65536 overflows and skips steps until it has found its scale again; each skip costs a batch,
and schedulers and counters fall behind.

What the evidence looks like
----------------------------
`loss_scale_before` of the first row is not that of the save, followed by rows with `step_skipped`.

Fix
---
Save ``scaler.state_dict()``, and load it after the scaler was built.

References
----------
ultralytics/ultralytics#22189, huggingface/transformers#34053.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.resume.continuation import Continuation, continuations
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Scales that start over; told once, since one scaler usually serves all optimizers."""
    loaded = any(True for _ in view.events("scaler_loaded"))
    for run in continuations(view):
        found = _scale(run) or (_tracker(run) if not loaded else None)
        if found is not None:
            yield found
            return


def _scale(run: Continuation) -> Finding | None:
    now = run.rows["loss_scale_before"]
    expected = _expected(run)
    if not len(now) or np.isnan(now[0]) or expected is None or now[0] in expected:
        return None
    skipped = run.rows.windows("step_skipped")[:50] == 1.0
    burst = int(skipped.sum())
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"the loss scale was {expected[0]:g} at the save and is {now[0]:g} at the first step after the resume"
        f"{f', and {burst} steps were skipped' if burst else ''}; save and load scaler.state_dict()",
        run.rows,
        np.concatenate([[0], run.rows.ends[:50][skipped]]).astype(np.int64),
        observed=float(now[0]),
        expected=float(expected[0]),
        columns=["loss_scale_before", "step_skipped"],
    )


def _expected(run: Continuation) -> list[float] | None:
    """The scales at the save; those of the last update where no save was seen. None where there was no scaler."""
    if run.saved is not None:
        return [float(s) for s in run.saved["scale"]] or None
    seen = run.before["loss_scale_after"]
    seen = seen[~np.isnan(seen)]
    return [float(seen[-1])] if len(seen) else None


def _tracker(run: Continuation) -> Finding | None:
    """The same scale by chance: the count of clean steps tells that the scaler is a new one."""
    if run.saved is None or len(run.saved["growth_tracker"]) != 1 or len(run.started["growth_tracker"]) != 1:
        return None
    old, new = float(run.saved["growth_tracker"][0]), float(run.started["growth_tracker"][0])
    if new != 0 or old < 2:
        return None
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"the scaler had counted {old:g} clean steps at the save and starts at 0 after the resume: its state was not restored, "
        "though the scale happens to be the same; save and load scaler.state_dict()",
        run.rows,
        np.array([0]),
        observed=new,
        expected=old,
        columns=["loss_scale_before"],
    )


RULE = Rule("RES603", "scaler-not-checkpointed", "warning", judge, needs=("loss_scale_before",), channel="resume")
