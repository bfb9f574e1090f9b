"""Watch a Lightning ``Trainer`` by a callback.

trainer = lightning.Trainer(..., callbacks=[StepscopeCallback(out="reports/run")])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from stepscope.watching import Watching

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.store.trace import Trace


class StepscopeCallback(Callback):
    """Records from the first training step to the last, or to the exception that ends the fit.

    The accumulation that the trainer is set to is declared as an intent, unless a callback changes it on the way.

    Args:
        out: directory for the trace; kept in memory without one.
        **options: further options of `stepscope.watch`.

    Attributes:
        watching: the recording, once training has begun.
    """

    def __init__(self, out: str | Path | None = None, **options: Any) -> None:
        self._options = {"out": out, **options}
        self.watching: Watching | None = None

    @property
    def trace(self) -> Trace | None:
        """What has been recorded so far; None before training."""
        return self.watching.trace if self.watching is not None else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch; the sanity check of the validation loop is over."""
        changing = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
        intents = {} if changing else {"accumulation_steps": trainer.accumulate_grad_batches}
        self.watching = Watching(
            pl_module,
            trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            **{**self._options, "declare": {**intents, **self._options.get("declare", {})}},
        ).start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching."""
        if self.watching is not None:
            self.watching.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching and note what ended the fit."""
        if self.watching is not None:
            status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
            self.watching.stop(status, error=f"{type(exception).__name__}: {exception}")
