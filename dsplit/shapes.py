"""Shape formulas of units, evaluated without torch: `"vae.z_dim, 1, H/8, W/8"`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from dsplit.errors import UnitError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "bool": 1, "int64": 8}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(formula: str, names: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape that `formula` gives for H, W, F, L and config fields such as `vae.z_dim` in `names`.

    Division rounds down; an empty formula is one number per row, `()`. Raises UnitError for a name that `names` lacks,
    or anything but + - * / and whole numbers.
    """
    try:
        return tuple(_number(part, names) for part in _parts(formula))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnitError(f"shape formula '{formula}': cannot use {error}") from error


def ragged_axis(formula: str) -> int | None:
    """The axis whose length depends on L (the number of tokens), or None; raises UnitError as `evaluate` does."""
    for axis, part in enumerate(_parts(formula)):
        if any(isinstance(n, ast.Name) and n.id == "L" for n in ast.walk(part)):
            return axis
    return None


def _parts(formula: str) -> list[ast.expr]:
    try:
        tree = ast.parse(f"({formula},)" if formula.strip() else "()", mode="eval").body
    except SyntaxError as error:
        raise UnitError(f"shape formula '{formula}': {error.msg}") from error
    return tree.elts if isinstance(tree, ast.Tuple) else [tree]


def _number(node: ast.expr, names: Mapping[str, Any]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(names[name])
        case ast.Attribute():
            return int(names[ast.unparse(node)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left, names), _number(right, names))
    raise KeyError(ast.unparse(node))
