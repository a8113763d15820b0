"""The numbers of each row, as columns beside its texts: tokens, target passes, acceptance.

For the whole row `tokens`, `prompt_tokens`, `passes`, `drafted`, `accepted` and `acceptance`; for
one stage the same behind its name and a dot, and `<stage>.finish`. A column of the data set that
already has such a name keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """Return the measures of a `generation` column, by name."""
    found: dict[str, Any] = {}
    for index, stage in enumerate(stages):
        item = _item(generation, index)
        for measure, field in FIELDS.items():
            values = pc.cast(pc.struct_field(item, field), pa.int64())
            found[measure] = values if index == 0 else pc.add(found[measure], values)
            found[f"{stage}.{measure}"] = values
        found[f"{stage}.acceptance"] = _ratio(found, f"{stage}.")
        found[f"{stage}.finish"] = pc.struct_field(item, "finish_reason")
    return found | {"acceptance": _ratio(found, "")}


def _item(generation: pa.Array, index: int) -> pa.Array:
    if len(generation) == 0:
        return pa.array([], generation.type.value_type)
    return pc.list_element(generation, index)


def _ratio(found: dict[str, Any], prefix: str) -> Any:
    passes = pc.max_element_wise(found[f"{prefix}passes"], 1)
    return pc.divide(pc.cast(found[f"{prefix}tokens"], pa.float64()), passes)
