"""What `stepscope trace` shows while it runs: a line for each window on stdout, a progress bar on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

_COLUMNS = (
    ("step", 5, "global_step", "d"),
    ("loss", 9, "_loss", ".4f"),
    ("aux", 9, "_aux", ".4f"),
    ("lr", 10, "lr", ".3e"),
    ("scale", 8, "loss_scale_before", ".0f"),
    ("norm", 10, "grad_norm", ".4g"),
    ("clipped", 10, "grad_norm_clipped", ".4g"),
    ("weights", 8, "loss_weight_sum", ".4g"),
    ("max delta", 10, "update_max", ".3e"),
)
"""Heading, width, cell and format. `_loss` and `_aux` are means over the window."""


class Live:
    """Prints a line for each window as its row is written, and moves a progress bar.

    Args:
        windows: windows that the run will have; 0 where that is not known.
        quiet: show nothing.
    """

    def __init__(self, windows: int, *, quiet: bool) -> None:
        self._windows = windows
        self._quiet = quiet
        self._losses: list[float] = []
        self._aux: list[float] = []
        self._headed = False
        self._bar: Any = None

    def __enter__(self) -> Live:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._windows or None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def shapes(self, shapes: dict[str, tuple[int, ...]], _: Any = None) -> None:
        """Print the shapes of what went into the first forward and came out of it."""
        if not self._quiet:
            for name, shape in shapes.items():
                _out(f"{name}.shape = {list(shape)}")

    def window_done(self, _: Any = None) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def rows(self, rows: list[dict[str, Any]]) -> None:
        """Print the windows that have ended."""
        for row in rows:
            self._losses += [row["loss"]] if row.get("loss") is not None else []
            self._aux += [row["aux_loss"]] if row.get("aux_loss") is not None else []
            if row.get("sync_gradients"):
                self._print(row)
                self._losses, self._aux = [], []

    def _print(self, row: dict[str, Any]) -> None:
        if self._quiet:
            return
        if not self._headed:
            self._headed = True
            _out("".join(f"{heading:>{width}}" for heading, width, _, _ in _COLUMNS))
        cells = {**row, "_loss": _mean(self._losses), "_aux": _mean(self._aux)}
        line = "".join(_cell(cells.get(name), width, form) for _, width, name, form in _COLUMNS)
        skipped = f"  skipped: {row['skip_reason']}" if row.get("step_skipped") else ""
        _out(line + skipped)


def _cell(value: Any, width: int, form: str) -> str:
    return f"{value:>{width}{form}}" if value is not None else f"{'-':>{width}}"


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _out(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - this is what was asked for
