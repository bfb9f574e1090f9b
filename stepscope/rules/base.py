"""What a rule is, and the headings under which its module explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stepscope.rules.outcome import Finding, Severity
    from stepscope.rules.view import View

HEADINGS = ("What it does", "Why it matters", "What the evidence looks like", "Fix", "Known false alarms", "References")
"""Sections of a rule module's docstring, in this order; the last two may be left out."""


class Skip(Exception):  # noqa: N818 - it is no error: it is how a rule says that it cannot judge
    """Raised by a rule that lacks its evidence; the text is the reason that is reported."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of fault.

    Attributes:
        code: three letters of the family and three digits; never reused.
        name: the catalogue's name; it names the fault, not the cure.
        severity: the usual severity of its findings.
        judge: looks at a run and yields findings; raises `Skip` where the evidence is missing.
        needs: columns of `steps` that must hold a value somewhere; else the rule is skipped.
        explains: names of rules whose findings are consequences of this fault: they are folded into its evidence.
        channel: ``run`` (one run tells), ``declare`` (an intent must be declared), ``resume`` (an earlier trace),
            ``ranks`` (several processes) or ``check`` (only an experiment decides: see `advice`).
        advice: for ``check``: the command that decides.
    """

    code: str
    name: str
    severity: Severity
    judge: Callable[[View], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    channel: str = "run"
    advice: str = ""
