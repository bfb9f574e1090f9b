"""What is built, loaded and saved on the way, with fingerprints by parameter name, so that a resume can be judged."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.probes.learning_rate import held, rates
from stepscope.probes.schedule import train_mode

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import WatchedOptimizer

_MOST_SNAPSHOTS = 64
"""Saves with fingerprints; beyond, only every save after 5 % more micro-steps than at the one before."""

_MOST_STARTS = 50
"""Optimizers whose first backward is described in full."""


class State(Probe):
    """Events ``optimizer_built``, ``*_loaded``, ``started``, ``saved`` and ``ended``: rates, counters, scales, fingerprints."""

    name = "state"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._watched: dict[int, WatchedOptimizer] = {}
        self._scalers: list[weakref.ref[Any]] = []
        self._schedulers: list[weakref.ref[Any]] = []
        self._started: set[int] = set()
        self._loaded: set[int] = set()
        self._owners: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._stateful: dict[str, bool] = {}
        self._age = self._micro_steps = self._taken = self._taken_at = 0
        self._ages: dict[int, int] = {}
        self._thinned = False

    def on_watched(self, watched: WatchedOptimizer) -> None:
        """Told by the recorder when an optimizer is seen for the first time."""
        self._watched[watched.index] = watched

    # ---- what there is ----------------------------------------------------------------------------------------------

    def on_existing(self, thing: Any) -> None:
        """Told by the recorder of scalers and schedulers that were there before it."""
        kept = (
            self._scalers
            if hasattr(thing, "_growth_tracker")
            else self._schedulers
            if hasattr(thing, "last_epoch")
            else None
        )
        if kept is not None and all(ref() is not thing for ref in kept):
            kept[:] = [*(ref for ref in kept if ref() is not None), weakref.ref(thing)]

    def on_scale_loss(self, event: events.ScaleLoss) -> None:
        """A scaler in use."""
        self.on_existing(event.scaler)

    def on_scheduler_step(self, event: events.SchedulerStep) -> None:
        """A scheduler in use."""
        self._age += 1
        self.on_existing(event.scheduler)

    def on_built(self, event: events.Built) -> None:
        """What came into being."""
        instance = event.instance
        detail: dict[str, Any] = {"class": type(instance).__name__}
        if event.what in ("scaler", "scheduler"):
            self.on_existing(instance)
        if event.what == "scheduler":
            return
        if event.what == "scaler":
            if not instance.is_enabled():
                return
            detail |= {"init_scale": instance._init_scale, "growth_interval": instance._growth_interval}
        elif event.what == "optimizer":
            detail |= _optimizer(instance)
        self.context.note(f"{event.what}_built", event.optimizer, detail)

    def on_loaded(self, event: events.Loaded) -> None:
        """What was loaded, and what it held before and after."""
        self._age += 1
        instance = event.instance
        detail: dict[str, Any] = {"class": type(instance).__name__}
        if event.what == "scheduler":
            return
        if event.what == "optimizer":
            self._loaded.add(id(instance))
            detail |= {"lr_before": event.before.get("lr"), "lr": rates(instance), "state_entries": len(instance.state)}
            detail["hyper"] = [_group(g) for g in instance.param_groups[:32]]
        elif event.what == "scaler" and instance.is_enabled():
            detail |= {"scale": _scale(instance), "growth_tracker": _tracker(instance)}
        self.context.note(f"{event.what}_loaded", event.optimizer, detail)

    # ---- what the run starts from, saves and ends with --------------------------------------------------------------

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """The state before the first backward: what this run, or this optimizer, starts from."""
        self._age += 1
        self._micro_steps += 1
        for index, watched in self._watched.items():
            if index not in self._started and watched.optimizer is not None and watched.params:
                self._started.add(index)
                described = self._snapshot(watched) if len(self._started) <= _MOST_STARTS else self._brief(watched)
                loaded = watched.key in self._loaded
                self.context.note(
                    "started", watched, {**described, "state_loaded": loaded, "taken_over": self._taken_over(watched)}
                )

    def on_attempt(self, event: events.Attempt) -> None:
        """Remember which optimizer moves which parameters, and whether it keeps a state."""
        self._age += 1
        watched = event.optimizer
        if watched.attempts > 3:
            return
        self._owners.update({id(p): (weakref.ref(p), watched.label) for p in watched.params})
        state = watched.optimizer.state if watched.optimizer is not None else {}
        kept = any(
            hasattr(v, "element_size") and v.numel() > 1
            for s in state.values()
            if isinstance(s, dict)
            for v in s.values()
        )
        self._stateful[watched.label] = self._stateful.get(watched.label, False) or kept

    def on_scaler_update(self, event: events.ScalerUpdate) -> None:
        """The scale may have changed."""
        self._age += 1

    def on_saved(self, event: events.Saved) -> None:
        """The state of everything at a save: what a resumed run should start from."""
        holds = [] if event.where == "state_dict" else contents(event.content)
        concerned = list(self._watched.values()) if event.optimizer is None else [event.optimizer]
        for watched in concerned:
            if watched.optimizer is None or watched.index not in self._watched:
                continue
            known = self._ages.get(watched.index) == self._age
            name, described = ("saved_again", {}) if known else ("saved", self._brief(watched))
            if not known and self._due():
                described = self._snapshot(watched)
                self._ages[watched.index] = self._age
            mode = train_mode(watched.optimizer)
            self.context.note(name, watched, {"where": event.where, "holds": holds, "train_mode": mode, **described})

    def _due(self) -> bool:
        if self._taken >= _MOST_SNAPSHOTS and self._micro_steps < 1.05 * self._taken_at:
            return False
        self._taken, self._taken_at = self._taken + 1, self._micro_steps
        return True

    def on_end(self, status: str) -> None:
        """The state at the end of the recording, where the optimizer still exists."""
        for watched in self._watched.values():
            if watched.optimizer is not None and watched.attempts and self._ages.get(watched.index) != self._age:
                self.context.note("ended", watched, self._snapshot(watched))

    def _brief(self, watched: WatchedOptimizer) -> dict[str, Any]:
        optimizer = watched.optimizer
        schedulers = [
            s for ref in self._schedulers if (s := ref()) is not None and getattr(s, "optimizer", None) is optimizer
        ]
        scalers = [s for ref in self._scalers if (s := ref()) is not None and s.is_enabled()]
        return {
            "lr": rates(optimizer),
            "hyper": [_group(g) for g in watched.groups[:32]],
            "attempts": watched.attempts,
            "scale": [_scale(s) for s in scalers],
            "growth_tracker": [_tracker(s) for s in scalers],
            "schedulers": [
                {"class": type(s).__name__, "last_epoch": getattr(s, "last_epoch", None)} for s in schedulers
            ],
        }

    def _snapshot(self, watched: WatchedOptimizer) -> dict[str, Any]:
        measure = self.context.measure
        names = self.context.names.of(watched)
        import torch

        params, optimizer = watched.params, watched.optimizer
        half = {d: measure.survives_rounding(params, d).unbind() for d in (torch.float16, torch.bfloat16)}
        return {
            **self._brief(watched),
            "params": dict(zip(names, [measure.fingerprint(p) for p in params], strict=True)),
            "norms": dict(zip(names, measure.norms(params).unbind(), strict=True)),
            "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in params}),
            "float16": dict(zip(names, half[torch.float16], strict=True)),
            "bfloat16": dict(zip(names, half[torch.bfloat16], strict=True)),
            "state": {n: self._fingerprints(optimizer, p) for n, p in zip(names, params, strict=True)},
        }

    def _fingerprints(self, optimizer: Any, parameter: Any) -> dict[str, Any]:
        """A parameter's state: numbers as they are, tensors by fingerprint (0 for one that is all zero)."""
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        out: dict[str, Any] = {}
        for key, value in state.items():
            if hasattr(value, "element_size"):
                number = value.dim() == 0 or (key == "step" and value.numel() == 1)
                out[key] = held(value).reshape(()) if number else self.context.measure.fingerprint(value)
            elif isinstance(value, int | float):
                out[key] = value
        return out

    def _taken_over(self, watched: WatchedOptimizer) -> dict[str, dict[str, Any]]:
        """Parameters that another optimizer moved before, by its label."""
        out: dict[str, dict[str, Any]] = {}
        for parameter in watched.params:
            ref, label = self._owners.get(id(parameter), (None, ""))
            if ref is not None and ref() is parameter and label != watched.label:
                found = out.setdefault(label, {"params": 0, "stateful": self._stateful.get(label, False)})
                found["params"] += 1
        return out


def contents(value: Any, depth: int = 3) -> list[str]:
    """What a checkpoint holds, as far as its shape tells: ``optimizer``, ``scheduler``, ``scaler``, ``tensors``, ``module``."""
    found: set[str] = set()
    if hasattr(value, "named_parameters"):
        found.add("module")
    elif hasattr(value, "element_size"):
        found.add("tensors")
    elif hasattr(value, "param_groups"):
        found.add("optimizer")
    elif isinstance(value, dict):
        if "param_groups" in value and "state" in value:
            found.add("optimizer")
        elif "growth_interval" in value and "scale" in value:
            found.add("scaler")
        elif "last_epoch" in value and "_step_count" in value:
            found.add("scheduler")
        elif depth:
            for inner in list(value.values())[:1000]:
                found.update(contents(inner, depth - 1))
    elif isinstance(value, list | tuple) and depth:
        for inner in value[:100]:
            found.update(contents(inner, depth - 1))
    return sorted(found)


def _scale(scaler: Any) -> Any:
    """A scaler's scale without waiting for it."""
    return held(scaler._scale).reshape(()) if scaler._scale is not None else float(scaler._init_scale)


def _tracker(scaler: Any) -> Any:
    """Clean steps since the last change of the scale, without waiting for them."""
    return (
        held(scaler._growth_tracker).reshape(()) if scaler._growth_tracker is not None else scaler._init_growth_tracker
    )


def _optimizer(optimizer: Any) -> dict[str, Any]:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    return {
        "groups": [_group(g) for g in optimizer.param_groups[:32]],
        "parameters": len(params),
        "repeated": len(params) - len({id(p) for p in params}),
    }


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """The plain settings of a parameter group, and how many parameters it has."""
    plain = {k: v for k, v in group.items() if isinstance(v, int | float | bool | str) or k == "betas"}
    return plain | {"lr": held(group.get("lr")), "params": len(group["params"])}
