"""A summed loss was divided by something else than the number of targets that count.

What it does
------------
Adds up the weights of all targets that a step used. Where the loss is meant as a mean over valid targets
(``--declare loss_average=targets``), they come to one.

Why it matters
--------------
Padding, an unshifted label, sentences in place of tokens or one device's count in place of all shrink (or swell) every
gradient by a factor that changes from window to window.

What the evidence looks like
----------------------------
`target_weight` is one number in the window, but `target_weight` times `num_items`, summed, is not one: its inverse times
the count is the denominator that was used.

Fix
---
Count the labels that enter the loss: after the shift, without the ignored ones, over the whole window (and all processes,
where the gradient is averaged over them).

References
----------
huggingface/transformers#46204, huggingface/transformers#37474.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, close, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Array, View


def judge(view: View) -> list[Finding]:
    """Windows whose targets' weights do not come to one."""
    view.need(
        view.declared.get("loss_average") == "targets",
        "whether the loss is meant as a mean over targets is not known: --declare loss_average=targets",
    )
    view.need(int(view.trace.meta.get("world_size") or 1) == 1, "with several processes the count may be a global one")
    return merged([f for w in windows_of(view) if len(w) for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    count = w.rows.per_window(np.where(w.used_rows, w.rows["num_items"], 0.0))
    whole = w.rows.per_window(np.where(w.used_rows, w.rows["target_weight"] * w.rows["num_items"], 0.0))
    whole = np.where(close(whole * w.ratio, 1.0), 1.0, whole * w.divided)
    wrong = np.isfinite(whole) & (whole > 0) & ~close(whole, 1.0, 0.002) & ~w.closure & ~_by_k(w, whole)
    if not wrong.any() or wrong.sum() < 0.2 * len(w):
        return []
    used, right = count[wrong] / whole[wrong], count[wrong]
    return [
        finding(
            RULE.code,
            RULE.name,
            "warning",
            f"{int(wrong.sum())} of {len(w)} windows divide their summed loss by {used[0]:.6g} where {right[0]:.6g} targets count "
            f"(first of them): the targets' weights come to {whole[wrong].min():.4g}..{whole[wrong].max():.4g} instead of 1",
            w.rows,
            w.mask(wrong),
            observed=float(used[0]),
            expected=float(right[0]),
            columns=["num_items", "target_weight", "loss_weight_sum"],
        )
    ]


def _by_k(w: Windows, whole: Array) -> Array:
    """Off by the number of micro-steps: another rule's business."""
    k = float(w.k or 1)
    return np.asarray(close(whole, w.live) | close(whole, 1.0 / k) | close(whole, w.live / k))


RULE = Rule(
    "ACC104", "accum-denominator-wrong", "warning", judge, needs=("target_weight", "num_items"), channel="declare"
)
