"""The optimizer's state was attached to the wrong parameters.

What it does
------------
Looks, by parameter name, for moments that were saved for one parameter and are found with another one after the load.

Why it matters
--------------
``load_state_dict`` of an optimizer goes by position, also where parameters have names. If their order changed (a dict or
a set was iterated, modules were re-ordered), equal shapes swap their moments in silence.

What the evidence looks like
----------------------------
The fingerprint of ``exp_avg`` in the event ``started`` of one name is that of another name in ``saved``.

Fix
---
Build the parameter groups in an order that does not depend on the run, for instance sorted by name.

References
----------
pytorch/pytorch#1489, PingoLH/CenterNet-HarDNet#10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule, Skip
from stepscope.rules.resume.continuation import Continuation, continuations, moments
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """State that is found under another name than it was saved for."""
    runs = [run for run in continuations(view) if run.saved is not None]
    if not runs:
        raise Skip("no save of the optimizer's state was seen in the earlier run")
    for run in runs:
        moved = _moved(run)
        if moved:
            name, other = next(iter(moved.items()))
            yield finding(
                RULE.code,
                RULE.name,
                "error",
                f"{len(moved)} parameters carry the optimizer state that was saved for another one ({name} has that of {other}): it "
                "is loaded by position, and the order of the parameters changed; build the groups in a fixed order",
                run.rows,
                run.rows.ends[:1],
                observed=other,
                expected=name,
                params=list(moved),
                rows_of_state=[{"param": n, "state_of": o} for n, o in list(moved.items())[:20]],
            )


def _moved(run: Continuation) -> dict[str, str]:
    """Parameter -> the one whose saved state it carries now."""
    assert run.saved is not None
    owners: dict[tuple[str, int], str] = {}
    for name in run.saved["state"]:
        for key, value in moments(run.saved, name).items():
            owners[key, value] = name
    moved = {}
    for name in run.names:
        old, new = moments(run.saved, name), moments(run.started, name)
        for key, value in new.items():
            owner = owners.get((key, value))
            if owner is not None and owner != name and old.get(key) != value:
                moved[name] = owner
    return moved


RULE = Rule(
    "RES602", "resume-optim-state-mismatch", "error", judge, channel="resume", explains=("resume-optim-state-lost",)
)
