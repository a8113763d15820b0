"""Cells of a table as Python objects."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def value_at(column: pa.ChunkedArray, row: int) -> Any:
    """Return a cell as templates see it.

    Python's times end at microseconds; finer ones are cut for templates, not for the output. Raises
    ValueError, OverflowError, LookupError or ArrowException where there is no such object.
    """
    return _rounded(column[row]).as_py()


def _rounded(scalar: pa.Scalar) -> pa.Scalar:
    kind = scalar.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return scalar.cast(pa.timestamp("us", kind.tz), safe=False)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return scalar.cast(pa.duration("us"), safe=False)
    if pa.types.is_time(kind) and kind.bit_width == 64 and kind.unit == "ns":
        return scalar.cast(pa.time64("us"), safe=False)
    return scalar
