"""Each process clips its shard of the gradient by the shard's own norm.

What it does
------------
Looks at processes that hold different parts of one model: the factor by which the gradient was clipped should be the same
in all of them.

Why it matters
--------------
The norm of a shard is less than the norm of the whole. Clipped apart, the parts of the gradient keep different shares of
their length: its direction changes, the limit is exceeded as a whole, and both depend on how the model was split.

What the evidence looks like
----------------------------
`clip_norm` and `clip_coef` differ between processes at the same step.

Fix
---
Sum the squared norms over the processes that share the model (each element once), take the root, and clip all of them by
it: ``clip_grads_with_norm_(params, max_norm, norm)``. FSDP and tensor-parallel libraries have a clip of their own.

Known false alarms
------------------
None known. Copies under DistributedDataParallel, and processes that train models of their own, are not judged.

References
----------
pytorch/pytorch#72548, areal-project/AReaL#312.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.ranks.aligned import aligned, uses_ddp
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.ranks.aligned import Aligned
    from stepscope.rules.view import Array, View


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer."""
    for steps in aligned(view):
        if uses_ddp(steps) or not _sharded(view, steps):
            continue
        factors = _factors(steps)
        clipped = (factors < 1.0 - 1e-4).any(axis=0)
        apart = clipped & (np.ptp(factors, axis=0) > 1e-4 * factors.max(axis=0))  # false where one is not known
        if int(apart.sum()) < max(2.0, 0.5 * clipped.sum()):
            continue
        at = int(np.flatnonzero(apart)[0])
        norms = steps.at("grad_norm")[:, at]
        whole = float(np.sqrt((norms**2).sum()))
        yield finding(
            RULE.code,
            RULE.name,
            "error",
            f"{int(apart.sum())} of {len(steps)} steps of {steps.label} were clipped by a different factor in each process ("
            f"{' and '.join(f'{f:.4g}' for f in factors[:2, at])}): each took the norm of its own shard ("
            f"{' and '.join(f'{n:.4g}' for n in norms[:2])}) instead of that of all shards ({whole:.4g} if they do not overlap); "
            "sum the squared norms over the processes first",
            steps.rows[0],
            steps.ends[0][apart],
            observed=[float(n) for n in norms],
            expected=whole,
            columns=["clip_norm", "clip_coef", "grad_norm"],
        )


def _factors(steps: Aligned) -> Array:
    """The factor of the clip: as torch's clip applied it, else what the norms before and after it say.

    Where gradients were reduced by hand in between, the norms say nothing of a clip.
    """
    told = steps.at("clip_coef")
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = np.where(
            steps.at("reduced_by_hand") == 1.0, np.nan, steps.at("grad_norm_clipped") / steps.at("grad_norm")
        )
    return np.where(np.isnan(told), seen, told)


def _sharded(view: View, steps: Aligned) -> bool:
    """Whether the processes hold parts of one model: other parameters, or others' values and they talk at each step.

    Copies of a model have the same norm at the first step; models of their own do not exchange anything in between.
    """
    parts = [_parameters(view, rows.rank, steps.label) for rows in steps.rows]
    if any(p != parts[0] for p in parts):
        return True
    calls = [
        rows["all_reduce_calls"][:-1] for rows in steps.rows
    ]  # what follows the last backward is not recorded whole
    talk = all(len(c) and (c > 0).mean() >= 0.9 for c in calls)
    return bool(steps.differs("param_norm")[0]) and talk


def _parameters(view: View, rank: int, label: str) -> set[tuple[str, str]]:
    held = {c: view.trace.values(c, table="params") for c in ("param", "shape", "rank", "optimizer")}
    mine = (held["rank"] == rank) & (held["optimizer"] == label)
    return set(zip(held["param"][mine], held["shape"][mine], strict=True))


RULE = Rule("CLP309", "clip-local-shard", "error", judge, needs=("grad_norm", "grad_norm_clipped"), channel="ranks")
