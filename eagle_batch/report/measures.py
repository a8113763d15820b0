"""The numbers of each row, as columns beside its texts: tokens, target passes, acceptance.

For the whole row `tokens`, `prompt_tokens`, `passes`, `drafted`, `accepted` and `acceptance`; for
one stage the same behind its name and a dot, and `<stage>.finish`. A column of the data set that
already has such a name keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: Measure -> field of the `generation` struct.
FIELDS = {
    "tokens": "completion_tokens",
    "prompt_tokens": "prompt_tokens",
    "passes": "target_passes",
    "drafted": "drafted",
    "accepted": "accepted",
}
#: Measures of a row and of a stage that can be named in `--where` and `--sort`.
MEASURES = (*FIELDS, "acceptance")


def with_measures(table: pa.Table, stages: Sequence[str]) -> pa.Table:
    """Return an output table with its measures as further columns."""
    for name, values in measures(table["generation"].combine_chunks(), stages).items():
        if name not in table.column_names:
            table = table.append_column(name, values)
    return table


def measures(generation: pa.Array, stages: Sequence[str]) -> dict[str, Any]:
    """Return the measures of a `generation` column, by name.

    Those of a stage add up all of its generations, the ones that were not kept included, and those
    of a row add the judges' too. The finish is that of the text that is kept, null without one.
    """
    rows = len(generation)
    items = generation.flatten()
    owners = np.asarray(pc.list_parent_indices(generation), np.int64)
    names = np.asarray(pc.struct_field(items, "stage").to_pylist(), object)
    everything = np.ones(len(items), bool)
    found = _sums(items, owners, everything, rows, "")
    for stage in stages:
        mine = names == stage
        found |= _sums(items, owners, mine, rows, f"{stage}.")
        found[f"{stage}.finish"] = _finishes(items, owners, mine & _kept(items), rows)
    return found


def _sums(
    items: pa.Array, owners: np.ndarray, chosen: np.ndarray, rows: int, prefix: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for measure, field in FIELDS.items():
        values = np.asarray(pc.struct_field(items, field), np.float64)
        sums = np.bincount(owners[chosen], values[chosen], rows)
        found[f"{prefix}{measure}"] = pa.array(sums.astype(np.int64))
    passes = pc.max_element_wise(found[f"{prefix}passes"], 1)
    tokens = pc.cast(found[f"{prefix}tokens"], pa.float64())
    return found | {f"{prefix}acceptance": pc.divide(tokens, passes)}


def _kept(items: pa.Array) -> np.ndarray:
    """Return which generations are in the output; an output of an older version holds no other."""
    if items.type.get_field_index("kept") < 0:
        return np.ones(len(items), bool)
    return np.asarray(pc.struct_field(items, "kept").to_pylist(), bool)


def _finishes(items: pa.Array, owners: np.ndarray, chosen: np.ndarray, rows: int) -> pa.Array:
    finishes: list[str | None] = [None] * rows
    reasons = pc.struct_field(items, "finish_reason").to_pylist()
    for place in np.flatnonzero(chosen):
        finishes[owners[place]] = reasons[place]
    return pa.array(finishes, pa.string())
