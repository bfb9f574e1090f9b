"""The clip was given other tensors than those that the step reads.

What it does
------------
Looks for clip calls that reached none of an optimizer's gradients while these waited for their step, that were the only
clips of that step, and that were in vain: given nothing that waited for a step, or another network's gradients that were
cleared before its next step.

Why it matters
--------------
With float32 master copies, a rebuilt model or a second network, the clip limits gradients that no step will read. The
optimizer works with the whole gradient.

What the evidence looks like
----------------------------
`clip_elsewhere` counts such calls; `clip_calls` is 0, and `grad_norm_clipped` is the whole norm.

Fix
---
Clip the tensors that the optimizer holds: ``[p for g in optimizer.param_groups for p in g["params"]]``.

Known false alarms
------------------
Clips of a network that is trained elsewhere, by code that is not watched, between backward and step of this one.

References
----------
Lightning-AI/pytorch-lightning#2556.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, merged, siblings, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed
from stepscope.rules.view import Mask, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding, Severity


def judge(view: View) -> Iterator[Finding]:
    """Steps whose only clip went elsewhere."""
    limits = {int(e["micro_step"]): e["detail"].get("max_norm") for e in view.events("clip_matched_nothing")}
    yield from merged([f for w in windows_of(view) if len(w) for f in (_judge(view, w, limits),) if f is not None])


def _judge(view: View, w: Windows, limits: dict[int, object]) -> Finding | None:
    rows = w.rows
    ran = executed(rows)
    elsewhere = (rows["clip_elsewhere"] > 0) | _in_vain(view, w)
    wrong = ran & elsewhere & (rows["clip_calls"] == 0.0) & (rows["grad_params"] > 0)
    if not wrong.any():
        return _partly(rows, ran)
    if np.count_nonzero(wrong) < 0.5 * np.count_nonzero(ran):
        return None
    used = rows["grad_norm_clipped"]
    at = int(np.flatnonzero(wrong)[0])
    limit = limits.get(int(rows["micro_step"][at]))
    given = f" to {limit:g}" if isinstance(limit, int | float) else ""
    severity: Severity = "notice" if limit == "inf" or limit == float("inf") else "error"
    return finding(
        RULE.code,
        RULE.name,
        severity,
        f"{int(wrong.sum())} clips{given} were given none of the {int(rows['grad_params'][at])} gradients that waited for the "
        f"step: it used a norm of up to {float(np.nanmax(used[wrong])):.4g}; clip the tensors that the optimizer holds",
        rows,
        wrong,
        observed=0,
        expected=int(rows["grad_params"][at]),
        columns=["grad_norm_clipped", "clip_elsewhere"],
    )


def _in_vain(view: View, w: Windows) -> Mask:
    """Micro-steps at which another optimizer's gradients were clipped that none of its steps used. Shape ``(rows,)``."""
    others = [o for o in siblings(view, w.rows) if o.rows is not w.rows]
    unused = [o.rows["micro_step"][~o.used_rows & (o.rows["clip_calls"] > 0)] for o in others]
    return np.isin(w.rows["micro_step"], np.concatenate(unused) if unused else [])


def _partly(rows: Rows, ran: Mask) -> Finding | None:
    """Every clip covers the same part of the gradient, and the rest is never limited."""
    covered, limit = rows["clip_covered"], rows["clip_max_norm"]
    part = ran & (rows["clip_calls"] > 0) & np.isfinite(limit) & (covered > 0.0) & (covered < 1.0)
    if np.count_nonzero(part) < 0.9 * np.count_nonzero(ran) or not (part & rows.true("clip_bound")).any():
        return None
    at = int(np.flatnonzero(part)[0])
    return finding(
        RULE.code,
        RULE.name,
        "notice",
        f"{int(part.sum())} clips to {float(limit[at]):g} covered {float(covered[at]):.0%} of the optimizer's gradients: the whole "
        f"had norm {float(np.nanmax(rows['grad_norm_clipped'][part])):.4g} at most; clip all of them unless that is meant",
        rows,
        part,
        observed=float(covered[at]),
        expected=1.0,
        columns=["clip_covered", "grad_norm_clipped", "clip_max_norm"],
    )


RULE = Rule("CLP307", "clip-wrong-params", "error", judge, needs=("clip_elsewhere",))
