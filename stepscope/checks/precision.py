"""Number formats of a check, and running a model in float64 or a working dtype without dropout."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOWER = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Precision:
    """A working dtype: parameters are kept in `parameters`, products are computed in `compute`.

    float16 and bfloat16 are run as mixed precision (float32 parameters under autocast), as training loops do.
    """

    name: str
    compute: torch.dtype
    parameters: torch.dtype

    @property
    def unit_roundoff(self) -> float:
        """u, half the distance from 1 to the next number: 2^-53, 2^-24, 2^-11 or 2^-8."""
        return torch.finfo(self.compute).eps / 2

    @property
    def scaled(self) -> bool:
        """Whether a loop in this dtype uses a GradScaler."""
        return self.compute is torch.float16

    def autocast(self, device: str) -> contextlib.AbstractContextManager[Any]:
        """The context in which the forward runs."""
        if self.compute is self.parameters:
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=self.compute)


FLOAT64 = Precision("float64", torch.float64, torch.float64)
WORKING = {
    "float32": Precision("float32", torch.float32, torch.float32),
    "bfloat16": Precision("bfloat16", torch.bfloat16, torch.float32),
    "float16": Precision("float16", torch.float16, torch.float32),
}


def working_precisions(names: tuple[str, ...]) -> list[Precision]:
    """Look up working dtypes by name.

    Raises:
        StepscopeError: a name is not known.
    """
    unknown = [name for name in names if name not in WORKING]
    if unknown:
        raise StepscopeError(f"unknown dtype {unknown[0]!r}", hint=f"one of {', '.join(WORKING)}")
    return [WORKING[name] for name in names]


class NoDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces every dropout mask by its mean, so that dropout leaves its input as it is.

    Works below modules and functions: ``nn.Dropout``, ``F.dropout``, the ``dropout_p`` of attention and the dropout
    of recurrent layers all draw their mask with ``aten::bernoulli_`` or ``aten::native_dropout``.

    Attributes:
        calls: masks replaced so far.
        keep: leave dropout as it is.
    """

    def __init__(self, *, keep: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.keep:
            return func(*args, **kwargs)
        if func is torch.ops.aten.bernoulli_.float:
            self.calls += 1
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if func is torch.ops.aten.native_dropout.default:
            self.calls += 1
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **kwargs)


class InFloat64(NoDropout):  # type: ignore[no-untyped-call]
    """`NoDropout` in which every computation on floating-point numbers is done in float64.

    A model cast with ``.double()`` still computes in float32 where its code says ``.float()`` (norms and losses often
    do) or where a constant was made in float32. Here such casts go to float64, and a float32 operand beside a float64
    one is lifted.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _LOWER:
            kwargs["dtype"] = torch.float64
        if not func._schema.is_mutable:
            args, kwargs = _lift(args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _lift(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    if torch.float64 not in dtypes or dtypes.isdisjoint(_LOWER):
        return args, kwargs

    def lift(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype in _LOWER else leaf

    return tree_map(lift, args), tree_map(lift, kwargs)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Run without oneDNN, which has no half-precision kernels for some layers (LSTM) on some processors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # flags() sets a switch of other processors
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with torch's random state set from `seed`, and put the caller's state back."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
