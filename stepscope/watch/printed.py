"""Loss values that a script prints, for those who declare what they look like (``--declare logged_loss=REGEX``)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepscope.errors import StepscopeError

Note = Callable[..., None]


@contextmanager
def listen_for_losses(pattern: str | None, note: Note) -> Iterator[None]:
    """Note each number that a line on stdout matches by the first group of `pattern`; without one, touch nothing.

    Raises:
        StepscopeError: the pattern is no regular expression with a group.
    """
    if pattern is None:
        yield
        return
    try:
        expression = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise StepscopeError(f"logged_loss={pattern!r} is no regular expression: {error}") from error
    if not expression.groups:
        raise StepscopeError(
            f"logged_loss={pattern!r} has no group", hint="put the number in parentheses: 'loss ([0-9.]+)'"
        )
    original = sys.stdout
    sys.stdout = _Listening(original, expression, note)
    try:
        yield
    finally:
        sys.stdout = original


class _Listening:
    """Passes everything on to the real stdout and reads along."""

    def __init__(self, stream: Any, expression: re.Pattern[str], note: Note) -> None:
        self._stream = stream
        self._expression = expression
        self._note = note
        self._line = ""

    def write(self, text: str) -> int:
        """Write `text` and look at the lines that it completes."""
        count = int(self._stream.write(text))
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            for match in self._expression.finditer(line):
                try:
                    self._note("logged_loss", None, {"value": float(match.group(1))})
                except ValueError:
                    continue
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
