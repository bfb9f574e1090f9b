"""JSON in which a value that is not finite stays visible: it is written as a string, since it *is* the evidence."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from stepscope.store.atomic import write_text

if TYPE_CHECKING:
    from pathlib import Path


def plain(value: Any) -> Any:
    """`value` with tuples as lists, numpy scalars as Python's, and NaN and infinities as strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, str | int | bool) or value is None:
        return value
    item = getattr(value, "item", None)
    return plain(item()) if callable(item) and getattr(value, "ndim", 0) == 0 else str(value)


def number(value: Any) -> float | None:
    """The float that `plain` wrote, None for None. Raises ValueError for anything else."""
    return None if value is None else float(value)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """`value` as strict JSON (no bare NaN), keys in the order given."""
    separators = None if indent else (",", ":")
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent, separators=separators)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, dumps(value, indent=1) + "\n")
