"""`watch`: record the loop that runs inside a ``with`` block, whoever wrote it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope import __version__
from stepscope.errors import StepscopeError
from stepscope.probes.base import Settings
from stepscope.store.folder import prepare_folder
from stepscope.store.writer import DirectoryStore, MemoryStore, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    import torch

    from stepscope.store.trace import Trace


class Watching:
    """A recording that can be started and stopped; also a context manager. See `watch` for the arguments.

    Attributes:
        unreached: names that were imported before the patches and so escape them, such as ``train.clip_grad_value_``.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        scaler: Any = None,
        scheduler: Any = None,
        out: str | Path | None = None,
        force: bool = False,
        every: int = 0,
        max_steps: int = 0,
        declare: dict[str, Any] | None = None,
        meta: dict[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        on_rows: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        from stepscope.recorder import Recorder

        models, optimizers = _many(model), _many(optimizer)
        check_types(models, optimizers)
        self._store: Store = MemoryStore()
        if out is not None:
            folder = prepare_folder(Path(out), force=force, rank=rank, world_size=world_size)
            self._store = DirectoryStore(folder, rank, world_size)
        self._recorder = Recorder(
            self._store,
            Settings(every=every, max_steps=max_steps, declared=dict(declare or {})),
            models=models,
            optimizers=optimizers or None,
            meta={
                **process_facts(),
                **(meta or {}),
                "declared": dict(declare or {}),
                "rank": rank,
                "world_size": world_size,
            },
            on_rows=on_rows,
        )
        self._given = [x for x in (scaler, *_many(scheduler)) if x is not None]
        self._search = not optimizers
        self._begun = False
        self.unreached: list[str] = []

    def start(self) -> Watching:
        """Begin to watch. A second call does nothing.

        Raises:
            StepscopeError: this recording has ended.
        """
        from stepscope.watch.patches import unreached

        if self._begun:
            if not self._recorder.open:
                raise StepscopeError("this recording has ended", hint="begin another one with stepscope.watch()")
            return self
        self._begun = True
        self.unreached = unreached()
        if self.unreached:
            self._recorder.meta["unreached"] = self.unreached
        self._recorder.start()
        found = _alive_optimizers() if self._search else []
        self._recorder.adopt([*found, *self._given])
        return self

    def stop(self, status: str = "complete", **facts: Any) -> None:
        """Stop watching: the patches are removed and the journal is closed. A second call does nothing."""
        self._recorder.stop(status, **{**_device(), **facts})

    def discard(self) -> None:
        """Stop, and remove what was written: the run never began."""
        self.stop("failed")
        self._store.discard()

    @property
    def trace(self) -> Trace:
        """What has been recorded so far."""
        self._recorder.hand_over()
        return self._store.trace()

    def facts(self, **facts: Any) -> None:
        """Add facts of the run to the trace's meta."""
        self._recorder.meta.update(facts)

    @property
    def note(self) -> Any:
        """Add an event of one's own: ``watching.note("validation", None, {"loss": 1.2})``."""
        return self._recorder.note

    @property
    def micro_steps(self) -> int:
        """Backward passes seen so far."""
        return self._recorder.watcher.micro_steps

    def __enter__(self) -> Watching:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        status = "complete" if kind is None else "interrupted" if interrupted else "failed"
        self.stop(status, **({"error": f"{kind.__name__}: {error}"} if kind is not None else {}))


def watch(model: Any = None, optimizer: Any = None, **options: Any) -> Watching:
    """Record the training loop that runs inside the ``with`` block; it need not know of it.

    Args:
        model: the model (or several): gives parameters their names. None: models are found when they are called.
        optimizer: the optimizer (or several) to watch. None: every optimizer that is used, whether it exists already or is built later.
        **options: ``scaler`` and ``scheduler`` in use, if they were built before; ``out``, a directory for the trace
            (kept in memory without one) and ``force`` to replace one that is there; ``every``, parameter-level rows at
            every n-th window only; ``max_steps``, micro-steps after which recording stops; ``declare``, intents such as
            ``{"accumulation_steps": 4}``.

    Returns:
        A context manager whose `trace` holds the recording; `start` and `stop` do without ``with``.

    Raises:
        StepscopeError: a model is no module, an optimizer no optimizer, or `out` cannot be used.
    """
    return Watching(model, optimizer, **options)


def process_facts() -> dict[str, Any]:
    """Facts of this process for the trace: versions, platform, device."""
    import platform
    from datetime import UTC, datetime

    import torch

    return {
        "stepscope": __version__,
        "kind": "watch",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": platform.machine(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
    }


def _device() -> dict[str, str]:
    """The CUDA device in use. Asked at the end: asking earlier would start CUDA before the script has chosen a device."""
    import torch

    return {"device": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def check_types(models: Iterable[Any], optimizers: Iterable[Any]) -> None:
    """Raise StepscopeError unless these are modules and optimizers of torch."""
    import torch

    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise StepscopeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise StepscopeError(
                f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer",
                hint="give the optimizer itself, not a wrapper",
            )


def _alive_optimizers() -> list[torch.optim.Optimizer]:
    """Optimizers that exist already; type(), not isinstance(), so that no lazy proxy is woken."""
    from torch.optim import Optimizer

    return [o for o in gc.get_objects() if issubclass(type(o), Optimizer) and "param_groups" in o.__dict__]
