"""Patterns that name parameters, as in ``--declare frozen=backbone.*``."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase


def names_match(name: str, patterns: str) -> bool:
    """Whether a parameter's name fits one of `patterns`.

    Args:
        name: such as ``backbone.layer1.weight``.
        patterns: separated by commas; each a shell pattern (``backbone.*``), a regular expression for the whole name, or
            the name of a module, which stands for everything in it (``backbone``).
    """
    return any(_fits(name, p.strip()) for p in str(patterns).split(",") if p.strip())


def _fits(name: str, pattern: str) -> bool:
    if fnmatchcase(name, pattern) or name.startswith(f"{pattern}."):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False
