"""Loading the optimizer discarded the hyper-parameters that this run was given.

What it does
------------
Compares the settings that the optimizer was built with in both runs: where this run asked for other values, and the
first step uses those of the checkpoint, it says so.

Why it matters
--------------
``optimizer.load_state_dict`` restores rate, betas and weight decay along with the moments. A new value on the command
line has no effect, without a word. Often that is wanted, hence a notice.

What the evidence looks like
----------------------------
The rate in ``optimizer_built`` differs between the runs, and `lr` of the first step is the one of ``optimizer_loaded``.

Fix
---
Set ``param_group["lr"]`` (and the scheduler's ``base_lrs``) after loading, if the new value is meant.

References
----------
pytorch/examples#816, pytorch/pytorch#156846.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.rules.base import Rule
from stepscope.rules.resume.continuation import Continuation, continuations
from stepscope.rules.schedule.pace import descriptions
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps")


def judge(view: View) -> Iterator[Finding]:
    """Settings that were asked for and did not take effect."""
    for run in continuations(view):
        ignored = _ignored(view, run)
        if ignored:
            first = ignored[0]
            yield finding(
                RULE.code,
                RULE.name,
                "notice",
                f"this run was given {first['setting']} {first['given']} and uses {first['used']}, the checkpoint's "
                f"({len(ignored)} settings in all): set it after loading if the new value is meant",
                run.rows,
                run.rows.ends[:1],
                observed=first["used"],
                expected=first["given"],
                columns=["lr"],
                rows_of_settings=ignored,
            )


def _ignored(view: View, run: Continuation) -> list[dict[str, Any]]:
    now = descriptions(view, run.rows, "optimizer_built")
    then = descriptions(View(view.after), run.before, "optimizer_built") if view.after is not None else []
    loaded = descriptions(view, run.rows, "optimizer_loaded")
    if not now or not then or not loaded:
        return []
    out = []
    groups = zip(now[0]["groups"], then[0]["groups"], loaded[-1]["hyper"], run.started["hyper"], strict=False)
    for number, (given, old, restored, used) in enumerate(groups, start=1):
        for key in _SETTINGS:
            if key in given and given[key] != old.get(key) and used.get(key) == restored.get(key) != given[key]:
                out.append({"group": number, "setting": key, "given": given[key], "used": used.get(key)})
    return out


RULE = Rule("RES608", "resume-lr-overwritten", "notice", judge, channel="resume")
