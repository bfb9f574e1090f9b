"""Watch a Hugging Face ``Trainer`` (and those built on it, such as TRL's) by a callback.

trainer = Trainer(..., callbacks=[StepscopeCallback(out="reports/run")])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from stepscope.watching import Watching

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.store.trace import Trace


class StepscopeCallback(TrainerCallback):
    """Records from the first training step to the last; evaluation in between is no micro-step and leaves no row.

    The accumulation and the number of steps that the arguments ask for are declared as intents.

    Args:
        out: directory for the trace; kept in memory without one.
        **options: further options of `stepscope.watch`.

    Attributes:
        watching: the recording, once training has begun. Where training raised, call its ``stop("failed")``: the
            Trainer tells callbacks nothing of it.
    """

    def __init__(self, out: str | Path | None = None, **options: Any) -> None:
        self._options = {"out": out, **options}
        self.watching: Watching | None = None

    @property
    def trace(self) -> Trace | None:
        """What has been recorded so far; None before training."""
        return self.watching.trace if self.watching is not None else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch the optimizer inside of Accelerate's wrapper: that is the one that steps."""
        optimizer, scheduler = (kwargs[name] for name in ("optimizer", "lr_scheduler"))
        intents = {"accumulation_steps": args.gradient_accumulation_steps, "total_steps": state.max_steps}
        self.watching = Watching(
            kwargs["model"],
            getattr(optimizer, "optimizer", optimizer),
            scheduler=getattr(scheduler, "scheduler", scheduler),
            rank=args.process_index,
            world_size=args.world_size,
            **{**self._options, "declare": {**intents, **self._options.get("declare", {})}},
        ).start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching."""
        if self.watching is not None:
            self.watching.stop()
