"""Forward, backward and the optimizer's step: what makes micro-steps, windows and attempts."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from stepscope import events
from stepscope.watch.leaves import cut_off
from stepscope.watch.ledger import Micro, stamps, tensors
from stepscope.watch.patches import Listener, Looks

if TYPE_CHECKING:
    from stepscope.watch.books import Books


_LOOK_UNTIL = 5
"""Micro-steps during which modules that run without gradients are looked at: is a checkpoint cut off?"""

_MOST_LOOKS = 2000
"""Modules looked at before each of these micro-steps; a look costs some ten microseconds."""


_HOME = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
"""The file of the function that wraps every step and calls the hooks."""


class StepListener(Listener):
    """Hears forwards, backwards and steps."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self._backward_began = 0.0
        Looks.left = _MOST_LOOKS

    def before_forward_without_gradients(self, module: Any) -> None:
        """A module runs without gradients: in an evaluation, under a checkpoint, or under one that is cut off."""
        if not self.books.backward_depth and cut_off():
            self.books.sink(events.Called("", "ran_without_graph", None, {"module": module}))

    def after_forward(self, module: Any, args: Any, kwargs: Any, output: Any, milliseconds: float) -> None:
        """The outermost call of a module ended; what a backward recomputes (checkpoints) is part of that backward."""
        if self.books.backward_depth:
            return
        training = torch.is_grad_enabled()
        if training:
            self.books.pending_calls.append("F")
            if self.books.idle:
                self.books.wake(module)
        self.books.sink(events.Forward(module, args, kwargs, output, training, milliseconds))

    def before_backward(self, args: Any, kwargs: Any) -> None:
        """``torch.autograd.backward`` begins; one within another (reentrant checkpoints) is part of the outer one."""
        self.books.backward_depth += 1
        if self.books.backward_depth > 1:
            return
        roots = tensors(args[0] if args else kwargs.get("tensors"))
        given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        self.books.micro_steps += 1
        Looks.left = _MOST_LOOKS if self.books.micro_steps < _LOOK_UNTIL else 0
        micro = Micro(self.books.micro_steps)
        micro.calls, self.books.pending_calls = [*self.books.pending_calls, "B"], []
        self.books.micro = micro
        for watched in self.books.alive():
            watched.refresh()
            watched.before = stamps(watched.params)
        self.books.sink(events.BackwardBegin(micro, roots, tensors(given)))
        self._backward_began = time.perf_counter()

    def after_backward(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The backward ended: open a row for each optimizer whose gradients it changed."""
        self.books.backward_depth -= 1
        if self.books.backward_depth:
            return
        elapsed = (time.perf_counter() - self._backward_began) * 1e3
        if error is not None:
            return
        micro = self.books.micro
        assert micro is not None
        rows = []
        for watched in self.books.alive():
            if watched.row is not None and watched.row.micro is micro:  # it stepped inside this backward
                rows.append(watched.row)
                watched.stamps = stamps(watched.params)
                continue
            now = stamps(watched.params)
            received = [
                i for i, (a, b) in enumerate(zip(watched.before, now, strict=False)) if a != b and b is not None
            ]
            watched.stamps = now
            if received:
                rows.append(self.books.open_row(watched, micro, received))
        if not rows:
            rows.append(self.books.open_orphan(micro))
        self.books.sink(events.BackwardEnd(micro, rows, elapsed))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The official pre-hook: an optimizer is about to step. A step inside a step is part of the outer one."""
        watched = self.books.watched(optimizer)
        if watched is None:
            return
        if self.books.scaler_step is not None and self.books.scaler_step["optimizer"] is watched:
            self.books.scaler_step["ran"] = True
        if self.books.stepping:
            self._forget_raised()
        if self.books.stepping and not self.books.backward_depth:
            outer = self.books.stepping[0][0]
            self.books.stepping.append((watched, 0.0))
            if watched is not outer:
                self.books.sink(events.Called("", "stepped_inside", outer, {"inner": watched}))
            return
        closure = (bool(args[1:]) and callable(args[1])) or callable(kwargs.get("closure"))
        micro = self.books.micro
        last = watched.window.last
        if self.books.backward_depth and micro is not None and (last is None or last.micro is not micro):
            received = [i for i, p in enumerate(watched.params) if p.grad is not None]
            self.books.open_row(watched, micro, received)
        if not closure:  # a closure runs backward passes of its own
            watched.take_back_window()
        row = self.books.adopt(watched)
        if row is not None and not closure:
            self.books.leave(watched, row)
        if row is not None:
            row.calls.append("S")
        in_scaler = self.books.scaler_step is not None
        self.books.stepping.append((watched, time.perf_counter()))
        self.books.sink(events.StepBegin(watched, row, in_scaler, bool(self.books.backward_depth), closure))
        self.books.stepping[-1] = (watched, time.perf_counter())

    def _forget_raised(self) -> None:
        """A step that raised never reaches torch's post-hook: only the stack tells that it is over."""
        announced, *outer = [id(o) for o in _steps_on_the_stack()] or [0]
        if announced:
            self.books.stepping = [(w, begin) for w, begin in self.books.stepping if w.key in outer]

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The official post-hook: the step returned."""
        watched = self.books.optimizers.get(id(optimizer))
        if watched is None or not any(w is watched for w, _ in self.books.stepping):
            return
        while self.books.stepping[-1][0] is not watched:
            self.books.stepping.pop()
        _, begin = self.books.stepping.pop()
        if not begin:
            return
        row = watched.window.last
        self.books.sink(events.StepEnd(watched, row, (time.perf_counter() - begin) * 1e3))
        if self.books.scaler_step is None:
            self.books.attempt(watched, ran=True, found_inf=None, scaler=None)


def _steps_on_the_stack() -> list[Any]:
    """The optimizers whose step is running, innermost first: torch calls its hooks from the function that wraps a step."""
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _HOME:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found
