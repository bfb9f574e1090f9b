"""Settings of a project: ``[tool.stepscope]`` in pyproject.toml, and ``--declare key=value`` on the command line."""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import FAIL_ON, StepscopeError, require_one_of

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Config:
    """What ``[tool.stepscope]`` says; keys are written with hyphens there.

    Attributes:
        select: codes, prefixes or names of rules to judge by; empty for all.
        ignore: the same, left out.
        fail_on: least severity that makes the exit code 1; ``never`` for none.
        declare: intents, as with ``--declare``.
        accept: findings that are known and wanted: name of the rule -> the reason.
        every: parameter-level rows at every n-th window only; 0 for the default rhythm.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"
    declare: dict[str, Any] = field(default_factory=dict)
    accept: dict[str, str] = field(default_factory=dict)
    every: int = 0


def load_config(start: Path | None = None) -> Config:
    """The configuration of the nearest pyproject.toml at or above `start` that has one; defaults if none has.

    Raises:
        StepscopeError: the file cannot be parsed, has an unknown key, or a value of the wrong type.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            table = _read(path).get("tool", {}).get("stepscope")
            if table is not None:
                return _convert(table, path)
    return Config()


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StepscopeError(f"cannot read {path}: {error}") from error


def _convert(table: dict[str, Any], path: Path) -> Config:
    known = {f.name.replace("_", "-"): f for f in fields(Config)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
            raise StepscopeError(f"unknown key {key!r} in [tool.stepscope] of {path}", hint=hint)
        values[known[key].name] = tuple(value) if isinstance(value, list) else value
    _check(values, path)
    return Config(**values)


def _check(values: dict[str, Any], path: Path) -> None:
    types = {"select": tuple, "ignore": tuple, "fail_on": str, "declare": dict, "accept": dict, "every": int}
    words = {tuple: "a list of strings", str: "a string", dict: "a table", int: "a whole number"}
    for name, value in values.items():
        if not isinstance(value, types[name]) or isinstance(value, bool):
            raise StepscopeError(f"{name.replace('_', '-')} in [tool.stepscope] of {path} must be {words[types[name]]}")
    require_one_of(f"fail-on in {path}", values.get("fail_on", "error"), FAIL_ON)
    if any(not isinstance(reason, str) or not reason.strip() for reason in values.get("accept", {}).values()):
        raise StepscopeError(f"accept in [tool.stepscope] of {path} needs a reason for each finding")


def parse_declarations(pairs: Iterable[str]) -> dict[str, Any]:
    """``["accumulation_steps=4", "frozen=backbone.*"]`` as a dict; values are JSON where they can be, else text.

    Raises:
        StepscopeError: a pair has no ``=`` or no key.
    """
    out: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise StepscopeError(
                f"--declare {pair!r} is not of the form key=value", hint="for example accumulation_steps=4"
            )
        try:
            out[key.strip()] = json.loads(value)
        except ValueError:
            out[key.strip()] = value
    for key in ("accumulation_steps", "total_steps"):
        if key in out and (not isinstance(out[key], int) or out[key] < 1):
            raise StepscopeError(f"--declare {key}={out[key]!r} must be a whole number of at least 1")
    return out
