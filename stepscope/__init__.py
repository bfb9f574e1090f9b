"""stepscope: a microscope for the PyTorch training step.

The public names are loaded when they are first used, so that importing stepscope imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.errors import StepscopeError
    from stepscope.store.trace import Trace
    from stepscope.tracer import Tracer
    from stepscope.watching import Watching, watch

__version__ = "0.1.0"
__all__ = ["StepscopeError", "Trace", "Tracer", "Watching", "__version__", "watch"]

_HOMES = {
    "StepscopeError": "stepscope.errors",
    "Trace": "stepscope.store.trace",
    "Tracer": "stepscope.tracer",
    "Watching": "stepscope.watching",
    "watch": "stepscope.watching",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stepscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
