"""How the rules of this family join two runs: which optimizer goes on, and from which save.

The save that a run resumes from is the one whose parameters, by name, are those that the run started with. Where none
is (weights rounded or stepped on the way, a save that was not seen), the optimizer's state decides, then the norms of
the parameters, then the order: the last save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Skip
from stepscope.rules.schedule.pace import descriptions
from stepscope.rules.view import Rows, View

if TYPE_CHECKING:
    from stepscope.rules.view import Array

Detail = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Continuation:
    """An optimizer of the resumed run and where it comes from.

    Attributes:
        rows: its rows in the resumed run.
        started: its state before its first backward there.
        before: rows of the optimizer of the earlier run that held the same parameters.
        saved: the state at the save that was resumed from, None where no save was seen.
        exact: most parameters are bit for bit those of that save.
        names: parameters that both have.
    """

    rows: Rows
    started: Detail
    before: Rows
    saved: Detail | None
    exact: bool
    names: tuple[str, ...]

    @property
    def changed(self) -> list[str]:
        """Parameters that are not those of the save, bit for bit; empty where no save was seen."""
        old = {} if self.saved is None else self.saved["params"]
        return [n for n in self.names if n in old and old[n] != self.started["params"][n]]

    @property
    def micro_step(self) -> int:
        """Micro-steps of the earlier run up to the save."""
        return (
            len(self.before)
            if self.saved is None
            else int((self.before["micro_step"] <= self.saved["micro_step"]).sum())
        )

    @property
    def attempts(self) -> int:
        """Attempts of the earlier run's optimizer up to the save."""
        return len(self.before.ends) if self.saved is None else int(self.saved["attempts"])


def continuations(view: View) -> list[Continuation]:
    """Every optimizer of the run that goes on with parameters of the earlier run.

    Raises:
        Skip: there is none, or the save that was resumed from is not in the trace.
    """
    held: list[Continuation] | None = view.__dict__.get("_continuations")
    if held is None:
        held = view.__dict__["_continuations"] = _find(view)
    if not held:
        raise Skip("the run starts from none of the states that the earlier run recorded, and loads nothing")
    return held


def _find(view: View) -> list[Continuation]:
    if view.after is None:
        return []
    earlier = View(view.after)
    origins = {(e["rank"], e["optimizer"]): e["detail"] for e in earlier.events("started") if "params" in e["detail"]}
    saves = list(earlier.events("saved", "ended"))
    loads = any(True for _ in view.events("module_loaded", "optimizer_loaded"))
    rows_before = {(r.rank, r.optimizer): r for r in earlier.stepping}
    out = []
    for event in view.events("started"):
        rows = next((r for r in view.stepping if (r.rank, r.optimizer) == (event["rank"], event["optimizer"])), None)
        started = event["detail"]
        if rows is None or "params" not in started:
            continue
        key, names = _origin(event["rank"], started, origins, rows_before)
        if key is not None:
            found = _continue(
                rows, started, rows_before[key], [s for s in saves if (s["rank"], s["optimizer"]) == key], names, loads
            )
            out += [found] if found is not None else []
    return out


def _origin(
    rank: int, started: Detail, origins: dict[Any, Detail], stepping: dict[Any, Rows]
) -> tuple[Any, tuple[str, ...]]:
    """The earlier optimizer that shares most parameter names; the last such one where several do."""
    best, names = None, ()
    for key, origin in origins.items():
        common = tuple(n for n in started["params"] if n in origin["params"])
        if key[0] == rank and key in stepping and common and len(common) >= len(names):
            best, names = key, common
    return best, names


def _continue(
    rows: Rows, started: Detail, before: Rows, saves: list[Detail], names: tuple[str, ...], loads: bool
) -> Continuation | None:
    whole = [{**s["detail"], "micro_step": s["micro_step"]} for s in saves if "params" in s["detail"]]
    if not whole:
        return Continuation(rows, started, before, None, False, names) if loads else None
    same = np.array([sum(s["params"].get(n) == started["params"][n] for n in names) for s in whole])
    state = np.array([_same_state(s, started, names) for s in whole])
    apart = np.array([distance(s, started, names) for s in whole])
    order = np.arange(len(whole))
    best = int(np.lexsort((order, -apart, state, same))[-1])
    exact = bool(same[best] >= 0.5 * len(names))
    if not exact and not state[best] and not loads and apart[best] > 0.05:
        return None
    if not exact and len(whole) < len(saves):
        raise Skip("the save that this run resumes from was not recorded in full: there were too many of them")
    return Continuation(rows, started, before, whole[best], exact, names)


def _same_state(save: Detail, started: Detail, names: tuple[str, ...]) -> int:
    return sum(bool(moments(save, n)) and moments(save, n) == moments(started, n) for n in names)


def distance(save: Detail, started: Detail, names: tuple[str, ...]) -> float:
    """Largest relative difference between the norms of the parameters."""
    old = np.array([float(save["norms"][n]) for n in names if n in save["norms"]])
    new = np.array([float(started["norms"][n]) for n in names if n in save["norms"]])
    scale = np.maximum(np.abs(old), 1e-3 * max(float(np.abs(old).max(initial=0.0)), 1e-30))
    return float((np.abs(new - old) / scale).max(initial=0.0))


def moments(detail: Detail, name: str) -> dict[str, int]:
    """Fingerprints of a parameter's state without its counter; all-zero tensors (fingerprint 0) left out."""
    state = detail["state"].get(name) or {}
    return {k: v for k, v in state.items() if k != "step" and isinstance(v, int) and v}


def counter(detail: Detail, name: str) -> float | None:
    """A parameter's step counter, None where its state has none."""
    value = (detail["state"].get(name) or {}).get("step")
    return None if value is None else float(value)


def base_rates(view: View, rows: Rows) -> list[float]:
    """The rates that the optimizer was built with; empty where its construction was not seen."""
    built = descriptions(view, rows, "optimizer_built")
    return [float(g["lr"]) for g in built[0]["groups"] if isinstance(g.get("lr"), int | float)] if built else []


def fingerprints(rows: Rows) -> Array:
    """Batch fingerprints as exact integers (a float64 would lose bits); 0 where none was seen. Shape ``(rows,)``."""
    table = rows.trace.tables["steps"]
    if "batch_fingerprint" not in table.column_names:
        return np.zeros(len(rows), dtype=np.int64)
    column = table["batch_fingerprint"].combine_chunks().fill_null(0)
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)[rows.index]
