"""The books that the watcher keeps: micro-steps, windows, and the optimizers they belong to."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Micro:
    """One backward pass. Its `cells` are shared by the rows of all optimizers that it gave gradients to."""

    number: int
    cells: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Row:
    """One micro-step as one optimizer sees it.

    Attributes:
        micro: the backward pass.
        optimizer: whose parameters received gradients; None until an optimizer adopts the row.
        window_step: place in the window, from 1.
        global_step: attempts of the optimizer up to and with this row's window.
        cells: what probes have observed; device scalars until the row is resolved.
        calls: letters of the calls from this backward to the next of the same optimizer.
        attempted: an optimizer step was attempted after this micro-step.
        received: the parameters that received a gradient in it, by position in the optimizer.
        params: name, group, shape and dtype of the optimizer's parameters at the attempt, where the table of parameters
            is to have them.
    """

    micro: Micro
    optimizer: WatchedOptimizer | None
    window_step: int
    global_step: int
    cells: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    attempted: bool = False
    left: bool = False
    received: list[int] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)

    def count(self, column: str) -> None:
        """Add one to a counter cell."""
        self.cells[column] = self.cells.get(column, 0) + 1


class Window:
    """The micro-steps since the last attempt. Only the last one is kept: a window that never ends must not grow.

    Attributes:
        size: how many there are.
        last: the row of the last one.
        received: the parameters that received a gradient in any of them, by position in the optimizer.
    """

    __slots__ = ("last", "received", "size")

    def __init__(self) -> None:
        self.size = 0
        self.last: Row | None = None
        self.received: set[int] = set()

    def __bool__(self) -> bool:
        return self.size > 0

    def add(self, row: Row) -> None:
        """Take in the next micro-step."""
        self.size += 1
        self.last = row
        self.received.update(row.received)


class WatchedOptimizer:
    """An optimizer under watch: its parameters, the open window and the number of attempts.

    Args:
        optimizer: the optimizer; held weakly, since watching must not keep it alive.
        index: order of first sight, from 0.

    Attributes:
        settings: the plain settings of its groups when their parameters last changed; they outlive the optimizer.
        layout: ids of its parameters, group by group.
        described: what the table of parameters says of each of them, and what it was made from.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self.ref = weakref.ref(optimizer, lambda _: self.params.clear())
        self.key = id(optimizer)
        self.index = index
        self.kind = type(optimizer).__name__
        self.label = f"{self.kind}/{index}"
        self.attempts = 0
        self.row: Row | None = None
        self.window = Window()
        self.handed_over: Window | None = None
        self.stamps: list[Stamp] = []
        self.params: list[torch.Tensor] = []
        self.before: list[Stamp] = []
        self.settings: list[dict[str, Any]] = []
        self.layout: tuple[int, ...] = ()
        self.described: tuple[Any, list[dict[str, Any]]] | None = None
        self.refresh()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer itself, None once it is gone."""
        return self.ref()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its param_groups, empty once it is gone."""
        optimizer = self.ref()
        return optimizer.param_groups if optimizer is not None else []

    def refresh(self) -> bool:
        """Take note of parameters that were added or replaced; True if there were any."""
        groups = self.groups
        layout = tuple(id(p) for g in groups for p in g["params"])
        if layout == self.layout:
            return False
        self.layout = layout
        self.settings = plain_settings(groups)
        self.params = list({id(p): p for g in groups for p in g["params"]}.values())
        self.stamps = stamps(self.params)
        return True

    def open_row(self, micro: Micro, received: list[int]) -> Row:
        """A new row at the end of the open window."""
        row = Row(micro, self, self.window.size + 1, self.attempts + 1, received=received)
        self.window.add(row)
        self.row = row
        return row

    @property
    def received(self) -> set[int]:
        """Ids of the parameters that received a gradient in the open window."""
        return {id(self.params[i]) for i in self.window.received if i < len(self.params)}

    def hand_over_window(self) -> None:
        """End the window without an attempt: another optimizer of the same parameters has used its gradients."""
        assert self.window.last is not None
        self.window.last.cells["used_elsewhere"] = True
        self.handed_over, self.window = self.window, Window()

    def take_back_window(self) -> None:
        """Open the window that was handed over again: this optimizer is about to use the same gradients too."""
        handed, self.handed_over = self.handed_over, None
        if not self.window and handed is not None and handed.last is self.row and self.stamps == stamps(self.params):
            assert handed.last is not None
            del handed.last.cells["used_elsewhere"]
            self.window = handed

    def close_window(self) -> Row | None:
        """Count an attempt and end the window; returns its last row, None if no backward preceded the attempt."""
        self.attempts += 1
        last = self.window.last
        if last is not None:
            last.attempted = True
            last.cells["window_size"] = self.window.size
        self.window = Window()
        return last


Stamp = tuple[int, int] | None
"""Identity and version of a gradient tensor, None where there is none: equal stamps mean it was not written to.

A write through ``.data`` leaves no trace here, so equal stamps are a hint and not a proof.
"""


def stamps(params: list[torch.Tensor]) -> list[Stamp]:
    """The stamps of the gradients of `params`."""
    return [None if (g := p.grad) is None else (id(g), g._version) for p in params]


def plain_settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What can be written down of each parameter group, and the number of its parameters."""
    return [
        {k: v for k, v in g.items() if isinstance(v, int | float | bool | str)} | {"params": len(g["params"])}
        for g in groups
    ]


def rates(optimizer: Any) -> list[Any]:
    """The learning rates of an optimizer's groups as they are now (tensors are copied)."""
    held = [g.get("lr") for g in getattr(optimizer, "param_groups", [])]
    return [r.detach().clone() if hasattr(r, "detach") else r for r in held]


def tensors(value: Any) -> list[Any]:
    """A tensor or several, as an argument may give them, as a list; empty for None."""
    if value is None:
        return []
    return [value] if hasattr(value, "element_size") else list(value)
