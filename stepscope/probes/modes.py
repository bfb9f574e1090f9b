"""Modes of layers whose behaviour depends on them, at the forwards that training uses."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events

_DROPOUT = "_DropoutNd"
_NORM = "_NormBase"
_MOST_SAID = 50
"""Changes of a set of modules that are told by name; a loop that switches modes at every step has many."""


@dataclass(slots=True)
class _Part:
    """A module whose behaviour depends on its mode.

    Attributes:
        module: the module, held weakly: watching keeps no model alive.
        name: its name in the model.
        block: the smallest module around it (or itself) that has parameters.
        norm: a norm with running statistics; else a Dropout.
    """

    module: weakref.ref[Any]
    name: str
    block: weakref.ref[Any]
    norm: bool


@dataclass(slots=True)
class _Frozen:
    """A norm with frozen parameters that ran in train mode.

    Attributes:
        ref: the module.
        name: its name in the model.
        thawed: times that it was trainable again after it had been frozen.
        forwards: training forwards in which it was frozen and in train mode, since it was last trainable.
        statistics, parameters: fingerprints at the first of them.
        moved, trained: whether the statistics, and the block's parameters, have changed since then.
    """

    ref: weakref.ref[Any]
    name: str
    statistics: Any
    parameters: Any
    thawed: int = 0
    forwards: int = 1
    moved: Any = False
    trained: Any = False
    now: bool = True


class Modes(Probe):
    """Looks at the modules of each model that training calls; the list of mode-dependent ones is made once a model."""

    name = "modes"
    columns = (
        Column("modules_in_eval", "int64", "modules", "mode-dependent modules (Dropout with p > 0, norms with running statistics) that ran in eval mode in a part of the model to which this backward gave gradients", "no module was called"),
        Column("dropouts_in_eval", "int64", "modules", "those of modules_in_eval that are Dropouts", "no module was called"),
        Column("model_in_eval", "bool", "", "a model to which modules_in_eval belong was in eval mode as a whole", "no module was called"),
        Column("frozen_norms_in_train", "int64", "modules", "norms with running statistics that ran in train mode although all parameters of theirs (without any: of the block around them) are frozen", "no module was called"),
        Column("optimizer_train_mode", "bool", "", "the optimizer's own train/eval switch stood at train", "the optimizer has none"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._lists: dict[int, tuple[Any, list[_Part]]] = {}
        self._called = False
        self._in_eval: list[tuple[_Part, bool]] = []
        self._frozen: dict[int, _Frozen] = {}
        self._frozen_now: set[int] = set()
        self._said: dict[str, list[str]] = {}
        self._times: dict[str, int] = {}
        self._switched: list[Any] = []
        self._forwards = 0

    def on_built(self, event: events.Built) -> None:
        """Optimizers with a train/eval switch of their own (schedule-free ones) are followed through evaluations."""
        if event.what == "optimizer" and callable(getattr(event.instance, "eval", None)):
            self._switched.append(weakref.ref(event.instance))

    def on_forward(self, event: events.Forward) -> None:
        """Look, for a training forward; look at optimizers' switches at an evaluation."""
        if not event.training:
            self._evaluation()
            return
        self._called = True
        self._forwards += 1
        known: dict[int, bool] = {}
        for part in self._parts(event.module):
            module, block = part.module(), part.block()
            if module is None or block is None:
                continue
            frozen = known[id(block)] if id(block) in known else known.setdefault(id(block), _all_frozen(block))
            if part.norm and frozen and module.training:
                self._frozen_norm(part, module, block)
            elif part.norm and not frozen and id(module) in self._frozen:
                self._thaw(module)
            if not frozen and not module.training:
                self._in_eval.append((part, not event.module.training))

    def on_called(self, event: events.Called) -> None:
        """A forward that served only ``autograd.grad`` (an adversarial input) is not what the next backward trains on."""
        if event.name == "autograd_grad" and not event.detail["create_graph"]:
            self._in_eval.clear()

    def _frozen_norm(self, part: _Part, module: Any, block: Any) -> None:
        self._frozen_now.add(id(module))
        known = self._frozen.get(id(module))
        if known is None or known.ref() is not module:
            prints = self._statistics(module), self._parameters(block)
            self._frozen[id(module)] = _Frozen(part.module, part.name, *prints)
            return
        if not known.now:
            known.statistics, known.parameters = self._statistics(module), self._parameters(block)
            known.forwards, known.now = 0, True
        known.forwards += 1
        if known.forwards <= 10 or known.forwards % 25 == 0:
            known.moved = (self._statistics(module) != known.statistics) | known.moved
            known.trained = (self._parameters(block) != known.parameters) | known.trained

    def _thaw(self, module: Any) -> None:
        known = self._frozen[id(module)]
        if known.now:
            known.now = False
            known.thawed += 1

    def _statistics(self, module: Any) -> Any:
        measure = self.context.measure
        return measure.fingerprint(module.running_mean) + measure.fingerprint(module.running_var)

    def _parameters(self, block: Any) -> Any:
        return sum(self.context.measure.fingerprint(p, 4096) for p in block.parameters())

    def _evaluation(self) -> None:
        for ref in self._switched:
            optimizer = ref()
            mode = _train_mode(optimizer)
            if mode is not None:
                self._say("evaluation_in_train_mode" if mode else "evaluation_in_eval_mode", [type(optimizer).__name__])

    def _say(self, event: str, names: list[str]) -> None:
        """An event when the set of names changes."""
        if self._said.get(event, []) != names and self._times.get(event, 0) < _MOST_SAID:
            self._said[event] = names
            self._times[event] = self._times.get(event, 0) + 1
            self.context.note(event, None, {"modules": names[:20], "count": len(names)})

    def _parts(self, model: Any) -> list[_Part]:
        known = self._lists.get(id(model))
        if known is None or known[0]() is not model:
            self._lists[id(model)] = known = (weakref.ref(model), _parts(model))
        return known[1]

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """What ran in eval mode counts where this backward gave gradients."""
        cells = event.micro.cells
        if self._called:
            found = self._trained(event.rows) if self._in_eval else []
            cells["modules_in_eval"] = len(found)
            cells["dropouts_in_eval"] = sum(not part.norm for part, _ in found)
            cells["model_in_eval"] = any(whole for _, whole in found)
            cells["frozen_norms_in_train"] = len(self._frozen_now)
            self._say("modules_in_eval_at_training", [part.name for part, _ in found])
        self._called, self._in_eval, self._frozen_now = False, [], set()
        number = event.micro.number
        if self._frozen and number in (3, 10, 30, 100, 300, 1000):
            self.on_end("")

    def _trained(self, rows: list[Any]) -> list[tuple[_Part, bool]]:
        received = {id(r.optimizer.params[i]) for r in rows if r.optimizer is not None for i in r.received}
        blocks = [(part, whole, part.block()) for part, whole in self._in_eval]
        return [(p, w) for p, w, b in blocks if b is not None and any(id(x) in received for x in b.parameters())]

    def on_step_begin(self, event: events.StepBegin) -> None:
        """The optimizer's own switch at its step."""
        if event.row is not None:
            event.row.cells["optimizer_train_mode"] = _train_mode(event.optimizer.optimizer)

    def on_end(self, _: str) -> None:
        """What is known of frozen norms."""
        if self._frozen:
            norms = [
                {"module": f.name, "forwards": f.forwards, "thawed": f.thawed, "moved": f.moved, "trained": f.trained}
                | {"frozen": f.now}
                for f in list(self._frozen.values())[:50]
            ]
            self.context.note("frozen_norms", None, {"norms": norms, "count": len(self._frozen)})


def _parts(model: Any) -> list[_Part]:
    """The mode-dependent modules of a model, each with the block that it belongs to."""
    modules = dict(model.named_modules())
    out = []
    for name, module in modules.items():
        if not _depends_on_mode(module):
            continue
        place, block = name, module
        while place and not any(True for _ in block.parameters()):
            place = place.rpartition(".")[0]
            block = modules[place]
        out.append(_Part(weakref.ref(module), name, weakref.ref(block), _is(module, _NORM)))
    return out


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
    return _is(module, _NORM) and getattr(module, "running_mean", None) is not None


def _all_frozen(block: Any) -> bool:
    """Whether a block has parameters and none is trainable."""
    trainable = [p.requires_grad for p in block.parameters()]
    return bool(trainable) and not any(trainable)
