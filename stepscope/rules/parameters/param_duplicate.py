"""One parameter is updated twice, or a tie between two was lost.

What it does
------------
Looks for a tensor that an optimizer holds more than once, for two parameters of optimizers that lie in the same memory,
and for names that stood for one parameter before ``load_state_dict`` and for two, both trained, after it.

Why it matters
--------------
A tensor that is listed twice takes two steps at once; momentum and decay count twice too. Tied weights that were untied by
a load drift apart: the output layer no longer is the embedding.

What the evidence looks like
----------------------------
The names, and how often each tensor is held.

Fix
---
Collect parameters by identity (``dict.fromkeys(params)``, or ``model.parameters()``, which lists each once). After
``load_state_dict(assign=True)`` tie the weights again, before the optimizer is built.

Known false alarms
------------------
None known. One tensor in two optimizers is not reported: networks that share a part do so on purpose.

References
----------
pytorch/pytorch#188346, volcengine/veGiantModel#6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few, of_run, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """Up to one finding of each of the three sorts."""
    facts = summary(view)
    if repeated := facts.get("repeated"):
        yield _repeated(repeated)
    if shared := facts.get("one_storage"):
        message = f"{few(shared[0])} are different parameters in the same memory, and each is stepped"
        yield _tied(
            shared,
            f"{message}: the values move {len(shared[0])} times per step; make them one parameter again (tie the weights)",
        )
    if untied := [names for names in facts.get("untied", []) if names not in (shared or [])]:
        message = f"{few(untied[0])} were one parameter before load_state_dict and are trained apart since"
        yield _tied(untied, f"{message}: tie them again after the load, before the optimizer is built")


def _repeated(repeated: list[dict[str, object]]) -> Finding:
    first = repeated[0]
    names = [str(r["param"]) for r in repeated]
    return of_run(
        RULE,
        "error",
        f"{first['optimizer']} holds {few(names)} {first['times']} times: each step moves it {first['times']} times as far; "
        "list each parameter once",
        observed=first["times"],
        expected=1,
        optimizer=first["optimizer"],
        params=names,
        rows=repeated,
    )


def _tied(groups: list[list[str]], message: str) -> Finding:
    names = [name for group in groups for name in group]
    return of_run(RULE, "error", message, observed=len(groups[0]), expected=1, params=names)


RULE = Rule("PAR705", "param-duplicate", "error", judge)
