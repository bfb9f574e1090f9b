"""Weight decay reaches other parameters than the groups suggest.

What it does
------------
Where an optimizer has groups with and without weight decay, looks at what is in them: vectors (biases, scales of norms)
and matrices.

Why it matters
--------------
Groups without decay are there to spare vectors. Where they hold the matrices and the decayed ones the vectors, the lists
are swapped; where vectors are in both, the exemption misses some.

What the evidence looks like
----------------------------
The number of vectors and matrices with and without decay, and names of the vectors that are decayed.

Fix
---
Choose by shape rather than by name: ``p.dim() >= 2`` decays, the rest does not.

Known false alarms
------------------
Which parameters to decay is a matter of policy: this is a notice, and silent where all groups have the same decay.

References
----------
ServiceNow/Fast-LLM#542, facebookresearch/BalancingGroups#6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few, of_run, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer whose groups look wrong."""
    for groups in summary(view).get("decay", []):
        n = groups["counts"]
        if not n["vectors"]:
            continue
        if n["bare_matrices"] and not n["matrices"]:
            said = f"decays {n['vectors']} vectors ({few(groups['vectors'])}) and none of its {n['bare_matrices']} matrices"
            yield _finding(groups, f"{said}: the groups look swapped")
        elif n["bare_vectors"]:
            said = f"spares {n['bare_vectors']} vectors from decay and decays {n['vectors']} others ({few(groups['vectors'])})"
            yield _finding(groups, f"{said}: the exemption may miss them")
        else:
            said = f"decays {n['vectors']} vectors ({few(groups['vectors'])}) while its group without decay holds only matrices"
            yield _finding(groups, f"{said} ({few(groups['bare_matrices'])}): check which were meant to be spared")


def _finding(groups: dict[str, Any], said: str) -> Finding:
    label = groups["optimizer"]
    counts = groups["counts"]
    return of_run(
        RULE,
        "notice",
        f"{label} {said}",
        observed=counts["vectors"],
        expected=0,
        optimizer=label,
        params=groups["vectors"],
        rows=[
            {"weight_decay": groups["weight_decay"], "vectors": counts["vectors"], "matrices": counts["matrices"]},
            {"weight_decay": 0.0, "vectors": counts["bare_vectors"], "matrices": counts["bare_matrices"]},
        ],
    )


RULE = Rule("PAR706", "weight-decay-groups", "notice", judge)
