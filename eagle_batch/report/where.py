"""The little language of `show --where`: comparisons over columns and measures.

    expression := comparison | expression and expression | expression or expression
                | not expression | ( expression )
    comparison := value OP value [OP value ...]     with OP one of == != < <= > >=
                | column in [literal, ...] | column not in [literal, ...]
                | column is None | column is not None
                | contains(column, "text") | startswith(column, "text")
    value      := column | length(column) | literal
    column     := name | stage.measure | column("any name")
    literal    := number | "text" | True | False

It has the look of Python and is read with Python's own parser, but nothing is ever evaluated: what
is not listed here is refused. Names are checked against the columns that there are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from eagle_batch.errors import ConfigError
from eagle_batch.pipeline.problems import suggestion

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: eq,
    ast.NotEq: ne,
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
}
TEXT_TESTS = {"contains": pc.match_substring, "startswith": pc.starts_with}


def parse_where(text: str, columns: Sequence[str]) -> pc.Expression:
    """Return a filter; raises ConfigError that says which part was not understood."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"--where: {text!r} is no expression; expected something like "
            "'acceptance < 1.5 and topic == \"tides\"'"
        ) from error
    return _Reader(text.strip(), tuple(columns)).condition(tree.body)


def filter_rows(table: pa.Table, expression: pc.Expression) -> pa.Table:
    """Return the rows for which a filter holds; raises ConfigError where types do not fit."""
    try:
        return table.filter(expression)
    except pa.ArrowException as error:
        said = str(error).split("\n")[0]
        raise ConfigError(f"--where: cannot compare these: {said}") from error


class _Reader:
    """Turns one parsed expression into a filter."""

    def __init__(self, text: str, columns: tuple[str, ...]) -> None:
        self._text = text
        self._columns = columns

    def condition(self, node: ast.expr) -> Any:
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                return reduce(and_, map(self.condition, values))
            case ast.BoolOp(values=values):
                return reduce(or_, map(self.condition, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self.condition(operand)
            case ast.Compare():
                return self._comparison(node)
            case ast.Call(func=ast.Name(id=name), args=[column, ast.Constant(value=str(part))]):
                if name in TEXT_TESTS:
                    return TEXT_TESTS[name](self._column(column), part)
        return self._refuse(node)

    def _comparison(self, node: ast.Compare) -> Any:
        operands = [node.left, *node.comparators]
        steps = zip(node.ops, pairwise(operands), strict=True)
        return reduce(and_, (self._step(op, left, right) for op, (left, right) in steps))

    def _step(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> Any:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple):
                self._refuse(right)
            found = self._column(left).isin([self._literal(item) for item in right.elts])
            return found if isinstance(op, ast.In) else ~found
        if isinstance(op, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                self._refuse(right)
            null = self._column(left).is_null()
            return null if isinstance(op, ast.Is) else ~null
        return COMPARISONS[type(op)](self._value(left), self._value(right))

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id="length"), args=[column]):
                return pc.utf8_length(self._column(column))
            case ast.Constant() | ast.UnaryOp():
                return pc.scalar(self._literal(node))
            case _:
                return self._column(node)

    def _column(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return self._field(name)
            case ast.Attribute(value=ast.Name(id=stage), attr=measure):
                return self._field(f"{stage}.{measure}")
            case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str(name))]):
                return self._field(name)
        return self._refuse(node)

    def _field(self, name: str) -> Any:
        if name not in self._columns:
            known = ", ".join(self._columns)
            hint = suggestion(name, self._columns)
            raise ConfigError(
                f"--where: found {name!r}, which is no column; {hint}there are {known}"
            )
        return pc.field(name)

    def _literal(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
        return self._refuse(node)

    def _refuse(self, node: ast.AST) -> NoReturn:
        part = ast.get_source_segment(self._text, node) or self._text
        raise ConfigError(
            f"--where: {part!r} is not understood; expected comparisons (== != < <= > >= in, is "
            "None), contains(), startswith(), length(), and, or, not"
        )
