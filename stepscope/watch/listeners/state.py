"""What is built, loaded and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope import events
from stepscope.watch.ledger import rates
from stepscope.watch.patches import Listener

if TYPE_CHECKING:
    from stepscope.watch.books import Books


class StateListener(Listener):
    """Hears constructors, ``load_state_dict`` and ``torch.save``."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self._before: list[dict[str, Any]] = []
        self._ties: list[list[list[str]]] = []
        self._saving = False

    def after_optimizer_init(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """An optimizer exists."""
        watched = self.books.watched(args[0]) if error is None else None
        if watched is not None:
            self.books.sink(events.Built("optimizer", args[0], optimizer=watched))

    def after_add_group(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """Constructors add their groups through this too; only what comes later is news."""
        watched = self.books.known(args[0])
        if error is None and watched is not None:
            self.books.sink(events.Called("", "param_group_added", watched, {"groups": len(watched.groups)}))

    def after_ddp_init(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A module was wrapped in DistributedDataParallel."""
        if error is None:
            self.books.sink(events.Built("ddp", args[0]))

    def before_load_optimizer(self, args: Any, kwargs: Any) -> None:
        """An optimizer's state is about to be replaced."""
        self._before.append({"lr": rates(args[0])})

    def after_load_optimizer(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """An optimizer's state was replaced."""
        before = self._before.pop()
        watched = self.books.watched(args[0]) if error is None else None
        if watched is not None:
            self.books.sink(events.Loaded("optimizer", args[0], before, watched))

    def after_optimizer_state_dict(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """An optimizer's state was asked for: most likely it goes into a checkpoint, whoever writes that."""
        watched = self.books.known(args[0])
        if error is None and watched is not None and not self._saving:
            self.books.sink(events.Saved("state_dict", result, watched))

    def after_load_scheduler(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A scheduler's state was replaced."""
        if error is None:
            self.books.sink(events.Loaded("scheduler", args[0], optimizer=self.books.of_scheduler(args[0])))

    def after_load_scaler(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A scaler's state was replaced."""
        if error is None:
            self.books.sink(events.Loaded("scaler", args[0]))

    def before_load_module(self, args: Any, kwargs: Any) -> None:
        """A module's parameters are about to be replaced: which names stand for the same one?"""
        self._ties.append(_ties(args[0]))

    def after_load_module(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A module's parameters were replaced."""
        ties = self._ties.pop()
        if error is None:
            self.books.sink(events.Loaded("module", args[0], {"ties": ties}))

    def before_save(self, args: Any, kwargs: Any) -> None:
        """Something is about to be written to a checkpoint."""
        if not self._saving:
            content = args[0] if args else kwargs.get("obj")
            where = args[1] if len(args) > 1 else kwargs.get("f")
            self.books.sink(events.Saved(str(where) if not hasattr(where, "write") else "a file object", content))
        self._saving = True

    def after_save(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """It was written."""
        self._saving = False


def _ties(module: Any) -> list[list[str]]:
    """Names that stand for one parameter, for each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [n for n in names.values() if len(n) > 1]
