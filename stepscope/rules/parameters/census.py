"""What the trace says about parameters as a whole: the last summary of each process."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from stepscope.patterns import names_match
from stepscope.rules.outcome import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.rules.base import Rule
    from stepscope.rules.outcome import Severity
    from stepscope.rules.view import View

HALF = ("float16", "bfloat16")


def summary(view: View) -> dict[str, Any]:
    """The last summary of the first process that wrote one, in the words of `probes.census`.

    Raises:
        Skip: there is none.
    """
    found = list(view.events("parameters"))
    view.need(found, "the run was too short for a look at its parameters")
    first = min(int(e["rank"]) for e in found)
    detail: dict[str, Any] = [e for e in found if int(e["rank"]) == first][-1]["detail"]
    return detail


def left_out(view: View) -> list[dict[str, Any]]:
    """Parameters that got gradients, are in no optimizer, and kept their value over at least two steps.

    Left out are those that somebody sees to: declared as frozen; moved by hand; held as a master copy of the same shape
    that gets its gradient by hand; in half precision beside others that are moved by hand, since a small step of a
    master copy can leave them as they were.
    """
    facts = summary(view)
    listed = facts.get("unoptimized", [])
    by_hand = any(p["moved"] for p in listed)
    masters = Counter(facts.get("fed_by_hand", []))
    frozen = str(view.declared.get("frozen", ""))
    return [
        p
        for p in listed
        if not p["moved"]
        and p["attempts"] >= 2
        and not masters[p["shape"]]
        and not (by_hand and p["dtype"] in HALF)
        and not names_match(p["param"], frozen)
    ]


def of_run(rule: Rule, severity: Severity, message: str, **evidence: Any) -> Finding:
    """A finding that belongs to the whole run and not to single steps."""
    return Finding(rule.code, rule.name, severity, message, evidence=evidence)


def few(names: Iterable[str], most: int = 4) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
