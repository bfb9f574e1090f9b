"""What is built, loaded and saved on the way, with fingerprints by parameter name, so that a resume can be judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import WatchedOptimizer


class State(Probe):
    """Events ``built``, ``loaded``, ``saved`` and ``first_step``: rates, counters, scales and fingerprints."""

    name = "state"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._watched: dict[int, WatchedOptimizer] = {}
        self._scalers: list[Any] = []
        self._schedulers: list[Any] = []
        self._started: set[int] = set()
        self._loaded: set[int] = set()

    def on_watched(self, watched: WatchedOptimizer) -> None:
        """Told by the recorder when an optimizer is seen for the first time."""
        self._watched[watched.index] = watched

    def on_existing(self, thing: Any) -> None:
        """Told by the recorder of scalers and schedulers that were there before it."""
        if hasattr(thing, "_growth_tracker") and thing not in self._scalers:
            self._scalers.append(thing)
        elif hasattr(thing, "last_epoch") and thing not in self._schedulers:
            self._schedulers.append(thing)

    def on_scale_loss(self, event: events.ScaleLoss) -> None:
        """A scaler in use."""
        self.on_existing(event.scaler)

    def on_scheduler_step(self, event: events.SchedulerStep) -> None:
        """A scheduler in use."""
        self.on_existing(event.scheduler)

    def on_built(self, event: events.Built) -> None:
        """What came into being, and what its constructor did to the rates."""
        instance = event.instance
        detail: dict[str, Any] = {"class": type(instance).__name__}
        if event.what == "scaler":
            self._scalers.append(instance)
            if not instance.is_enabled():
                return
            detail |= {"init_scale": instance._init_scale, "growth_interval": instance._growth_interval}
        elif event.what == "optimizer":
            detail |= self._optimizer(instance)
        elif event.what == "scheduler":
            self._schedulers.append(instance)
            detail |= self._scheduler(instance) | {"lr_before": event.lr_before}
        self.context.note(f"{event.what}_built", self._book(instance), detail)

    def _book(self, instance: Any) -> WatchedOptimizer | None:
        optimizer = getattr(instance, "optimizer", instance)
        return next((w for w in self._watched.values() if w.optimizer is optimizer), None)

    def _optimizer(self, optimizer: Any) -> dict[str, Any]:
        groups = optimizer.param_groups
        params = [p for g in groups for p in g["params"]]
        return {
            "groups": [_group(g) for g in groups[:32]],
            "parameters": len(params),
            "repeated": len(params) - len({id(p) for p in params}),
        }

    def _scheduler(self, scheduler: Any) -> dict[str, Any]:
        plain = {k: v for k, v in vars(scheduler).items() if isinstance(v, int | float | str | bool)}
        lists = {k: v for k, v in vars(scheduler).items() if k in ("base_lrs", "milestones", "max_lrs") and isinstance(v, list)}
        optimizer = getattr(scheduler, "optimizer", None)
        rates = [g.get("lr") for g in getattr(optimizer, "param_groups", [])]
        nested = [type(s).__name__ for s in getattr(scheduler, "_schedulers", [])]
        return {"settings": plain | lists, "lr": rates, "nested": nested}

    def on_loaded(self, event: events.Loaded) -> None:
        """What was loaded, and what it held before and after."""
        instance = event.instance
        detail: dict[str, Any] = {"class": type(instance).__name__}
        if event.what == "optimizer":
            book = self._book(instance)
            self._loaded.add(id(instance))
            detail |= {"lr_before": event.before.get("lr"), "lr": [g.get("lr") for g in instance.param_groups]}
            detail["state_entries"] = len(instance.state)
            detail["hyper"] = [_group(g) for g in instance.param_groups[:32]]
            self.context.note("optimizer_loaded", book, detail)
            return
        if event.what == "scheduler":
            detail |= self._scheduler(instance)
        elif event.what == "scaler" and instance.is_enabled():
            detail |= {"scale": instance.get_scale(), "growth_tracker": instance._get_growth_tracker()}
        self.context.note(f"{event.what}_loaded", self._book(instance), detail)

    def on_saved(self, event: events.Saved) -> None:
        """The state of everything at a save: what a resumed run should start from."""
        for watched in self._watched.values():
            if watched.optimizer is not None:
                self.context.note("saved", watched, {"where": event.where, **self._snapshot(watched)})

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """The state before the first backward: what this run starts from."""
        for index, watched in self._watched.items():
            if index not in self._started and watched.optimizer is not None and watched.params:
                self._started.add(index)
                self.context.note("started", watched, {**self._snapshot(watched), "state_loaded": watched.key in self._loaded})

    def _snapshot(self, watched: WatchedOptimizer) -> dict[str, Any]:
        measure = self.context.measure
        names = self.context.names.of(watched)
        optimizer = watched.optimizer
        import torch

        half = [measure.survives_rounding([p], d) for d in (torch.float16, torch.bfloat16) for p in watched.params]
        size = len(watched.params)
        return {
            "params": dict(zip(names, [measure.fingerprint(p) for p in watched.params], strict=True)),
            "norms": dict(zip(names, measure.norms(watched.params).unbind(), strict=True)),
            "float16": dict(zip(names, half[:size], strict=True)),
            "bfloat16": dict(zip(names, half[size:], strict=True)),
            "state": {n: self._fingerprints(optimizer, p) for n, p in zip(names, watched.params, strict=True)},
            "lr": [g.get("lr") for g in watched.groups],
            "attempts": watched.attempts,
            "scale": [s._scale.detach().clone() if s._scale is not None else s._init_scale for s in self._enabled()],
            "growth_tracker": [s._growth_tracker.detach().clone() for s in self._enabled() if s._growth_tracker is not None],
            "schedulers": [{"class": type(s).__name__, "last_epoch": getattr(s, "last_epoch", None)} for s in self._schedulers if getattr(s, "optimizer", None) is optimizer],
        }  # fmt: skip

    def _enabled(self) -> list[Any]:
        return [s for s in self._scalers if s.is_enabled()]

    def _fingerprints(self, optimizer: Any, parameter: Any) -> dict[str, Any]:
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        out: dict[str, Any] = {}
        for key, value in state.items():
            if hasattr(value, "element_size") and value.numel() == 1:
                out[key] = value.detach().clone().reshape(())
            elif hasattr(value, "element_size"):
                out[key] = self.context.measure.fingerprint(value)
            elif isinstance(value, int | float):
                out[key] = value
        return out


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """The plain settings of a parameter group, and how many parameters it has."""
    plain = {k: v for k, v in group.items() if isinstance(v, int | float | bool | str) or k == "betas"}
    return plain | {"params": len(group["params"])}
