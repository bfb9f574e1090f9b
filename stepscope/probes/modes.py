"""Modes of layers whose behaviour depends on them, at the forwards that training uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events

_DROPOUT = "_DropoutNd"
_NORM = "_NormBase"


class Modes(Probe):
    """Looks at the modules of each model that training calls; the list of mode-dependent ones is made once a model."""

    name = "modes"
    columns = (
        Column("modules_in_eval", "int64", "modules", "mode-dependent modules (Dropout with p > 0, BatchNorm with trainable parameters) in eval mode at this training forward", "no module was called"),
        Column("frozen_norms_in_train", "int64", "modules", "BatchNorm modules in train mode whose parameters, and those of the block around them, are all frozen", "no module was called"),
        Column("optimizer_train_mode", "bool", "", "the optimizer's own train/eval switch stood at train", "the optimizer has none"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._lists: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}
        self._eval = self._frozen = None
        self._said: dict[str, Any] = {}
        self._switched: list[Any] = []

    def on_built(self, event: events.Built) -> None:
        """Optimizers with a train/eval switch of their own (schedule-free ones) are followed through evaluations."""
        if event.what == "optimizer" and callable(getattr(event.instance, "eval", None)):
            import weakref

            self._switched.append(weakref.ref(event.instance))

    def on_forward(self, event: events.Forward) -> None:
        """Count, for a training forward; look at optimizers' switches at an evaluation."""
        if not event.training:
            self._evaluation()
            return
        in_eval, frozen = self._count(event.module)
        self._eval = (self._eval or 0) + len(in_eval)
        self._frozen = (self._frozen or 0) + len(frozen)
        self._say("modules_in_eval_at_training", in_eval)
        self._say("frozen_norms_in_train_mode", frozen)

    def _evaluation(self) -> None:
        for ref in self._switched:
            optimizer = ref()
            mode = _train_mode(optimizer)
            if mode is not None:
                self._say("evaluation_in_train_mode" if mode else "evaluation_in_eval_mode", [type(optimizer).__name__])

    def _say(self, event: str, names: list[str]) -> None:
        """An event when the set of names changes."""
        if self._said.get(event, []) != names:
            self._said[event] = names
            self.context.note(event, None, {"modules": names[:20], "count": len(names)})

    def _count(self, module: Any) -> tuple[list[str], list[str]]:
        known = self._lists.get(id(module))
        if known is None or known[0]() is not module:
            known = self._list(module)
        in_eval, frozen = [], []
        for name, part in known[1]:
            norm = _is(part, _NORM)
            if norm and _all_frozen(part):
                if part.training and part.track_running_stats:
                    frozen.append(name)
            elif not part.training:
                in_eval.append(name)
        return in_eval, frozen

    def _list(self, module: Any) -> tuple[Any, list[tuple[str, Any]]]:
        import weakref

        parts = [(n, m) for n, m in module.named_modules() if _depends_on_mode(m)]
        self._lists[id(module)] = found = (weakref.ref(module), parts)
        return found

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """The counts belong to this backward."""
        event.micro.cells["modules_in_eval"], self._eval = self._eval, None
        event.micro.cells["frozen_norms_in_train"], self._frozen = self._frozen, None

    def on_step_begin(self, event: events.StepBegin) -> None:
        """The optimizer's own switch at its step."""
        if event.row is not None:
            event.row.cells["optimizer_train_mode"] = _train_mode(event.optimizer.optimizer)


def _train_mode(optimizer: Any) -> bool | None:
    """The state of a schedule-free optimizer's switch, None for others."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    mode = groups[0].get("train_mode")
    if mode is None:
        mode = getattr(optimizer, "train_mode", None)
    return bool(mode) if isinstance(mode, bool) else None


def _is(module: Any, base: str) -> bool:
    return any(c.__name__ == base for c in type(module).__mro__)


def _depends_on_mode(module: Any) -> bool:
    """Dropout(p=0) and norms without running statistics do the same in both modes."""
    if _is(module, _DROPOUT):
        return float(getattr(module, "p", 0)) > 0
    return _is(module, _NORM) and bool(getattr(module, "track_running_stats", False))


def _all_frozen(module: Any) -> bool:
    params = list(module.parameters(recurse=False))
    return bool(params) and not any(p.requires_grad for p in params)
