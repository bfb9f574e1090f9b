"""Torch's hooks around an optimizer's step, placed so that they are the nearest to the step.

Global hooks enclose those that a script puts on an optimizer itself. What these do to gradients before the step belongs to
what the step uses, and what they do after it comes too late: where an optimizer has hooks of its own, ours go inside.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable


class StepHooks:
    """Tells ``before_step(optimizer, args, kwargs)`` and ``after_step(optimizer, args, kwargs)`` of every step."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._handles: list[Any] = []
        self._inner: dict[str, weakref.WeakKeyDictionary[Any, Any]] = {
            "pre": weakref.WeakKeyDictionary(),
            "post": weakref.WeakKeyDictionary(),
        }

    def install(self) -> None:
        """Register the global hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(self._enter),
            register_optimizer_step_post_hook(self._leave),
        ]

    def remove(self) -> None:
        """Take back every hook, those on single optimizers too."""
        for handle in (*self._handles, *self._inner["pre"].values(), *self._inner["post"].values()):
            handle.remove()
        for placed in self._inner.values():
            placed.clear()

    def _enter(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer._optimizer_step_post_hooks:
            self._place(optimizer, "post", self._after)
        if not (optimizer._optimizer_step_pre_hooks and self._place(optimizer, "pre", self._before)):
            self._before(optimizer, args, kwargs)

    def _leave(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._inner["post"] or optimizer not in self._inner["post"]:
            self._after(optimizer, args, kwargs)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._tell("before_step", optimizer, args, kwargs)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._tell("after_step", optimizer, args, kwargs)

    def _place(self, optimizer: Any, when: str, hook: Callable[..., None]) -> bool:
        """Put our hook last before the step, or first after it. False where an optimizer of another make does not let us."""
        try:
            handle = self._inner[when].get(optimizer)
            if handle is None:
                register = optimizer.register_step_pre_hook if when == "pre" else optimizer.register_step_post_hook
                handle = self._inner[when][optimizer] = register(hook)
            hooks = optimizer._optimizer_step_pre_hooks if when == "pre" else optimizer._optimizer_step_post_hooks
            hooks.move_to_end(handle.id, last=when == "pre")
        except (AttributeError, KeyError, TypeError):
            return False
        return True
