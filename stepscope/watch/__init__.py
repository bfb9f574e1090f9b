"""Observation: every patch and hook, the events they raise, and what the autograd graph tells.

The package is callable: ``stepscope.watch(model, optimizer)`` is `stepscope.watching.watch`. A package and a function of
one name cannot both be attributes of `stepscope`, so the package answers the call itself.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from stepscope.watching import watch

        return watch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
