"""Which parameters train: who has them, who gets gradients, and what moves although nothing should move it."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.patterns import names_match
from stepscope.probes.base import Context, Probe
from stepscope.watch.remembered import Remembered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope import events
    from stepscope.watch.ledger import WatchedOptimizer

_MOST_NAMED = 100
"""Parameters that one list of the event names at most."""

_SAMPLE = 4096
"""Elements of a parameter that a fingerprint looks at."""

_WALKS = (1, 2, 3, 10, 100)
"""Micro-steps at which the graph is walked to its leaves."""


@dataclass(slots=True)
class _Held:
    """A parameter of a model that was called in training."""

    parameter: Any
    name: str
    training: bool
    model: int


@dataclass(slots=True)
class _Followed:
    """A parameter whose value is compared with what it was when it was first seen."""

    ref: weakref.ref[Any]
    facts: dict[str, Any]
    first: Any
    attempts: int
    moved: Any = False
    rounds: int = 0


class Census(Probe):
    """Looks at every parameter at the first ten micro-steps and every 25th, and writes what it knows as an event.

    The event ``parameters`` holds the whole summary each time; the last one counts. It comes ever more rarely, so that a
    run that is killed leaves one and a long run not many.
    """

    name = "census"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._models: list[weakref.ref[Any]] = []
        self._optimizers: list[WatchedOptimizer] = []
        self._ever = Remembered()
        self._fed = Remembered()
        self._cut_off: dict[int, weakref.ref[Any]] = {}
        self._ties: list[tuple[weakref.ref[Any], list[list[str]]]] = []
        self._leaves: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._suspects: dict[int, _Followed] = {}
        self._frozen: dict[int, _Followed] = {}
        self._attempts = 0
        self._next = 3
        self._latest: dict[str, Any] = {}

    # ---- hearing ----------------------------------------------------------------------------------------------------

    def on_watched(self, watched: WatchedOptimizer) -> None:
        """Told by the recorder when an optimizer is seen for the first time."""
        self._optimizers.append(watched)
        self._ever.add(watched.params)

    def on_forward(self, event: events.Forward) -> None:
        """A model that is called in training."""
        if event.training and not any(ref() is event.module for ref in self._models):
            self._models = [ref for ref in self._models if ref() is not None]
            self._models.append(weakref.ref(event.module))

    def on_called(self, event: events.Called) -> None:
        """A module that no backward will reach in this forward."""
        if event.name == "ran_without_graph":
            for parameter in event.detail["module"]._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    self._cut_off[id(parameter)] = weakref.ref(parameter)

    def on_loaded(self, event: events.Loaded) -> None:
        """Names that stood for one parameter before a load should do so after it."""
        if event.what == "module" and event.before.get("ties"):
            self._ties.append((weakref.ref(event.instance), event.before["ties"]))

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """Where does this graph end?"""
        if event.micro.number in _WALKS:
            from stepscope.watch.leaves import leaves

            for leaf in leaves(r for r in event.roots if hasattr(r, "grad_fn")):
                _, times = self._leaves.get(id(leaf), (None, 0))
                self._leaves[id(leaf)] = (weakref.ref(leaf), times + 1)

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Note who received gradients; look at everything now and then."""
        for row in event.rows:
            if row.optimizer is not None:
                params = row.optimizer.params
                self._fed.add(params[i] for i in row.received if i < len(params))
        number = event.micro.number
        if number <= 10 or number % 25 == 0:
            self._latest = self._look()
        if number >= self._next:
            self._next *= 3
            self._tell()

    def on_step_begin(self, event: events.StepBegin) -> None:
        """Gradients that a script assigned itself are seen here."""
        if self._attempts < 10 or self._attempts % 25 == 0:
            self._fed.add(p for p in event.optimizer.params if p.grad is not None)

    def on_attempt(self, event: events.Attempt) -> None:
        """Count the chances that parameters had to move."""
        self._attempts += 1

    def on_end(self, _: str) -> None:
        """The run ends: the last summary."""
        self._tell()

    def _tell(self) -> None:
        if self._latest:
            self.context.note("parameters", None, self._latest)

    # ---- looking ----------------------------------------------------------------------------------------------------

    def _look(self) -> dict[str, Any]:
        """The summary as of now. Lists that are empty are left out."""
        models = [m for ref in self._models if (m := ref()) is not None]
        held = {id(h.parameter): h for number, m in enumerate(models) for h in _parameters(m, number)}
        alive = [w for w in self._optimizers if w.attempts and w.optimizer is not None]
        owned = {id(p): p for w in self._optimizers if w.optimizer is not None for p in w.params}
        self._ever.add(owned.values())
        self._fed.add(h.parameter for h in held.values() if h.parameter.grad is not None)
        self._find_suspects(held)
        self._follow_frozen(held)
        for followed in (*self._suspects.values(), *self._frozen.values()):
            self._compare(followed)
        summary: dict[str, list[Any]] = {
            "unoptimized": [self._say(f) for f in self._suspects.values() if f.ref() not in self._ever],
            "declared_frozen": [self._say(f) for f in self._frozen.values()],
            "stale": [_entry(w, p) for w in alive for p in w.params if id(p) not in held and p not in self._fed],
            "fed_by_hand": [_shape(p) for w in alive for p in w.params if id(p) not in held and p in self._fed],
            "cut_off": self._without_graph(held),
            "repeated": [r for w in alive for r in self._repeated(w)],
            "one_storage": self._one_storage(alive),
            "untied": self._untied(held, owned),
            "decay": [d for w in alive if (d := self._decay(w))],
        }
        out: dict[str, Any] = {k: v[:_MOST_NAMED] for k, v in summary.items() if v}
        counts = {k: len(v) for k, v in summary.items() if v}
        return {"attempts": self._attempts, "trainable": _trainable(held), "counts": counts, **out}

    def _find_suspects(self, held: dict[int, _Held]) -> None:
        """Parameters that have a gradient and are in no optimizer."""
        covered = {h.model for h in held.values() if h.parameter in self._ever}
        for h in held.values():
            p = h.parameter
            if p.requires_grad and p.grad is not None and p not in self._ever:
                facts = {"param": self._name(p, h.name), "where": "model", "training": h.training}
                self._suspect(p, {**facts, "alone": h.model not in covered})
        for key, (ref, times) in self._leaves.items():
            leaf = ref()
            if leaf is None or key in held or leaf in self._ever or leaf.grad is None:
                continue
            if _is_parameter(leaf):
                self._suspect(leaf, {"param": self._name(leaf, None) or _home(leaf), "where": "graph"})
            elif times > 2 and (attribute := self._attribute(leaf)) is not None:
                self._suspect(leaf, {"param": attribute, "where": "attribute"})

    def _suspect(self, parameter: Any, facts: dict[str, Any]) -> None:
        known = self._suspects.get(id(parameter))
        if known is not None and known.ref() is parameter:
            known.facts |= facts
            known.rounds += 1
        elif len(self._suspects) < 2000:
            self._suspects[id(parameter)] = self._follow(parameter, facts)

    def _follow_frozen(self, held: dict[int, _Held]) -> None:
        pattern = self.context.settings.declared.get("frozen")
        for key, h in held.items() if pattern else ():
            name = self._name(h.parameter, h.name)
            if key not in self._frozen and names_match(name, str(pattern)):
                facts = {"param": name, "requires_grad": h.parameter.requires_grad}
                self._frozen[key] = self._follow(h.parameter, facts)

    def _follow(self, parameter: Any, facts: dict[str, Any]) -> _Followed:
        facts |= {"shape": _shape(parameter), "dtype": str(parameter.dtype).removeprefix("torch.")}
        first = self.context.measure.fingerprint(parameter, _SAMPLE)
        return _Followed(weakref.ref(parameter), facts, first, self._attempts)

    def _compare(self, followed: _Followed) -> None:
        parameter = followed.ref()
        if parameter is not None:
            followed.moved = (self.context.measure.fingerprint(parameter, _SAMPLE) != followed.first) | followed.moved

    def _say(self, followed: _Followed) -> dict[str, Any]:
        times = {"attempts": self._attempts - followed.attempts, "seen": followed.rounds + 1}
        return {**followed.facts, "moved": followed.moved, **times}

    def _name(self, parameter: Any, otherwise: str | None) -> str:
        return self.context.names.name(parameter) or otherwise or ""

    def _attribute(self, leaf: Any) -> str | None:
        """The attribute of a called model's module that holds a plain tensor, None where none does."""
        for model in (m for ref in self._models if (m := ref()) is not None):
            for name, module in model.named_modules():
                for key, value in vars(module).items():
                    inside = (
                        value.values()
                        if type(value) is dict
                        else value
                        if isinstance(value, list | tuple)
                        else (value,)
                    )
                    if key[0] != "_" and any(v is leaf for v in inside):
                        return f"{name}.{key}" if name else key
        return None

    def _without_graph(self, held: dict[int, _Held]) -> list[str]:
        """Parameters of cut-off modules that require a gradient and have never got one."""
        found = [(key, p) for key, ref in self._cut_off.items() if (p := ref()) is not None]
        never = [(k, p) for k, p in found if p.requires_grad and p.grad is None and p not in self._fed]
        return [self._name(p, held[k].name if k in held else _shape(p)) for k, p in never]

    def _repeated(self, watched: WatchedOptimizer) -> list[dict[str, Any]]:
        """Tensors that one optimizer holds more than once."""
        counts = Counter(id(p) for g in watched.groups for p in g["params"])
        if not counts or max(counts.values()) == 1:
            return []
        named = zip(watched.params, self.context.names.of(watched), strict=True)
        return [
            {"optimizer": watched.label, "param": n, "times": counts[id(p)], "shape": _shape(p)}
            for p, n in named
            if counts[id(p)] > 1
        ]

    def _one_storage(self, alive: list[WatchedOptimizer]) -> list[list[str]]:
        """Different parameters of optimizers that share their memory."""
        places: dict[tuple[str, int], dict[int, str]] = {}
        for watched in alive:
            for p, name in zip(watched.params, self.context.names.of(watched), strict=True):
                if (place := _place(p)) is not None:
                    places.setdefault(place, {})[id(p)] = name
        return [list(names.values()) for names in places.values() if len(names) > 1]

    def _untied(self, held: dict[int, _Held], owned: dict[int, Any]) -> list[list[str]]:
        """Names that were tied before a load, stand for different parameters now, and are both trained."""
        out = []
        for ref, ties in self._ties:
            module = ref()
            now = dict(module.named_parameters(remove_duplicate=False)) if module is not None else {}
            for names in ties:
                params = {id(now[n]): n for n in names if n in now}
                trained = [n for k, n in params.items() if now[n] in self._fed or (k in owned and k in held)]
                if len(trained) > 1:
                    out.append(trained)
        return out

    def _decay(self, watched: WatchedOptimizer) -> dict[str, Any] | None:
        """Vectors and matrices with and without weight decay; None where every group has the same."""
        named = dict(zip(map(id, watched.params), self.context.names.of(watched), strict=True))
        kinds: dict[str, list[str]] = {"vectors": [], "matrices": [], "bare_vectors": [], "bare_matrices": []}
        largest = 0.0
        for group in watched.groups:
            decay = group.get("weight_decay")
            if not isinstance(decay, int | float):
                return None
            largest = max(largest, float(decay))
            for p in group["params"]:
                kind = ("" if decay else "bare_") + ("matrices" if p.dim() > 1 else "vectors")
                kinds[kind].append(named.get(id(p), ""))
        if not (kinds["vectors"] or kinds["matrices"]) or not (kinds["bare_vectors"] or kinds["bare_matrices"]):
            return None
        counts = {k: len(v) for k, v in kinds.items()}
        return {
            "optimizer": watched.label,
            "weight_decay": largest,
            "counts": counts,
            **{k: v[:8] for k, v in kinds.items()},
        }


def _parameters(model: Any, number: int) -> Iterator[_Held]:
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{name}" if prefix else name
                yield _Held(parameter, full, bool(module.training), number)


def _trainable(held: dict[int, _Held]) -> int:
    return sum(h.parameter.requires_grad for h in held.values())


def _is_parameter(tensor: Any) -> bool:
    return any(c.__name__ == "Parameter" for c in type(tensor).__mro__) or bool(getattr(tensor, "_is_param", False))


def _shape(tensor: Any) -> str:
    return "x".join(map(str, tensor.shape))


def _entry(watched: WatchedOptimizer, parameter: Any) -> dict[str, Any]:
    return {"optimizer": watched.label, "shape": _shape(parameter)}


def _place(parameter: Any) -> tuple[str, int] | None:
    """Where a parameter's memory begins; None for those that hold none (empty, sharded, on no device)."""
    try:
        address = parameter.data_ptr() if parameter.numel() else 0
    except (RuntimeError, NotImplementedError):
        return None
    return (str(parameter.device), address) if address else None


def _home(parameter: Any) -> str:
    """Class and attribute of the module that holds a parameter, wherever that module is kept."""
    import gc

    from torch.nn import Module

    for thing in gc.get_referrers(parameter):
        if type(thing) is not dict:
            continue
        name = next((k for k, v in thing.items() if v is parameter), None)
        owners = [o for o in gc.get_objects() if issubclass(type(o), Module) and o.__dict__.get("_parameters") is thing]
        if name is not None and owners:
            return f"{type(owners[0]).__name__}.{name}"
    return f"a parameter of shape {_shape(parameter)}"
