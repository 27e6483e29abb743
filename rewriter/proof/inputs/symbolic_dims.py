"""Evaluate dimensions that are arithmetic on names, such as `past_sequence_length + 1` or `floor(frames/2)`.

The text comes from the model file and is not trusted: only integer arithmetic of bounded length is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

_LONGEST = 200
_LARGEST = 2**31

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "max": max,
    "min": min,
    "floor": int,
    "ceil": int,
    "ceiling": int,
    "trunc": int,
    "int": int,
}


def names_in(text: str) -> tuple[str, ...]:
    """The symbolic names in a dimension; the whole text if it is not arithmetic."""
    tree = _parse(text)
    if tree is None:
        return (text,)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called]
    return tuple(dict.fromkeys(found)) or (text,)


def value_of(text: str, values: Mapping[str, int]) -> int | None:
    """The value of a dimension; None if a name is unknown or the arithmetic has no value."""
    if text in values:
        return values[text]
    tree = _parse(text)
    if tree is None:
        return None
    try:
        return _evaluate(tree.body, values)
    except (KeyError, ZeroDivisionError, ValueError, TypeError, OverflowError):
        return None


def _parse(text: str) -> ast.Expression | None:
    if len(text) > _LONGEST:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    # An allow-list: anything else that Python can parse, such as attribute access, is not a dimension.
    allowed = (
        ast.Expression, ast.BinOp, ast.UnaryOp, ast.USub, ast.Name, ast.Load, ast.Constant, ast.Call,
        *_OPERATORS,
    )  # fmt: skip
    return tree if all(isinstance(node, allowed) for node in ast.walk(tree)) else None


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand, values)
    if isinstance(node, ast.BinOp):
        result = _OPERATORS[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values))
        # Intermediate results are bounded too.
        if abs(result) > _LARGEST:
            raise OverflowError
        return result
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _FUNCTIONS[node.func.id.lower()](*(_evaluate(argument, values) for argument in node.args))
    raise ValueError
