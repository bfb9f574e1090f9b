"""Updates of half-precision weights are too small to change them.

What it does
------------
Looks at parameters in bfloat16 or float16, at steps with a learning rate above zero: which share of the elements with a
gradient kept their value bit for bit?

Why it matters
--------------
bfloat16 has 8 significant bits: an update below 0.2 to 0.4 % of a weight rounds away, at every step anew. Weights of norms
that start at 1 never move, decay never acts, and the loss goes down all the same for what is left.

What the evidence looks like
----------------------------
`lost_update_frac` near one, for all elements together or for single parameters (5 % overall can be all of the norms).

Fix
---
Keep the weights in float32 and compute under ``torch.autocast``; or keep float32 master copies, compensate (Kahan), or
round stochastically.

Known false alarms
------------------
Optimizers that keep a master copy or a compensation in their state, and those that round stochastically, are recognised
and left alone. float32 loses tiny updates by nature and is never reported.

References
----------
vllm-project/speculators#765, pytorch/ao#1124. Zamirai et al., Revisiting BFloat16 Training, 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Array, Rows, View

_SPACING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Least distance between neighbouring numbers, as a share of their size."""

_MOMENTS = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "step_size",
        "eta",
        "ax",
        "z",
    ]
)
"""What torch's optimizers keep for each parameter; anything else of a parameter's shape may save its small updates."""

_COLUMNS = ("param", "dtype", "shape", "micro_step", "lost_update_frac", "update_norm", "update_max", "param_norm")


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer; processes do the same, so the first one's rows are enough."""
    for rows in view.stepping:
        if rows.rank == view.stepping[0].rank and not _saved(view, rows):
            yield from _judge(view, rows)


def _saved(view: View, rows: Rows) -> bool:
    """Whether the optimizer keeps something by which small updates survive."""
    told = [e["detail"]["state"] for e in view.events("half_precision_state") if e["optimizer"] == rows.optimizer]
    return any(set(state) - _MOMENTS for state in told)


def _judge(view: View, rows: Rows) -> Iterator[Finding]:
    table = _table(view, rows)
    if not len(table["param"]):
        return
    names, first, which = np.unique(table["param"].astype(str), return_index=True, return_inverse=True)
    steps = np.bincount(which)
    lost = np.array([np.median(table["lost_update_frac"][which == i]) for i in range(len(names))])
    stuck = np.bincount(which, table["update_norm"] != 0.0) == 0
    size = np.array([_numel(s) for s in table["shape"][first]])
    share = float((lost * size).sum() / size.sum())
    never = stuck & (lost == 1.0) & (steps >= 5)
    mostly = share >= 0.5 and int(steps.max()) >= 3 and not _stochastic(table, lost[which])
    if not mostly and (not never.any() or _stochastic(table, lost[which])):
        return
    worst = names[np.argsort(-lost, kind="stable")]
    kind = str(table["dtype"][0])
    where = np.isin(rows["micro_step"], table["micro_step"]) & (rows["lost_update_frac"] > 0)
    said = f"{share:.0%} of the elements with a gradient kept their {kind} value at a usual step of {rows.optimizer}"
    held = f"; {few(names[never])} never moved in {int(steps[never].max())} steps" if never.any() else ""
    yield finding(
        RULE.code,
        RULE.name,
        "warning",
        f"{said}{held}: the updates round away; keep the weights in float32 and compute under autocast, or keep master copies",
        rows,
        where,
        observed=share,
        expected=0.0,
        columns=["lost_update_frac", "update_ratio"],
        params=[str(n) for n in (names[never] if never.any() else worst)[:20]],
    )


def _table(view: View, rows: Rows) -> dict[str, Array]:
    """Rows of the table of parameters: half precision, this optimizer, counted, at a rate above zero, not skipped."""
    column: dict[str, Any] = {c: view.trace.values(c, table="params") for c in _COLUMNS}
    kept = np.isin(column["dtype"], list(_SPACING)) & ~np.isnan(column["lost_update_frac"].astype(float))
    kept &= view.trace.values("optimizer", table="params") == rows.optimizer
    kept &= view.trace.values("rank", table="params") == rows.rank
    acted = rows["micro_step"][(rows["lr"] != 0.0) & ~rows.true("step_skipped")]
    kept &= np.isin(column["micro_step"], acted)
    return {c: v[kept] for c, v in column.items()}


def _stochastic(table: dict[str, Array], lost: Array) -> bool:
    """Whether the elements that moved jumped by the spacing of ordinary weights, as stochastic rounding makes them.

    What survives rounding to nearest is at most twice the update, and where half of the updates are lost they are below
    half the spacing of a usual weight: what moved has then moved by about that spacing at most, and by far less where
    nine in ten are lost.
    """
    size = np.sqrt(np.array([_numel(s) for s in table["shape"]]))
    usual = table["param_norm"] / size * np.array([_SPACING[d] for d in table["dtype"]])
    moved = (lost >= 0.5) & (table["update_norm"] > 0)
    jumped = table["update_max"] >= usual * np.where(lost >= 0.9, 1.0, 1.5)
    return bool(moved.any() and jumped[moved].mean() > 0.5)


def _numel(shape: str) -> int:
    return int(np.prod([int(n) for n in shape.split("x")])) if shape else 1


RULE = Rule("NUM902", "bf16-update-lost", "warning", judge, needs=("lost_update_frac",))
