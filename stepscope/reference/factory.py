"""Own parts for the reference loop: load ``file.py:make`` or ``pkg.mod:make`` and check what it returns."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from types import ModuleType

    from stepscope.reference.loop import LossFunction


def load_object(target: str) -> Any:
    """Import the object that ``file.py:name`` or ``pkg.mod:name`` names.

    A file's own folder, and for a module the current folder, is importable while and after it loads, as it would be if
    Python had been started on it.

    Args:
        target: path or dotted module, a colon, and a name (dots reach into it).

    Raises:
        StepscopeError: the target is malformed, does not exist, cannot be imported or has no such name.
    """
    where, separator, name = target.rpartition(":")
    if not (separator and where and name):
        raise StepscopeError(f"target {target!r} names no object", hint="write file.py:make or pkg.mod:make")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=1)
            raise StepscopeError(f"{where} has no {name!r}", hint=f"did you mean {near[0]}?" if near else "")
        found = getattr(found, part)
    return found


def call_factory(target: str) -> dict[str, Any]:
    """Load `target`, call it without arguments and give its result as a dict of parts.

    Raises:
        StepscopeError: it is not callable, raises, or returns nothing that holds parts.
    """
    make = load_object(target)
    if not callable(make):
        raise StepscopeError(f"{target} is a {type(make).__name__}, not a function")
    with _blaming(f"{target} raised"):
        result = make()
    if isinstance(result, dict):
        return result
    if result is None or isinstance(result, nn.Module | Tensor | str | int | float | list | tuple):
        raise StepscopeError(
            f"{target} returned a {type(result).__name__}", hint="return a dict or an object with model, data, …"
        )
    return {name: getattr(result, name) for name in dir(result) if not name.startswith("_")}


@dataclass(frozen=True, slots=True)
class FactoryParts:
    """What a factory may bring to the reference loop.

    Attributes:
        model: has at least one parameter that requires a gradient.
        data: the batches.
        loss_fn: (model, batch) -> mean loss.
        optimizer: None for the reference's AdamW.
        scheduler: stepped after each applied optimizer step; None for none.
    """

    model: nn.Module
    data: FactoryBatches
    loss_fn: LossFunction
    optimizer: Optimizer | None
    scheduler: LRScheduler | None


def load_parts(target: str) -> FactoryParts:
    """Call a factory and check its parts: ``model``, ``data``; optionally ``optimizer``, ``loss_fn``, ``scheduler``.

    Raises:
        StepscopeError: a part is missing or of the wrong kind.
    """
    parts = call_factory(target)
    model = _part(target, parts, "model", nn.Module)
    optimizer = _part(target, parts, "optimizer", Optimizer, optional=True)
    scheduler = _part(target, parts, "scheduler", LRScheduler, optional=True)
    loss_fn = _part(target, parts, "loss_fn", Callable, optional=True)
    data = _part(target, parts, "data", Iterable | Callable)
    _check_optimizer(target, model, optimizer, scheduler)
    return FactoryParts(model, FactoryBatches(data), checked(loss_fn or model_loss), optimizer, scheduler)


def _part(target: str, parts: dict[str, Any], name: str, kind: Any, *, optional: bool = False) -> Any:
    value = parts.get(name)
    if value is None and optional:
        return None
    if value is None:
        raise StepscopeError(f"{target} returned no {name!r}", hint=f"it returned {', '.join(parts) or 'nothing'}")
    if not isinstance(value, kind):
        raise StepscopeError(f"{target} returned a {type(value).__name__} as {name!r}, not {_WANTED[name]}")
    return value


_WANTED = {
    "model": "a torch.nn.Module",
    "optimizer": "a torch.optim.Optimizer",
    "scheduler": "a torch.optim.lr_scheduler.LRScheduler",
    "loss_fn": "a function of model and batch",
    "data": "batches or a function that gives them; wrap a Dataset in a DataLoader",
}


def _check_optimizer(target: str, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None) -> None:
    if optimizer is not None:
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise StepscopeError(f"{target}: the optimizer holds none of the model's parameters")
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise StepscopeError(f"{target}: the scheduler drives another optimizer than the one returned")


class FactoryBatches:
    """Endless batches from an iterable, or from a function that gives a new one for each epoch."""

    def __init__(self, data: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.data = data

    def __len__(self) -> int:
        """Batches in an epoch.

        Raises:
            StepscopeError: the data does not know its length.
        """
        try:
            return len(self._epoch())  # type: ignore[arg-type]
        except TypeError as error:
            raise StepscopeError("the factory's data has no length", hint="use --steps instead of --epochs") from error

    def _epoch(self) -> Iterable[Any]:
        return self.data if isinstance(self.data, Iterable) else self.data()

    def stream(self, start: int = 0) -> Iterator[Any]:
        """Yield batch `start`, `start` + 1, …, restarting the data when it runs out.

        Earlier batches are drawn and dropped, here and now, so that the random states can be restored afterwards.

        Raises:
            StepscopeError: the data is empty, or an iterator that cannot be started again.
        """
        batches = self._endless()
        for _ in range(start):
            next(batches)
        return batches

    def _endless(self) -> Iterator[Any]:
        while True:
            epoch_is_empty = True
            with _blaming("the factory's data raised"):
                for batch in self._epoch():
                    epoch_is_empty = False
                    yield batch
            if epoch_is_empty:
                raise StepscopeError(
                    "the factory's data is empty or used up", hint="return a list, a DataLoader or a function"
                )


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model itself returns for a batch: as is, as ``.loss`` or ``["loss"]``, plus ``aux_loss``."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*batch)
    else:
        output = model(batch)
    if isinstance(output, Tensor):
        return output
    loss, aux_loss = _member(output, "loss"), _member(output, "aux_loss")
    if loss is None:
        raise StepscopeError(
            f"the model returned a {type(output).__name__} without a loss", hint="return a loss_fn too"
        )
    total: Tensor = loss if aux_loss is None else loss + aux_loss
    return total


def _member(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def checked(loss_fn: LossFunction) -> LossFunction:
    """`loss_fn`, with an error that names it where it raises or returns something that backward cannot start from."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        with _blaming("the factory's model or loss_fn raised"):
            loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise StepscopeError(f"the factory's loss is {what}, not a single number")
        if not loss.requires_grad:
            raise StepscopeError("the factory's loss depends on no parameter that requires a gradient")
        return loss

    return loss_of


@contextmanager
def _blaming(whose: str) -> Iterator[None]:
    """Turn any exception of foreign code, an exit included, into one line that says whose it is."""
    try:
        yield
    except StepscopeError:
        raise
    except (Exception, SystemExit) as error:
        raise StepscopeError(f"{whose} {type(error).__name__}: {' '.join(str(error).split())}") from error


def _load_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        found = False
    if not found:
        raise StepscopeError(f"there is no module {name!r}", hint="for a file, write its path ending in .py")
    with _blaming(f"importing {name} raised"):
        return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise StepscopeError(f"{path}: no such file")
    path = path.resolve()
    _make_importable(path.parent)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise StepscopeError(f"{path} cannot be imported")
    # Registered before it runs, as the import statement does: dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        with _blaming(f"importing {path} raised"):
            spec.loader.exec_module(module)
    except StepscopeError:
        del sys.modules[name]
        raise
    return module


def _module_name(path: Path) -> str:
    """The name under which the file's neighbours would import it, unless another module has that name already."""
    known = sys.modules.get(path.stem)
    taken = known is not None and getattr(known, "__file__", None) != str(path)
    return f"stepscope_target_{path.stem}" if taken else path.stem


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
