"""One file per command of the command line.

A command file defines ``register(app)`` and imports torch, pandas, pyarrow or plotly only inside the command's body.
Commands return their exit code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

COMMANDS = ("trace", "run", "check", "report", "compare", "rules", "columns")
"""Command files, in the order in which ``--help`` lists them."""


def register_all(app: typer.Typer) -> None:
    """Add every command to the app."""
    for name in COMMANDS:
        importlib.import_module(f"stepscope.commands.{name}").register(app)
