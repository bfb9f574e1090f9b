"""Names of parameters as the user's model has them.

A parameter's name is looked up in the models that were given or were seen in a forward; where those do not hold it, in
every module that is alive. What no module holds is named by group and index.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.watch.ledger import WatchedOptimizer

_TRIES = 3
"""Times that unnamed parameters are looked for: a sharded model holds others than its optimizer while it computes."""

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Prefixes that DDP, torch.compile and FSDP put before a name."""


class Names:
    """Finds and remembers names; holds models weakly."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._of: dict[int, tuple[tuple[int, ...], list[str]]] = {}
        self._tries: dict[int, int] = {}
        self._searched: set[tuple[int, ...]] = set()

    def add_model(self, module: Any) -> None:
        """A model that names its parameters; the first that holds a parameter gives it its name."""
        if any(ref() is module for ref in self._models):
            return
        self._models = [ref for ref in self._models if ref() is not None]
        self._models.append(weakref.ref(module))
        self._learn(module, taken=self._taken())

    def _taken(self) -> set[str]:
        return {name for ref, name in self._names.values() if ref() is not None}

    @property
    def models(self) -> list[Any]:
        """The models that are alive, outermost ones first seen first."""
        return [m for ref in self._models if (m := ref()) is not None]

    def _learn(self, module: Any, taken: set[str]) -> None:
        own = {id(p) for p in module.parameters()}
        fresh = [(n, p) for n, p in module.named_parameters() if not self._knows(p)]
        clash = any(_bare(n) in taken for n, _ in fresh)
        prefix = f"{type(module).__name__}:" if clash and len(fresh) == len(own) else ""
        for name, parameter in fresh:
            self._names[id(parameter)] = (weakref.ref(parameter), prefix + _bare(name))

    def _knows(self, parameter: Any) -> bool:
        held = self._names.get(id(parameter))
        return held is not None and held[0]() is parameter

    def name(self, parameter: Any) -> str | None:
        """The name of a parameter, None where no model has it."""
        held = self._names.get(id(parameter))
        return held[1] if held is not None and held[0]() is parameter else None

    def of(self, watched: WatchedOptimizer) -> list[str]:
        """Names of an optimizer's parameters, in its order."""
        key = tuple(id(p) for p in watched.params)
        known = self._of.get(watched.index)
        if known is None or known[0] != key:
            self._tries[watched.index] = _TRIES
        if known is not None and known[0] == key and not self._tries[watched.index]:
            return known[1]
        self._tries[watched.index] -= 1
        if any(not self._knows(p) for p in watched.params):
            for model in self.models:
                self._learn(model, taken=self._taken())
            self._search(key, watched)
        if all(self._knows(p) for p in watched.params):
            self._tries[watched.index] = 0
        fallback = _by_group(watched)
        names = [self.name(p) or fallback[id(p)] for p in watched.params]
        self._of[watched.index] = (key, names)
        return names

    def _search(self, key: tuple[int, ...], watched: WatchedOptimizer) -> None:
        """Look for modules that hold the parameters among all objects; once for each set of parameters."""
        if key in self._searched:
            return
        self._searched.add(key)
        from torch.nn import Module

        wanted = {id(p) for p in watched.params if not self._knows(p)}
        found = []
        for thing in gc.get_objects():
            # type(), not isinstance(): a lazy proxy must not be woken by looking at it
            if issubclass(type(thing), Module) and "_parameters" in thing.__dict__:
                held = wanted.intersection(id(p) for p in thing.parameters())
                if held:
                    found.append((len(held), sum(1 for _ in thing.modules()), thing))
        for _, _, module in sorted(found, key=lambda f: (-f[0], -f[1])):
            if wanted.intersection(id(p) for p in module.parameters() if not self._knows(p)):
                self.add_model(module)


def _bare(name: str) -> str:
    """A name without what wrappers put before it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "") if name.startswith(wrapper) or f".{wrapper}" in name else name
    return name


def _by_group(watched: WatchedOptimizer) -> dict[int, str]:
    """``pg1.0`` for the first parameter of the first group; names given to the optimizer itself come first."""
    out: dict[int, str] = {}
    for number, group in enumerate(watched.groups, start=1):
        given = group.get("param_names") or []
        for index, parameter in enumerate(group["params"]):
            out.setdefault(id(parameter), given[index] if index < len(given) else f"pg{number}.{index}")
    return out
