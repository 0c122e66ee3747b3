"""A calculator as a tool."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_MOST_CHARACTERS = 200
_LARGEST = 10**30  # of an operand or a result
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator:
    """`calculate`, for prompts that another reward function judges."""

    def calculate(self, expression: str) -> str:
        """
        Computes an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % and parentheses, for example (12 + 7) * 3.

        Returns:
            The value.
        """
        if len(expression) > _MOST_CHARACTERS:
            raise ValueError(f"at most {_MOST_CHARACTERS} characters")
        value = evaluate(expression)
        return str(int(value)) if value == int(value) else f"{value:.10g}"


def evaluate(expression: str) -> float:
    """The value of an arithmetic expression. Raises ValueError for anything else, ZeroDivisionError."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> float:
    value: float
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only numbers, + - * / // % and parentheses")
    if not abs(value) <= _LARGEST:
        raise ValueError("a number is too large")
    return value
