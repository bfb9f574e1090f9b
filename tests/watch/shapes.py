"""A loop that keeps its own books: what it tells of itself while it runs is compared with what stepscope recorded.

`Story` knows nothing of stepscope. Its methods do what a script would do (``loss.backward()``, ``optimizer.step()``) and
write down, by naive counting and in float64, what a row of the trace must hold. `check` runs a loop alone and watched.
"""

from __future__ import annotations

import gc
import math
import random
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import stepscope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stepscope.store.trace import Trace

torch.set_num_threads(1)

ABSENT = object()
"""Expected of a cell about which the loop cannot say anything."""


def norm64(tensors: Iterable[Tensor | None]) -> float:
    """L2 norm over all, one tensor after the other, in float64."""
    whole = 0.0
    for tensor in tensors:
        if tensor is not None:
            values = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
            whole += float((values.abs().double() ** 2).sum())
    return math.sqrt(whole)


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, each once."""
    return list({id(p): p for g in optimizer.param_groups for p in g["params"]}.values())


class Story:
    """The loop's own books.

    Attributes:
        rows: one dict for each micro-step and optimizer that it gave gradients to.
        state: tensors that must be the same bits whether or not the loop is watched.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.state: list[Tensor] = []
        self.micro_steps = 0
        self.labels: dict[int, str] = {}
        self.attempts: dict[str, int] = {}
        self.applied: dict[str, int] = {}
        self.windows: dict[str, list[dict[str, Any]]] = {}
        self._kept: list[Any] = []  # so that no address is used twice

    def optimizer(self, optimizer: Any) -> Any:
        """Give an optimizer the label that it has by its place in the order of creation."""
        label = f"{type(optimizer).__name__}/{len(self.labels)}"
        self.labels[id(optimizer)] = label
        self._kept.append(optimizer)
        return optimizer

    def noted(self, *optimizers: Any, **cells: Any) -> None:
        """A backward pass has run and gave gradients to these optimizers."""
        self.micro_steps += 1
        for optimizer in optimizers or (None,):
            label = self.labels[id(optimizer)] if optimizer is not None else None
            window = self.windows.setdefault(label, []) if label else []
            row = {
                "micro_step": self.micro_steps,
                "optimizer": label,
                "window_step": len(window) + 1,
                "window_size": None,
                "global_step": self.attempts.get(label, 0) + 1 if label else 0,
                "sync_gradients": False,
                "used_elsewhere": None,
                "applied_steps": self.applied.get(label, 0),
                "update_norm": None,
                **cells,
            }
            window.append(row)
            self.rows.append(row)

    def backward(self, loss: Tensor, *optimizers: Any, cells: dict[str, Any] | None = None, **options: Any) -> None:
        """``loss.backward()``, which gives gradients to the parameters of these optimizers."""
        loss.backward(**options)
        self.noted(*optimizers, **(cells or {}))

    def step(self, optimizer: Any, *args: Any, call: Any = None, applied: bool = True, **cells: Any) -> Any:
        """``optimizer.step()``, or `call` in its place, ends the window of `optimizer`."""
        label = self.labels[id(optimizer)]
        gradients = norm64(p.grad for p in parameters(optimizer))
        before = [p.detach().clone() for p in parameters(optimizer)]
        lr = optimizer.param_groups[0]["lr"]
        result = call() if call is not None else optimizer.step(*args)
        self.attempts[label] = self.attempts.get(label, 0) + 1
        self.applied[label] = self.applied.get(label, 0) + applied
        window = self.windows.get(label, [])
        self.windows[label] = []
        if window:
            changes = [
                p.detach().to(torch.promote_types(p.dtype, torch.float64)) - b
                for p, b in zip(parameters(optimizer), before, strict=True)
            ]
            found = {
                "sync_gradients": True,
                "window_size": len(window),
                "applied_steps": self.applied[label],
                "lr": float(lr),
                "grad_norm_clipped": gradients,
                "update_norm": norm64(changes),
                "step_skipped": not applied,
            }
            window[-1].update({**found, **cells})
        self._hand_over(optimizer)
        return result

    def _hand_over(self, optimizer: Any) -> None:
        """Other optimizers of the same parameters begin a new window: this one has used their gradients."""
        own = {id(p) for p in parameters(optimizer)}
        for other in self._kept:
            window = self.windows.get(self.labels[id(other)])
            if window and other is not optimizer and {id(p) for p in parameters(other)} <= own:
                window[-1]["used_elsewhere"] = True
                self.windows[self.labels[id(other)]] = []

    def keep(self, *things: Any) -> None:
        """Keep the end state of models, optimizers and tensors."""
        for thing in things:
            if isinstance(thing, Tensor):
                self.state.append(thing.detach().clone())
            elif isinstance(thing, nn.Module):
                self.state += [t.detach().clone() for t in (*thing.parameters(), *thing.buffers())]
            elif isinstance(thing, torch.optim.Optimizer):
                for parameter in parameters(thing):
                    held = thing.state.get(parameter, {})
                    self.state += [v.detach().clone() for _, v in sorted(held.items()) if isinstance(v, Tensor)]
        self.state += [torch.get_rng_state(), torch.tensor(random.random())]


def check(loop: Callable[[], Story], **options: Any) -> Trace:
    """Run the loop alone and watched: the same end, every probe on, and the rows that it told of itself."""
    plain = alone(loop)
    random.seed(0)
    with stepscope.watch(**options) as watching:
        story = loop()
    trace = watching.trace
    assert trace.meta["probes_off"] == {}, trace.meta["probes_off"]
    assert len(plain) == len(story.state)
    for place, (a, b) in enumerate(zip(plain, story.state, strict=True)):
        assert same_bits(a, b), f"tensor {place} of the end state differs: {a} alone, {b} watched"
    if story.rows:
        compare(trace, story.rows)
    return trace


def alone(loop: Callable[[], Story]) -> list[Tensor]:
    """The end state of the loop without stepscope; nothing of it is left for the watched run to find."""
    random.seed(0)
    state = loop().state
    gc.collect()
    return state


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, NaN included."""
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def compare(trace: Trace, rows: list[dict[str, Any]]) -> None:
    """Every cell that the loop has told of, in the order of micro-steps and optimizers."""
    frame = trace.steps.sort_values(["micro_step", "optimizer"], na_position="first", kind="stable")
    seen = frame.astype(object).to_dict("records")
    expected = sorted(rows, key=lambda r: (r["micro_step"], r["optimizer"] or ""))
    keys = [(r["micro_step"], r["optimizer"]) for r in expected]
    found = [(r["micro_step"], None if pd.isna(r["optimizer"]) else r["optimizer"]) for r in seen]
    assert found == keys, f"rows {found}, expected {keys}"
    for row, cells in zip(expected, seen, strict=True):
        for column, value in row.items():
            if value is not ABSENT:
                where = f"micro-step {row['micro_step']}, {row['optimizer']}, {column}"
                assert_cell(cells[column], value, where)


def assert_cell(seen: Any, expected: Any, where: str) -> None:
    """Null is null, whole numbers and words are exact, floats are as good as float32 sums are."""
    if expected is None:
        assert seen is pd.NA or seen is None, f"{where}: {seen!r}, expected null"
    elif isinstance(expected, float):
        assert seen is not pd.NA, f"{where}: null, expected {expected}"
        assert float(seen) == pytest.approx(expected, rel=3e-5, abs=1e-9, nan_ok=True), where
    else:
        assert seen is not pd.NA, f"{where}: null, expected {expected}"
        assert seen == expected, f"{where}: {seen!r}, expected {expected!r}"
