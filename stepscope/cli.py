"""The command line: the typer app, and `main`, the only place that turns an error into a line and an exit code.

Commands live one per file in `commands/`. Those files import nothing heavy at the top, so that ``stepscope --help``
answers without torch, pandas or plotly.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from stepscope.commands import register_all
from stepscope.commands.finish import say
from stepscope.errors import EXIT_COULD_NOT_RUN, EXIT_INTERRUPTED, StepscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    name="stepscope",
    help="A microscope for the PyTorch training step: does this loop really do what I think?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
register_all(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 clean, 1 findings at or above ``--fail-on`` or a failed check, 2 could not run, 130 interrupted.
    """
    try:
        result = app(args=list(argv) if argv is not None else None, standalone_mode=False)
    except StepscopeError as error:
        say(f"stepscope: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("stepscope: interrupted")
        return EXIT_INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_COULD_NOT_RUN if stop.code else 0
    except Exception as error:
        return _explain(error)
    return result if isinstance(result, int) else 0


def _explain(error: Exception) -> int:
    """Usage errors of typer print themselves; anything else is a fault of ours and says so."""
    show = getattr(error, "show", None)
    if callable(show):
        show()
        return int(getattr(error, "exit_code", EXIT_COULD_NOT_RUN))
    if type(error).__name__ == "Abort":
        return EXIT_INTERRUPTED
    if os.environ.get("STEPSCOPE_DEBUG"):
        raise error
    say(f"stepscope: internal error: {type(error).__name__}: {error} (set STEPSCOPE_DEBUG=1 for the traceback)")
    return EXIT_COULD_NOT_RUN
