"""The recording of a script: begins when the script imports torch, ends as the script ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.commands.finish import say
from stepscope.watch.arrival import when_torch_arrives

if TYPE_CHECKING:
    from types import TracebackType

    from stepscope.watch.launcher import Exit
    from stepscope.watching import Watching


class Recording:
    """A `Watching` that is made when torch arrives. A fault of ours in it is said and does not reach the script.

    Args:
        **options: those of `stepscope.watching.Watching`.

    Attributes:
        ended: how the script ended; None while it runs, and where the launcher itself raised.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._watching: Watching | None = None
        self.ended: Exit | None = None

    def __enter__(self) -> Recording:
        self._give_up = when_torch_arrives(self._begin)
        return self

    def _begin(self) -> None:
        from stepscope.watching import Watching

        try:
            self._watching = Watching(**self._options)
            self._watching.start()
        except Exception as error:
            say(f"stepscope: cannot watch: {type(error).__name__}: {error}")

    def note(self, event: str, optimizer: Any = None, detail: dict[str, Any] | None = None) -> None:
        """Add an event to the trace; dropped before torch has arrived."""
        if self._watching is not None:
            self._watching.note(event, optimizer, detail)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._give_up()
        if self.ended is not None and self.ended.forked:
            return  # a copy of this process: the recording belongs to the one it was copied from
        if self._watching is None:
            self._begin()  # the script never imported torch: the trace says that nothing was there to see
        try:
            if self._watching is not None:
                self._watching.stop(self._status(), **self._facts())
        except Exception as fault:
            say(f"stepscope: the trace could not be ended: {type(fault).__name__}: {fault}")

    def _status(self) -> str:
        if self.ended is None:
            return "failed"
        if self.ended.code == 0:
            return "complete"
        return "interrupted" if isinstance(self.ended.error, KeyboardInterrupt) else "failed"

    def _facts(self) -> dict[str, Any]:
        if self.ended is None:
            return {}
        error = self.ended.error
        return {"exit_code": self.ended.code} | ({"error": f"{type(error).__name__}: {error}"} if error else {})
