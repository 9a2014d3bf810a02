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

    Division rounds down. Raises UnitError for a name that `names` lacks or anything but + - * / and whole numbers.
    """
    try:
        tree = ast.parse(f"({formula},)", mode="eval").body
        assert isinstance(tree, ast.Tuple)
        return tuple(_number(node, names) for node in tree.elts)
    except (SyntaxError, KeyError, AssertionError) as error:
        raise UnitError(f"shape formula '{formula}': cannot use {error}") from error


def ragged_axis(formula: str) -> int | None:
    """The axis whose length depends on L (the number of tokens), or None."""
    for axis, part in enumerate(formula.split(",")):
        if any(isinstance(n, ast.Name) and n.id == "L" for n in ast.walk(ast.parse(part.strip(), mode="eval"))):
            return axis
    return None


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
