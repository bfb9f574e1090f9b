"""After the resume the data is not what it would have been: batches repeat, are left out, or the noise differs.

What it does
------------
Compares the fingerprints of the batches after the resume with those of the earlier run, up to the save (seen before) and
after it (what should come next). Where batch and weights are the same as in the earlier run's next micro-step, it
compares the loss, which then only the random state of dropout and the like can change.

Why it matters
--------------
A sampler that starts over trains twice on the first part of the data and never on the last.

What the evidence looks like
----------------------------
`batch_fingerprint` of the first rows after the resume occurs in the earlier run before the save.

Fix
---
Save the position in the epoch and the states of the generators (Python, numpy, torch, the DataLoader's own), or derive
the order from the epoch and skip the batches that were done.

Known false alarms
------------------
Data in a fixed order that starts over at an epoch's end is recognised by its period, or by a DataLoader that does not
shuffle; a hand-written pass in fixed order, resumed after its first epoch, is not.

References
----------
huggingface/accelerate#4071, kyutai-labs/pocket-tts#287.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.resume.continuation import Continuation, continuations, fingerprints
from stepscope.rules.view import Array, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

_FEWEST = 3
"""Batches in a row that must repeat."""

_MOST_PLACES = 25
"""Places of one batch, from either end of the earlier run, from which on the rest is compared."""


def judge(view: View) -> Iterator[Finding]:
    """The first optimizer's batches: all of them see the same data."""
    run = continuations(view)[0]
    earlier, now = fingerprints(run.before), fingerprints(run.rows)
    view.need(earlier.any() and now.any(), "batch_fingerprint was not observed in both runs")
    done, ahead = earlier[: run.micro_step], earlier[run.micro_step :]
    found = _next(run, ahead, now) if len(ahead) else None
    if found is None and not (len(ahead) and now[0] == ahead[0]):
        found = _seen_before(view, run, done, now) or _left_out(run, ahead, now)
    if found is not None:
        yield found


def _tell(run: Continuation, text: str, count: int, observed: object, expected: object) -> Finding:
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        text,
        run.rows,
        np.arange(count),
        observed=observed,
        expected=expected,
        columns=["batch_fingerprint", "loss"],
    )


def _seen_before(view: View, run: Continuation, done: Array, now: Array) -> Finding | None:
    """Batches of the earlier run, in its order, from some place on."""
    places = np.flatnonzero(done == now[0]) if now[0] else np.zeros(0, dtype=np.int64)
    if not len(places):
        return None
    runs = {int(k): _match(done[k:], now) for k in [*places[:_MOST_PLACES], *places[-_MOST_PLACES:]]}
    place = max(runs, key=lambda k: (runs[k], -k))
    count = runs[place]
    if count < min(_FEWEST, len(now), len(done) - place) or _periodic(done, now) or _whole_epochs(view, done, place):
        return None
    text = (
        f"the first {count} batches after the resume at micro-step {run.micro_step} are those of micro-steps {place + 1} to "
        f"{place + count} of the earlier run again: restore the position in the data, or skip the batches that were done"
    )
    return _tell(run, text, count, place + 1, run.micro_step + 1)


def _match(old: Array, new: Array) -> int:
    """How many leading elements are equal."""
    size = min(len(old), len(new))
    different = np.flatnonzero(old[:size] != new[:size])
    return int(different[0]) if len(different) else size


def _periodic(done: Array, now: Array) -> bool:
    """The earlier run itself repeats with a period, and the resumed one goes on in it: data in a fixed order."""
    last = np.flatnonzero(done[:-1] == done[-1])
    for place in last[::-1][:20]:
        period = len(done) - 1 - int(place)
        tail = min(period, len(done) - period)
        if (done[-tail:] == done[-tail - period : len(done) - period]).all():
            coming = np.resize(done[len(done) - period :], len(now))
            if _match(coming, now) >= min(_FEWEST, len(now)):
                return True
    return False


def _whole_epochs(view: View, done: Array, place: int) -> bool:
    """A loader in fixed order had just come to an end, and starts over: the same batches again are right."""
    assert view.after is not None
    loaders = [e["detail"] for e in view.after.details("loader_started")]
    fixed = [d["batches"] for d in loaders if d["shuffles"] is False and d["batches"]]
    return any(len(done) % n == 0 and place % n == 0 for n in fixed) and not any(d["shuffles"] for d in loaders)


def _left_out(run: Continuation, ahead: Array, now: Array) -> Finding | None:
    places = np.flatnonzero(ahead == now[0]) if now[0] else np.zeros(0, dtype=np.int64)
    if (
        not len(places)
        or not places[0]
        or _match(ahead[places[0] :], now) < min(_FEWEST, len(now), len(ahead) - int(places[0]))
    ):
        return None
    text = f"the resumed run leaves out {int(places[0])} batches: it goes on with the one that the earlier run used in micro-step "
    return _tell(run, text + f"{run.micro_step + int(places[0]) + 1}", 1, int(places[0]), 0)


def _next(run: Continuation, ahead: Array, now: Array) -> Finding | None:
    """The right batch and the same weights, but another loss: dropout or augmentation drew other numbers."""
    old, new = run.before["loss"][run.micro_step], run.rows["loss"][0]
    if not run.exact or ahead[0] != now[0] or not now[0] or not np.isfinite([old, new]).all():
        return None
    if abs(new - old) <= 1e-3 * abs(old):
        return None
    text = (
        f"the first batch after the resume is the right one and the weights are the saved ones, but the loss is {new:.6g} and was "
        f"{old:.6g}: the random state (dropout, augmentation) was not restored"
    )
    return _tell(run, text, 1, float(new), float(old))


RULE = Rule("RES610", "resume-rng-sampler", "warning", judge, needs=("batch_fingerprint",), channel="resume")
