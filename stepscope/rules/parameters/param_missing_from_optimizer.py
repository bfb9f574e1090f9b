"""Trainable parameters get gradients and are in no optimizer.

What it does
------------
Looks for parameters that require a gradient, got one, were in no optimizer at any time, and kept their value over at
least two steps. Parameters kept in a plain list are found at the ends of the loss's graph, and tensors that were meant
to be parameters in the attributes of modules.

Why it matters
--------------
Such a parameter stays as it was initialised. Everything around it adapts to it, the loss goes down, and nothing says
that a part of the model does not learn.

What the evidence looks like
----------------------------
The names and shapes of the parameters, the number of steps that left them bit for bit as they were, and where they were
found: in a model that was called, at the end of the graph only, or as a plain attribute.

Fix
---
Give the optimizer all of ``model.parameters()``, or add the missing part to a parameter group. Keep submodules in
``nn.ModuleList`` rather than in a list, and trainable tensors as ``nn.Parameter``. What is meant to stay as it is should
say so: ``requires_grad_(False)``, or ``--declare frozen=PATTERN``.

Known false alarms
------------------
Parameters that a script moves itself are left alone, since they change. A network that only serves a loss (perceptual
losses) and was put into eval mode is a notice: it costs gradients that nobody uses.

References
----------
zjunlp/HVPNeT#5, ACEsuit/mace#1529.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few, left_out, of_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding, Severity
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """One finding for parts that are missing, one for networks that were set aside on purpose, by the look of it."""
    missing = left_out(view)
    aside = [p for p in missing if p.get("alone") and not p.get("training")]
    forgotten = [p for p in missing if p not in aside]
    if forgotten:
        yield _finding(forgotten, "error", "add them to a parameter group, or freeze them if they are meant to stay")
    if aside:
        yield _finding(aside, "notice", "if their network is fixed on purpose, requires_grad_(False) saves the work")


def _finding(params: list[dict[str, Any]], severity: Severity, advice: str) -> Finding:
    names = [p["param"] for p in params]
    steps = max(p["attempts"] for p in params)
    what = "parameter is" if len(names) == 1 else "parameters are"
    return of_run(
        RULE,
        severity,
        f"{len(names)} trainable {what} in no optimizer: {few(names)}; got gradients and did not change in {steps} steps; {advice}",
        observed="in no optimizer, change 0",
        expected="each trainable parameter in one group",
        params=names,
        rows=[{k: p[k] for k in ("param", "shape", "where")} for p in params],
    )


RULE = Rule("PAR701", "param-missing-from-optimizer", "error", judge)
