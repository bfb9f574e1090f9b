"""The one exception that stepscope raises for a user's mistake, and the exit codes of the command line."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_CLEAN = 0
EXIT_FINDINGS = 1
EXIT_COULD_NOT_RUN = 2
EXIT_INTERRUPTED = 130

FAIL_ON = ("error", "warning", "notice", "never")
"""Least severity of a finding that ends in `EXIT_FINDINGS`."""


class StepscopeError(Exception):
    """A mistake in the input or the environment that one line can explain.

    Args:
        message: what was wrong, in one line, naming the value that was given.
        hint: what to do about it, in one line.
        exit_code: what the command line ends with; 2 ("could not run") unless said otherwise.
    """

    def __init__(self, message: str, *, hint: str = "", exit_code: int = EXIT_COULD_NOT_RUN) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def require_one_of(what: str, value: str, choices: Sequence[str]) -> None:
    """Raise a StepscopeError that lists the choices and the nearest one, unless `value` is one of them.

    Args:
        what: what was given, as the user knows it, e.g. ``--dtype``.
        value: what it is.
        choices: what it may be; an empty string among them is not listed.
    """
    if value in choices:
        return
    near = difflib.get_close_matches(value, choices, n=1)
    hint = f"did you mean {near[0]}?" if near else ""
    raise StepscopeError(f"{what} {value!r} is none of {', '.join(filter(None, choices))}", hint=hint)
