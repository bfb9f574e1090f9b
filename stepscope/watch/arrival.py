"""Waits for the script to import torch: what it sets before that (threads, visible devices) must count as it does alone."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def when_torch_arrives(begin: Callable[[], None]) -> Callable[[], None]:
    """Call `begin` as soon as torch has been imported, at once if it has been already.

    Returns:
        A function that gives up waiting; it does nothing where `begin` has been called.
    """
    if "torch" in sys.modules:
        begin()
        return lambda: None
    finder = _Arrival(begin)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Arrival(MetaPathFinder):
    """Finds nothing itself: it lets torch's own loader run, and says when it has."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def leave(self) -> None:
        """Take this finder out of the way again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """For torch: its own spec, whose loader tells when it is done."""
        if name != "torch":
            return None
        self.leave()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is left as it was found
            execute(module)
            self._begin()

        loader.exec_module = exec_module
