"""The optimizer holds tensors that the model no longer uses.

What it does
------------
Looks for two things together: tensors in an optimizer that are in no model that was called and never got a gradient, and
trainable parameters of the model that get gradients, are in no optimizer and do not change.

Why it matters
--------------
The optimizer steps tensors that nobody reads. The layers that replaced them stay as they were initialised or loaded.

What the evidence looks like
----------------------------
Both sets, with shapes. Where a head was replaced they are a few tensors each; after ``load_state_dict(assign=True)`` they
are the whole model.

Fix
---
Build the optimizer after the last change of the model: after a head is replaced, after ``load_state_dict`` with
``assign=True``, after moves that exchange parameters. Or rebuild its groups then.

Known false alarms
------------------
None known. ``model.to(device)`` keeps parameters on CPU and CUDA as the same objects, and is not reported.

References
----------
pytorch/xla#1623, pytorch/pytorch#149205.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few, left_out, of_run, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """One finding for the run."""
    facts = summary(view)
    stale, missing = facts.get("stale", []), left_out(view)
    if not stale or not missing:
        return
    names = [p["param"] for p in missing]
    number = facts["counts"]["stale"]
    tensors = "tensor" if number == 1 else "tensors"
    yield of_run(
        RULE,
        "error",
        f"{stale[0]['optimizer']} holds {number} {tensors} that no model in use has (shapes {few(s['shape'] for s in stale)}), while "
        f"{few(names)} get gradients, are in no optimizer and do not change; build the optimizer after the model is final",
        observed=number,
        expected=0,
        optimizer=stale[0]["optimizer"],
        params=names,
        rows=[{"param": p["param"], "shape": p["shape"]} for p in missing],
    )


RULE = Rule("PAR703", "param-stale-ref", "error", judge, explains=("param-missing-from-optimizer",))
