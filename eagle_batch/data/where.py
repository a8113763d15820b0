"""`input.where`: one Jinja expression over a row, in the sandbox, that says whether it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from eagle_batch.data.sandbox import Sandbox, plain
from eagle_batch.data.templates import row_keys, uses_whole_row
from eagle_batch.data.values import value_at
from eagle_batch.errors import ConfigError, DataError
from eagle_batch.pipeline import ROW_VARIABLE
from eagle_batch.pipeline.problems import suggestion

_MOST_PROBLEMS = 5
_MOST_NAMES = 20


class RowFilter:
    """A compiled `input.where`."""

    def __init__(self, text: str) -> None:
        """Compile the expression; raises ConfigError where it is none."""
        self._text = text
        self._sandbox = jinja = Sandbox()
        try:
            self._tree = jinja.parse("{{ (" + text + ") }}")
            self._expression = jinja.compile_expression(text, undefined_to_none=False)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(
                f"input.where: not a valid expression: {error}; write a Jinja expression over the "
                "columns, such as `language == 'en' and score > 0.5`"
            ) from error
        self._globals = set(jinja.globals)

    def problems(self, columns: Sequence[str]) -> list[str]:
        """Return one line for each name that is no column."""
        names = find_undeclared_variables(self._tree) - {ROW_VARIABLE} - self._globals
        names |= set(row_keys(self._tree, columns))
        shown = ", ".join(sorted(columns)[:_MOST_NAMES])
        if not names and not self.columns(columns):
            return ["input.where: names no column, so that it holds for every row or for none"]
        return [
            f"input.where: found {name!r}, which is no column; {suggestion(name, columns)}"
            f"expected one of {shown}"
            for name in sorted(names)
            if name not in columns
        ]

    def columns(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that the expression uses."""
        if uses_whole_row(self._tree, columns):
            return tuple(columns)
        used = find_undeclared_variables(self._tree) | set(row_keys(self._tree, columns))
        return tuple(name for name in columns if name in used)

    def mask(
        self, table: pa.Table, names: Sequence[str], path: str, first: int
    ) -> npt.NDArray[np.bool_]:
        """Return which rows of a table are taken; `first` is the number of its first row.

        Raises DataError, naming the first rows, where the expression cannot be evaluated.
        """
        problems: list[str] = []
        mask = np.zeros(table.num_rows, np.bool_)
        columns = {name: table.column(name) for name in names}
        for row in range(table.num_rows):
            try:
                mask[row] = bool(self._evaluate(columns, row))
            except Exception as error:  # noqa: BLE001 - it is code over foreign data
                problems.append(
                    f"input.where: {path}, row {first + row}: {type(error).__name__}: {error}; "
                    "expected an expression for every row, such as `x is not none and x > 1`"
                )
            if len(problems) == _MOST_PROBLEMS:
                break
        if problems:
            raise DataError(problems)
        return mask

    def _evaluate(self, columns: dict[str, pa.ChunkedArray], row: int) -> Any:
        values = {name: plain(value_at(column, row)) for name, column in columns.items()}
        context = values if ROW_VARIABLE in values else {**values, ROW_VARIABLE: values}
        return self._sandbox.evaluate(self._expression, context)
