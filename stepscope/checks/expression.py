"""A learning-rate formula given as text, evaluated without running any code: numbers, operators and a few names."""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Values = npt.NDArray[np.float64]

NAMES = ("s", "T", "lr", "w", "r", "pi")
"""s step, T total steps, lr base rate, w warm-up steps, r floor as a share of the base rate."""

LONGEST = 500
"""Characters of a formula. A schedule is one line; this also bounds the depth of its tree."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: np.power,
}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "cos": (np.cos, 1),
    "sin": (np.sin, 1),
    "sqrt": (np.sqrt, 1),
    "exp": (np.exp, 1),
    "min": (np.minimum, 2),
    "max": (np.maximum, 2),
}


def evaluate(formula: str, values: Mapping[str, Values | float]) -> Values:
    """Evaluate `formula` elementwise in float64.

    Args:
        formula: numbers, ``+ - * / **``, the names in `NAMES` and cos, sin, sqrt, exp, min, max (of two).
        values: the names that are known.

    Raises:
        StepscopeError: the formula is not of this form, or uses a name without a value.
    """
    if len(formula) > LONGEST:
        raise StepscopeError(f"the formula has {len(formula)} characters; at most {LONGEST} are read")
    try:
        tree = ast.parse(formula, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise StepscopeError(f"the formula {formula!r} cannot be read: {error}") from error
    with np.errstate(all="ignore"):
        result = np.asarray(_value(tree.body, values), dtype=np.float64)
    size = np.shape(values.get("s", 0.0))
    return np.broadcast_to(result, size).astype(np.float64)


def _value(node: ast.expr, values: Mapping[str, Values | float]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return np.float64(number)
        case ast.Name(id=name) if name in NAMES:
            return _named(name, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, values)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _call(name, args, values)
    raise StepscopeError(
        f"the formula has {ast.unparse(node)!r}, which is not allowed",
        hint=f"numbers, + - * / **, {', '.join(NAMES)}, {', '.join(_FUNCTIONS)}",
    )


def _named(name: str, values: Mapping[str, Values | float]) -> Any:
    if name == "pi":
        return np.float64(np.pi)
    if name not in values:
        raise StepscopeError(f"the formula uses {name}, which has no value", hint=f"give {name}, e.g. --set {name}=…")
    return np.asarray(values[name], dtype=np.float64)


def _call(name: str, args: list[ast.expr], values: Mapping[str, Values | float]) -> Any:
    function, arity = _FUNCTIONS[name]
    if len(args) != arity:
        raise StepscopeError(f"{name} takes {arity} argument{'s' if arity > 1 else ''}, not {len(args)}")
    return function(*(_value(argument, values) for argument in args))
