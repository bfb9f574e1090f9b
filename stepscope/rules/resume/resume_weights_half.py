"""The checkpoint held the weights in half precision.

What it does
------------
Looks for parameters that differ from those at the save, are equal to their own round trip through float16 or bfloat16,
and were not before.

Why it matters
--------------
The resumed run starts from rounded weights: up to half a unit in the last of 8 or 11 bits is lost in each. The
optimizer's state is exact and no longer fits.

What the evidence looks like
----------------------------
The flags ``float16`` or ``bfloat16`` of the event ``started`` are true for parameters where those of ``saved`` are not.

Fix
---
Save the weights in the dtype in which they are trained.

References
----------
torch.save keeps the dtype that it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.resume.continuation import Continuation, continuations, distance
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

_CLOSE = {"bfloat16": 1e-2, "float16": 2e-3}
"""How far a norm may move by rounding each element to the dtype: 2^-8 and 2^-11, and some room. What was rounded to
bfloat16 mostly survives float16 too, so the coarser one comes first."""


def judge(view: View) -> Iterator[Finding]:
    """Weights that are the saved ones, rounded."""
    origins = {}
    if view.after is not None:
        origins = {(e["rank"], e["optimizer"]): e["detail"] for e in View(view.after).events("started")}
    for run in continuations(view):
        reference = run.saved or origins.get((run.before.rank, run.before.optimizer))
        if reference is None or "params" not in reference:
            continue
        for dtype, close in _CLOSE.items():
            changed = [n for n in run.names if reference["params"].get(n) != run.started["params"][n]]
            rounded = [n for n in changed if run.started[dtype][n] and not reference[dtype].get(n, True)]
            near = run.saved is None or distance(reference, run.started, tuple(changed)) <= close
            if (
                rounded
                and len(rounded) >= 0.9 * len([n for n in changed if not reference[dtype].get(n, True)])
                and near
            ):
                yield _tell(run, dtype, rounded)
                break


def _tell(run: Continuation, dtype: str, rounded: list[str]) -> Finding:
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"the weights after the resume are those of the save rounded to {dtype} ({len(rounded)} of {len(run.names)} parameters, "
        f"{rounded[0]} the first): save them in {', '.join(run.started.get('dtypes', ['their own dtype']))}",
        run.rows,
        run.rows.ends[:1],
        observed=dtype,
        expected=", ".join(run.started.get("dtypes", [])),
        params=rounded[:20],
    )


RULE = Rule("RES604", "resume-weights-half", "warning", judge, channel="resume")
