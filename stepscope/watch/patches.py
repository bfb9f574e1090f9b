"""Every patch and global hook, in one table: what is replaced, why, and by what; installed and removed as one.

Official hooks are used where torch has them (those around a step are in `stephooks`). Everything else replaces an attribute
of a *class* or *module* (never of an instance, where schedulers and wrappers would bypass or break it) and is put back exactly
as it was. A replacement calls the original with the same arguments, tells the listeners before and after, and lets every
exception of the original pass.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from stepscope.watch.stephooks import StepHooks

Original = Callable[..., Any]


class Listener:
    """What patches call. Every method may be overridden; none may raise (see `tell`)."""

    def failed(self, method: str, error: Exception) -> None:
        """A method of this listener raised; it must not disturb the loop."""


_listeners: list[Listener] = []
_hearing: dict[str, list[tuple[Listener, Callable[..., None]]]] = {}
_undo: list[Callable[[], None]] = []


def tell(method: str, *args: Any) -> None:
    """Call `method` of every listener that has it; what a listener raises stays with it."""
    for listener, heard in _hearing.get(method, ()):
        try:
            heard(*args)
        except Exception as error:  # a fault of ours must never end the user's training
            listener.failed(method, error)


_PASSED_BY = f"{__file__} (importlib._bootstrap)"
"""The name of a file whose frames `warnings` does not count, since it takes them for the import system's."""


def passed_by(function: Original) -> Original:
    """Let a warning of torch's name the line of the script that called it, as it does without us, and not our own."""
    function.__code__ = function.__code__.replace(co_filename=_PASSED_BY)
    return function


_step_hooks = StepHooks(tell)


def around(name: str) -> Callable[[Original], Original]:
    """A replacement that tells ``before_<name>(args, kwargs)`` and ``after_<name>(args, kwargs, result, error)``."""
    before, after = f"before_{name}", f"after_{name}"

    def make(original: Original) -> Original:
        @passed_by
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if before in _hearing:
                tell(before, args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                tell(after, args, kwargs, None, error)
                raise
            tell(after, args, kwargs, result, None)
            return result

        return replacement

    return make


def around_tensors(name: str) -> Callable[[Original], Original]:
    """The same for a function that takes tensors first: a generator becomes a list, since looking would exhaust it."""
    outer = around(name)

    def make(original: Original) -> Original:
        heard = outer(original)

        @passed_by
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            for key in ("parameters", "tensors"):
                if isinstance(kwargs.get(key), Iterator):
                    kwargs[key] = list(kwargs[key])
            return heard(*args, **kwargs)

        return replacement

    return make


_calling = threading.local()


class Looks:
    """How many more modules that run without gradients are to be told (``before_forward_without_gradients``), inner ones too."""

    left = 0


def _outermost(original: Original) -> Original:
    """A replacement for ``Module.__call__`` that tells ``after_forward`` of calls that are not inside another.

    Torch's own global forward hooks would do, but they slow down every module, and a compiled model warns of them.
    """

    @passed_by
    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        if Looks.left and not torch.is_grad_enabled():
            Looks.left -= 1
            tell("before_forward_without_gradients", self)
        if getattr(_calling, "module", False):
            return original(self, *args, **kwargs)
        _calling.module = True
        begin = time.perf_counter()
        try:
            output = original(self, *args, **kwargs)
        finally:
            _calling.module = False
        tell("after_forward", self, args, kwargs, output, (time.perf_counter() - begin) * 1e3)
        return output

    return replacement


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute.

    Attributes:
        owner: dotted path of the module or class that holds it.
        attribute: its name.
        why: what it is watched for.
        make: builds the replacement from the original.
    """

    owner: str
    attribute: str
    why: str
    make: Callable[[Original], Original]


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.autograd", "backward", "a micro-step; Tensor.backward calls it through the module", around("backward")
    ),
    Patch("torch.autograd", "grad", "hooks on loss nodes also fire under it and must not be counted", around("grad")),
    Patch("torch.amp.grad_scaler.GradScaler", "__init__", "a scaler exists", around("scaler_init")),
    Patch("torch.amp.grad_scaler.GradScaler", "scale", "which loss carries which scale", around("scale")),
    Patch("torch.amp.grad_scaler.GradScaler", "unscale_", "from here gradients are unscaled", around("unscale")),
    Patch("torch.amp.grad_scaler.GradScaler", "step", "an attempt to step, skipped or not", around("scaler_step")),
    Patch("torch.amp.grad_scaler.GradScaler", "update", "the scale before and after", around("update")),
    Patch("torch.amp.grad_scaler.GradScaler", "load_state_dict", "a resume", around("load_scaler")),
    # clip_grad_norm_ looks these two up in its module's globals: both import styles of it are seen.
    Patch("torch.nn.utils.clip_grad", "_get_total_norm", "the norm that a clip finds", around("total_norm")),
    Patch("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", "the clip itself", around("clip")),
    Patch("torch.nn.utils.clip_grad", "get_total_norm", "a norm that a script takes", around_tensors("own_norm")),
    Patch("torch.nn.utils", "get_total_norm", "the same, as most scripts reach it", around_tensors("own_norm")),
    Patch(
        "torch.nn.utils.clip_grad", "clip_grads_with_norm_", "a clip to the script's own norm", around_tensors("clip")
    ),
    Patch("torch.nn.utils", "clip_grads_with_norm_", "the same, as most scripts reach it", around_tensors("clip")),
    Patch("torch.nn.utils.clip_grad", "clip_grad_value_", "a clip of each element", around_tensors("clip_value")),
    Patch("torch.nn.utils", "clip_grad_value_", "the same, as most scripts reach it", around_tensors("clip_value")),
    Patch("torch.optim.optimizer.Optimizer", "__init__", "an optimizer exists", around("optimizer_init")),
    Patch("torch.optim.optimizer.Optimizer", "zero_grad", "place in the order of calls", around("zero_grad")),
    Patch("torch.optim.optimizer.Optimizer", "load_state_dict", "a resume", around("load_optimizer")),
    Patch(
        "torch.optim.optimizer.Optimizer",
        "state_dict",
        "a checkpoint, whoever writes it",
        around("optimizer_state_dict"),
    ),
    Patch("torch.optim.optimizer.Optimizer", "add_param_group", "groups added on the way", around("add_group")),
    Patch("torch.nn.modules.module.Module", "__call__", "forwards: what they are given and return", _outermost),
    Patch("torch.nn.modules.module.Module", "zero_grad", "place in the order of calls", around("zero_grad")),
    Patch("torch.nn.modules.module.Module", "load_state_dict", "a resume", around("load_module")),
    Patch("torch.optim.swa_utils.AveragedModel", "update_parameters", "an average of weights moves", around("average")),
    Patch(
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "__init__",
        "which tensors DDP knows",
        around("ddp_init"),
    ),
    Patch("torch.distributed", "all_reduce", "gradients averaged by hand", around("all_reduce")),
    Patch("torch.distributed.distributed_c10d", "all_reduce", "the same, as torch reaches it", around("all_reduce")),
    Patch("torch.amp.autocast_mode.autocast", "__enter__", "regions of autocast", around("autocast_enter")),
    Patch("torch.amp.autocast_mode.autocast", "__exit__", "regions of autocast", around("autocast_exit")),
    Patch("torch.utils.data.dataloader._BaseDataLoaderIter", "__init__", "an epoch begins", around("loader_iter")),
    Patch(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "__next__",
        "which loader a batch came from",
        around("loader_next"),
    ),
    Patch("torch", "save", "what a checkpoint holds", around("save")),
    Patch("torch.serialization", "save", "the same, as torch reaches it", around("save")),
)
"""The whole table, except the schedulers' classes, which are found by walking them (`_patch_schedulers`)."""

_SCHEDULER_METHODS = {
    "__init__": around("scheduler_init"),
    "step": around("scheduler_step"),
    "load_state_dict": around("load_scheduler"),
    "get_lr": around("get_lr"),
}


def subscribe(listeners: Sequence[Listener]) -> None:
    """Let listeners hear; the first ones install everything."""
    if not _listeners:
        _install()
    _listeners.extend(listeners)
    _list_hearing()


def unsubscribe(listeners: Sequence[Listener]) -> None:
    """Let listeners go; with the last ones everything is put back."""
    before = len(_listeners)
    _listeners[:] = [x for x in _listeners if x not in listeners]
    _list_hearing()
    if before and not _listeners:
        _remove()


def _list_hearing() -> None:
    """Who hears what: looked up once, not at every call."""
    _hearing.clear()
    for listener in _listeners:
        for name in dir(type(listener)):
            if name.startswith(("before_", "after_")):
                _hearing.setdefault(name, []).append((listener, getattr(listener, name)))


def installed() -> bool:
    """Whether any patch or hook of ours is in place."""
    return bool(_undo)


def unreached() -> list[str]:
    """Names in imported modules that still hold an original function which a patch would replace.

    A script that did ``from torch.nn.utils import clip_grad_value_`` before the patches were installed calls the
    original; methods of classes are always reached.
    """
    originals: dict[int, str] = {}
    for patch in PATCHES:
        owner = _resolve(patch.owner)
        held = getattr(owner, patch.attribute, None)
        if owner is not None and not isinstance(owner, type) and held is not None:
            originals[id(held)] = patch.attribute
    homes = {p.owner for p in PATCHES}
    found = []
    for name, module in list(sys.modules.items()):
        if module is None or name in homes or name.split(".")[0] in ("torch", "stepscope"):
            continue
        held = getattr(module, "__dict__", None) or {}
        found += [f"{name}.{key}" for key, value in list(held.items()) if id(value) in originals and callable(value)]
    return sorted(found)


def _install() -> None:
    for patch in PATCHES:
        owner = _resolve(patch.owner)
        if owner is not None and hasattr(owner, patch.attribute):
            _replace(owner, patch.attribute, patch.make)
    _patch_schedulers(LRScheduler)
    _step_hooks.install()
    _undo.append(_step_hooks.remove)


def _remove() -> None:
    while _undo:
        _undo.pop()()


def _resolve(path: str) -> Any:
    """The module or class at a dotted path, None where this torch does not have it (or was built without it)."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        module = sys.modules.get(".".join(parts[:cut]))
        if module is None:
            continue
        owner: Any = module
        for name in parts[cut:]:
            owner = getattr(owner, name, None)
        return owner
    return None


_MISSING = object()


def _replace(owner: Any, attribute: str, make: Callable[[Original], Original]) -> None:
    """Replace ``owner.attribute``; undone by restoring what its own namespace held, or by deleting it."""
    held = vars(owner).get(attribute, _MISSING)
    setattr(owner, attribute, make(getattr(owner, attribute)))

    def undo() -> None:
        if held is _MISSING:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, held)

    _undo.append(undo)


def _patch_schedulers(cls: type) -> None:
    """Patch the methods that a scheduler class defines itself, and those of its subclasses."""
    for name, make in _SCHEDULER_METHODS.items():
        own = vars(cls).get(name)
        if callable(own) and not hasattr(own, "__stepscope__"):
            _replace(cls, name, _marked(make))
    children: list[type] = cls.__subclasses__()
    for child in children:
        _patch_schedulers(child)


def _marked(make: Callable[[Original], Original]) -> Callable[[Original], Original]:
    def marking(original: Original) -> Original:
        replacement = make(original)
        replacement.__stepscope__ = True  # type: ignore[attr-defined]
        return replacement

    return marking


def patch_late_scheduler(cls: type) -> None:
    """Patch a scheduler class that was defined after installation; called when its first instance appears."""
    for base in cls.__mro__:
        if base is not object and issubclass(base, LRScheduler):
            _patch_schedulers(base)
